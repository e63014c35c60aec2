"""Other back ends compute what the reference computes if they are called as the documentation says.

The tables of the page are the calls: each value is evaluated for a batch, and given to a plain interpreter of
the back end.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from differential import back_ends
from differential.attention_cases import Case, Model
from pagoda.attention import hnd_pages, nhd_pages

PAGE = Path(__file__).parents[2] / "docs" / "attention.md"
MIXED = [(9, 1), (0, 0), (17, 17), (13, 5), (1, 1), (6, 0), (8, 1), (20, 5)]
DECODE = [(9, 1), (16, 1), (1, 1), (17, 1), (30, 1)]
DRAFTS = [(9, 3), (16, 3), (3, 3), (17, 3)]
LATENT = Model(heads=5, kv_heads=1, k_dim=12, v_dim=8, is_latent=True, scale=0.3)


def tables() -> dict[str, dict[str, str]]:
    """The tables of the page: the call, and the value of each argument."""
    found: dict[str, dict[str, str]] = {}
    for line in PAGE.read_text().splitlines():
        if match := re.fullmatch(r"\| `(\w+)` \| value \|", line):
            own = found[match[1]] = {}
        elif match := re.fullmatch(r"\| `(\w+)` \| `(.+)` \|", line):
            own[match[1]] = match[2]
    return found


TABLES = tables()


def arguments(call: str, case: Case, pages: Any = nhd_pages) -> dict[str, Any]:
    """What the page says that a call takes, for a case."""
    layer, batch, group = case.layer, case.batch, case.view
    buffers = [layer.keys] if layer.values is None else [layer.keys, layer.values]
    shown = [pages(buffer, group.page_tokens) for buffer in buffers]
    names = {
        "batch": batch, "group": group, "layer": layer, "host": batch.host,
        "host_group": batch.host[layer.group.name], "k_pages": shown[0], "v_pages": shown[-1],
        "v_dim": case.model.v_dim, "torch": torch, "pad": pad,
    }  # fmt: skip
    return {name: eval(value, {}, names) for name, value in TABLES[call].items()}


def queries_of(case: Case) -> torch.Tensor:
    """[tokens, heads, k_dim] with those of padding, which are NaN."""
    padding = case.batch.positions.shape[0] - case.batch.num_tokens
    return pad(case.queries, (0, 0, 0, 0, 0, padding), value=float("nan"))


def assert_reference(out: torch.Tensor, case: Case) -> None:
    expected = case.reference().double()
    torch.testing.assert_close(out[: case.batch.num_tokens], expected, rtol=1e-5, atol=1e-5)


def test_the_page_has_every_interpreter_and_only_arguments_that_it_takes():
    assert set(TABLES) == set(back_ends.__all__)
    for call, values in TABLES.items():
        parameters = inspect.signature(getattr(back_ends, call)).parameters
        assert set(values) <= set(parameters), call
        # What is left to the caller: the step's own tensors, and what belongs to the model.
        own = {
            "q", "query", "q_nope", "q_pe", "key", "value", "append_key", "append_value", "sm_scale",
            "softmax_scale", "scale", "softcap", "logits_soft_cap", "kv_layout",
        }  # fmt: skip
        assert set(parameters) - set(values) <= own, call


# Arguments that a call has for what belongs to the model.
MIXES = {
    "flashinfer_prefill": ("q", "sm_scale", "logits_soft_cap"),
    "flash_attn_with_kvcache": ("q", "softmax_scale", "softcap"),
    "flash_attn_varlen_func": ("q", "softmax_scale", "softcap"),
    "vllm_attention": ("query", "scale", "softcap"),
}


@pytest.mark.parametrize("call", MIXES)
@pytest.mark.parametrize("kernel_page", [None, 2])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize("padding", [None, (2, 3)])
def test_mixes_of_rows(
    call: str, kernel_page: int | None, window: int | None, padding: tuple[int, int] | None
):
    model = Model(window=window, softcap=1.5, scale=0.4, v_dim=6)
    case = Case(model, MIXED, kernel_page=kernel_page, seed=5, padding=padding)
    queries, scale, softcap = MIXES[call]
    own = {queries: queries_of(case), scale: 0.4, softcap: 1.5}
    assert_reference(getattr(back_ends, call)(**own, **arguments(call, case)), case)


@pytest.mark.parametrize("call", MIXES)
def test_pages_that_rows_share(call: str):
    case = Case(Model(), [(20, 1), (13, 2), (16, 4), (5, 5), (30, 1)], prefix=12)
    table = case.view.page_table
    assert (table[[0, 1, 2, 4], :3] == table[0, :3]).all()
    assert_reference(getattr(back_ends, call)(queries_of(case), **arguments(call, case)), case)


@pytest.mark.parametrize("padding", [None, (2, 2)])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
def test_flashinfer_decodes(window: int | None, padding: tuple[int, int] | None):
    case = Case(Model(window=window, softcap=1.5), DECODE, padding=padding)
    out = back_ends.flashinfer_decode(
        queries_of(case), **arguments("flashinfer_decode", case), logits_soft_cap=1.5
    )
    assert_reference(out, case)


@pytest.mark.parametrize("window", [None, 6])
def test_flashinfer_reads_pages_with_heads_before_tokens(window: int | None):
    case = Case(Model(window=window), MIXED, kernel_page=2)
    given = arguments("flashinfer_prefill", case, hnd_pages)
    assert given["paged_kv_cache"][0].shape[1:] == (2, 2, 8)
    assert_reference(back_ends.flashinfer_prefill(queries_of(case), **given, kv_layout="HND"), case)


@pytest.mark.parametrize("kernel_page", [None, 1])
@pytest.mark.parametrize("padding", [None, (2, 3)])
def test_flashinfer_reads_latents(kernel_page: int | None, padding: tuple[int, int] | None):
    case = Case(LATENT, MIXED, kernel_page=kernel_page, padding=padding)
    queries = queries_of(case)
    out = back_ends.flashinfer_mla(
        queries[..., :8], queries[..., 8:], **arguments("flashinfer_mla", case), sm_scale=0.3
    )
    assert_reference(out, case)


@pytest.mark.parametrize("rows", [DECODE, DRAFTS])
@pytest.mark.parametrize("is_padded", [False, True])
def test_flashattention_with_a_dimension_for_rows(rows: list[tuple[int, int]], is_padded: bool):
    count = rows[0][1]
    padding = (1, count) if is_padded else None
    case = Case(Model(window=6), rows, padding=padding)
    given = arguments("flash_attn_with_kvcache", case)
    del given["cu_seqlens_q"], given["max_seqlen_q"]
    queries = queries_of(case).unflatten(0, (-1, count))
    out = back_ends.flash_attn_with_kvcache(queries, **given)
    if is_padded:
        assert not out[-1].any()
    assert_reference(out.flatten(0, 1), case)


@pytest.mark.parametrize("rows", [DECODE, DRAFTS])
def test_flashmla(rows: list[tuple[int, int]]):
    for page, kernel_page in ((64, None), (128, 64)):
        count = rows[0][1]
        longer = [(length + 60, queries) for length, queries in rows]
        case = Case(LATENT, longer, page, kernel_page, padding=(1, count))
        queries = queries_of(case).unflatten(0, (-1, count))
        out = back_ends.flash_mla_with_kvcache(
            queries, **arguments("flash_mla_with_kvcache", case), softmax_scale=0.3
        )
        assert_reference(out.flatten(0, 1), case)


@pytest.mark.parametrize("call", ["flashinfer_append", "reshape_and_cache_flash"])
@pytest.mark.parametrize("kernel_page", [None, 2])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("padding", [None, (2, 3)])
def test_tokens_are_stored_where_our_store_puts_them(
    call: str, kernel_page: int | None, window: int | None, padding: tuple[int, int] | None
):
    model = Model(window=window, v_dim=6)
    ours, theirs = (Case(model, MIXED, kernel_page=kernel_page, padding=padding) for _ in range(2))
    num_tokens = ours.batch.num_tokens
    keys, values = torch.randn(num_tokens, 2, 8), torch.randn(num_tokens, 2, 6)
    ours.layer.store(ours.batch, keys, values)
    if call == "flashinfer_append":
        back_ends.flashinfer_append(keys, values, **arguments(call, theirs))
    else:
        rest = theirs.batch.positions.shape[0] - num_tokens
        padded = (pad(each, (0, 0, 0, 0, 0, rest)) for each in (keys, values))
        back_ends.reshape_and_cache_flash(*padded, **arguments(call, theirs))
    for mine, other in ((ours.layer.keys, theirs.layer.keys), (ours.layer.values, theirs.layer.values)):
        assert mine is not None
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(ours.reference(), theirs.reference(), rtol=0, atol=0)


def test_an_interpreter_reads_only_what_it_is_given():
    case = Case(Model(), MIXED)
    given = arguments("flashinfer_prefill", case)
    given["window_left"] = 2
    out = back_ends.flashinfer_prefill(queries_of(case), **given)
    with pytest.raises(AssertionError):
        assert_reference(out, case)
