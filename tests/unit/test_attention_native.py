"""Native attention on the CPU against the reference in float64, on every instruction set of this machine."""

import _thread
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from differential.attention_cases import Case, Model
from pagoda.attention import _native, _reference, nhd_pages, paged
from pagoda.errors import ArgumentError
from profiles import examples
from unit.test_paged_attention import MIXED, SHAPES

LEVELS = _native.levels()
NARROW = {"rtol": 2**-7, "atol": 2**-7}  # bfloat16 keeps 8 bits
EXACT = {"rtol": 1e-5, "atol": 1e-5}


def judged(case: Case) -> torch.Tensor:
    """The reference in float64, of the queries as the pool's dtype keeps them."""
    call = case.call(case.queries.to(case.pool.dtype).double())
    _reference.attend(call)
    return call.out


def native(case: Case, level: str | None = None, **given: Any) -> torch.Tensor:
    call = case.call(case.queries.to(case.pool.dtype), **given)
    assert _native.can_attend(call)
    _native.attend(call, level=level)
    return call.out


def require_close(case: Case, level: str) -> None:
    tolerance = NARROW if case.model.dtype == "bfloat16" else EXACT
    torch.testing.assert_close(native(case, level).double(), judged(case), **tolerance)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


LONG = [(900, 1), (70, 70), (131, 3), (0, 0), (300, 66), (64, 1), (65, 9)]
MODELS = {
    **SHAPES,
    "smollm": Model(heads=9, kv_heads=3, k_dim=64, v_dim=64),
    "many-heads": Model(heads=40, kv_heads=2, k_dim=80, v_dim=96),
    "not-whole-vectors": Model(heads=6, kv_heads=3, k_dim=33, v_dim=17),
    "one-wide": Model(heads=2, kv_heads=2, k_dim=1, v_dim=1),
    "large": Model(heads=4, kv_heads=2, k_dim=256, v_dim=128),
    "latent-large": Model(heads=16, kv_heads=1, k_dim=576, v_dim=512, is_latent=True, scale=0.05),
    "latent-few": Model(heads=3, kv_heads=1, k_dim=76, v_dim=60, is_latent=True, scale=0.2),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", MODELS)
def test_it_is_the_reference(shape: str, dtype: str, level: str):
    model = MODELS[shape]._replace(dtype=dtype)
    require_close(Case(model, LONG, page=32, kernel_page=16, seed=1), level)
    windows = [None] if model.is_latent else [1, 50, 10_000]
    for window in windows:
        case = Case(model._replace(window=window, softcap=2.0, has_sinks=True), LONG, page=32, seed=2)
        require_close(case, level)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=examples(60))
@given(data=st.data())
def test_any_shape_and_batch(level: str, data: st.DataObject):
    kv_heads = data.draw(st.integers(1, 3))
    model = Model(
        heads=kv_heads * data.draw(st.integers(1, 12)),
        kv_heads=kv_heads,
        k_dim=data.draw(st.integers(1, 70)),
        v_dim=data.draw(st.integers(1, 70)),
        window=data.draw(st.sampled_from([None, None, 1, 7, 64, 90])),
        softcap=data.draw(st.sampled_from([None, 0.7, 30.0])),
        has_sinks=data.draw(st.booleans()),
        dtype=data.draw(st.sampled_from(["float32", "bfloat16"])),
    )
    rows = [(1, 1)]
    for _ in range(data.draw(st.integers(0, 4))):
        length = data.draw(st.integers(0, 200))
        rows.append((length, data.draw(st.integers(0, min(length, 80)))))
    kernel_page = data.draw(st.sampled_from([1, 4, 16]))
    require_close(Case(model, rows, 16, kernel_page, seed=data.draw(st.integers(0, 99))), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_long_rows_are_merged_from_parts(level: str, dtype: str, has_sinks: bool):
    rows = [(2_900, 1), (5, 5), (2_300, 70), (1_100, 2)]
    case = Case(Model(has_sinks=has_sinks, dtype=dtype), rows, page=128, kernel_page=16, seed=4)
    require_close(case, level)


@pytest.mark.parametrize("level", LEVELS)
def test_results_do_not_depend_on_the_number_of_threads(level: str, threads: Any):
    case = Case(Model(heads=6, kv_heads=2), [(2_900, 1), (3_000, 70), (9, 9)], page=128, kernel_page=16)
    outs = []
    for n in (1, 2, 5):
        threads(n)
        outs.append(native(case, level))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [0, -1, -(2**31), "the first behind the pool", 2**31 - 1])
def test_pages_outside_the_pool_are_not_read(level: str, bad: int | str):
    for model in (MODELS["smollm"], MODELS["not-whole-vectors"]._replace(dtype="bfloat16")):
        case = Case(model, LONG, page=32, seed=3)
        table = case.view.page_table
        if isinstance(bad, str):
            bad = len(case.layer.keys) // case.view.page_tokens
        table[0, ::3] = bad  # holes
        table[1] = bad  # nothing at all
        table[4, 0] = bad
        require_close(case, level)
        assert not native(case, level)[1:71].any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_queries_and_out_may_be_strided(level: str, dtype: str):
    case = Case(MODELS["smollm"]._replace(dtype=dtype), MIXED, seed=5)
    n = len(case.queries)
    queries = torch.full((n + 4, 12, 70), torch.nan, dtype=case.pool.dtype)
    queries[:n, :9, 3:67] = case.queries.to(case.pool.dtype)
    memory = torch.full((n + 4, 11, 80), 7.0, dtype=case.pool.dtype)
    call = case.call(queries[:, :9, 3:67], memory[:, 1:10, 8:72])
    _native.attend(call, level=level)
    expected = native(case, level)
    assert torch.equal(memory[:n, 1:10, 8:72], expected)
    assert not memory[n:, 1:10, 8:72].any()  # padding, although its queries are NaN
    memory[:, 1:10, 8:72] = 7.0
    assert (memory == 7.0).all()


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_not_a_number_stays_so_and_stays_where_it_is(level: str):
    case = Case(Model(), [(40, 1), (40, 30)], page=4)
    case.queries[0, 1] = torch.nan
    case.queries[7, 2] = torch.inf
    out = native(case, level)
    assert out[0, 1].isnan().all()
    assert out[7, 2].isnan().all()
    out[0, 1] = out[7, 2] = 0
    assert out.isfinite().all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scale", [1e-6, 0.5, 30.0, 1e6])
@pytest.mark.parametrize("softcap", [None, 0.1, 50.0])
def test_logits_of_any_size(level: str, scale: float, softcap: float | None):
    case = Case(Model(scale=scale, softcap=softcap), [(150, 1), (90, 40)], page=8)
    # A logit of 1,000 has an error of 1e-4 in float32, whoever computes it.
    tolerance = 1e-5 if softcap is not None or scale < 1 else 2e-3
    torch.testing.assert_close(native(case, level).double(), judged(case), rtol=tolerance, atol=tolerance)


def test_weights_are_accurate_where_they_are_small():
    """One key has all the weight but e^−x: what is left shows the error of exp."""
    case = Case(Model(heads=1, kv_heads=1, k_dim=1, v_dim=1, scale=1.0), [(2, 1)])
    pages = nhd_pages(case.layer.keys, 4)
    page = int(case.view.page_table[0, 0])
    assert case.layer.values is not None
    values = nhd_pages(case.layer.values, 4)
    values[page, 0], values[page, 1], case.queries[0] = 0, 1, 1
    for x in torch.linspace(0.01, 80, 500).tolist():
        pages[page, 0], pages[page, 1] = 0, -x
        expected = torch.sigmoid(pages[page, 1, 0, 0].double())
        for level in LEVELS:
            found = native(case, level)[0, 0, 0].double()
            error = max(1e-6, x * 1e-7)  # of exp itself, or what a logit of −x in float32 has anyway
            torch.testing.assert_close(found, expected, rtol=error, atol=0)


def test_which_calls_it_serves(monkeypatch: pytest.MonkeyPatch):
    served = []
    monkeypatch.setattr(_native, "attend", lambda call: served.append("native"))
    monkeypatch.setattr(_reference, "attend", lambda call: served.append("reference"))
    for model, dtype, who in [
        (Model(), torch.float32, "native"),
        (Model(dtype="bfloat16"), torch.bfloat16, "native"),
        (Model(), torch.bfloat16, "reference"),
        (Model(), torch.float64, "reference"),
        (Model(dtype="float16"), torch.float16, "reference"),
        (Model(dtype="float8_e4m3fn"), torch.bfloat16, "reference"),
        (Model(window=3, sink_tokens=2), torch.float32, "reference"),
    ]:
        case = Case(model, [(5, 1)])
        paged(case.queries.to(dtype), case.layer, case.batch)
        assert served.pop() == who, model


def test_an_unknown_level_is_refused():
    assert LEVELS[-1] == "baseline"
    case = Case(Model(), [(5, 1)])
    out = torch.full((1, 4, 8), 3.0)
    with pytest.raises(ArgumentError, match=r"level: this machine has no sse9: it has .*baseline"):
        native(case, "sse9", out=out)
    assert (out == 3.0).all()


def test_calls_of_several_threads_and_an_interrupt():
    case = Case(MODELS["smollm"], [(900, 1), (900, 200)], page=32)
    expected, outs = native(case), {}

    def attend(i: int) -> None:
        outs[i] = [native(case) for _ in range(20)]

    workers = [threading.Thread(target=attend, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(outs) == 3
    assert all(torch.equal(out, expected) for each in outs.values() for out in each)

    timer = threading.Timer(0.02, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        timer.start()
        while True:
            native(case)
    timer.join()
    assert torch.equal(native(case), expected)


THREADS = """
import os, sys
sys.path[:0] = ["tests", "."]
import torch
torch.set_num_threads(1)
from pagoda import _native as native
from pagoda.attention import _native
from differential.attention_cases import Case, Model

def libraries():
    return {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.split()[-1].split("/")[-1]}

def num_threads():
    return len(os.listdir("/proc/self/task"))

case = Case(Model(), [(2000, 2000)], page=64)
call, loaded, before = case.call(), libraries(), num_threads()
assert native.has_openmp() and loaded
_native.attend(call)
assert num_threads() == before, "one thread is the caller's own"
torch.set_num_threads(3)
_native.attend(call)
assert num_threads() == before + 2, (before, num_threads())
torch.ones(10_000_000).add_(1)
assert num_threads() == before + 2, "torch uses the same threads"
assert libraries() == loaded
print("same threads")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_runs_on_the_threads_of_torch():
    if "OpenMP" not in torch.__config__.parallel_info():
        pytest.skip("torch is built without OpenMP")
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "same threads" in done.stdout
