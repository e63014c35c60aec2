"""contracts/pools.md: `KVPool.set_kv_buffer`, its shapes, dtypes, strides and bad arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.builders import (
    FLOATS,
    FP8,
    PLAIN,
    bits,
    contents,
    kv_pool,
    rows_like,
    same,
)
from pagoda import UsageError, kernels
from pagoda.compat import KVPool
from pagoda.errors import ArgumentError

WRITE_PATHS = ["dispatched"] if torch.cuda.is_available() else ["dispatched", "interpreted"]


@pytest.fixture(params=WRITE_PATHS)
def written_on(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device to write on; without a GPU also the kernel that serves CUDA, interpreted."""
    if request.param == "interpreted":
        pytest.importorskip("triton")
        monkeypatch.setattr(kernels, "store", kernels.triton_module("_store_fused").store)
    return device


LEADS = [(6,), (2, 3), (3, 2), (1, 6), (6, 1), (2, 1, 3), (1, 1, 6, 1)]


@pytest.mark.parametrize("ids_shape", LEADS)
@pytest.mark.parametrize("lead", LEADS)
def test_indices_have_any_shape_and_leading_dimensions_hold_as_many_elements(
    written_on: str, ids_shape: tuple[int, ...], lead: tuple[int, ...]
) -> None:
    pool = kv_pool(written_on)
    k, v = rows_like(pool, 6)
    slots = torch.tensor([7, 1, 8, 3, 2, 5], device=written_on)
    pool.set_kv_buffer(0, slots.reshape(ids_shape), k.reshape(*lead, 2, 4), v.reshape(*lead, 3, 5))
    assert torch.equal(pool.k_buffer[0][slots], k)
    assert torch.equal(pool.v_buffer[0][slots], v)


@pytest.mark.parametrize("k_tail", [(2, 4), (8,), (4, 2), (2, 2, 2), (1, 8), (8, 1), (1, 2, 1, 4)])
@pytest.mark.parametrize("v_tail", [(3, 5), (15,)])
@pytest.mark.parametrize("lead", [(6,), (2, 3)])
def test_trailing_dimensions_multiply_to_heads_times_dim(
    written_on: str, lead: tuple[int, ...], k_tail: tuple[int, ...], v_tail: tuple[int, ...]
) -> None:
    pool = kv_pool(written_on)
    k, v = rows_like(pool, 6)
    slots = torch.tensor([7, 1, 8, 3, 2, 5], device=written_on)
    pool.set_kv_buffer(1, slots, k.reshape(*lead, *k_tail), v.reshape(*lead, *v_tail))
    assert torch.equal(pool.k_buffer[1][slots], k)
    assert torch.equal(pool.v_buffer[1][slots], v)


def test_one_token_needs_no_leading_dimension(written_on: str) -> None:
    pool = kv_pool(written_on)
    k, v = rows_like(pool)
    pool.set_kv_buffer(0, torch.tensor(4, device=written_on), k, v.reshape(-1))
    assert torch.equal(pool.k_buffer[0][4], k)
    assert torch.equal(pool.v_buffer[0][4], v)


def test_writing_no_tokens_changes_nothing(written_on: str) -> None:
    pool = kv_pool(written_on)
    before = contents(pool)
    pool.set_kv_buffer(0, torch.empty(0, dtype=torch.int32, device=written_on), *rows_like(pool, 0))
    pool.set_kv_buffer(0, torch.empty(0, 3, dtype=torch.int64, device=written_on), *rows_like(pool, 3, 0))
    assert same(contents(pool), before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_only_the_named_rows_of_the_named_layer_are_written(written_on: str, dtype: torch.dtype) -> None:
    pool = kv_pool(written_on, 16, 3)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(-1)
    k, v = rows_like(pool, 3)
    pool.set_kv_buffer(1, torch.tensor([16, 2, 9], dtype=dtype, device=written_on), k, v)
    others = [row for row in range(17) if row not in (16, 2, 9)]
    for layer in range(3):
        for buffer, rows in ((pool.k_buffer[layer], k), (pool.v_buffer[layer], v)):
            assert bool((buffer[others] == -1).all())
            if layer == 1:
                assert torch.equal(buffer[[16, 2, 9]], rows)
            else:
                assert bool((buffer == -1).all())


@pytest.mark.parametrize("given", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_any_float_dtype_is_cast_to_that_of_the_pool(
    written_on: str, dtype: torch.dtype, given: torch.dtype
) -> None:
    pool = kv_pool(written_on, dtype=dtype)
    k, v = rows_like(pool, 4)
    if given == torch.float8_e8m0fnu:
        k, v = k.abs(), v.abs()  # powers of two: it has no sign
    k, v = (rows.cpu().double().to(given).to(written_on) for rows in (k, v))
    pool.set_kv_buffer(0, torch.tensor([3, 1, 8, 6], device=written_on), k, v)
    # On the CPU: a judge of its own.
    assert torch.equal(pool.k_buffer[0][[3, 1, 8, 6]].cpu(), k.cpu().to(dtype))
    assert torch.equal(pool.v_buffer[0][[3, 1, 8, 6]].cpu(), v.cpu().to(dtype))


def test_k_and_v_may_come_in_different_dtypes(written_on: str) -> None:
    pool = kv_pool(written_on, dtype=torch.bfloat16)
    k, v = rows_like(pool, 2)
    pool.set_kv_buffer(0, torch.tensor([1, 2], device=written_on), k.half(), v.double())
    assert torch.equal(pool.k_buffer[0][1:3], k.half().bfloat16())
    assert torch.equal(pool.v_buffer[0][1:3], v.bfloat16())


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_stores_value_over_scale_of_its_layer_and_side(
    written_on: str, dtype: torch.dtype, given: torch.dtype
) -> None:
    k_scale, v_scale = [0.37, 1.0, 3.0], [2.5, 0.011, 1.0]
    pool = kv_pool(
        written_on, 64, 3, k_head_num=3, k_head_dim=8, dtype=dtype, k_scale=k_scale, v_scale=v_scale
    )
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:50] + 1
    top = torch.finfo(dtype).max
    for layer in range(3):
        k, v = rows_like(pool, 50, seed=layer)
        # From subnormals to the largest finite value, both signs, zeros.
        k, v = (rows * torch.logspace(-6, 2, 50, device=written_on)[:, None, None] for rows in (k, v))
        k[0], v[0] = 0, -0.0
        k, v = k.to(given), v.to(given)
        pool.set_kv_buffer(layer, slots.to(written_on), k, v)
        for rows, buffer, scale in (
            (k, pool.k_buffer[layer], k_scale[layer]),
            (v, pool.v_buffer[layer], v_scale[layer]),
        ):
            divided = rows.cpu().float() / scale
            in_range = divided.abs() <= top
            assert float(in_range.float().mean()) > 0.5
            stored, wanted = bits(buffer)[slots], bits(divided.to(dtype))
            assert torch.equal(stored[in_range], wanted[in_range])


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_without_scales_is_a_plain_cast(written_on: str, dtype: torch.dtype) -> None:
    pool = kv_pool(written_on, dtype=dtype)
    k, v = rows_like(pool, 8)
    pool.set_kv_buffer(1, torch.arange(1, 9, device=written_on), k, v)
    assert torch.equal(bits(pool.k_buffer[1])[1:], bits(k.cpu().to(dtype)))
    assert torch.equal(bits(pool.v_buffer[1])[1:], bits(v.cpu().to(dtype)))


# Ways to come by a [6, heads, dim] tensor that is not contiguous; each gets random numbers of any shape.
Numbers = Callable[..., torch.Tensor]
STRIDED: dict[str, Callable[[Numbers, int, int], torch.Tensor]] = {
    "heads first": lambda new, h, d: new(h, 6, d).transpose(0, 1),
    "dim first": lambda new, h, d: new(d, 6, h).permute(1, 2, 0),
    "dim before heads": lambda new, h, d: new(6, d, h).transpose(1, 2),
    "every second token": lambda new, h, d: new(12, h, d)[::2],
    "every second head": lambda new, h, d: new(6, 2 * h, d)[:, 1::2],
    "every third element": lambda new, h, d: new(6, h, 3 * d)[..., 2::3],
    "a slice of a fused projection": lambda new, h, d: new(6, 3 * h * d)[:, h * d : 2 * h * d].view(6, h, d),
    "a slice, flat": lambda new, h, d: new(6, h * d + 7)[:, 5 : 5 + h * d],
    "batch, heads, sequence": lambda new, h, d: new(2, h, 3, d).transpose(1, 2),
    "sequence before batch": lambda new, h, d: new(3, 2, h, d).transpose(0, 1),
    "padded sequences": lambda new, h, d: new(2, 5, h, d)[:, 1:4],
    "three batch dimensions": lambda new, h, d: (
        new(3, h, 2, 2, d).permute(3, 2, 0, 1, 4)[:, :, :, :, :][:, :, ::2].flatten(0, 2)[[0, 1, 2, 3, 4, 5]]
    ),
    "one token for all": lambda new, h, d: new(1, h, d).expand(6, h, d),
    "one head for all": lambda new, h, d: new(6, 1, d).expand(6, h, d),
    "one number for all": lambda new, h, d: new(1, 1, 1).expand(6, h, d),
    "overlapping windows": lambda new, h, d: new(6 + h * d).unfold(0, h * d, 1)[:6],
    "an odd storage offset": lambda new, h, d: new(6 * h * d + 3)[3:].view(6, h, d),
    "the imaginary part": lambda new, h, d: torch.view_as_complex(new(6, h, d, 2)).imag,
    "a negated view": lambda new, h, d: torch.view_as_complex(new(6, h, d, 2)).conj().imag,
    "a tensor that wants a gradient": lambda new, h, d: new(6, h, 2 * d).requires_grad_()[..., ::2],
}


@pytest.mark.parametrize("way", STRIDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_non_contiguous_inputs_work(written_on: str, dtype: torch.dtype, way: str) -> None:
    random = torch.Generator().manual_seed(2)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(written_on)

    pool = kv_pool(written_on, dtype=dtype)
    k, v = STRIDED[way](new, 2, 4), STRIDED[way](new, 3, 5)
    slots = torch.tensor([7, 1, 8, 3, 2, 5], device=written_on)
    pool.set_kv_buffer(0, slots, k, v)
    assert torch.equal(pool.k_buffer[0][slots], k.detach().clone().reshape(6, 2, 4).to(dtype))
    assert torch.equal(pool.v_buffer[0][slots], v.detach().clone().reshape(6, 3, 5).to(dtype))


def test_three_batch_dimensions_that_do_not_merge_work(written_on: str) -> None:
    k = torch.randn(3, 2, 1 + 2, 2, 4).to(written_on).permute(1, 2, 0, 3, 4)[:, 1:]  # [2, 2, 3, 2, 4]
    v = torch.randn(3, 5, 2, 2, 3).to(written_on).permute(2, 3, 4, 0, 1)
    pool = kv_pool(written_on, 12)
    slots = torch.arange(12, 0, -1, device=written_on)
    pool.set_kv_buffer(0, slots.view(2, 2, 3), k, v)
    assert torch.equal(pool.k_buffer[0][slots], k.reshape(12, 2, 4))
    assert torch.equal(pool.v_buffer[0][slots], v.reshape(12, 3, 5))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "strided",
    [
        lambda slots: torch.stack([slots, torch.full_like(slots, 4)], dim=1)[:, 0],
        lambda slots: torch.stack([slots, torch.full_like(slots, 4)], dim=1).reshape(-1)[::2],
        lambda slots: slots.view(2, 3).t().contiguous().t(),
        lambda slots: torch.cat([torch.full_like(slots, 4), slots])[6:],
    ],
    ids=["a column", "every second", "transposed", "an offset"],
)
def test_non_contiguous_indices_work(
    written_on: str, dtype: torch.dtype, strided: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    pool = kv_pool(written_on)
    k, v = rows_like(pool, 6)
    slots = torch.tensor([7, 1, 8, 3, 2, 5], dtype=dtype, device=written_on)
    pool.set_kv_buffer(0, strided(slots), k, v)
    assert torch.equal(pool.k_buffer[0][slots.long()], k)
    assert torch.equal(pool.v_buffer[0][slots.long()], v)
    assert not bool(pool.k_buffer[0][4].any())


def test_k_and_v_may_be_views_of_the_pool_itself(written_on: str) -> None:
    pool = kv_pool(written_on)
    pool.set_kv_buffer(0, torch.tensor([1, 2], device=written_on), *rows_like(pool, 2))
    k, v = pool.k_buffer[0][1:3].clone(), pool.v_buffer[0][1:3].clone()
    pool.set_kv_buffer(
        0, torch.tensor([6, 7], device=written_on), pool.k_buffer[0][1:3], pool.v_buffer[0][1:3]
    )
    assert torch.equal(pool.k_buffer[0][6:8], k)
    assert torch.equal(pool.v_buffer[0][6:8], v)


def good_write(pool: KVPool) -> dict[str, Any]:
    k, v = rows_like(pool, 2)
    return {"layer_id": 0, "indices": torch.tensor([1, 2], device=pool.device), "k": k, "v": v}


BAD_LAYERS = [-1, 2, 0.0, "0", None, [0]]
BAD_INDICES: dict[str, Callable[[torch.Tensor], Any]] = {
    "past the end": lambda good: [1, 9],
    "negative": lambda good: [1, -2],
    "past int32": lambda good: [1, 2**31],
    "past int64": lambda good: [1, 2**70],
    "floats": lambda good: [1.0, 2.0],
    "a float tensor": lambda good: good.float(),
    "a mask": lambda good: good > 1,
    "strings": lambda good: ["1", "2"],
    "None": lambda good: None,
    "ragged": lambda good: [[1], [2, 3]],
    "one too few": lambda good: good[:1],
    "one too many": lambda good: [1, 2, 3],
    "on another device": lambda good: good.to("meta"),
}
BAD_ROWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "one too few": lambda good: good[:1],
    "too many": lambda good: torch.cat([good, good]),
    "one element too few": lambda good: good[..., :-1],
    "another head": lambda good: torch.cat([good, good[:, :1]], dim=1),
    "all in one dimension": lambda good: good.reshape(-1),
    "tokens and heads in one dimension": lambda good: good.flatten(0, 1),
    "no batch": lambda good: good[0],
    "integers": lambda good: good.int(),
    "booleans": lambda good: good > 0,
    "complex": lambda good: good.to(torch.complex64),
    "on another device": lambda good: good.to("meta"),
    "sparse": lambda good: good.to_sparse(),
    "a list": lambda good: good.tolist(),
    "an array": lambda good: good.cpu().numpy(),
    "None": lambda good: None,
    "a string": lambda good: "no tensor",
}
BAD_WRITES: list[Any] = [
    *[pytest.param("layer_id", lambda good, bad=bad: bad, id=f"layer_id-{bad!r}") for bad in BAD_LAYERS],
    *[pytest.param("indices", bad, id=f"indices-{why}") for why, bad in BAD_INDICES.items()],
    *[pytest.param(side, bad, id=f"{side}-{why}") for side in "kv" for why, bad in BAD_ROWS.items()],
]


@pytest.mark.parametrize(("name", "bad"), BAD_WRITES)
def test_a_write_with_a_bad_argument_raises_and_writes_nothing(
    device: str, name: str, bad: Callable[[Any], Any]
) -> None:
    pool = kv_pool(device)
    good = good_write(pool)
    before = contents(pool)
    with pytest.raises(UsageError):
        pool.set_kv_buffer(**(good | {name: bad(good[name])}))
    assert same(contents(pool), before)
    pool.check()


@pytest.mark.gpu
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize(("pool_on", "given_on"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_k_and_v_on_another_device_are_refused(side: str, pool_on: str, given_on: str) -> None:
    pool = kv_pool(pool_on)
    good = good_write(pool)
    before = contents(pool)
    with pytest.raises(ArgumentError):
        pool.set_kv_buffer(**(good | {side: good[side].to(given_on)}))
    assert same(contents(pool), before)


@pytest.mark.parametrize("layer_id", BAD_LAYERS)
def test_views_of_a_layer_that_is_not_there_raise(device: str, layer_id: Any) -> None:
    pool = kv_pool(device)
    for get in (pool.get_key_buffer, pool.get_value_buffer, pool.get_kv_buffer):
        with pytest.raises(UsageError):
            get(layer_id)


@pytest.mark.gpu
def test_offsets_are_64_bit_in_the_pool_and_in_the_source() -> None:
    width, num_slots = 8 * 128, 2**31 // (8 * 128) + 1024
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB on the device")
    pool = KVPool(num_slots, 1, 8, 128, dtype=torch.float8_e5m2)
    wide = torch.zeros(2, 2**31 + 4096, dtype=torch.uint8, device="cuda")
    wide[:, :width] = torch.randint(0, 0x7B, (2, width), dtype=torch.uint8, device="cuda")
    k = wide.view(torch.float8_e5m2)[:, :width]
    last = torch.tensor([num_slots - 1, num_slots], device="cuda")
    pool.set_kv_buffer(0, last, k, k)
    for buffer in (pool.k_buffer[0], pool.v_buffer[0]):
        assert torch.equal(buffer.view(torch.uint8)[last].view(2, width), wide[:, :width])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_one_kernel_writes_k_and_v_together() -> None:
    pool = kv_pool("cuda", dtype=torch.bfloat16)
    good = good_write(pool)
    pool.set_kv_buffer(**good)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        pool.set_kv_buffer(**good)
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_device) == 1, [event.name for event in on_device]


@pytest.mark.gpu
def test_a_write_of_device_tensors_can_be_captured() -> None:
    pool = kv_pool("cuda")
    good = good_write(pool)
    pool.set_kv_buffer(**good)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.set_kv_buffer(**good)
    good["indices"].copy_(torch.tensor([7, 8]))
    graph.replay()
    assert torch.equal(pool.k_buffer[0][7:9], good["k"])
    assert torch.equal(pool.v_buffer[0][7:9], good["v"])
