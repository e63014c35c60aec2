"""The attention benchmark in tiny sizes: what it measures is right, and so is what it counts."""

import json
import sys
from pathlib import Path

import pytest
import torch

from bench import attention, measure
from bench.__main__ import main
from bench.attention import BACKENDS, SMOKE_DIVISOR
from bench.attention.lines import lines
from bench.attention.step import Shape, decode, extend, make_step


@pytest.fixture(scope="module")
def rows() -> list[attention.Row]:
    machine = attention.limits("cpu", SMOKE_DIVISOR)
    return list(attention.measure_all(machine, "cpu", SMOKE_DIVISOR))


def test_every_line_is_measured_and_right(rows: list[attention.Row]):
    assert [row["work"] for row in rows] == [line.name for line in lines(SMOKE_DIVISOR)]
    for row in rows:
        assert row["error"] < 0.01, row["work"]  # bfloat16 outputs are rounded by 0.004 at most
        assert row["ours µs"] > 0


@pytest.mark.parametrize("divisor", [1, SMOKE_DIVISOR])
def test_lines_have_their_own_names_and_follow_those_they_are_compared_with(divisor: int):
    before: set[str] = set()
    for line in lines(divisor):
        assert line.name not in before
        assert before.issuperset(line.beside)
        before.add(line.name)


def test_a_back_end_that_refuses_is_no_failure(rows: list[attention.Row]):
    row = rows[0]  # cuDNN is not there on a CPU
    assert (row["cuDNN µs"], row["of cuDNN"], row["met"]) == ("refused", "–", "–")
    assert row["details"]["cuDNN"]["decode"].startswith("refused: ")


def test_lines_that_are_as_fast_as_they_should_be_are_met():
    assert attention._met([(1.0, 0.97), (0.95, 0.95)]) == "yes"
    assert attention._met([(1.0, 0.97), (0.94, 0.95)]) == "no"
    assert attention._met([]) == attention._met([(1.0, 0.97), ("–", 0.95)]) == "–"


def test_results_are_compared_with_the_reference():
    step = make_step(decode(3, 128), "cpu")
    assert step.error() < 0.01
    step.calls = lambda: [lambda: step.out.mul_(1.5)]
    assert step.error() > 0.4


def test_rows_have_pages_in_any_order():
    step = make_step(decode(4, 512), "cpu")
    (group,) = step.pools.layout.paged_groups
    ids = [step.manager.page_ids(row, group.name).tolist() for row in step.rows.tolist()]
    assert sorted(page for row in ids for page in row) == list(range(1, 129))
    for row in ids:
        assert row != sorted(row)
        assert max(row) - min(row) > len(row)


def test_bytes_and_operations_of_a_call():
    one = decode(64, 4_096)
    assert one.num_bytes == 64 * 4_096 * 8 * 128 * 2 * 2
    assert one.num_flops == 64 * 4_096 * 32 * 128 * 4
    assert one._replace(dtype="float8_e4m3fn").num_bytes == one.num_bytes // 2
    assert one._replace(window=1_024).num_bytes == one.num_bytes // 4
    assert one._replace(window=1_024).num_flops == one.num_flops // 4
    chunk = extend(1_024, 31_744)
    assert chunk.num_flops == 4 * 32 * 128 * (1_024 * 31_744 + 1_024 * 1_025 // 2)
    absorbed = decode(1, 10, heads=128, kv_heads=1, k_dim=576, v_dim=512, is_latent=True)
    assert absorbed.num_bytes == 10 * 576 * 2
    assert absorbed.num_flops == 10 * 128 * (576 + 512) * 2
    narrow = Shape((6,), (4,), window=3)  # four queries that read three tokens each
    assert narrow.num_flops == 4 * 32 * 128 * 12


def test_sdpa_computes_the_same_shapes():
    for shape in (decode(2, 64), extend(32, 0), extend(16, 48)):
        step = make_step(shape, "cpu")
        for backend in BACKENDS.values():
            for calls, work in step.sdpa(backend).values():
                assert len(calls) == step.num_layers
                assert 1 <= work < 1.5


def test_smoke_prints_both_tables_and_saves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(attention, "lines", lambda divisor: lines(divisor)[:1])
    monkeypatch.setattr(attention, "SWEEP_TOKENS", 1_024 * SMOKE_DIVISOR**2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    attention.run(smoke=True)
    shown = capsys.readouterr().out
    assert "attention over shuffled pages" in shown
    assert "decode by batch and context" in shown
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("options", [[], ["--sweep"], ["--smoke"]], ids=str)
def test_without_a_gpu_only_the_smoke_run_starts(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked: list[dict[str, bool]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(attention, "run", lambda **given: asked.append(given))
    monkeypatch.setattr(sys, "argv", ["bench", "attention", *options])
    assert main() == 0
    assert asked == ([{"sweep": False, "smoke": True}] if options == ["--smoke"] else [])
    assert ("skipped" in capsys.readouterr().out) != (options == ["--smoke"])


def test_a_sweep_is_saved_for_the_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(attention, "SWEEP_TOKENS", 1_024)
    monkeypatch.setattr(attention, "limits", lambda device, divisor: {"copy": 4e6, "matmul": 7e8})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    attention.run(sweep=True)
    (row,) = json.loads((tmp_path / "attention-sweep.json").read_text())["rows"]
    assert (row["rows"], row["context"], row["copy TB/s"]) == (1, 1_024, 4.0)
