"""Which implementation serves a call: the one of the device, under the name that was declared."""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagoda import kernels
from pagoda.errors import ConfigError
from pagoda.kernels import compress, entries, gather
from pagoda.kernels._dispatch import operation, triton_module


def declared(reference: Any) -> Any:
    @operation("_no_such_module", reference)
    def double(given: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Twice what is given."""
        return out

    return double


def test_the_reference_serves_the_cpu_under_the_declared_name():
    calls: list[Any] = []
    double = declared(SimpleNamespace(double=lambda *args, **named: calls.append((args, named))))
    given, out = torch.ones(2), torch.zeros(2)
    assert double(given, out=out) is None
    assert [(args[0] is given, named["out"] is out) for args, named in calls] == [(True, True)]
    assert (double.__name__, double.__doc__) == ("double", "Twice what is given.")


def test_without_triton_cuda_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pagoda.kernels._store_fused", None)
    triton_module.cache_clear()
    with pytest.raises(ConfigError, match="triton"):
        triton_module("_store_fused")


def test_every_operation_has_both_implementations():
    pytest.importorskip("triton")
    for room in (kernels, entries, compress, gather):
        found = [getattr(room, name) for name in room.__all__]
        # `operation` returns a closure over the name of the Triton module and the reference module; other
        # wrappers, such as the cached `triton_module`, are not operations.
        operations = [each for each in found if hasattr(each, "__wrapped__") and each is not triton_module]
        assert operations
        for each in operations:
            held = inspect.getclosurevars(each).nonlocals
            assert callable(getattr(held["reference"], each.__name__))
            assert callable(getattr(triton_module(held["fused"]), each.__name__))


def test_what_a_declaration_leaves_out_is_given_to_the_implementation():
    calls: list[Any] = []

    @operation(
        "_no_such_module", SimpleNamespace(scale=lambda *args, **named: calls.append((args[1:], named)))
    )
    def scale(out: torch.Tensor, by: float = 2.0, shift: float | None = None) -> torch.Tensor:
        """Scale in place."""
        return out

    out = torch.ones(2)
    scale(out)
    scale(out, 3.0)
    scale(out, shift=1.0)
    expected = [((), {"by": 2.0, "shift": None}), ((3.0,), {"shift": None}), ((), {"by": 2.0, "shift": 1.0})]
    assert calls == expected
