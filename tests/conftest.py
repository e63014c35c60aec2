"""What all tests share: devices, and Triton's interpreter where there is no GPU."""

import os

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
