"""What all tests share: profiles of hypothesis, seeds, devices, and Triton interpreted without a GPU."""

import faulthandler
import os
import random
import sys
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Before anything imports triton: it reads this when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"

# Tensors in tests are small and workers many: threads would wait for each other longer than they compute.
torch.set_num_threads(1)

# `--hypothesis-profile` chooses one; `profiles.examples` scales what a test asks for by its `max_examples`.
hypothesis.settings.register_profile("ci", derandomize=True, database=None, deadline=None, max_examples=100)
hypothesis.settings.register_profile("long", hypothesis.settings.get_profile("ci"), max_examples=150)
hypothesis.settings.register_profile(
    "nightly", derandomize=False, deadline=None, max_examples=1000, print_blob=True
)
hypothesis.settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a CUDA device do not exist where there is none; `tests/gpu` is not even imported.

    Those that compile all kernels take minutes, and come first, so that no worker waits for them at the end.
    """
    if not HAS_CUDA:
        items[:] = [item for item in items if item.get_closest_marker("gpu") is None]
    items.sort(key=lambda item: "test_kernels_compile" not in item.nodeid)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Whatever a test draws without a generator of its own is the same in each run."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


# The longest test compiles for minutes. One that waits for ever would have everybody wait.
_PATIENCE = 1200  # seconds


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Ends a process whose test hangs, with the lines where its threads stand, and so the run."""
    faulthandler.dump_traceback_later(_PATIENCE, exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not HAS_CUDA:
        terminalreporter.write_line(
            "tests that need a CUDA device were not collected: run `make test-gpu` on a machine with one"
        )


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if HAS_CUDA else ["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """Each kind of device that pools live on."""
    return str(request.param)
