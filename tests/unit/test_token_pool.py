"""TokenPool: what is stored is found, pages move whole, bad input changes nothing."""

import math

import pytest
import torch

from pagoda import ConfigError, StatePool, TokenPool
from pagoda.errors import ArgumentError, InvariantError, OutOfRangeError
from pagoda.pools import DeviceTable, StateSpec

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def pool_of(
    device: str, dtype: torch.dtype = torch.float32, page_tokens: int = 4, **options: object
) -> TokenPool:
    shape = {"k_shape": (2, 8), "v_shape": (3, 4), **options}
    return TokenPool(5, page_tokens, 2, dtype=dtype, device=device, **shape)  # type: ignore[arg-type]


def contents(pool: TokenPool) -> list[torch.Tensor]:
    return [buffer.view(torch.uint8).cpu().clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]


def test_geometry(device: str):
    pool = pool_of(device)
    assert [tuple(b.shape) for b in pool.k_buffer] == [(24, 2, 8)] * 2
    assert [tuple(b.shape) for b in pool.v_buffer] == [(24, 3, 4)] * 2
    assert pool.page_bytes == 2 * 4 * (16 + 12) * 4
    assert (
        pool.memory_bytes() == 6 * pool.page_bytes == sum(b.nbytes for b in (*pool.k_buffer, *pool.v_buffer))
    )
    assert all(not bool(b.any()) for b in pool.k_buffer)
    pool.check()


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_are_found_where_they_were_stored_and_nowhere_else(device: str, dtype: torch.dtype):
    pool = pool_of(device, dtype)
    slots = torch.tensor([7, 23, 4, 12], device=device)
    k, v = torch.randn(4, 2, 8, device=device), torch.randn(4, 3, 4, device=device)
    pool.store(1, slots, k, v)
    assert torch.equal(pool.k_buffer[1][slots], k.to(dtype))
    assert torch.equal(pool.v_buffer[1][slots], v.to(dtype))
    rest = [s for s in range(24) if s not in slots.tolist()]
    assert not bool(pool.k_buffer[1][rest].any())
    assert not bool(pool.k_buffer[0].any())


def test_slots_on_the_host_reach_a_device_pool(device: str):
    for slots in (
        [5, 6],
        torch.tensor([5, 6]),
        torch.tensor([5, 6]).numpy(),
        (5, 6),
        torch.tensor([[5], [6]]),
    ):
        pool = pool_of(device)
        pool.store(0, slots, torch.ones(2, 16, device=device), torch.ones(2, 12, device=device))
        assert pool.k_buffer[0].sum(dim=(1, 2)).nonzero().flatten().tolist() == [5, 6]


def test_slot_minus_one_is_not_written(device: str):
    pool = pool_of(device)
    slots = torch.tensor([-1, 5, -1], device=device, dtype=torch.int32)
    pool.store(0, slots, torch.ones(3, 16, device=device), torch.ones(3, 12, device=device))
    assert pool.v_buffer[0].sum(dim=(1, 2)).nonzero().flatten().tolist() == [5]


@pytest.mark.gpu
def test_slots_out_of_range_in_a_device_tensor_are_not_written():
    pool = pool_of("cuda")
    slots = torch.tensor([24, 2**31 - 1, -2, 5, 2**40], device="cuda")
    pool.store(0, slots, torch.ones(5, 16, device="cuda"), torch.ones(5, 12, device="cuda"))
    torch.cuda.synchronize()
    assert pool.k_buffer[0].sum(dim=(1, 2)).nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.37, 13.0])
def test_fp8_stores_value_over_scale_and_saturates(device: str, dtype: torch.dtype, scale: float):
    pool = pool_of(device, dtype, k_scale=[1.0, scale], v_scale=[3.0, 2.0])
    values = torch.cat([torch.randn(15) * 3, torch.tensor([1e6])]).to(device)
    slots = torch.tensor([9], device=device)
    pool.store(1, slots, values[None], torch.full((1, 12), -1e9, device=device))
    top = torch.finfo(dtype).max
    plain = (values.cpu() / scale)[:-1].to(dtype)
    assert torch.equal(pool.k_buffer[1][9].flatten().cpu().view(torch.uint8)[:-1], plain.view(torch.uint8))
    assert float(pool.k_buffer[1][9].flatten()[-1]) == top
    assert pool.v_buffer[1][9].float().unique().tolist() == [-top]


def test_nan_stays_nan_in_fp8(device: str):
    for dtype in FP8:
        pool = pool_of(device, dtype)
        pool.store(0, [4], torch.full((1, 16), math.nan, device=device), torch.zeros(1, 12, device=device))
        assert bool(pool.k_buffer[0][4].float().isnan().all())


def test_keys_alone_for_latent_attention(device: str):
    pool = pool_of(device, v_shape=None)
    assert pool.v_buffer == []
    pool.store(1, [5], torch.ones(1, 16, device=device), None)
    assert float(pool.k_buffer[1][5].sum()) == 16
    with pytest.raises(ArgumentError, match="this pool has no values"):
        pool.store(1, [5], torch.ones(1, 16, device=device), torch.ones(1, 12, device=device))
    packed = pool.pack([1])
    assert packed.shape == (1, 2 * 4 * 16 * 4)
    pool.unpack([2], packed)
    assert float(pool.k_buffer[1][9].sum()) == 16


def test_rows_that_need_a_gradient_are_stored_without_one(device: str):
    pool = pool_of(device)
    k = torch.ones(1, 16, device=device, requires_grad=True)
    pool.store(0, [4], k, torch.ones(1, 12, device=device, requires_grad=True))
    assert not pool.k_buffer[0].requires_grad


def test_buffers_of_the_caller_are_used_where_they_lie(device: str):
    k = [torch.zeros(24, 2, 8, device=device) for _ in range(2)]
    v = [torch.zeros(24, 3, 4, device=device) for _ in range(2)]
    pool = pool_of(device, k_buffer=k, v_buffer=v)
    pool.store(1, [5], torch.ones(1, 16, device=device), torch.ones(1, 12, device=device))
    assert float(k[1][5].sum()) == 16
    assert float(v[1][5].sum()) == 12
    assert pool.k_buffer[0].data_ptr() == k[0].data_ptr()


def test_buffers_of_the_caller_that_do_not_fit():
    good = torch.zeros(24, 2, 8)
    for bad in (
        [good],
        [good, good.half()],
        [good, torch.zeros(24, 8, 2)],
        [good, torch.zeros(24, 2, 16)[:, :, ::2]],
        [good, torch.zeros(24 * 16 + 1)[1:].view(24, 2, 8)],
    ):
        with pytest.raises(ConfigError, match="k_buffer"):
            pool_of("cpu", k_buffer=bad)
    with pytest.raises(ConfigError, match="v_buffer"):
        pool_of("cpu", v_shape=None, v_buffer=[good, good])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_tokens", [1, 4])
def test_packed_pages_are_layer_after_layer_k_before_v(device: str, dtype: torch.dtype, page_tokens: int):
    pool = pool_of(device, dtype, page_tokens)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.view(torch.uint8).random_(0, 256)
    page_ids = [4, 1]
    packed = pool.pack(page_ids)
    for row, page in enumerate(page_ids):
        at = slice(page * page_tokens, (page + 1) * page_tokens)
        expected = [
            side[layer][at].view(torch.uint8).flatten()
            for layer in (0, 1)
            for side in (pool.k_buffer, pool.v_buffer)
        ]
        assert torch.equal(packed[row], torch.cat(expected))


def test_pages_come_back_elsewhere_and_touch_nothing_else(device: str):
    pool = pool_of(device)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    before = contents(pool)
    out = torch.empty(2 * pool.page_bytes, dtype=torch.uint8, device=device)
    assert pool.pack(torch.tensor([5, 2], device=device), out).data_ptr() == out.data_ptr()
    pool.unpack([3, 1], out)
    for old, new in zip(before, contents(pool), strict=True):
        expected = old.clone()
        expected[12:16], expected[4:8] = old[20:24], old[8:12]
        assert torch.equal(new, expected)


def test_packing_nothing(device: str):
    pool = pool_of(device)
    assert pool.pack([]).shape == (0, pool.page_bytes)
    pool.unpack([], torch.empty(0, dtype=torch.uint8, device=device))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_pages": -1}, "num_pages"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": 1.0}, "num_layers"),
        ({"k_shape": (0, 8)}, "k_shape"),
        ({"k_shape": (2,)}, "k_shape"),
        ({"v_shape": 5}, "v_shape"),
        ({"dtype": torch.int32}, "dtype"),
        ({"dtype": torch.float64}, "dtype"),
        ({"device": "cuda:77"}, "device"),
        ({"num_pages": 2**31}, "exceed 2"),
        ({"num_pages": 10**5000}, "num_pages"),
        ({"k_scale": [1.0, 1.0]}, "k_scale"),  # not an fp8 pool
        ({"dtype": torch.float8_e5m2, "k_scale": [1.0]}, "k_scale"),
        ({"dtype": torch.float8_e5m2, "v_scale": [1.0, 0.0]}, "v_scale"),
        ({"dtype": torch.float8_e5m2, "v_scale": [1.0, math.inf]}, "v_scale"),
        ({"dtype": torch.float8_e5m2, "v_scale": [1.0, -2.0]}, "v_scale"),
        ({"dtype": torch.float8_e5m2, "v_scale": [1.0, 1e-50]}, "v_scale"),  # 0 in float32
        ({"dtype": torch.float8_e5m2, "v_scale": [1.0, 1e300]}, "v_scale"),
        ({"dtype": torch.float8_e5m2, "v_scale": [1.0, 10**400]}, "v_scale"),
        ({"dtype": torch.float8_e5m2, "v_scale": "11"}, "v_scale"),
        ({"k_buffer": [1, 2]}, "k_buffer"),
        ({"k_buffer": 3}, "k_buffer"),
        ({"k_shape": (2**40, 2**40)}, "address space"),
        ({"staging": "x"}, "staging"),
    ],
)
def test_pools_that_cannot_be(change: dict[str, object], named: str):
    arguments = {
        "num_pages": 5, "page_tokens": 4, "num_layers": 2, "k_shape": (2, 8), "v_shape": (3, 4),
        "dtype": torch.float32, "device": "cpu",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=named):
        TokenPool(**{**arguments, **change})  # type: ignore[arg-type]


def test_bad_stores_change_nothing(device: str):
    pool = pool_of(device)
    before = contents(pool)
    k, v, slots = torch.ones(2, 16, device=device), torch.ones(2, 12, device=device), [4, 5]
    cases: list[tuple[tuple[object, ...], type[Exception]]] = [
        ((2, slots, k, v), ArgumentError),
        ((-1, slots, k, v), ArgumentError),
        (("0", slots, k, v), ArgumentError),
        ((0, [4, 24], k, v), OutOfRangeError),
        ((0, [-2, 4], k, v), OutOfRangeError),
        ((0, [4], k, v), ArgumentError),
        ((0, [4.5, 5], k, v), ArgumentError),
        ((0, [[4], [5, 6]], k, v), ArgumentError),
        ((0, torch.tensor([4.0, 5.0]), k, v), ArgumentError),
        ((0, slots, k.long(), v), ArgumentError),
        ((0, slots, k, v.bool()), ArgumentError),
        ((0, slots, k[:, :15], v), ArgumentError),
        ((0, slots, k, v[:1]), ArgumentError),
        ((0, slots, k.view(16, 2), v), ArgumentError),
        ((0, slots, k, None), ArgumentError),
        ((0, slots, None, v), ArgumentError),
        ((0, slots, k.cpu().numpy(), v), ArgumentError),
        ((0, slots, k.to("meta"), v), ArgumentError),
    ]
    for arguments, error in cases:
        with pytest.raises(error):
            pool.store(*arguments)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(before, contents(pool), strict=True))


def test_bad_packs_change_nothing(device: str):
    pool = pool_of(device)
    before = contents(pool)
    good = torch.ones(1, pool.page_bytes, dtype=torch.uint8, device=device)
    for ids in ([6], [-1], [1.5], "1"):
        with pytest.raises((ArgumentError, OutOfRangeError)):
            pool.unpack(ids, good)  # type: ignore[arg-type]
    for buffer in (
        good[:, 1:],
        good.float(),
        good.to("meta"),
        None,
        torch.ones(1, 2 * pool.page_bytes, dtype=torch.uint8)[:, ::2],
    ):
        with pytest.raises(ArgumentError):
            pool.unpack([1], buffer)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(before, contents(pool), strict=True))


def test_pools_made_in_inference_mode_are_written_outside_of_it(device: str):
    with torch.inference_mode():
        pool, table = pool_of(device), DeviceTable(2, 4, device)
        states = StatePool(2, 1, {"s": StateSpec((3,), torch.float32)}, device)
    pool.store(0, [4], torch.ones(1, 16, device=device), torch.ones(1, 12, device=device))
    pool.unpack([1], pool.pack([2]))
    states.reset([1])
    states.copy([1], [2])
    table.write([5], [1])


def test_the_default_device_does_not_matter(device: str):
    with torch.device(device):
        pool = pool_of(device)
        pool.store(0, [4], torch.ones(1, 16), torch.ones(1, 12))
        pool.unpack([1], pool.pack([2]))
        assert pool_of("cpu").k_buffer[0].device.type == "cpu"


def test_check_finds_a_buffer_that_has_moved(device: str):
    pool = pool_of(device)
    pool.k_buffer[0] = pool.k_buffer[0].clone()
    with pytest.raises(InvariantError) as caught:
        pool.check()
    assert caught.value.number == 6
