"""The command line."""

import io
import subprocess
import sys

import pytest

from pagoda.cli import demo, main


def test_the_tour_runs_to_its_end(capsys: pytest.CaptureFixture[str]):
    assert main(["demo"]) == 0
    text = capsys.readouterr().out
    assert "Everything ends, and nothing has leaked" in text
    assert "0 held, 0 quarantined, 47 free" in text
    assert "\033" not in text  # no colours into a pipe


def test_colours_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    demo.run("cpu", out)
    assert "\033[36mA█\033[0m" in out.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    demo.run("cpu", out)
    assert "\033" not in out.getvalue()


def test_a_device_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["demo", "--device", "cuda:99"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("pagoda: device: there is no")
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--nonsense"]])
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
