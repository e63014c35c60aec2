"""The command line."""

import io
import re
import subprocess
import sys

import pytest

from pagoda.cli import _demo as demo
from pagoda.cli import main


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def pool_is_toured(text: str) -> bool:
    assert ("── The pool" in text) == ("0 in use, 0 waiting for a fence, 47 free" in text)
    return "── The pool" in text


def tree_is_toured(text: str) -> bool:
    assert ("── The tree" in text) == ("0 tokens: 0 protected, 0 evictable" in text)
    return "── The tree" in text


@pytest.mark.parametrize("part", ["pool", "tree"])
def test_the_tours_run_to_their_end(part: str, capsys: pytest.CaptureFixture[str]):
    assert main(["demo", part]) == 0
    text, errors = capsys.readouterr()
    assert (pool_is_toured(text), tree_is_toured(text)) == (part == "pool", part == "tree")
    assert text.count("All requests end, and nothing has leaked") == 1
    assert text.count("Mistakes raise an error and change nothing") == 1
    assert "\033" not in text  # no colours into a pipe
    assert errors == ""


def test_the_tree_tour_shows_what_it_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["demo", "tree"]) == 0
    steps = re.split(r"\n\d+\. ", capsys.readouterr().out)[1:]
    grown, split, third, locked, running, evicted, demoted, apart, mistakes, ended = steps
    # Three prompts of 16 words, pages of 4: the second shares 12 words with the first, the third 8.
    assert "0 of 16 tokens are cached" in grown
    assert "16 tokens: 0 protected, 16 evictable · 1 node, 1 leaf" in grown
    assert "12 of 16 tokens are cached, in pages 1-3" in split
    assert "20 tokens: 0 protected, 20 evictable · 3 nodes, 2 leaves" in split
    assert '├─ "blue and not green?" ' in split
    assert "8 of 16 tokens are cached, in pages 1-2" in third
    assert "28 tokens: 0 protected, 28 evictable · 5 nodes, 3 leaves" in third
    assert "28 tokens: 16 protected, 12 evictable · 5 nodes, 3 leaves, 1 lease" in locked
    assert 'namespace "", held by 1 lease' in locked
    # Three pages of an answer of fourteen words, and not a node more.
    assert [line for line in running.split("\n") if "covers" in line] == [
        f"   the lease covers {n} tokens; 5 nodes, as before" for n in (20, 24, 28)
    ]
    assert "pages 4, 8-10  16 tokens  1 lease, leaf" in running
    # The coldest leaf had page 5, the next one 6 and 7: it loses its tail.
    before, after = evicted.split("↓")
    assert "evict(8) returned pages 5, 7" in after
    assert re.search(r'"dark during the night\?" .* leaf, coldest', before)
    assert "dark during the night?" not in after
    assert re.search(r'"How do birds find" +page 6 +4 tokens  leaf, coldest', after)
    before, after = demoted.split("↓")
    assert re.search(r'"Throw this .* leaf, coldest, demoted', before)
    assert "Throw this" not in after
    assert "0 of 16 tokens are cached" in apart
    assert 'namespace "tenant-b"' in apart
    assert "drop('tenant-b') returned pages 5, 7, 11-12" in apart
    for error in ("DoubleFreeError", "NotHeldError", "CapacityError", "OutOfRangeError"):
        assert f": {error}: " in mistakes
    assert "0 nodes, 0 leaves, 0 leases" in ended
    assert (
        len(re.findall(r"(?:insert one|match one: 1,024 tokens found|evict 64 tokens) +[\d.]+ µs", ended))
        == 3
    )


def tour(out: io.StringIO) -> str:
    """The two that need no model."""
    for part in ("pool", "tree"):
        demo.run(part, "cpu", out)
    return out.getvalue()


@pytest.mark.parametrize("columns", [20, 80, 100, 300])
def test_the_tours_stay_within_80_to_100_columns(columns: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    told = tour(io.StringIO())
    assert max(map(len, told.split("\n"))) <= min(100, max(80, columns))


def test_colours_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    told = tour(Terminal())
    assert "\033[36mA█\033[0m" in told  # a page of the pool
    assert '└─ \033[33m"You are a teacher.' in told  # a leased node of the tree
    monkeypatch.setenv("NO_COLOR", "1")
    plain = tour(Terminal())
    assert "\033" not in plain
    times = re.compile(r"[\d.]+ µs")
    uncoloured = re.sub("\033\\[[0-9;]*m", "", told)
    assert re.sub(" +", " ", times.sub("", uncoloured)) == re.sub(" +", " ", times.sub("", plain))


def test_a_stream_without_box_drawing_gets_the_tour_all_the_same():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    demo.run("tree", "cpu", out)
    assert b"All requests end, and nothing has leaked" in out.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_device_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["demo", "--device", "cuda:99"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("pagoda: device: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["demo", "--nonsense"], ["demo", "attic"], ["demo", "pool", "tree"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: pagoda" in capsys.readouterr().err


def test_python_m_pagoda():
    done = subprocess.run(
        [sys.executable, "-m", "pagoda", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("pagoda 0.")


def test_nobody_reads_on():
    """`pagoda demo | head`: the tour notices that its reader has gone, and says nothing about it."""
    command = [sys.executable, "-m", "pagoda", "demo", "tree"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tour:
        assert tour.stdout is not None
        assert tour.stderr is not None
        tour.stdout.close()
        assert tour.stderr.read() == ""
    assert tour.returncode == 141
