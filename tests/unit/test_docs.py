"""The documentation is true: its example runs, its links lead somewhere, its numbers of invariants exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    told = capsys.readouterr().out
    assert "131072 79\n" in told
    assert "\n32\n" in told
    assert "1 of 8 rows run" in told


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
    for target in re.findall(r"`((?:tests|docs|native|bench|src)/[\w/.]+)`", page.read_text()):
        assert (ROOT / target).exists(), target


def test_invariants_are_numbered_and_those_that_code_names_exist():
    numbers = [
        int(n)
        for n in re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "invariants.md").read_text(), re.MULTILINE)
    ]
    assert numbers == list(range(1, len(numbers) + 1))
    named = {
        int(number)
        for folder, suffix in (("src", "*.py"), ("native", "*.cpp"))
        for path in (ROOT / folder).rglob(suffix)
        for number in re.findall(r"(?:InvariantError\(|BrokenInvariant\{|broken\()\s*(\d+)", path.read_text())
    }
    assert named == set(numbers)
