"""Reading a call of `generate`: which prompts there are, and when a call is left alone."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="needs transformers: it is its arguments that are read")

from transformers import DynamicCache, GenerationConfig, GenerationMixin

from pagoda.hf import _arguments as arguments
from pagoda.hf._arguments import Prompts, read_call
from profiles import examples


class Model(GenerationMixin):
    """As much of a model as a call shows."""

    def __init__(self, **settings: Any) -> None:
        self.generation_config = GenerationConfig(**settings)


IDS = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def read(*args: Any, model: Any = None, **kwargs: Any) -> Prompts:
    found = read_call(model or Model(), args, kwargs)
    assert isinstance(found, Prompts), found
    return found


def refused(*args: Any, model: Any = None, **kwargs: Any) -> str:
    found = read_call(model or Model(), args, kwargs)
    assert isinstance(found, str)
    return found


def test_prompts_are_rows_without_their_padding() -> None:
    found = read(IDS, attention_mask=MASK)
    assert [row.tolist() for row in found.tokens] == [[5, 6, 7], [8, 9, 10, 11, 12]]
    assert all(row.dtype == np.int32 for row in found.tokens)
    assert found.pads == (2, 0)
    assert found.length == 5
    assert (found.copies, found.is_beams, found.end_tokens) == (1, False, frozenset())


@given(data=st.data())
@settings(max_examples=examples(60))
def test_any_batch(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 12))
    pads = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=4))
    ids = torch.randint(0, 2**31 - 1, (len(pads), length))
    kinds = [torch.int64, torch.int32, torch.uint16, torch.bool, torch.float32, torch.bfloat16]
    dtype = data.draw(st.sampled_from(kinds))
    mask = torch.tensor([[column >= pad for column in range(length)] for pad in pads]).to(dtype)
    found = read(ids, attention_mask=mask)
    assert found.pads == tuple(pads)
    assert [row.tolist() for row in found.tokens] == [
        row[pad:] for row, pad in zip(ids.tolist(), pads, strict=True)
    ]
    # One more hole anywhere behind the padding, and it is left alone.
    row = data.draw(st.integers(0, len(pads) - 1))
    if length - pads[row] > 1:
        mask[row, data.draw(st.integers(pads[row] + 1, length - 1))] = 0
        assert refused(ids, attention_mask=mask) == "the attention_mask is not left padding"


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ([[1, 1, 1, 0, 0]], "the attention_mask is not left padding"),
        ([[0, 0, 0, 0, 0]], "the attention_mask is not left padding"),
        ([[0, 1, 0, 1, 1]], "the attention_mask is not left padding"),
        ([[1, 0, 1, 1, 1]], "the attention_mask is not left padding"),
        ([[0, 2, 1, 1, 1]], "the attention_mask has values other than 0 and 1"),
        ([[1, 1, 1, 1, 2]], "the attention_mask has values other than 0 and 1"),
        ([[1, 1, 1, 1]], "the attention_mask has another shape than input_ids"),
        ([1, 1, 1, 1, 1], "the attention_mask has another shape than input_ids"),
        ([[[1, 1, 1, 1, 1]]], "the attention_mask has another shape than input_ids"),
    ],
)
def test_masks_that_are_left_alone(mask: Any, reason: str) -> None:
    assert refused(IDS[:1], attention_mask=torch.tensor(mask)) == reason


@pytest.mark.parametrize("value", [0.5, -1.0, float("nan"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mask_with_other_values_is_left_alone(value: float, dtype: torch.dtype) -> None:
    mask = torch.tensor([[0.0, value, 1.0, 1.0, 1.0]], dtype=dtype)
    assert refused(IDS[:1], attention_mask=mask) == "the attention_mask has values other than 0 and 1"


def test_a_mask_that_is_no_tensor_is_left_alone() -> None:
    assert refused(IDS, attention_mask=MASK.tolist()) == "the attention_mask is not a tensor"


@pytest.mark.parametrize(
    "make", [lambda it: it.to("meta"), lambda it: it.to_sparse()], ids=["meta", "sparse"]
)
def test_tensors_that_cannot_be_read_are_left_to_plain_generate(make: Callable[[Any], Any]) -> None:
    assert refused(make(IDS)) == refused(IDS, attention_mask=make(MASK)) == arguments.NOT_TAKEN


def test_without_a_mask_padding_is_guessed_by_transformers() -> None:
    reason = "padding tokens without an attention_mask"
    assert refused(IDS, model=Model(pad_token_id=0)) == reason
    assert refused(IDS, pad_token_id=12) == reason
    assert refused(IDS, pad_token_id=torch.tensor(5)) == reason
    assert refused(IDS, generation_config=GenerationConfig(pad_token_id=7)) == reason
    assert read(IDS, model=Model(pad_token_id=13)).pads == (0, 0)
    assert read(IDS).pads == (0, 0)
    assert read(IDS, model=Model(pad_token_id=0), pad_token_id=None).pads == (0, 0)
    assert read(IDS, attention_mask=MASK, pad_token_id=0).pads == (2, 0)


@pytest.mark.parametrize(
    "ids",
    [
        None,
        [[1, 2]],
        np.array([[1, 2]]),
        torch.tensor([1, 2]),
        torch.tensor([[[1, 2]]]),
        torch.tensor([[1.0, 2.0]]),
        torch.tensor([[1 + 1j, 2]]),
        torch.zeros(0, 3, dtype=torch.long),
        torch.zeros(3, 0, dtype=torch.long),
        torch.tensor([[1, -1]]),
        torch.tensor([[1, 2**31]]),
    ],
    ids=str,
)
def test_what_is_no_matrix_of_tokens_is_left_alone(ids: Any) -> None:
    assert "input_ids" in refused(ids)


def test_tokens_may_have_either_name() -> None:
    row = IDS[1:]
    for found in (read(row), read(inputs=row), read(input_ids=row), read(None, input_ids=row)):
        assert found.tokens[0].tolist() == [8, 9, 10, 11, 12]


def test_what_the_call_says_comes_first() -> None:
    model = Model(num_beams=5, eos_token_id=3, num_return_sequences=2)
    assert read(IDS, model=model).copies == 5
    config = GenerationConfig(num_beams=4, eos_token_id=[4, 5])
    assert read(IDS, config, model=model).copies == 4
    assert read(IDS, config, model=model).end_tokens == {4, 5}
    assert read(IDS, config, model=model, num_beams=1).copies == 2
    assert read(IDS, config, model=model, num_beams=1).is_beams is False
    assert read(IDS, config, model=model, eos_token_id=torch.tensor([6])).end_tokens == {6}
    assert read(IDS, config, model=model, eos_token_id=None).end_tokens == frozenset()


@pytest.mark.parametrize("name", sorted(arguments.REQUIRED))
def test_required_settings(name: str) -> None:
    allowed, reason = arguments.REQUIRED[name]
    wrong = {"use_cache": False, "cache_implementation": "static", "guidance_scale": 2.0}.get(name, True)
    if name in ("prefill_chunk_size", "num_beam_groups", "diversity_penalty"):
        wrong = 7
    model = Model()
    setattr(model.generation_config, name, wrong)
    config = GenerationConfig()
    setattr(config, name, wrong)
    assert refused(IDS, model=model) == refused(IDS, config) == refused(IDS, **{name: wrong}) == reason
    right = allowed[0]
    if right is not None:  # what the call says comes first
        read(IDS, model=model, **{name: right})
    for value in allowed:
        read(IDS, **{name: value})


def test_whether_there_is_a_cache_must_not_be_left_open() -> None:
    """With None, `generate` makes a cache and feeds all tokens at every step."""
    assert refused(IDS, use_cache=None) == "use_cache is off"
    read(IDS)


@pytest.mark.parametrize("name", sorted(vars(GenerationConfig())))
def test_every_setting_is_known_or_left_alone(name: str) -> None:
    model = Model()
    setattr(model.generation_config, name, "something")
    found = read_call(model, (IDS,), {})
    in_numbers = {"eos_token_id", "pad_token_id", "num_beams", "num_return_sequences"}
    is_known = name in (arguments.SETTINGS - in_numbers) | arguments.INNER or name.startswith("_")
    assert isinstance(found, Prompts if is_known else str)


def test_settings_that_nobody_knows() -> None:
    model = Model()
    model.generation_config.my_own = 3
    assert refused(IDS, model=model) == "setting my_own"
    model.generation_config.my_own = False
    read(IDS, model=model)
    assert refused(IDS, my_own=0) == "argument my_own"
    read(IDS, my_own=None)


def test_drafts_that_need_states_of_the_whole_prompt() -> None:
    for name, value in {"use_mtp": True, "speculation_type": "dflash", "assistant_early_exit": 1}.items():
        model = Model()
        setattr(model.generation_config, name, value)
        assert refused(IDS, model=model) == f"setting {name}"
        assert refused(IDS, **{name: value}) == f"argument {name}"

    class Gemma4AssistantForCausalLM:
        pass

    assert "assistant" in refused(IDS, assistant_model=Gemma4AssistantForCausalLM())
    read(IDS, assistant_model=Model())


def test_names_that_are_known_exist() -> None:
    """A misspelt name would be a setting that is never served."""
    parameters = set(inspect.signature(GenerationMixin.generate).parameters)
    of_models = {"input_ids", "attention_mask", "tokenizer", "assistant_tokenizer"}
    assert parameters >= arguments.ARGUMENTS - of_models
    known = set(vars(GenerationConfig()))
    # Versions add some and drop some; most are there.
    assert len(arguments.SETTINGS - known) <= 3
    assert not arguments.SETTINGS & arguments.REQUIRED.keys()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_beams": "three"},
        {"num_return_sequences": [1, 2]},
        {"eos_token_id": "stop"},
        {"eos_token_id": [[1], [2, 3]]},
        {"eos_token_id": {"a token"}},
        {"pad_token_id": "pad"},
        {"pad_token_id": {}},
        {"generation_config": {"max_new_tokens": 3}},
        {"generation_config": "greedy"},
        {"inputs": IDS},
    ],
    ids=str,
)
def test_nonsense_is_left_to_plain_generate(kwargs: dict[str, Any]) -> None:
    """Its errors are plain `generate`'s own."""
    assert refused(IDS, **kwargs) == "arguments that generate does not accept"


def test_too_many_arguments() -> None:
    assert refused(*range(30)) == "arguments that generate does not accept"


def test_a_model_without_settings() -> None:
    model = Model()
    model.generation_config = None
    assert refused(IDS, model=model) == "arguments that generate does not accept"


def test_a_cache_or_embeddings() -> None:
    assert refused(IDS, past_key_values=DynamicCache()) == "past_key_values were passed"
    assert refused(inputs_embeds=torch.zeros(1, 2, 3)) == "inputs_embeds were passed"
    assert refused(IDS, synced_gpus=True) == "argument synced_gpus"
    read(IDS, past_key_values=None, inputs_embeds=None, synced_gpus=False)


def test_reading_changes_nothing() -> None:
    model, config = Model(num_beams=2), GenerationConfig(max_new_tokens=3)
    before = (dict(vars(model.generation_config)), dict(vars(config)), IDS.clone(), MASK.clone())
    read(IDS, config, model=model, attention_mask=MASK)
    assert (vars(model.generation_config), vars(config)) == before[:2]
    assert torch.equal(IDS, before[2])
    assert torch.equal(MASK, before[3])
