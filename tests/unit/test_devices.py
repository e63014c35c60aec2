"""Work for one of several CUDA devices happens with that one current. torch is pretended here: it has two."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pagoda.errors import CaptureError
from pagoda.kernels import on_device
from pagoda.pools._arguments import refuse_capture

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Pretended:
    """Two devices, the first of them current; one of them is being captured."""

    def __init__(self) -> None:
        self.current, self.capturing, self.switches = 0, -1, 0

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        self.switches += 1
        yield
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    pretended = Pretended()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pretended.current)
    monkeypatch.setattr(torch.cuda, "device", pretended.device)
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: pretended.current == pretended.capturing
    )
    return pretended


def test_a_device_is_made_current_only_where_it_is_not(cuda: Pretended):
    with on_device(FIRST):
        assert (cuda.current, cuda.switches) == (0, 0)
    with on_device(SECOND):
        assert (cuda.current, cuda.switches) == (1, 1)
    assert cuda.current == 0
    with on_device(torch.device("cpu")):
        assert (cuda.current, cuda.switches) == (0, 1)


@pytest.mark.parametrize("capturing", [0, 1])
def test_a_capture_is_refused_on_its_device_and_on_no_other(cuda: Pretended, capturing: int):
    cuda.capturing = capturing
    captured, other = (FIRST, SECOND) if capturing == 0 else (SECOND, FIRST)
    with pytest.raises(CaptureError, match="alloc is not possible while the stream is being captured"):
        refuse_capture(captured, "alloc")
    refuse_capture(other, "alloc")
    refuse_capture(torch.device("cpu"), "alloc")
