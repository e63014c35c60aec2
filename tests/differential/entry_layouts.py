"""Layouts of entries that tests share: quantised and plain, of a real model's size and of odd ones."""

from pagoda.layout._entries import Entry, TensorSpec, compressed_fp8, index_keys

__all__ = ["ENTRIES", "plain_entry"]


def plain_entry(flat_dim: int, rope_dim: int, dtype: str = "float32") -> Entry:
    """An entry that keeps numbers as they are."""
    return Entry(
        "compressed", (TensorSpec("flat", (flat_dim,), dtype), TensorSpec("rope", (rope_dim,), dtype))
    )


ENTRIES: dict[str, Entry] = {
    "584 bytes": compressed_fp8(512, 64),
    "small": compressed_fp8(16, 8),
    "two scales, the second half full": compressed_fp8(104, 8),
    "float32": plain_entry(8, 8),
    "bfloat16": plain_entry(100, 6, "bfloat16"),
    "float16": plain_entry(33, 7, "float16"),
    "fp8 keys": index_keys(128, "fp8"),
    "fp4 keys": index_keys(128, "fp4"),
    "33 bytes and a scale": Entry(
        "compressed",
        (TensorSpec("flat", (33,), "float8_e4m3fn"),),
        (TensorSpec("scale", (1,), "float8_e8m0fnu"),),
    ),
    "a scale for two": Entry(
        "compressed",
        (TensorSpec("flat", (8,), "float8_e4m3fn"), TensorSpec("rope", (2,), "bfloat16")),
        (TensorSpec("scale", (4,), "float8_e8m0fnu"),),
    ),
    "bfloat16 keys": index_keys(12, "bfloat16"),
    # Those of later models: 512 numbers in fp8 under four float32 scales, in fp4 under 32 exponents.
    "528 bytes": Entry(
        "compressed",
        (TensorSpec("flat", (512,), "float8_e4m3fn"),),
        (TensorSpec("scale", (4,), "float32"),),
    ),
    "288 bytes": Entry(
        "compressed",
        (TensorSpec("flat", (256,), "float4_e2m1fn_x2"),),
        (TensorSpec("scale", (32,), "float8_e8m0fnu"),),
    ),
}
