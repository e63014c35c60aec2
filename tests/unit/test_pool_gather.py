"""TokenPool.gather: tokens of all layers come out byte for byte, and bad input writes nothing."""

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from pagoda import TokenPool
from pagoda.errors import ArgumentError, OutOfRangeError

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
LAYERS = 3


def pool_of(device: str, dtype: torch.dtype = torch.float32, **options: Any) -> TokenPool:
    """A pool of 6 pages and the padding page, full of noise."""
    arguments = {"page_tokens": 4, "k_shape": (2, 8), "v_shape": (3, 4), **options}
    pool = TokenPool(6, num_layers=LAYERS, dtype=dtype, device=device, **arguments)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.view(torch.uint8).random_(0, 256)
    return pool


def outputs(pool: TokenPool, n: int) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Outputs whose every byte is 0xA5: what is not written shows, as does a row of zeros."""

    def noise(shape: tuple[int, int]) -> torch.Tensor:
        size = n * shape[0] * shape[1] * pool.dtype.itemsize
        flat = torch.full((size,), 0xA5, dtype=torch.uint8, device=pool.device)
        return flat.view(pool.dtype).view(n, *shape)

    out_k = [noise(pool.k_shape) for _ in range(LAYERS)]
    return out_k, None if pool.v_shape is None else [noise(pool.v_shape) for _ in range(LAYERS)]


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def wanted(buffer: torch.Tensor, slots: list[int]) -> bytes:
    """Token after token, cut out of the bytes of a buffer: no indexing of tensors in it."""
    whole = as_bytes(buffer)
    row = len(whole) // buffer.shape[0]
    return b"".join(whole[s * row : (s + 1) * row] if s >= 0 else bytes(row) for s in slots)


def judge(
    pool: TokenPool, slots: list[int], out_k: list[torch.Tensor], out_v: list[torch.Tensor] | None
) -> None:
    for layer in range(LAYERS):
        assert as_bytes(out_k[layer]) == wanted(pool.k_buffer[layer], slots), f"keys of layer {layer}"
        if out_v is not None:
            assert as_bytes(out_v[layer]) == wanted(pool.v_buffer[layer], slots), f"values of layer {layer}"


SLOTS = {
    "one page": [8, 9, 10, 11],
    "whole pages in any order, one of them twice": [20, 21, 22, 23, 4, 5, 6, 7, 20, 21, 22, 23],
    "pages that begin in the middle": [6, 7, 8, 9, 14, 15, 16, 17],
    "a page backwards": [7, 6, 5, 4],
    "pages whose begins are right and the rest is not": [4, 5, 6, 8, 12, 13, 14, 15],
    "a last page in part": [*range(4, 18)],
    "single tokens, one of them twice": [27, 4, 13, 4, 19],
    "the padding page": [0, 1, 2, 3, 12],
    "padding on the left of two rows": [-1, -1, -1, 4, 5, 6, -1, 20, 21, 22, 23, 16],
    "padding where the page would begin": [-1, 1, 2, 3, -1, -1, -1, -1],
    "padding alone": [-1, -1, -1, -1, -1],
    "nothing": [],
}


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_all_layers_come_out(device: str, dtype: torch.dtype, slots: list[int]):
    pool = pool_of(device, dtype)
    out_k, out_v = outputs(pool, len(slots))
    pool.gather(slots, out_k, out_v)
    judge(pool, slots, out_k, out_v)


@pytest.mark.parametrize("page_tokens", [1, 3, 16])
@pytest.mark.parametrize("shapes", [((1, 1), (1, 3)), ((3, 5), (1, 7)), ((1, 64), (8, 64)), ((5, 80), None)])
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.float32])
def test_rows_of_any_width(device: str, dtype: torch.dtype, shapes: tuple[Any, Any], page_tokens: int):
    pool = pool_of(device, dtype, page_tokens=page_tokens, k_shape=shapes[0], v_shape=shapes[1])
    pages = [5, 1, 2]
    whole = [page * page_tokens + offset for page in pages for offset in range(page_tokens)]
    scattered = random.Random(1).choices(range(-1, pool.num_slots), k=37)
    for slots in (whole, scattered):
        out_k, out_v = outputs(pool, len(slots))
        pool.gather(slots, out_k, out_v)
        judge(pool, slots, out_k, out_v)


def test_slots_from_anywhere(device: str):
    pool, slots = pool_of(device), [5, -1, 20, 9]
    for given in (
        slots,
        tuple(slots),
        np.array(slots, np.int32),
        np.array([slots[:2], slots[2:]]),
        torch.tensor(slots),
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor([slots, slots], device=device).t()[:, 0],
        torch.tensor(slots, device=device).view(2, 2),
    ):
        out_k, out_v = outputs(pool, 4)
        pool.gather(given, out_k, out_v)
        judge(pool, slots, out_k, out_v)
    out_k, out_v = outputs(pool, 1)
    pool.gather(7, out_k, out_v)
    judge(pool, [7], out_k, out_v)


def test_outputs_of_any_shape_with_these_bytes(device: str):
    pool, slots = pool_of(device), [8, 9, 10, 11, -1, 4]
    for k_shape, v_shape in (((2, 3, 2, 8), (2, 3, 3, 4)), ((6, 16), (6, 12)), ((96,), (1, 72, 1))):
        out_k = [torch.ones(k_shape, device=device) for _ in range(LAYERS)]
        out_v = [torch.ones(v_shape, device=device) for _ in range(LAYERS)]
        pool.gather(slots, out_k, tuple(out_v))
        judge(pool, slots, out_k, out_v)
    one = pool_of(device, k_shape=(1, 1), v_shape=None)
    scalars = [torch.tensor(1.0, device=device) for _ in range(LAYERS)]
    one.gather([9], scalars)
    judge(one, [9], scalars, None)


@pytest.mark.parametrize("begin", [0, 1, 2, 4, 7])
def test_outputs_in_the_middle_of_a_larger_tensor(device: str, begin: int):
    """At any alignment, and nothing before or behind them is written."""
    pool, slots = pool_of(device, torch.float16, k_shape=(2, 8), v_shape=(2, 8)), [20, 21, 22, 23, -1]
    n = len(slots) * 16
    room = torch.full((2 * LAYERS, 128), 7.0, dtype=torch.float16, device=device)
    parts = [row[begin : begin + n] for row in room]
    pool.gather(slots, parts[::2], parts[1::2])
    judge(pool, slots, parts[::2], parts[1::2])
    assert bool((room[:, :begin] == 7).all())
    assert bool((room[:, begin + n :] == 7).all())


def test_keys_alone(device: str):
    pool, slots = pool_of(device, v_shape=None), [4, -1, 9]
    out_k, _ = outputs(pool, 3)
    pool.gather(slots, out_k)
    judge(pool, slots, out_k, None)
    with pytest.raises(ArgumentError, match="this pool has no values"):
        pool.gather(slots, out_k, out_k)


def test_what_was_stored_is_gathered(device: str):
    pool = TokenPool(4, 4, 2, (2, 8), (2, 8), torch.float32, device)
    slots = [14, 4, 5, 9]
    k, v = ([torch.randn(4, 2, 8, device=device) for _ in range(2)] for _ in range(2))
    for layer in range(2):
        pool.store(layer, slots, k[layer], v[layer])
    out_k, out_v = ([torch.empty(4, 2, 8, device=device) for _ in range(2)] for _ in range(2))
    pool.gather(slots, out_k, out_v)
    assert all(torch.equal(a, b) for a, b in zip([*k, *v], [*out_k, *out_v], strict=True))


def test_fp8_comes_as_it_is_stored(device: str):
    pool = TokenPool(4, 4, 1, (1, 8), None, torch.float8_e4m3fn, device, k_scale=[2.0])
    pool.store(0, [5], torch.full((1, 8), 3.0, device=device), None)
    out = torch.zeros(1, 1, 8, device=device).to(torch.float8_e4m3fn)
    pool.gather([5], [out])
    assert out.float().unique().tolist() == [1.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_outputs_of_any_mode_are_written(device: str, dtype: torch.dtype):
    pool, slots = pool_of(device, dtype), [4, 5, 6, 7, -1, 9]
    with torch.inference_mode():
        inferred = outputs(pool, 6)
    pool.gather(slots, *inferred)
    judge(pool, slots, *inferred)
    with torch.inference_mode():
        pool.gather(slots[::-1], *inferred)
    judge(pool, slots[::-1], *inferred)
    out_k, out_v = outputs(pool, 6)
    with_gradient = [out.requires_grad_() for out in out_k]
    pool.gather(slots, with_gradient, out_v)
    judge(pool, slots, with_gradient, out_v)
    fresh = outputs(pool, 6)
    with torch.inference_mode():
        pool.gather(slots, *fresh)
    judge(pool, slots, *fresh)
    assert not fresh[0][0].is_inference()  # still a tensor of the usual kind


@pytest.mark.gpu
def test_slots_out_of_range_in_a_device_tensor_give_zeros():
    pool = pool_of("cuda")
    for dtype, far in ((torch.int32, 2**31 - 1), (torch.int64, 2**40)):
        slots = torch.tensor([28, far, -2, 5, -1, 27], device="cuda", dtype=dtype)
        out_k, out_v = outputs(pool, 6)
        pool.gather(slots, out_k, out_v)
        judge(pool, [-1, -1, -1, 5, -1, 27], out_k, out_v)


def test_several_threads(device: str):
    pool = pool_of(device)
    choices = [random.Random(seed).choices(range(-1, pool.num_slots), k=64) for seed in range(4)]
    filled = [outputs(pool, 64) for _ in choices]
    if device == "cuda":
        torch.cuda.synchronize()

    def work(at: int) -> None:
        for _ in range(20):
            pool.gather(choices[at], *filled[at])

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for slots, (out_k, out_v) in zip(choices, filled, strict=True):
        judge(pool, slots, out_k, out_v)


def test_bad_calls_write_nothing(device: str):
    pool = pool_of(device)
    k, v = outputs(pool, 2)
    assert v is not None
    before = [as_bytes(tensor) for tensor in (*pool.k_buffer, *pool.v_buffer, *k, *v)]
    slots = [4, 5]
    strided = torch.zeros(2, 2, 16, device=device)[:, :, ::2]
    flipped = torch.zeros(2, 2, 8, device=device)._neg_view()
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        (([4, 28], k, v), OutOfRangeError, r"slots\[1\] = 28 .* -1 to 27"),
        (([-2, 4], k, v), OutOfRangeError, r"slots\[0\] = -2"),
        (([4.5, 5], k, v), ArgumentError, "slots: give integer"),
        (([[4], [5, 6]], k, v), ArgumentError, "slots"),
        ((torch.tensor([4.0, 5.0]), k, v), ArgumentError, "slots"),
        (([4], k, v), ArgumentError, r"out_k\[0\] has shape \(2, 2, 8\): give 16 elements"),
        (([], k, v), ArgumentError, r"out_k\[0\]"),
        ((slots, k[:2], v), ArgumentError, "out_k: give a list of 3 tensors"),
        ((slots, torch.stack(k), v), ArgumentError, "out_k: give a list"),
        ((slots, None, v), ArgumentError, "out_k: give a list"),
        ((slots, k, None), ArgumentError, "out_v: give a list"),
        ((slots, k, v[:2]), ArgumentError, "out_v: give a list"),
        ((slots, k, [*v[:2], None]), ArgumentError, r"out_v\[2\]: give a tensor of torch.float32"),
        ((slots, k, [*v[:2], v[2].half()]), ArgumentError, r"out_v\[2\]: give a tensor"),
        ((slots, k, [*v[:2], v[2].to("meta")]), ArgumentError, r"out_v\[2\]: give a tensor .* on c"),
        ((slots, k, [*v[:2], v[2].cpu().numpy()]), ArgumentError, r"out_v\[2\]"),
        ((slots, k, [*v[:2], v[2][:1]]), ArgumentError, r"out_v\[2\] has shape"),
        ((slots, v, k), ArgumentError, r"out_k\[0\] has shape"),
        ((slots, [*k[:2], strided], v), ArgumentError, r"out_k\[2\]: give a contiguous tensor"),
        ((slots, [*k[:2], flipped], v), ArgumentError, r"out_k\[2\]: give a contiguous tensor"),
        ((slots, [*k[:2], k[2].to_sparse()], v), ArgumentError, r"out_k\[2\]: give a contiguous tensor"),
        ((slots, [k[0], k[1], k[0]], v), ArgumentError, "overlaps"),
        ((slots, [*k[:2], pool.k_buffer[0][6:8]], v), ArgumentError, "overlaps .* the pool"),
        ((slots, [*k[:2], pool.v_buffer[2].view(-1)[-32:]], v), ArgumentError, "overlaps .* the pool"),
    ]
    for arguments, error, message in cases:
        with pytest.raises(error, match=message):
            pool.gather(*arguments)
    assert before == [as_bytes(tensor) for tensor in (*pool.k_buffer, *pool.v_buffer, *k, *v)]


def test_outputs_that_share_a_byte_are_refused_and_neighbours_are_not(device: str):
    pool = pool_of(device, torch.float16, k_shape=(1, 8), v_shape=None)
    room = torch.zeros(64, dtype=torch.float16, device=device)
    neighbours = [room[16:24], room[8:16], room[24:32]]
    pool.gather([5], neighbours)
    judge(pool, [5], neighbours, None)
    with pytest.raises(ArgumentError, match="overlaps"):
        pool.gather([5], [room[16:24], room[9:17], room[24:32]])


def test_buffers_that_layers_share_may_be_gathered(device: str):
    shared = torch.randn(28, 2, 8, device=device)
    pool = TokenPool(6, 4, 2, (2, 8), None, torch.float32, device, k_buffer=[shared, shared])
    out = [torch.zeros(1, 2, 8, device=device) for _ in range(2)]
    pool.gather([9], out)
    assert all(torch.equal(tensor[0], shared[9]) for tensor in out)
