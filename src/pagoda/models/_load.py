"""Loads models. In: a name or a folder; out: a model that is ready to generate, and its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as transformers_logging

from pagoda.errors import ConfigError
from pagoda.layout._numbers import show
from pagoda.models._smollm2 import smollm2
from pagoda.pools._arguments import resolve_device

__all__ = ["load"]

DTYPES = ("float32", "bfloat16", "float16", "auto")


def load(
    name_or_folder: str | os.PathLike[str] = "smollm2",
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device | None = None,
) -> tuple[Any, Any]:
    """Load "smollm2" or a Hugging Face folder, and return the model, ready to generate, and its tokenizer.

    Folders are loaded without network access and without running code from them. `dtype` is the dtype of the
    weights in memory, "auto" that of the file; `device` defaults to CUDA if available. Loading smollm2 takes
    1 s once it is downloaded. Errors: ConfigError, MissingError.
    """
    if not isinstance(dtype, torch.dtype) and dtype not in DTYPES:
        raise ConfigError(f"dtype: give one of {', '.join(DTYPES)}, not {show(dtype)}")
    place = resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not isinstance(name_or_folder, (str, os.PathLike)):
        raise ConfigError(f"model: give 'smollm2' or a folder, not {type(name_or_folder).__name__}")
    folder = smollm2() if name_or_folder == "smollm2" else Path(os.path.expanduser(name_or_folder))
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise ConfigError(
            f"model: {show(folder, 200)} {what}: give 'smollm2', or a folder with config.json, weights and "
            "tokenizer"
        )
    with _no_progress():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # any error here is about the contents of the folder
            told = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"model: transformers {transformers.__version__} cannot load {show(folder, 200)}: "
                f"{type(error).__name__}: {told}"
            ) from error
    return model.to(place).eval(), tokenizer


@contextmanager
def _no_progress() -> Iterator[None]:
    """Hide progress bars: loading takes less time than reading them."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()
