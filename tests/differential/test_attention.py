"""Every implementation of attention against the torch reference, on all variants; Triton's is interpreted
where there is no GPU, and compiled where there is one."""

import importlib
import importlib.util
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from differential.attention_cases import (
    MANY,
    ROWS,
    SHAPES,
    VARIANTS,
    Attend,
    Case,
    Model,
    Variant,
    case_of,
    judge,
    needed_pairs,
    pairs_of,
    same_bytes,
)
from pagoda.attention import _reference
from pagoda.attention._call import Call
from profiles import examples

HAS_CUDA = torch.cuda.is_available()
TRITON_DEVICE = "cuda" if HAS_CUDA else "cpu"
MODULES = {  # and where their tensors are
    "listed": ("differential.listed_attention", "cpu"),
    "native": ("pagoda.attention._native", "cpu"),
    "triton": ("pagoda.attention._triton", TRITON_DEVICE),
}
NAMES = [name for name, (module, _) in MODULES.items() if importlib.util.find_spec(module)]
DEVICES = {name: MODULES[name][1] for name in NAMES}


def takes(name: str, variant: Variant) -> bool:
    """The native kernels have queries of the pool's dtype, float32 or bfloat16."""
    return name != "native" or variant.dtype in ("float32/float32", "bfloat16/bfloat16")


def attend_of(name: str) -> Attend:
    if name == "triton":
        pytest.importorskip("triton", reason="needs triton")
    attend: Attend = importlib.import_module(MODULES[name][0]).attend
    return attend


def each(variants: list[Variant]) -> Any:
    """A test for each implementation and each variant that it takes."""
    return pytest.mark.parametrize(
        ("name", "variant"),
        [(name, variant) for name in NAMES for variant in variants if takes(name, variant)],
        ids=str,
    )


def test_every_implementation_is_judged():
    found = {
        path.stem
        for path in Path(_reference.__file__).parent.glob("*.py")
        if "\ndef attend(" in path.read_text()
    }
    assert found == {"_reference", *(MODULES[name][0].rpartition(".")[2] for name in NAMES[1:])}


def test_all_pairs_of_values_are_among_the_variants():
    found = set(itertools.chain.from_iterable(pairs_of(variant._asdict()) for variant in VARIANTS))
    assert found >= needed_pairs()
    # On a GPU, 11 shapes and 9 dtypes alone make 99 pairs; elsewhere, 11 shapes and 6 rows make 65. Few more
    # variants than that have all others, too.
    assert len(VARIANTS) <= (110 if HAS_CUDA else 85)


def test_rows_are_split_or_not_as_the_variants_say():
    parts = {}
    for rows in ROWS:
        case = Case(SHAPES["16x1"], ROWS[rows], 16)
        found = case.view.work.splits.tolist()
        parts[rows] = [n for n, _ in found[: len(ROWS[rows])]]
    assert max(parts["split"][:2]) > 2, "a row of several parts"
    assert parts["split"][-1] == 1
    assert parts["long"][0] > 1, "an extend row of several parts"
    assert parts["long"][1] > 1, "a decode row"
    assert parts["decode"].count(1) > 4, "rows of one part"
    assert max(parts["extend"]) == 1


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_reference_is_plain_attention(variant: Variant):
    case = case_of(variant, "cpu")
    torch.testing.assert_close(case.reference(case.queries.double()), case.plain(), rtol=1e-9, atol=1e-9)


@each(VARIANTS)
def test_variants(name: str, variant: Variant):
    judge(attend_of(name), case_of(variant, DEVICES[name]), variant.form == "strided")


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_several_tiles_of_queries(name: str):
    for model in (SHAPES["16x1"], SHAPES["112x3"]._replace(kv_heads=1, heads=3, window=40)):
        judge(attend_of(name), Case(model, MANY, 16, None, DEVICES[name]))


@pytest.mark.parametrize("name", NAMES)
def test_an_extend_row_of_more_parts(name: str):
    for window in (None, 2050):
        case = Case(SHAPES["80x4"]._replace(window=window), [(2100, 9)], 16, None, DEVICES[name])
        assert int(case.view.work.splits[0, 0]) > 2
        judge(attend_of(name), case)


PAIRED = [
    Variant("16x1", "float32/float32", (16, None), "split", None, None, True, "exact"),
    Variant("64x2", "bfloat16/bfloat16", (16, None), "split", None, None, True, "exact"),
    Variant("112x3", "float32/float32", (16, None), "mixed", 40, None, True, "exact"),
    Variant("latent48", "bfloat16/bfloat16", (16, None), "long", None, None, True, "exact"),
]


@each(PAIRED)
def test_padding_changes_no_byte_and_neither_does_a_second_run(name: str, variant: Variant):
    attend, device = attend_of(name), DEVICES[name]
    exact = judge(attend, case_of(variant, device))
    for padding in (None, (1, 0), (2, 3)):
        assert same_bytes(judge(attend, case_of(variant, device, padding=padding)), exact)


@each(PAIRED)
def test_strides_change_no_byte(name: str, variant: Variant):
    attend, case = attend_of(name), case_of(variant, DEVICES[name], padding=(2, 3))
    assert same_bytes(judge(attend, case, is_strided=True), judge(attend, case))


@pytest.mark.parametrize("name", NAMES)
def test_pages_of_the_kernel_give_the_same_bytes_whatever_the_pages_of_the_group_are(name: str):
    attend, device = attend_of(name), DEVICES[name]
    rows = [(70, 1), (30, 9), (300, 1)]
    cases = [Case(SHAPES["64x2"], rows, page, 16, device) for page in (16, 64)]
    assert torch.equal(cases[0].keys[2], cases[1].keys[2])
    assert not torch.equal(cases[0].view.indices, cases[1].view.indices)
    assert same_bytes(*(judge(attend, case) for case in cases))


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_share_pages(name: str):
    rows = [(300, 1), (200, 1), (130, 1), (129, 17), (64, 2), (400, 1)]
    case = Case(SHAPES["64x2"], rows, 16, None, DEVICES[name], prefix=128)
    assert (case.view.page_table[[0, 1, 2, 3, 5], :8] == case.view.page_table[0, :8]).all()
    judge(attend_of(name), case)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_nothing_but_padding(name: str):
    attend, device = attend_of(name), DEVICES[name]
    for rows in ([(0, 0)], [(0, 0), (40, 0)], [(5, 1)]):
        case = Case(SHAPES["16x1"], rows, 16, None, device)
        judge(attend, case)
    if name == "triton":  # it reads what the table names, and a row of a manager has every page that it reads
        return
    case = Case(SHAPES["16x1"], [(40, 1), (9, 9)], 16, None, device)
    case.view.page_table.zero_()  # rows whose pages are all gone read nothing
    out = torch.full((10, 2, 16), math.nan, device=device)
    attend(case.call(out=out))
    assert not out.any()


@pytest.mark.parametrize("name", NAMES)
def test_queries_behind_a_batch_of_no_tokens_get_0(name: str):
    for padding in (None, (0, 0), (2, 3)):
        case = Case(SHAPES["16x1"], [(40, 0), (0, 0)], 16, None, DEVICES[name], padding=padding)
        out = torch.full((5, 2, 16), math.nan, device=DEVICES[name])
        attend_of(name)(case.call(torch.full((5, 2, 16), math.nan), out))
        assert not out.any()


@pytest.mark.parametrize("name", ["reference", "native", "triton"])
def test_outputs_may_take_the_place_of_the_queries(name: str):
    device = DEVICES.get(name, "cpu")
    case = Case(SHAPES["64x2"], [(700, 1), (40, 9), (3, 2), (64, 1)], 16, None, device, padding=None)
    queries = case.queries.clone().to(device)
    (_reference.attend if name == "reference" else attend_of(name))(case.call(queries, queries))
    torch.testing.assert_close(queries.cpu(), case.reference(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_latents_of_the_common_width_with_other_values(name: str):
    model = Model(heads=2, kv_heads=1, k_dim=576, v_dim=448, is_latent=True, scale=0.06, dtype="bfloat16")
    case = Case(model, [(70, 1), (20, 9)], 16, None, DEVICES[name])
    case.queries = case.queries.to(torch.bfloat16)
    judge(attend_of(name), case)


@pytest.mark.parametrize("name", NAMES)
def test_caps_far_above_and_below_the_logits(name: str):
    for softcap in (1e-3, 0.3, 50.0, 1e5, 1e20):
        case = Case(SHAPES["64x2"]._replace(softcap=softcap), [(70, 1), (40, 9)], 16, None, DEVICES[name])
        case.queries *= 3
        judge(attend_of(name), case)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_sinks_that_no_float_holds_once_exponentiated(name: str):
    attend, rows = attend_of(name), [(70, 1), (300, 1), (40, 9)]
    case = Case(SHAPES["64x2"]._replace(has_sinks=True), rows, 16, None, DEVICES[name])
    case.sinks = torch.full((4,), 200.0)  # outweigh all keys
    call = case.call()
    attend(call)
    assert call.out.abs().max() < 1e-30
    case.sinks = torch.full((4,), -200.0)  # weigh nothing
    judge(attend, case)
    case.sinks = None
    large = case.queries * 40  # logits of more than 100
    call = case.call(large)
    attend(call)
    exact = case.reference(large.double())
    assert call.out.isfinite().all()
    torch.testing.assert_close(call.out.cpu().double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=examples(100 if HAS_CUDA else 8),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_any_batch(name: str, data: st.DataObject):
    kernel_page = data.draw(st.sampled_from([1, 2, 4, 16]))
    page = kernel_page * data.draw(st.sampled_from([1, 2, 3]))
    length = st.integers(0, 20) | st.sampled_from([63, 64, 65, 128, 255, 256, 257, 320, 513])
    count = st.sampled_from([0, 1, 1, 2, 7, 8, 9, 17])
    rows = [(n, min(n, q)) for n, q in data.draw(st.lists(st.tuples(length, count), min_size=1, max_size=4))]
    model = Model(
        heads=3, kv_heads=data.draw(st.sampled_from([1, 3])), k_dim=16, v_dim=16,
        window=data.draw(st.sampled_from([None, 1, 3, 64, 65, 300])),
        has_sinks=data.draw(st.booleans()), softcap=data.draw(st.sampled_from([None, 2.0])),
    )  # fmt: skip
    padding = data.draw(st.sampled_from([None, (0, 0), (2, 3)]))
    if not any(count for _, count in rows):
        rows[0] = (3, 1)
    case = Case(model, rows, page, kernel_page, DEVICES[name], data.draw(st.integers(0, 99)), padding=padding)
    judge(attend_of(name), case)


def test_constants_determine_the_types_of_all_arguments(monkeypatch: pytest.MonkeyPatch):
    """A kernel that was compiled once is found by its constants alone, and launched with any arguments."""
    pytest.importorskip("triton", reason="needs triton")
    fused = importlib.import_module("pagoda.kernels._attention_fused")
    found: dict[Any, tuple[Any, ...]] = {}

    def record(kernel: Any, tiling: Any, grid: Any, args: tuple[Any, ...], *constants: Any, **_: Any) -> None:
        types = tuple(arg.dtype if isinstance(arg, torch.Tensor) else type(arg) for arg in args)
        assert found.setdefault((kernel, tiling[2:], constants), types) == types

    monkeypatch.setattr(fused, "_run", record)
    monkeypatch.setattr(fused, "_is_interpreted", lambda device: False)
    for dtype in {variant.dtype for variant in VARIANTS}:
        for rows, has_sinks in itertools.product(("decode", "split", "long", "mixed"), (False, True)):
            variant = Variant("64x2", dtype, (16, None), rows, None, None, has_sinks, "exact")
            attend_of("triton")(case_of(variant, "cpu").call())
    assert len(found) > 40


def test_the_stride_of_one_token_makes_no_variant(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton", reason="needs triton")
    fused = importlib.import_module("pagoda.kernels._attention_fused")
    found = set()
    monkeypatch.setattr(fused, "_run", lambda *args, **_: found.add(args[4:]))
    case = Case(SHAPES["64x2"], [(70, 1)], 16, padding=None)
    for stride in (4 * 64, 1000):
        queries = case.queries.as_strided((1, 4, 64), (stride, 64, 1))
        attend_of("triton")(case.call(queries, torch.empty(1, 4, 64).as_strided((1, 4, 64), (stride, 64, 1))))
    assert len(found) == 1


# ── the judge itself ────────────────────────────────────────────────────────────────────────────────


def wrong(change: Callable[[Call], Call]) -> Attend:
    return lambda call: _reference.attend(change(call))


def writes(where: Any, value: float) -> Attend:
    def attend(call: Call) -> None:
        _reference.attend(call)
        call.out[where] = value

    return attend


def reads_one_key_less(call: Call) -> None:
    lengths = call.batch.lengths.clone()
    call.batch.lengths.sub_(1).clamp_(min=0)
    _reference.attend(call)
    call.batch.lengths.copy_(lengths)


MISTAKES: dict[str, Attend] = {
    "scale": wrong(lambda call: call._replace(scale=call.scale * 1.001)),
    "softcap": wrong(lambda call: call._replace(softcap=call.softcap * 1.01)),
    "sinks": wrong(lambda call: call._replace(sinks=None)),
    "k_scale": wrong(lambda call: call._replace(k_scale=1.0)),
    "v_scale": wrong(lambda call: call._replace(v_scale=1.0)),
    "one key less": reads_one_key_less,
    "padding": writes((-1, 0, 0), 1e-3),
    "NaN": writes((0, 0, 0), math.nan),
    "nothing": lambda call: None,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_judge_sees(mistake: str):
    model = SHAPES["64x2"]._replace(dtype="float8_e4m3fn", has_sinks=True, softcap=1.5)
    with pytest.raises(AssertionError):
        judge(MISTAKES[mistake], Case(model, [(70, 1), (30, 9)], 16))
    judge(_reference.attend, Case(model, [(70, 1), (30, 9)], 16))


def test_the_judge_sees_what_is_written_between_outputs():
    def attend(call: Call) -> None:
        _reference.attend(call)
        whole = call.out.as_strided((1,), (1,), call.out.storage_offset() + call.out.shape[2])
        whole.zero_()

    with pytest.raises(AssertionError, match="behind v_dim"):
        judge(attend, Case(SHAPES["64x2"], [(70, 1)], 16), is_strided=True)
