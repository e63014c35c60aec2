"""contracts/hybrid.md: `LayerCacheHandle`, against lists of what each request has seen.

Entries are float32 where results are compared exactly; the bytes of quantised ones are judged elsewhere."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.builders import captured
from conformance.hybrid_models import CSA, HCA, LAYERS, exact, manager_of, parts_of, tiny
from pagoda.compat import AttentionType, DSV4Config, KVCacheManager, LayerCacheHandle
from pagoda.errors import ArgumentError, CaptureError, OutOfRangeError

WINDOW, CSA_LAYER, HCA_LAYER, SWA_LAYER = 8, 2, 3, 1


class Request:
    """What one request has seen, token after token, in one layer: rows of [dim]."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.kv: list[torch.Tensor] = []
        self.entries: list[torch.Tensor] = []
        self.keys: list[torch.Tensor] = []

    @property
    def length(self) -> int:
        return len(self.kv)


class Driver:
    """A manager of exact entries, a layer of it, and the requests that run, fed with random numbers."""

    def __init__(self, device: str, layer: int, config: DSV4Config | None = None) -> None:
        self.device, self.layer = device, layer
        unbounded = {"num_blocks_per_csa_layer": None, "num_blocks_per_hca_layer": None}
        self.manager = manager_of(device, config or exact(), **unbounded)
        self.schema = self.manager.schemas[layer]
        self.random = torch.Generator().manual_seed(layer)
        self.requests: list[Request] = []

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.device)

    def admit(self) -> Request:
        request = Request(self.manager.admit_request())
        for _ in range(5 if self.schema.ratio else 0):
            self.manager.allocate_block(self.layer, request.row)
        self.requests.append(request)
        return request

    def release(self, request: Request) -> None:
        self.manager.release_request(request.row)
        self.requests.remove(request)

    def handle(self, *chunks: tuple[Request, int], padding: int = 0) -> LayerCacheHandle:
        """The handle of a step in which requests get so many tokens each; padding stands in front."""
        slots = [request.row for request, _ in chunks] + [0] * bool(padding)
        ids, positions = [-1] * padding, [3] * padding
        for number, (request, n) in enumerate(chunks):
            ids += [number] * n
            positions += range(request.length, request.length + n)
        return self.manager.acquire(self.layer, slots, positions, ids)

    def step(self, *chunks: tuple[Request, int], padding: int = 0) -> tuple[LayerCacheHandle, torch.Tensor]:
        """Feed a step: windows and entries are written, and the lists know of them."""
        handle = self.handle(*chunks, padding=padding)
        total = handle.positions.shape[0]
        kv, entries, keys = self.numbers(total, 16), self.numbers(total, 16), self.numbers(total, 8)
        kv[:padding] = entries[:padding] = keys[:padding] = float("nan")
        handle.write_swa(kv)
        if self.schema.ratio:
            handle.write_compressed(entries)
        if self.schema.index is not None:
            handle.write_index(keys)
        at = padding
        for request, n in chunks:
            for token in range(at, at + n):
                request.kv.append(kv[token])
                if self.schema.ratio and request.length % self.schema.ratio == 0:
                    request.entries.append(entries[token])
                    request.keys.append(keys[token])
            at += n
        return handle, kv


def stacked(rows: list[torch.Tensor], width: int, dim: int, device: str) -> torch.Tensor:
    """Rows, then zeros: [width, dim]."""
    return (
        torch.stack([*rows, *[torch.zeros(dim, device=device)] * (width - len(rows))])
        if width
        else (torch.zeros(0, dim, device=device))
    )


# --- windows


@pytest.mark.parametrize("layer", LAYERS)
def test_the_window_of_every_token_oldest_first(device: str, layer: int) -> None:
    driver = Driver(device, layer)
    first, second = driver.admit(), driver.admit()
    for step in range(14):  # the ring wraps
        chunks = [(first, 1), (second, 1)] if step % 3 else [(second, 1)]
        handle, _ = driver.step(*chunks)
        out, lens = handle.gather_swa_kv()
        assert (tuple(out.shape), out.dtype) == ((len(chunks), WINDOW, 16), torch.float32)
        assert lens.dtype == torch.int32
        for number, (request, _) in enumerate(chunks):
            recent = request.kv[-WINDOW:]
            assert int(lens[number]) == len(recent)
            assert torch.equal(out[number], stacked(recent, WINDOW, 16, device))


@pytest.mark.parametrize("unaccepted", [1, 3])
def test_several_tokens_of_a_step_have_windows_of_their_own(device: str, unaccepted: int) -> None:
    driver = Driver(device, SWA_LAYER, exact(unaccepted=unaccepted))
    request = driver.admit()
    driver.step((request, 5))
    for _ in range(6):
        handle, _ = driver.step((request, unaccepted))
        out, lens = handle.gather_swa_kv()
        for token in range(unaccepted):
            seen = request.kv[: request.length - unaccepted + token + 1][-WINDOW:]
            assert int(lens[token]) == len(seen)
            assert torch.equal(out[token], stacked(seen, WINDOW, 16, device))


@pytest.mark.parametrize("length", [0, 1, 3, 7, 8, 9, 20])
@pytest.mark.parametrize("chunk", [1, 2, 8, 9, 25])
def test_a_chunk_of_prefill_comes_behind_the_window_before_it(device: str, length: int, chunk: int) -> None:
    """Also one longer than the ring, which a ring of just the window would have lost."""
    driver = Driver(device, SWA_LAYER)
    first, second = driver.admit(), driver.admit()
    if length:
        driver.step((first, length))
    driver.step((second, 2))
    handle = driver.handle((second, 1), (first, chunk))
    kv = driver.numbers(1 + chunk, 16)
    out, lens = handle.gather_swa_chunk(kv)
    assert out.shape == (2, WINDOW - 1 + chunk, 16)
    before = [second.kv[-(WINDOW - 1) :], first.kv[-(WINDOW - 1) :] if length else []]
    wanted = [[*before[0], kv[0]], [*before[1], *kv[1:]]]
    for number in range(2):
        assert int(lens[number]) == len(wanted[number])
        assert torch.equal(out[number], stacked(wanted[number], out.shape[1], 16, device))
    handle.write_swa(kv)
    out, _ = handle.gather_swa_kv()
    whole = [*first.kv, *kv[1:]]
    assert torch.equal(out[-1], stacked(whole[-WINDOW:], WINDOW, 16, device))


def test_a_chunk_comes_back_as_it_would_be_stored(device: str) -> None:
    driver = Driver(device, SWA_LAYER, tiny())
    request = driver.admit()
    kv = 30 * driver.numbers(4, 16)
    handle = driver.handle((request, 4))
    out, _ = handle.gather_swa_chunk(kv)
    assert out.dtype == torch.bfloat16
    handle.write_swa(kv)
    stored, _ = handle.gather_swa_kv()
    assert torch.equal(out[0, :4], stored[-1, :4])
    assert torch.allclose(out[0, :4].float(), kv, rtol=2**-4, atol=0.1)


# --- compressed entries


@pytest.mark.parametrize("layer", [CSA_LAYER, HCA_LAYER])
@pytest.mark.parametrize("padding", [0, 3])
def test_all_entries_of_every_request(device: str, layer: int, padding: int) -> None:
    driver = Driver(device, layer)
    first, second = driver.admit(), driver.admit()
    for sizes in ((3, 1), (1, 7), (12, 0), (1, 16), (15, 1), (1, 1)):
        chunks = [(r, n) for r, n in ((first, sizes[0]), (second, sizes[1])) if n]
        handle, _ = driver.step(*chunks, padding=padding)
        out, lens = handle.gather_all_compressed_kv()
        longest = max(len(request.entries) for request, _ in chunks)
        assert (tuple(out.shape), out.dtype) == ((len(chunks) + bool(padding), longest, 16), torch.float32)
        for number, (request, _) in enumerate(chunks):
            assert int(lens[number]) == request.length // driver.schema.ratio == len(request.entries)
            assert torch.equal(out[number], stacked(request.entries, longest, 16, device))
        assert not padding or (int(lens[-1]) == 0 and not bool(out[-1].any()))


def test_all_keys_of_the_indexer(device: str) -> None:
    driver = Driver(device, CSA_LAYER)
    first, second = driver.admit(), driver.admit()
    handle, _ = driver.step((first, 37), (second, 6))
    out, lens = handle.gather_index()
    assert out.shape == (2, 9, 8)
    assert lens.tolist() == [9, 1]
    for number, request in enumerate((first, second)):
        assert torch.equal(out[number], stacked(request.keys, 9, 8, device))


def test_n_is_what_blocks_could_hold_where_the_host_does_not_know_lengths(device: str) -> None:
    driver = Driver(device, CSA_LAYER)
    request = driver.admit()
    driver.step((request, 13))
    given = [torch.tensor(it, dtype=torch.int32, device=device) for it in ([request.row], [12], [0])]
    handle = driver.manager.acquire(CSA_LAYER, *given)
    out, lens = handle.gather_all_compressed_kv()
    assert out.shape == (1, 5 * 4, 16)
    assert lens.tolist() == [3]
    assert torch.equal(out[0], stacked(request.entries, 20, 16, device))
    out, _ = handle.gather_swa_chunk(driver.numbers(1, 16))
    assert out.shape == (1, WINDOW, 16)


def test_tokens_of_row_0_make_no_output_longer(device: str) -> None:
    driver = Driver(device, CSA_LAYER)
    request = driver.admit()
    driver.step((request, 9))
    tokens = [request.row, 0], [8, 40, 41, 42], [0, 1, 1, 1]
    handle = driver.manager.acquire(CSA_LAYER, *tokens)
    out, lens = handle.gather_all_compressed_kv()
    assert (out.shape[:2], lens.tolist()) == ((2, 2), [2, 0])
    out, lens = handle.gather_swa_chunk(driver.numbers(4, 16))
    assert (out.shape[:2], lens.tolist()) == ((2, WINDOW), [WINDOW, 0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_entries_that_an_indexer_chose(device: str, dtype: torch.dtype) -> None:
    driver = Driver(device, CSA_LAYER)
    first, second = driver.admit(), driver.admit()
    driver.step((first, 14), (second, 30))
    handle, _ = driver.step((first, 4), (second, 1), padding=2)
    # Of first, at positions 14 to 17, entries 0 to 2, from 15 on 0 to 3; of second, at 30, entries 0 to 6.
    chosen = torch.tensor(
        [[0, 1, 2], [-1, 0, 5], [2, 0, 3], [3, 3, -1], [4, 0, 1], [3, 2, 1], [6, 7, 0]],
        device=device,
        dtype=dtype,
    )
    out, mask = handle.gather_compressed_kv(chosen)
    assert (tuple(out.shape), out.dtype, mask.dtype) == ((7, 3, 16), torch.float32, torch.bool)
    whose = [None, None, first, first, first, first, second]
    visible = [0, 0, 3, 4, 4, 4, 7]
    for token, request in enumerate(whose):
        for at, entry in enumerate(chosen[token].tolist()):
            is_there = 0 <= entry < visible[token]
            assert bool(mask[token, at]) == is_there, (token, entry)
            wanted = request.entries[entry] if is_there and request else torch.zeros(16, device=device)
            assert torch.equal(out[token, at], wanted)


def test_a_row_of_which_all_is_masked_is_zeros(device: str) -> None:
    """So that attention over it gives 0 and not NaN: nothing there is NaN or infinite."""
    driver = Driver(device, CSA_LAYER, tiny())
    for table in (driver.manager.paged_pools[CSA_LAYER],):
        table.entries.fill_(0x7F)  # NaN, whatever is read
    request = driver.admit()
    handle = driver.handle((request, 1), padding=1)
    out, mask = handle.gather_compressed_kv(torch.zeros(2, 4, dtype=torch.int32, device=device))
    assert not bool(mask.any())
    assert not bool(out.any())
    out, lens = handle.gather_all_compressed_kv(torch.empty(2, 6, 16, dtype=torch.bfloat16, device=device))
    assert lens.tolist() == [0, 0]
    assert not bool(out.any())


def test_entries_go_on_in_the_next_block_and_in_the_blocks_of_the_table(device: str) -> None:
    driver = Driver(device, CSA_LAYER)
    first, second = driver.admit(), driver.admit()
    driver.release(first)
    third = driver.admit()  # its blocks lie before those of the second
    driver.step((second, 33), (third, 18))
    pool, table = driver.manager.paged_pools[CSA_LAYER], driver.manager.block_tables[CSA_LAYER]
    flat = pool.view("latent", "latent")
    for request in (second, third):
        for number, entry in enumerate(request.entries):
            block = int(table[request.row, number // 4])
            assert torch.equal(flat[block, number % 4], entry[:12])


def test_an_entry_without_a_block_is_not_written(device: str) -> None:
    manager = manager_of(device, exact())
    row = manager.admit_request()
    handle = manager.acquire(CSA_LAYER, [row], [0, 1, 2, 3], [0] * 4)
    handle.write_compressed(torch.ones(4, 16, device=device))
    handle.write_index(torch.ones(4, 8, device=device))
    pool = manager.paged_pools[CSA_LAYER]
    assert not bool(pool.entries.any())
    assert not bool(pool.index.any())
    out, lens = handle.gather_all_compressed_kv()
    assert lens.tolist() == [1]
    assert not bool(out.any())


def test_an_id_is_valid_in_every_layer_of_its_group(device: str) -> None:
    manager = manager_of(device, exact())
    row = manager.admit_request()
    manager.allocate_block(2, row)  # layer 5 never asks
    for layer, value in ((2, 1.0), (5, 2.0)):
        handle = manager.acquire(layer, [row], [0, 1, 2, 3], [0] * 4)
        handle.write_compressed(torch.full((4, 16), value, device=device))
    for layer, value in ((2, 1.0), (5, 2.0)):
        out, _ = manager.acquire(layer, [row], [3], [0]).gather_all_compressed_kv()
        assert out.unique().tolist() == [value]


# --- the compressor


def pooled(values: torch.Tensor, scores: torch.Tensor, block: int, ratio: int, overlap: bool) -> list[float]:
    """Entry `block` of projections, [tokens, channels], as the contract has it, in plain Python."""
    dim = values.shape[1] // 2 if overlap else values.shape[1]
    rows: list[tuple[Any, Any]] = []
    for token in range((block - 1) * ratio, block * ratio) if overlap else ():
        if token >= 0:  # block −1 has score −inf: no weight
            rows.append((values[token, :dim].tolist(), scores[token, :dim].tolist()))
    for token in range(block * ratio, (block + 1) * ratio):
        begin = dim if overlap else 0
        rows.append((values[token, begin:].tolist(), scores[token, begin:].tolist()))
    entry = []
    for channel in range(dim):
        most = max(score[channel] for _, score in rows)
        weights = [math.exp(score[channel] - most) for _, score in rows]
        entry.append(sum(w * v[channel] for w, (v, _) in zip(weights, rows, strict=True)) / sum(weights))
    return entry


@pytest.mark.parametrize("sizes", [[40], [1] * 40, [3, 5, 4, 1, 16, 11], [4, 4, 16, 16]], ids=str)
@pytest.mark.parametrize(("layer", "which"), [(CSA_LAYER, "main"), (CSA_LAYER, "index"), (HCA_LAYER, "main")])
def test_the_compressor_over_any_chunks(device: str, layer: int, which: str, sizes: list[int]) -> None:
    driver = Driver(device, layer)
    dim = 16 if which == "main" else 8
    overlap, ratio = driver.schema.overlap, driver.schema.ratio
    channels = 2 * dim if overlap else dim
    first, second = driver.admit(), driver.admit()
    values, scores = driver.numbers(40, channels), driver.numbers(40, channels)
    done, found = 0, []
    for size in sizes:
        handle = driver.handle((second, 1), (first, size))
        call = handle.compress if which == "main" else handle.compress_index
        mixed = torch.cat([driver.numbers(1, channels), values[done : done + size]])
        out = call(mixed, torch.cat([driver.numbers(1, channels), scores[done : done + size]]))
        assert (tuple(out.shape), out.dtype) == ((1 + size, dim), torch.float32)
        for token in range(size):
            is_end = (done + token + 1) % ratio == 0
            assert is_end or not bool(out[1 + token].any())
            if is_end:
                found.append(out[1 + token])
        first.kv += [values[0]] * size  # only their number counts here
        second.kv.append(values[0])
        done += size
    assert len(found) == 40 // ratio
    for block, entry in enumerate(found):
        wanted = torch.tensor(pooled(values, scores, block, ratio, overlap), device=device)
        torch.testing.assert_close(entry, wanted, rtol=1e-5, atol=1e-5)


def test_norm_and_rotation_of_an_entry(device: str) -> None:
    driver = Driver(device, HCA_LAYER)
    request = driver.admit()
    values, scores = driver.numbers(16, 16), driver.numbers(16, 16)
    weight, angles = driver.numbers(16), driver.numbers(16, 2)
    handle = driver.handle((request, 16))
    out = handle.compress(
        values,
        scores,
        norm=(weight, 1e-6),
        rotary=(angles.cos(), angles.sin()),
        out=torch.empty(16, 16, device=device),
    )
    entry = torch.tensor(pooled(values, scores, 0, 16, False), device=device)
    entry = entry / (entry.square().mean() + 1e-6).sqrt() * weight
    pairs = torch.view_as_complex(entry[12:].view(2, 2).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles[15]), angles[15])).flatten()
    torch.testing.assert_close(out[15], torch.cat([entry[:12], turned]), rtol=1e-5, atol=1e-5)


# --- tokens that are not accepted, rows that are used again, requests that resume


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_tokens_that_are_rolled_back_leave_nothing(device: str, layer: int, accepted: int) -> None:
    """Up to 3 tokens are written before it is known how many hold; then the right ones come."""
    driver = Driver(device, layer, exact(unaccepted=3))
    request, ratio = driver.admit(), driver.schema.ratio
    driver.step((request, 30))
    driver.step((request, 3))
    holds = 30 + accepted
    del request.kv[holds:]
    if ratio:
        del request.entries[holds // ratio :], request.keys[holds // ratio :]
    handle, _ = driver.step((request, 3))
    out, lens = handle.gather_swa_kv()
    for token in range(3):
        seen = request.kv[: holds + token + 1][-WINDOW:]
        assert int(lens[token]) == len(seen)
        assert torch.equal(out[token], stacked(seen, WINDOW, 16, device))
    if ratio:
        out, lens = handle.gather_all_compressed_kv()
        assert lens.tolist() == [(holds + 3) // ratio]
        assert torch.equal(out[0], stacked(request.entries, out.shape[1], 16, device))


@pytest.mark.parametrize(("layer", "which"), [(CSA_LAYER, "main"), (CSA_LAYER, "index"), (HCA_LAYER, "main")])
@pytest.mark.parametrize("begin", [13, 14, 15, 16, 29, 30, 31])
def test_a_compressor_whose_tokens_are_rolled_back_makes_the_same_entries(
    device: str, layer: int, which: str, begin: int
) -> None:
    driver = Driver(device, layer, exact(unaccepted=3))
    dim = 16 if which == "main" else 8
    overlap, ratio = driver.schema.overlap, driver.schema.ratio
    channels = 2 * dim if overlap else dim
    request = driver.admit()
    values, scores = driver.numbers(48, channels), driver.numbers(48, channels)
    found: dict[int, torch.Tensor] = {}

    def feed(first: int, last: int, given: torch.Tensor, weights: torch.Tensor) -> None:
        request.kv = [values[0]] * first
        handle = driver.handle((request, last - first))
        call = handle.compress if which == "main" else handle.compress_index
        out = call(given, weights)
        found.update({p // ratio: out[p - first] for p in range(first, last) if (p + 1) % ratio == 0})

    feed(0, begin, values[:begin], scores[:begin])
    feed(begin, begin + 3, driver.numbers(3, channels), driver.numbers(3, channels))  # none is accepted
    for position in range(begin, 48):
        feed(position, position + 1, values[position : position + 1], scores[position : position + 1])
    for block in range(48 // ratio):
        wanted = torch.tensor(pooled(values, scores, block, ratio, overlap), device=device)
        torch.testing.assert_close(found[block], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("whole", [False, True], ids=["at a length", "all of it"])
def test_a_request_resumes_from_a_snapshot_as_if_it_had_never_stopped(
    device: str, layer: int, whole: bool
) -> None:
    """In another row, over its blocks; what a ring outside of the snapshot would have corrupted."""
    driver = Driver(device, layer)
    pool = driver.manager.state_pools[layer]
    noise, request = driver.admit(), driver.admit()
    channels = pool.main_values.shape[2] if pool.main_values is not None else 0
    values, scores = driver.numbers(52, channels), driver.numbers(52, channels)

    def feed(whose: Request, first: int, last: int) -> tuple[torch.Tensor, ...]:
        handle, _ = driver.step((whose, last - first))
        got = handle.gather_swa_kv()[0][-1:]
        if not channels:
            return (got,)
        return got, handle.compress(values[first:last], scores[first:last])

    feed(request, 0, 32)
    kept = pool.snapshot(request.row, None if whole else 32)
    resumed = driver.admit()
    driver.step((noise, 3))
    feed(resumed, 0, 9)  # something else was in that row
    pool.restore(resumed.row, kept)
    resumed.kv, resumed.entries, resumed.keys = list(request.kv), list(request.entries), list(request.keys)
    state = driver.random.get_state()
    wanted = [feed(request, 32 + n, 33 + n) for n in range(20)]
    driver.random.set_state(state)
    found = [feed(resumed, 32 + n, 33 + n) for n in range(20)]
    for one, other in zip(wanted, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("layer", LAYERS)
def test_padding_may_be_a_position_of_its_request(device: str, layer: int) -> None:
    """Position −1 before and behind a request's tokens changes nothing: not in rings, not in compressors."""
    drivers = [Driver(device, layer) for _ in range(2)]
    rows = [driver.admit().row for driver in drivers]
    channels = 16 * (2 if drivers[0].schema.overlap else 1)
    for begin, end in ((0, 3), (3, 18), (18, 64)):
        n, made = end - begin, []
        kv, values, scores = (drivers[0].numbers(n, width) for width in (16, channels, channels))
        for padding, driver, row in zip((0, 20), drivers, rows, strict=True):
            positions = [-1] * padding + [*range(begin, end)] + [-1] * padding
            handle = driver.manager.acquire(layer, [row], positions, [0] * len(positions))
            noise = torch.full((padding, channels), float("nan"), device=device)
            handle.write_swa(torch.cat([noise[:, :16], kv, noise[:, :16]]))
            read = [handle.gather_swa_kv()[0]]
            if driver.schema.ratio:
                read.append(handle.compress(*(torch.cat([noise, x, noise]) for x in (values, scores))))
            made.append([each[padding : padding + n] for each in read])
        assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))
        states = [driver.manager.state_pools[layer] for driver in drivers]
        for one, other in zip(*(parts_of(state).values() for state in states), strict=True):
            assert torch.equal(one, other)


# --- outputs of the caller, and bad arguments


def reading_calls(handle: LayerCacheHandle, device: str) -> dict[str, Callable[..., Any]]:
    chosen = torch.zeros(handle.positions.shape[0], 2, dtype=torch.int32, device=device)
    chunk = torch.zeros(handle.positions.shape[0], 16, device=device)
    return {
        "gather_compressed_kv": lambda *out: handle.gather_compressed_kv(chosen, *out),
        "gather_all_compressed_kv": handle.gather_all_compressed_kv,
        "gather_index": handle.gather_index,
        "gather_swa_kv": handle.gather_swa_kv,
        "gather_swa_chunk": lambda *out: handle.gather_swa_chunk(chunk, *out),
    }


CALLS = [
    "gather_compressed_kv",
    "gather_all_compressed_kv",
    "gather_index",
    "gather_swa_kv",
    "gather_swa_chunk",
]


def prepared(device: str, config: DSV4Config | None = None) -> tuple[KVCacheManager, LayerCacheHandle]:
    driver = Driver(device, CSA_LAYER, config)
    first, second = driver.admit(), driver.admit()
    driver.step((first, 20), (second, 9))
    handle, _ = driver.step((first, 2), (second, 3))
    return driver.manager, handle


@pytest.mark.parametrize("name", CALLS)
def test_outputs_of_the_caller_are_filled_and_given_back(device: str, name: str) -> None:
    _, handle = prepared(device)
    call = reading_calls(handle, device)[name]
    made = call()
    given = [torch.full_like(it, 1) for it in made]
    addresses = [it.data_ptr() for it in given]
    found = call(*given)
    assert [it.data_ptr() for it in found] == addresses
    assert all(torch.equal(one, other) for one, other in zip(found, made, strict=True))


@pytest.mark.parametrize("name", ["gather_all_compressed_kv", "gather_index", "gather_swa_chunk"])
def test_a_wider_output_has_zeros_behind_and_a_narrower_one_is_cut(device: str, name: str) -> None:
    _, handle = prepared(device)
    call = reading_calls(handle, device)[name]
    out, lens = call()
    wide, wide_lens = call(torch.full((2, out.shape[1] + 7, out.shape[2]), 3.0, device=device))
    assert torch.equal(wide[:, : out.shape[1]], out)
    assert not bool(wide[:, out.shape[1] :].any())
    assert torch.equal(lens, wide_lens)
    if name != "gather_swa_chunk":
        narrow, narrow_lens = call(torch.empty(2, 2, out.shape[2], device=device))
        assert torch.equal(narrow, out[:, :2])
        assert torch.equal(narrow_lens, lens)  # the true lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_outputs_may_be_of_another_dtype(device: str, name: str, dtype: torch.dtype) -> None:
    _, handle = prepared(device)
    call = reading_calls(handle, device)[name]
    made, *rest = call()
    out, *_ = call(torch.empty_like(made, dtype=dtype), *rest)
    assert torch.equal(out, made.to(dtype))


def test_quantised_entries_come_back_as_bfloat16(device: str) -> None:
    _, handle = prepared(device, tiny())
    for call in reading_calls(handle, device).values():
        assert call()[0].dtype == torch.bfloat16
    half = dataclasses.replace(exact(), entry=dataclasses.replace(exact().entry, parts=tuple(
        dataclasses.replace(part, dtype="float16") for part in exact().entry.parts
    )))  # fmt: skip
    _, handle = prepared(device, half)
    assert handle.gather_swa_kv()[0].dtype == torch.float16


@pytest.mark.parametrize("name", CALLS)
def test_outputs_that_do_not_fit_are_refused(name: str) -> None:
    _, handle = prepared("cpu")
    call = reading_calls(handle, "cpu")[name]
    out, second = call()
    for bad in (
        out[..., :-1].contiguous(),
        out[:-1].contiguous(),
        out[None],
        torch.empty(out.shape, dtype=torch.int32),
        torch.empty(out.shape, dtype=torch.float64),
        out.to("meta"),
        out.transpose(0, 1).contiguous().transpose(0, 1),
        [],
        "out",
    ):
        with pytest.raises(ArgumentError, match="out"):
            call(bad, second)
    for bad in (second[:-1], second.to(torch.int64), second.float(), second.to("meta"), 3):
        with pytest.raises(ArgumentError, match=r"lens|mask"):
            call(out, bad)


def test_a_chunk_needs_room_for_the_window_and_a_token() -> None:
    _, handle = prepared("cpu")
    with pytest.raises(ArgumentError, match="at least 8 positions"):
        handle.gather_swa_chunk(torch.zeros(5, 16), torch.zeros(2, 7, 16))


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(4, 16),
        torch.zeros(5, 15),
        torch.zeros(5, 1, 16),
        torch.zeros(5, 16, dtype=torch.float64),
        torch.zeros(5, 16, dtype=torch.int32),
        torch.zeros(5, 16, device="meta"),
        torch.zeros(5, 16).to_sparse(),
        [[0.0] * 16] * 5,
        None,
    ],
    ids=lambda it: str(getattr(it, "shape", it))[:20] + str(getattr(it, "dtype", "")),
)
def test_values_that_do_not_fit_are_refused_and_nothing_is_written(bad: Any) -> None:
    manager, handle = prepared("cpu")
    state, paged = manager.state_pools[CSA_LAYER], manager.paged_pools[CSA_LAYER]
    before = [it.clone() for it in (state.window, state.main_values, paged.entries, paged.index)]
    good, keys = torch.zeros(5, 32), torch.zeros(5, 16)
    for call in (
        lambda: handle.write_swa(bad),
        lambda: handle.write_compressed(bad),
        lambda: handle.write_index(bad),
        lambda: handle.compress(bad, good),
        lambda: handle.compress(good, bad),
        lambda: handle.gather_swa_chunk(bad),
        lambda: handle.compress(good, good, norm=(bad, 1e-6)),
        lambda: handle.compress(good, good, rotary=(bad, bad)),
        lambda: handle.compress(good, good, out=bad if bad is not None else 3),
    ):
        with pytest.raises(ArgumentError):
            call()
    with pytest.raises(ArgumentError):
        handle.compress_index(keys, good)
    for norm in (3, (torch.ones(16),), (torch.ones(16), "x"), (torch.ones(8), 1e-6)):
        with pytest.raises(ArgumentError, match="norm"):
            handle.compress(good, good, norm=norm)  # type: ignore[arg-type]
    for rotary in (3, (torch.ones(5, 2),), (torch.ones(5, 2), torch.ones(5, 3)), (torch.ones(5, 9),) * 2):
        with pytest.raises(ArgumentError, match="rotary"):
            handle.compress(good, good, rotary=rotary)  # type: ignore[arg-type]
    after = (state.window, state.main_values, paged.entries, paged.index)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(4, 3, dtype=torch.int32),
        torch.zeros(5, dtype=torch.int32),
        torch.zeros(5, 3),
        torch.zeros(5, 3, dtype=torch.int16),
        torch.zeros(3, 5, dtype=torch.int64).t(),
        torch.zeros(5, 3, dtype=torch.int32, device="meta"),
        [[0] * 3] * 5,
        None,
    ],
    ids=lambda it: str(getattr(it, "shape", it))[:20] + str(getattr(it, "dtype", "")),
)
def test_choices_that_do_not_fit_are_refused(bad: Any) -> None:
    _, handle = prepared("cpu")
    with pytest.raises(ArgumentError, match="topk_indices"):
        handle.gather_compressed_kv(bad)


@pytest.mark.parametrize(
    ("layer", "calls"),
    [
        (SWA_LAYER, ["gather_compressed_kv", "gather_all_compressed_kv", "gather_index", "write_compressed",
                     "write_index", "compress", "compress_index"]),
        (HCA_LAYER, ["gather_index", "write_index", "compress_index"]),
    ],
)  # fmt: skip
def test_what_a_layer_does_not_have_is_refused(layer: int, calls: list[str]) -> None:
    handle = Driver("cpu", layer).handle()
    kinds: dict[int, AttentionType] = {SWA_LAYER: AttentionType.SWA, HCA_LAYER: HCA}
    for name in calls:
        arguments = {"gather_all_compressed_kv": 0, "gather_index": 0, "compress": 2, "compress_index": 2}
        given = [torch.zeros(0, 16)] * arguments.get(name, 1)
        with pytest.raises(ArgumentError, match=f"layer {layer} is {kinds[layer].name}: it has no"):
            getattr(handle, name)(*given)
    assert CSA not in kinds.values()


def test_gradients_end_at_the_cache(device: str) -> None:
    for config in (exact(), tiny()):
        driver = Driver(device, CSA_LAYER, config)
        request = driver.admit()
        handle = driver.handle((request, 4))
        kv, keys, weight = (driver.numbers(*shape).requires_grad_() for shape in ((4, 16), (4, 8), (16,)))
        values, scores, angles = (
            driver.numbers(*shape).requires_grad_() for shape in ((4, 32), (4, 32), (4, 2))
        )
        chunk, _ = handle.gather_swa_chunk(kv)
        handle.write_swa(kv)
        made = handle.compress(values, scores, (weight, 1e-6), (angles, angles))
        handle.write_compressed(kv)
        handle.write_index(keys)
        state, paged = driver.manager.state_pools[CSA_LAYER], driver.manager.paged_pools[CSA_LAYER]
        read = [call()[0] for call in reading_calls(handle, device).values()]
        for tensor in (chunk, made, *parts_of(state).values(), paged.entries, paged.index, *read):
            assert not tensor.requires_grad


@pytest.mark.parametrize("name", CALLS)
def test_outputs_may_have_gradients_or_be_made_under_inference_mode(device: str, name: str) -> None:
    _, handle = prepared(device)
    call = reading_calls(handle, device)[name]
    made, *rest = call()
    with torch.inference_mode():
        inference = torch.empty_like(made)
    for out in (torch.empty_like(made, requires_grad=True), inference):
        found, *_ = call(out, *rest)
        assert found is out
        assert torch.equal(found, made)


def test_a_step_without_tokens_or_requests_is_none(device: str) -> None:
    driver = Driver(device, CSA_LAYER)
    handle = driver.handle()
    handle.write_swa(torch.zeros(0, 16, device=device))
    handle.write_compressed(torch.zeros(0, 16, device=device))
    for call in reading_calls(handle, device).values():
        out, second = call()
        assert out.shape[0] == second.shape[0] == 0
    request = driver.admit()
    handle = driver.handle((request, 0))
    out, lens = handle.gather_all_compressed_kv()
    assert (out.shape[0], lens.tolist()) == (1, [0])


@pytest.mark.gpu
def test_what_would_be_copied_inside_a_capture_is_refused() -> None:
    """Parts of wider rows are read as they lie; numbers of a token that lie apart are copied first."""
    driver = Driver("cuda", CSA_LAYER)
    request = driver.admit()
    given = [torch.tensor(it, dtype=torch.int32, device="cuda") for it in ([request.row], [0, 1], [0, 0])]
    handle = driver.manager.acquire(CSA_LAYER, *given)
    parts, apart = driver.numbers(2, 64), driver.numbers(32, 2).t()
    out, angles = driver.numbers(2, 16), (parts[:, 1:5], parts[:, 7:11])
    handle.write_swa(parts[:, 16:32])
    handle.compress(parts[:, :32], parts[:, 32:], rotary=angles, out=out)
    torch.cuda.synchronize()
    with captured():
        handle.write_swa(parts[:, 16:32])
        handle.compress(parts[:, :32], parts[:, 32:], rotary=angles, out=out)
        for call in (
            lambda: handle.write_swa(apart[:, :16]),
            lambda: handle.compress(apart, parts[:, 32:], out=out),
            lambda: handle.compress(parts[:, :32], parts[:, 32:], rotary=(apart[:, :2],) * 2, out=out),
        ):
            with pytest.raises(CaptureError, match="which is not contiguous"):
                call()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_leaving_out_an_output_inside_a_capture_is_refused(name: str) -> None:
    driver = Driver("cuda", CSA_LAYER)
    request = driver.admit()
    driver.step((request, 20))
    given = [torch.tensor(it, dtype=torch.int32, device="cuda") for it in ([request.row], [19], [0])]
    call = reading_calls(driver.manager.acquire(CSA_LAYER, *given), "cuda")[name]
    out, second = call()
    call(out, second)
    torch.cuda.synchronize()
    with captured():
        for missing in ((), (out,), (None, second)):
            with pytest.raises(CaptureError):
                call(*missing)
        call(out, second)


def test_positions_behind_the_longest_context_are_refused_where_the_host_sees_them() -> None:
    """They have no block; and outputs as long as such a request would be larger than any memory."""
    manager = manager_of("cpu", max_context_tokens=80)
    row = manager.admit_request()
    manager.acquire(SWA_LAYER, [row], [79], [0])
    for position in (80, 2**31 - 2, 2**31):
        with pytest.raises(OutOfRangeError, match="positions"):
            manager.acquire(SWA_LAYER, [row], [position], [0])


def test_a_bool_is_no_row() -> None:
    manager = manager_of("cpu")
    assert manager.admit_request() == 1
    with pytest.raises(ArgumentError, match="bool"):
        manager.release_request(True)
    manager.release_request(1)
