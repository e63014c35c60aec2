"""How many examples a test of hypothesis runs under the profile that was chosen (conftest.py has them)."""

from hypothesis import settings


def examples(number: int) -> int:
    """`number` under the profile `ci`, as many times more as another profile has examples."""
    return max(1, number * settings.default.max_examples // 100)
