"""What one token, or one compressed entry, takes in one tensor of a layer. Layouts of bytes are data here.

In: dimensions and dtypes; out: parts with shapes, and bytes. No other place knows how wide a dtype is, or
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

# torch's names, so that a pool finds its dtype by them; bytes of one element. The fp4 one is two values.
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
    """torch's name of a dtype, from that name, a short one ('bf16', 'fp8') or a torch dtype.

    O(1). Errors: ConfigError that lists what is allowed.
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
    """An array of one shape and dtype; `initial` is what a new request's begins with.

    Errors: ConfigError for a shape or dtype that is none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    initial: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.shape, (tuple, list)):
            raise ConfigError(f"shape of {self.name}: give a tuple of sizes, not {type(self.shape).__name__}")
        shape = tuple(count(size, f"shape of {self.name}") for size in self.shape)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", dtype_name(self.dtype, f"dtype of {self.name}"))

    @property
    def num_bytes(self) -> int:
        """Bytes of the array. O(dimensions)."""
        return math.prod(self.shape) * DTYPES[self.dtype]


@dataclass(frozen=True)
class Entry:
    """The bytes of one entry in one tensor of a layer: `parts` in their order, side by side.

    With `scales`, a page holds the parts of all its entries first and the scales of all of them behind. A
    page is padded to a multiple of `page_multiple` bytes. Another layout of bytes is another value of this
    class. Errors: ConfigError for an entry of no bytes."""

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
        """Bytes of an entry's parts, without its scales. O(parts)."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def scale_bytes(self) -> int:
        """Bytes of an entry's scales. O(parts)."""
        return sum(part.num_bytes for part in self.scales)

    @property
    def num_bytes(self) -> int:
        """Bytes of one entry, before a page is padded. O(parts)."""
        return self.data_bytes + self.scale_bytes

    def page_bytes(self, num_entries: int) -> int:
        """Bytes of a page of so many entries, padding included. O(parts)."""
        return -(-num_entries * self.num_bytes // self.page_multiple) * self.page_multiple


def plain(name: str, heads: int, dim: int, dtype: str) -> Entry:
    """Keys or values of one token: [heads, dim]. O(1). Errors: ConfigError."""
    return Entry(name, (TensorSpec(name, (heads, dim), dtype),))


def latent(latent_dim: int, rope_dim: int, dtype: str) -> Entry:
    """A token of latent attention: the compressed vector and the rotated key all heads share. O(1).

    Errors: ConfigError.
    """
    rope = (TensorSpec("rope", (rope_dim,), dtype),) if rope_dim else ()
    return Entry("latent", (TensorSpec("latent", (latent_dim,), dtype), *rope))


def latent_fp8(latent_dim: int, rope_dim: int, block: int = 128) -> Entry:
    """A token of latent attention as FlashMLA's sparse kernels read it: fp8, a float32 scale for each
    `block` values, the rotated key in bfloat16; 656 B for 512 + 64. O(1). Errors: ConfigError."""
    if count(latent_dim, "latent_dim") % count(block, "block"):
        raise ConfigError(f"latent_dim: {latent_dim} is no multiple of {block}, the values under one scale")
    return Entry(
        "latent",
        (
            TensorSpec("latent", (latent_dim,), "float8_e4m3fn"),
            TensorSpec("scale", (latent_dim // block,), "float32"),
            TensorSpec("rope", (rope_dim,), "bfloat16"),
        ),
    )


def compressed_fp8(head_dim: int, rope_dim: int, block: int = 64, scale_multiple: int = 8) -> Entry:
    """A DeepSeek-V4 entry: what has no position in fp8, the rotated part in bfloat16, and behind all entries
    of a page their scales, a power of two for each `block` values, padded to `scale_multiple` bytes.

    584 B for 512 of which 64 are rotated. Pages are padded to a multiple of the entry's data, so that they
    are aligned for a kernel that reads entries as rows. O(1). Errors: ConfigError."""
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
    """The key by which a sparse indexer finds a token or an entry; 'fp8' has one float32 scale, 'fp4' a
    power of two for each 32 values, other dtypes none. O(1). Errors: ConfigError."""
    if dtype == "fp4":
        if count(dim, "index_dim") % 32:
            raise ConfigError(f"index_dim: {dim} is no multiple of 32, the values under one fp4 scale")
        packed = TensorSpec("index", (dim // 2,), "float4_e2m1fn_x2")
        return Entry("index", (packed,), (TensorSpec("scale", (dim // 32,), "float8_e8m0fnu"),))
    name = dtype_name(dtype, "index_dtype", KV_DTYPES)
    scales = (TensorSpec("scale", (1,), "float32"),) if name.startswith("float8") else ()
    return Entry("index", (TensorSpec("index", (dim,), name),), scales)
