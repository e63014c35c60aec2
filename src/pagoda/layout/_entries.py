"""Entries: the bytes of one token, or of one compressed block, in one tensor of a layer.

In: dimensions and dtypes; out: parts with shapes, and bytes. Only this module knows the width of a dtype and
how a page of entries is padded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pagoda.errors import ConfigError
from pagoda.layout._numbers import count, show

__all__ = [
    "DTYPES",
    "Entry",
    "TensorSpec",
    "compressed_fp8",
    "dtype_name",
    "index_keys",
    "latent",
    "latent_fp8",
    "plain",
]

# Bytes of one element, by torch's name of the dtype. An element of fp4 has two values.
DTYPES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "uint8": 1,
    "int32": 4,
}
_ALSO = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
KV_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def dtype_name(value: Any, name: str, allowed: tuple[str, ...] = tuple(DTYPES)) -> str:
    """Return torch's name of a dtype, given that name, a short one ('bf16', 'fp8') or a torch dtype.

    Errors: ConfigError that lists the allowed names.
    """
    text = value if isinstance(value, str) else str(value) if type(value).__name__ == "dtype" else ""
    text = text.removeprefix("torch.").lower()
    text = _ALSO.get(text, text)
    if text not in allowed:
        shorts = [short for short, long in _ALSO.items() if long in allowed]
        raise ConfigError(f"{name}: give one of {', '.join((*allowed, *shorts))}, not {show(value)}")
    return text


@dataclass(frozen=True)
class TensorSpec:
    """An array of one shape and dtype; `initial` is its value when a request begins.

    `kept` is what a checkpoint keeps of an array that is part of a state: all of it (None), or the last
    `kept` cells before the checkpoint's length. Cells are the first dimension, a ring: the token at position
    p is in cell p % cells. Cells that were not kept are `initial` after a restore. With `holds_positions`,
    a cell contains the position of its token, so the kept cells follow from the length and take no bytes.

    Errors: ConfigError for an invalid shape or dtype, or if more is kept than there is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    initial: float = 0.0
    kept: int | None = None
    holds_positions: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.shape, (tuple, list)):
            raise ConfigError(f"shape of {self.name}: give a tuple of sizes, not {type(self.shape).__name__}")
        shape = tuple(count(size, f"shape of {self.name}") for size in self.shape)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", dtype_name(self.dtype, f"dtype of {self.name}"))
        if self.kept is not None:
            kept = count(self.kept, f"kept of {self.name}", low=0)
            object.__setattr__(self, "kept", kept)
            cells = shape[0] if shape else 0
            if kept > cells:
                raise ConfigError(
                    f"kept of {self.name}: give at most {cells}, the number of cells, not {kept}"
                )
        holds = f"holds_positions of {self.name}"
        if not isinstance(self.holds_positions, bool):
            raise ConfigError(f"{holds}: give True or False, not {type(self.holds_positions).__name__}")
        if self.holds_positions and (len(shape) != 1 or self.dtype != "int32" or self.kept is None):
            raise ConfigError(f"{holds}: give one int32 per cell, and the number of cells kept")

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * DTYPES[self.dtype]

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the array that a checkpoint contains."""
        if self.kept is None:
            return self.num_bytes
        if self.holds_positions or not self.kept:
            return 0
        return self.num_bytes // self.shape[0] * self.kept


@dataclass(frozen=True)
class Entry:
    """The bytes of one entry in one tensor of a layer: `parts`, one after the other.

    With `scales`, a page contains the parts of all its entries, followed by the scales of all its entries.
    Pages are padded to a multiple of `page_multiple` bytes. Errors: ConfigError if there are no parts."""

    name: str
    parts: tuple[TensorSpec, ...]
    scales: tuple[TensorSpec, ...] = ()
    page_multiple: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.parts, (tuple, list)) or not isinstance(self.scales, (tuple, list)):
            raise ConfigError(f"entry {self.name}: give at least one TensorSpec, in a tuple")
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "scales", tuple(self.scales))
        if not self.parts or not all(isinstance(part, TensorSpec) for part in (*self.parts, *self.scales)):
            raise ConfigError(f"entry {self.name}: give at least one TensorSpec")
        count(self.page_multiple, f"page_multiple of {self.name}")

    @property
    def data_bytes(self) -> int:
        """Bytes of an entry's parts, without its scales."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def scale_bytes(self) -> int:
        """Bytes of an entry's scales."""
        return sum(part.num_bytes for part in self.scales)

    @property
    def num_bytes(self) -> int:
        """Bytes of one entry, before a page is padded."""
        return self.data_bytes + self.scale_bytes

    def page_bytes(self, num_entries: int) -> int:
        """Return the bytes of a page of `num_entries` entries, padding included."""
        return -(-num_entries * self.num_bytes // self.page_multiple) * self.page_multiple


def plain(name: str, heads: int, dim: int, dtype: str) -> Entry:
    """Return the entry for keys or values of one token: [heads, dim]. Errors: ConfigError."""
    return Entry(name, (TensorSpec(name, (heads, dim), dtype),))


def latent(latent_dim: int, rope_dim: int, dtype: str) -> Entry:
    """Return the entry of latent attention: the compressed vector and the rotated key shared by all heads.

    Errors: ConfigError.
    """
    rope = (TensorSpec("rope", (rope_dim,), dtype),) if rope_dim else ()
    return Entry("latent", (TensorSpec("latent", (latent_dim,), dtype), *rope))


def latent_fp8(latent_dim: int, rope_dim: int, block: int = 128) -> Entry:
    """Return the entry of latent attention that FlashMLA's sparse kernels read: fp8 with one float32 scale
    per `block` values, and the rotated key in bfloat16. 656 B for 512 + 64 values. Errors: ConfigError."""
    if count(latent_dim, "latent_dim") % count(block, "block"):
        raise ConfigError(f"latent_dim: {latent_dim} is not a multiple of {block}, the values per scale")
    return Entry(
        "latent",
        (
            TensorSpec("latent", (latent_dim,), "float8_e4m3fn"),
            TensorSpec("scale", (latent_dim // block,), "float32"),
            TensorSpec("rope", (rope_dim,), "bfloat16"),
        ),
    )


def compressed_fp8(head_dim: int, rope_dim: int, block: int = 64, scale_multiple: int = 8) -> Entry:
    """Return the entry of DeepSeek-V4: fp8 values, and the rotated part in bfloat16. The scales follow all
    entries of a page: one power of two per `block` values, padded to `scale_multiple` bytes.

    584 B for 512 values of which 64 are rotated. Pages are padded to a multiple of an entry's data, so that
    kernels can address pages as arrays of entries. Errors: ConfigError."""
    flat_dim = count(head_dim, "head_dim") - count(rope_dim, "rope_dim")
    if flat_dim < 1:
        raise ConfigError(f"rope_dim: {rope_dim} leaves nothing of head_dim = {head_dim}")
    num_scales = -(-flat_dim // count(block, "block"))
    padding = -num_scales % count(scale_multiple, "scale_multiple")
    return Entry(
        "compressed",
        (TensorSpec("flat", (flat_dim,), "float8_e4m3fn"), TensorSpec("rope", (rope_dim,), "bfloat16")),
        (
            TensorSpec("scale", (num_scales,), "float8_e8m0fnu"),
            *((TensorSpec("padding", (padding,), "uint8"),) if padding else ()),
        ),
        page_multiple=flat_dim + 2 * rope_dim,
    )


def index_keys(dim: int, dtype: str) -> Entry:
    """Return the entry of a sparse indexer's key: 'fp8' with one float32 scale, 'fp4' with one power of two
    per 32 values, or another dtype without scales. Errors: ConfigError."""
    if dtype == "fp4":
        if count(dim, "index_dim") % 32:
            raise ConfigError(f"index_dim: {dim} is not a multiple of 32, the values per fp4 scale")
        packed = TensorSpec("index", (dim // 2,), "float4_e2m1fn_x2")
        return Entry("index", (packed,), (TensorSpec("scale", (dim // 32,), "float8_e8m0fnu"),))
    name = dtype_name(dtype, "index_dtype", KV_DTYPES)
    scales = (TensorSpec("scale", (1,), "float32"),) if name.startswith("float8") else ()
    return Entry("index", (TensorSpec("index", (dim,), name),), scales)
