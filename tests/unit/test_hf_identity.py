"""Which weights a model has: all that changes its output changes the identity, and nothing else does."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pagoda.hf does")

from pagoda.hf._identity import Look, identity


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(40, 30)
        self.norm = torch.nn.BatchNorm1d(30)
        self.activation = torch.nn.SiLU()
        self.scale = 1.5
        self.is_on = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.activation(self.norm(self.linear(hidden)))
        return out * self.scale if self.is_on else out


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    made = torch.nn.Sequential(Block(), torch.nn.Linear(30, 40), Block())
    return made.eval()


def write_once(model: Any) -> None:
    with torch.no_grad():
        model[0].linear.weight[3, 3] += 1  # torch counts it


def forward_of_its_own(model: Any) -> None:
    model[0].forward = lambda hidden: hidden


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an element": write_once,
    "a bias": lambda model: model[1].bias.detach().zero_(),
    "a buffer": lambda model: model[0].norm.running_mean.add_(1),
    "all of a tensor, uncounted": lambda model: model[2].linear.weight.data.mul_(1.01),
    "all of a buffer, uncounted": lambda model: model[2].norm.running_var.data.mul_(1.01),
    "a new parameter with the same values": lambda model: setattr(
        model[1], "weight", torch.nn.Parameter(model[1].weight.detach().clone())
    ),
    "new memory with the same values": lambda model: setattr(
        model[1].weight, "data", model[1].weight.data.clone()
    ),
    "a transposed one": lambda model: setattr(
        model[2].linear, "weight", torch.nn.Parameter(model[2].linear.weight.detach().flip(0))
    ),
    "no bias": lambda model: setattr(model[1], "bias", None),
    "dtype": lambda model: model[1].to(torch.float16),
    "a module more": lambda model: model.append(torch.nn.Identity()),
    "a module less": lambda model: model.pop(2),
    "modules swapped": lambda model: model.insert(0, model.pop(2)),
    "another kind of module": lambda model: setattr(model[0], "activation", torch.nn.ReLU()),
    "a module twice": lambda model: model.append(model[1]),
    "names swapped": lambda model: setattr(
        model[0],
        "_modules",
        dict(zip(("norm", "linear", "activation"), model[0]._modules.values(), strict=True)),
    ),
    "one that is known by another name": lambda model: setattr(
        model[1], "_parameters", dict(zip(("bias", "weight"), model[1]._parameters.values(), strict=True))
    ),
    "a number": lambda model: setattr(model[0], "scale", 1.25),
    "a flag": lambda model: setattr(model[2], "is_on", False),
    "a module in training": lambda model: model[0].norm.train(),
    "a hook": lambda model: model[0].linear.register_forward_hook(lambda *_: None),
    "a hook before": lambda model: model[0].linear.register_forward_pre_hook(lambda *_: None),
    "another forward": forward_of_its_own,
    "an adapter": lambda model: setattr(model[0], "_active_adapter", "french"),
    "adapters in a list": lambda model: setattr(model[0], "_active_adapter", ["french", "polite"]),
    "an adapter that is off": lambda model: setattr(model[0], "_disable_adapters", True),
    "how strong adapters are": lambda model: setattr(model[0], "scaling", {"french": 0.5}),
    "merged adapters": lambda model: setattr(model[0], "merged_adapters", ["french"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen(model: Any, name: str) -> None:
    before = identity(model)
    assert identity(model) == before
    CHANGES[name](model)
    after = identity(model)
    assert after != before
    assert identity(model) == after
    assert len(after) == len(before) == 16


@pytest.mark.parametrize("name", CHANGES)
def test_a_second_look_sees_the_same_changes(model: Any, name: str) -> None:
    look = Look(model)
    assert look.identity == identity(model)
    assert look.is_still(model)
    CHANGES[name](model)
    assert not look.is_still(model)


def test_running_a_model_is_no_change(model: Any) -> None:
    before = identity(model)
    model(torch.randn(3, 40))
    with torch.inference_mode():
        model(torch.randn(3, 40))
        assert identity(model) == before
    with torch.no_grad():
        assert identity(model) == before
    model.some_note = object()  # what is no number, flag or text is not looked at
    model._runs = 7  # nor are names with an underscore
    assert identity(model) == before


def test_gradients_are_no_change(model: Any) -> None:
    before = identity(model)
    model(torch.randn(3, 40)).sum().backward()
    assert identity(model) == before
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    assert identity(model) != before


def test_a_copy_is_another_model(model: Any) -> None:
    assert identity(copy.deepcopy(model)) != identity(model)


def test_what_comes_back_is_what_it_was(model: Any) -> None:
    before = identity(model)
    hook = model[0].register_forward_hook(lambda *_: None)
    model[0]._active_adapter = "french"
    model[0].scale = 2.0
    assert identity(model) != before
    hook.remove()
    del model[0]._active_adapter
    model[0].scale = 1.5
    assert identity(model) == before


def test_weights_written_back_are_not_the_same(model: Any) -> None:
    """They might differ where nobody looked."""
    before, kept = identity(model), model[1].weight.detach().clone()
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].weight.copy_(kept)
    assert identity(model) != before


def test_no_identity_comes_twice(model: Any) -> None:
    """Memory, functions and their addresses are used again; identities are not."""
    seen = set()
    for number in range(40):
        kind = number % 4
        if kind == 0:
            weight = model[1].weight.detach().clone()
            weight[1, 1] += 1  # an element that no sample has
            model[1].weight = torch.nn.Parameter(weight)
        elif kind == 1:
            weight = model[1].weight.detach().clone()
            weight[1, 1] += 1
            model[1].weight.data = weight
        elif kind == 2:
            model[0].forward = lambda hidden, number=number: hidden * number
        else:
            model[2].linear.register_forward_hook(lambda *_, number=number: number).remove()
            model[2].linear.register_forward_hook(lambda *_, number=number: number)
        weight = None
        gc.collect(0)
        seen.add(identity(model))
    assert len(seen) == 40


def test_tensors_of_every_kind() -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(8, 6).t())  # not contiguous
    model.scalar = torch.nn.Parameter(torch.tensor(1.0))
    model.empty = torch.nn.Parameter(torch.zeros(0, 3))
    model.short = torch.nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
    model.nowhere = torch.nn.Parameter(torch.zeros(4, 4, device="meta"))
    model.register_buffer("whole", torch.arange(5))
    model.register_buffer("flags", torch.ones(3, dtype=torch.bool))
    model.register_buffer("eight", torch.ones(3).to(torch.float8_e4m3fn))
    model.register_buffer("complex", torch.ones(3, dtype=torch.complex64))
    model.register_buffer("none", None)
    before = identity(model)
    assert identity(model) == before
    for name in ("weight", "scalar", "short", "whole", "flags", "complex"):
        look = Look(model)
        with torch.inference_mode():
            getattr(model, name).data[...] = 0  # nobody counts it
        after = identity(model)
        assert after != before, name
        assert not look.is_still(model), name
        before = after


def test_a_second_look_reads_the_weights_again() -> None:
    """Of a tensor that is not contiguous the sample is a copy, which would stay as it was."""
    for transposed in (False, True):
        model = torch.nn.Module()
        weight = torch.randn(30, 20)
        model.weight = torch.nn.Parameter(weight.t() if transposed else weight)
        look = Look(model)
        assert look.is_still(model)
        model.weight.data.mul_(1.01)
        assert not look.is_still(model), transposed


def test_the_same_bytes_as_another_dtype(model: Any) -> None:
    model.half()
    look = Look(model)
    model[1].weight.data = model[1].weight.data.view(torch.bfloat16)
    assert identity(model) != look.identity
    assert not look.is_still(model)


def test_memory_that_is_taken_away_is_not_read(model: Any) -> None:
    """As training over several machines does between steps."""
    look = Look(model)
    model[1].weight.untyped_storage().resize_(0)
    assert not look.is_still(model)
    with pytest.raises(RuntimeError):
        identity(model)


def test_dropout_in_training_is_seen(model: Any) -> None:
    assert not Look(model).drops
    model[0].norm.train()  # drops nothing
    assert not Look(model).drops
    model[2].extra = torch.nn.Dropout(0.1)
    assert Look(model).drops
    model[2].extra.p = 0.0
    assert not Look(model).drops
    model[2].extra.eval().p = 0.1
    assert not Look(model).drops
    model[1].attention_dropout = 0.1
    assert not Look(model).drops
    model[1].train()
    assert Look(model).drops


def test_tensors_that_count_no_writes_have_no_identity() -> None:
    model = torch.nn.Module()
    with torch.inference_mode():
        model.register_buffer("inferred", torch.randn(7))
    with pytest.raises(RuntimeError, match="version"):
        identity(model)


@pytest.mark.parametrize("shape", [(48, 48), (64, 48), (96, 14), (49152, 576)])
def test_a_sample_is_of_many_columns(shape: tuple[int, int]) -> None:
    """A head that is taken out behind torch's back is an eighth of the columns."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(shape))
    before = identity(model)
    eighth = shape[1] // 8
    for head in range(8):
        model.weight.data[:, head * eighth : (head + 1) * eighth] = 0
        assert identity(model) != before, head
        model.weight.data[...] = 1


def test_what_modules_of_others_keep_counts() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._scale, self.strengths, self.extra = 1.0, {"a": 0.5}, torch.ones(3)

    model = Scaled()
    seen = {identity(model)}
    model._scale = 2.0
    seen.add(identity(model))
    model.strengths["a"] = 0.7
    seen.add(identity(model))
    model.extra = torch.zeros(3)
    seen.add(identity(model))
    assert len(seen) == 4


def test_tied_weights(model: Any) -> None:
    model[2].linear = model[0].linear
    before = identity(model)
    with torch.no_grad():
        model[2].linear.weight.add_(1)
    assert identity(model) != before


def test_hooks_for_all_modules_count(model: Any) -> None:
    before = identity(model)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert identity(model) != before
    finally:
        hook.remove()
    assert identity(model) == before
