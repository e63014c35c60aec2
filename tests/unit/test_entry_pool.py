"""EntryPool: pages of entries as bytes."""

from typing import Any

import pytest
import torch

from pagoda import ConfigError, EntryPool, LatentAttention, Layout, from_hf, model_config
from pagoda.errors import ArgumentError, InvariantError
from pagoda.layout import Entry, TensorSpec, compressed_fp8, index_keys, latent_fp8, plain

# Parts of unequal widths, two scales, and pages that are padded to 32 bytes.
ODD = Entry(
    "odd",
    (
        TensorSpec("a", (3, 2), "bfloat16"),
        TensorSpec("b", (5,), "uint8"),
        TensorSpec("c", (3,), "float8_e5m2"),
    ),
    (TensorSpec("s", (2,), "float32"), TensorSpec("t", (4,), "uint8")),
    page_multiple=32,
)


def test_a_page_has_data_then_scales_then_padding(device: str):
    pool = EntryPool(2, 3, 1, [ODD], device)
    (pages,) = pool.pages["odd"]
    assert (pages.shape, pages.dtype) == ((3, 96), torch.uint8)  # 3 × (20 + 12), a multiple of 32
    assert EntryPool(2, 2, 1, [ODD], device).pages["odd"][0].shape == (3, 64)
    assert EntryPool(2, 3, 1, [compressed_fp8(16, 4)], device).pages["compressed"][0].shape == (3, 100)
    pages.copy_(torch.arange(96, device=device).expand(3, 96))
    for entry in range(3):
        data, scales = 20 * entry, 60 + 12 * entry
        for name, begin, width in (("a", data, 12), ("b", data + 12, 5), ("c", data + 17, 3)):
            wanted = torch.arange(begin, begin + width, dtype=torch.uint8)
            found = pool.view(0, "odd", name)[2, entry].contiguous().flatten().view(torch.uint8).cpu()
            assert torch.equal(found, wanted), name
        for name, begin, width in (("s", scales, 8), ("t", scales + 8, 4)):
            wanted = torch.arange(begin, begin + width, dtype=torch.uint8)
            found = pool.view(0, "odd", name)[2, entry].contiguous().flatten().view(torch.uint8).cpu()
            assert torch.equal(found, wanted), name
    assert pool.view(0, "odd", "a").shape == (3, 3, 3, 2)
    assert pool.view(0, "odd", "a").dtype == torch.bfloat16
    assert pool.view(0, "odd", "s").dtype == torch.float32
    assert pool.view(0, "odd", "c").dtype == torch.float8_e5m2


def test_views_write_into_pages_and_are_no_copies(device: str):
    pool = EntryPool(2, 3, 2, [ODD], device)
    pool.view(1, "odd", "s")[1, 2] = 1.0
    assert int(pool.pages["odd"][1].count_nonzero()) == 2 * 2  # 1.0 is two bytes of 0 and two that are not
    assert not bool(pool.pages["odd"][0].any())
    assert pool.pages["odd"][1][1, 60 + 24 : 60 + 32].cpu().view(torch.float32).tolist() == [1, 1]


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_a_page_of_a_pool_weighs_what_its_group_says(name: str):
    for group in from_hf(model_config(name), index_dtype="fp4").paged_groups:
        pool = EntryPool.from_group(group, 2, "cpu")
        assert pool.memory_bytes() == group.page_bytes * 3  # page 0 is null
        assert (pool.num_pages, pool.entries_per_page) == (2, group.entries_per_page)
        assert pool.num_layers == len(group.layers)
        assert set(pool.layer(0)) == {entry.name for entry in group.storage.entries}
        tensors = [tensor for layers in pool.pages.values() for tensor in layers]
        assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
        pool.check()


def test_entries_of_other_kinds_of_layers_have_pages_too(device: str):
    (group,) = Layout([LatentAttention(entry=latent_fp8(512, 64))], 4).paged_groups
    pool = EntryPool.from_group(group, 3, device)
    assert pool.view(0, "latent", "scale").shape == (4, 4, 4)
    assert pool.view(0, "latent", "rope").shape == (4, 4, 64)


def test_bytes_that_lie_between_the_places_of_numbers_have_no_view():
    crooked = Entry("crooked", (TensorSpec("mark", (1,), "uint8"), TensorSpec("number", (2,), "float32")))
    pool = EntryPool(2, 3, 1, [crooked], "cpu")
    assert pool.view(0, "crooked", "mark").shape == (3, 3, 1)
    with pytest.raises(ArgumentError, match="number of crooked is not aligned to float32"):
        pool.view(0, "crooked", "number")


def test_what_torch_does_not_know_is_bytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    monkeypatch.delattr(torch, "float4_e2m1fn_x2", raising=False)
    pool = EntryPool(2, 3, 1, [compressed_fp8(16, 4), index_keys(32, "fp4")], "cpu")
    assert pool.view(0, "compressed", "scale").dtype == torch.uint8
    assert pool.view(0, "index", "index").dtype == torch.uint8


@pytest.mark.parametrize(
    ("layer", "entry", "part"),
    [(2, "odd", "a"), (-1, "odd", "a"), ("0", "odd", "a"), (0, "even", "a"), (0, "odd", "z"), (0, None, "a")],
)
def test_a_view_of_what_is_not_there(layer: Any, entry: Any, part: Any):
    with pytest.raises(ArgumentError):
        EntryPool(2, 3, 2, [ODD], "cpu").view(layer, entry, part)


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        *[("num_pages", bad) for bad in (-1, 1.0, "2", None, 2**31, 2**62)],
        *[("entries_per_page", bad) for bad in (0, -1, 1.0, None)],
        *[("num_layers", bad) for bad in (0, -1, 1.0, None)],
        *[("entries", bad) for bad in ([], None, "odd", [3], [ODD, ODD], ODD)],
        ("device", "nowhere"),
    ],
)
def test_pools_that_cannot_be(argument: str, bad: Any):
    arguments: dict[str, Any] = {
        "num_pages": 2,
        "entries_per_page": 3,
        "num_layers": 1,
        "entries": [ODD],
        "device": "cpu",
    }
    with pytest.raises(ConfigError, match=argument):
        EntryPool(**(arguments | {argument: bad}))


def test_pools_larger_than_memory_can_be_addressed():
    with pytest.raises(ConfigError, match="exceeds the address space"):
        EntryPool(2**30, 2**30, 1, [plain("wide", 1, 2**10, "float32")], "cpu")


def test_only_a_paged_group_has_pages():
    with pytest.raises(ConfigError, match="give a PagedGroup"):
        EntryPool.from_group(from_hf(model_config("deepseek-v4-pro")).state_group, 1, "cpu")  # type: ignore[arg-type]


def test_pages_made_under_inference_mode_are_written_outside_of_it(device: str):
    with torch.inference_mode():
        pool = EntryPool(1, 1, 1, [ODD], device)
    pool.pages["odd"][0].fill_(1)


def test_check_finds_pages_that_moved(device: str):
    pool = EntryPool(2, 3, 2, [ODD], device)
    pool.check()
    pool.pages["odd"][1] = pool.pages["odd"][1].clone()
    with pytest.raises(InvariantError):
        pool.check()
