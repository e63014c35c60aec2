"""What all tests share: devices, and Triton's interpreter where there is no GPU."""

import faulthandler
import os
import sys
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports triton: it reads this when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"

# Matrices of tests are small and workers many: threads would wait for each other longer than they compute.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


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
    skipped = sum("needs a CUDA device" in str(r.longrepr) for r in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.write_line(
            f"{skipped} tests need a CUDA device: `make test-gpu` on a machine with one"
        )


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every kind of device that pools live on."""
    return str(request.param)
