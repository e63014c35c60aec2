"""Pools take their sizes from layouts: what a group says a page or row weighs is what tensors weigh."""

import pytest
import torch

from pagoda.errors import ConfigError
from pagoda.layout import (
    FullAttention,
    GatedDelta,
    LatentAttention,
    Layout,
    PagedGroup,
    StateGroup,
    WindowAttention,
    from_hf,
    index_keys,
    latent,
    model_config,
)
from pagoda.pools import CheckpointPool, Pools, StatePool, TokenPool

# Every kind of paged layer that a TokenPool holds, with unequal sizes.
PAGED = [
    FullAttention(kv_heads=3, k_dim=24, v_dim=16),
    FullAttention(kv_heads=2, k_dim=8, v_dim=8, dtype="fp8"),
    WindowAttention(kv_heads=1, k_dim=32, v_dim=32, window=40, dtype="float32"),
    LatentAttention(entry=latent(48, 16, "bfloat16")),
    LatentAttention(entry=latent(48, 0, "float16")),
]


@pytest.mark.parametrize("kind", PAGED, ids=lambda kind: type(kind).__name__)
@pytest.mark.parametrize("page_tokens", [1, 16])
def test_a_page_of_a_pool_weighs_what_its_group_says(kind: FullAttention | LatentAttention, page_tokens: int):
    (group,) = Layout([kind, kind, kind], page_tokens).paged_groups
    pool = TokenPool.from_group(group, 5, "cpu")
    tensors = [*pool.k_buffer, *pool.v_buffer]
    assert sum(tensor.nbytes for tensor in tensors) == group.page_bytes * 6  # page 0 is padding
    assert len(pool.k_buffer) == 3
    assert (pool.num_pages, pool.page_tokens) == (5, page_tokens)
    pool.check()


def test_keys_and_values_have_the_shapes_of_the_layer():
    (group,) = Layout([FullAttention(kv_heads=3, k_dim=24, v_dim=16)] * 2, 4).paged_groups
    pool = TokenPool.from_group(group, 2, "cpu")
    assert pool.k_buffer[0].shape == (12, 3, 24)
    assert pool.v_buffer[1].shape == (12, 3, 16)
    assert pool.k_buffer[0].dtype == torch.bfloat16
    (group,) = Layout([LatentAttention(entry=latent(48, 16, "float32"))], 4).paged_groups
    pool = TokenPool.from_group(group, 2, "cpu")
    assert pool.k_buffer[0].shape == (12, 1, 64)
    assert pool.v_buffer == []


def test_a_row_of_a_pool_weighs_what_its_group_says():
    kind = GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=16, kernel=4)
    group = Layout([kind, [], kind]).state_group
    assert group is not None
    pool = StatePool.from_group(group, 3, "cpu")
    assert pool.memory_bytes() == group.state_bytes * 4  # row 0 is padding
    assert pool.tensors["recurrent"].shape == (2, 4, 4, 8, 16)
    assert pool.tensors["recurrent"].dtype == torch.float32
    assert pool.tensors["conv"].shape == (2, 4, 2 * 2 * 8 + 4 * 16, 3)
    assert pool.tensors["conv"].dtype == torch.bfloat16


def test_layers_that_keep_different_states_are_in_one_pool():
    """DeepSeek-V4: windows alone, and with compressors of two kinds, whose parts have the same names."""
    layout = from_hf(model_config("deepseek-v4-flash"))
    group = layout.state_group
    assert group is not None
    assert len(set(group.parts)) == 3
    pool = StatePool.from_group(group, 1, "cpu")
    assert pool.memory_bytes() == group.state_bytes * 2
    for number, parts in enumerate(group.parts):
        views = pool.layer(number)
        assert list(views) == [part.name for part in parts]
        for part in parts:
            view = views[part.name]
            assert tuple(view.shape) == (2, *part.shape)
            assert view.dtype == getattr(torch, part.dtype)
            assert view.flatten()[-1] == part.initial
            view[1] = number % 7
    for number in range(len(group.layers)):
        assert all(part[1].eq(number % 7).all() for part in pool.layer(number).values())
        pool.regions(number)
    kept = pool.snapshot(1)
    pool.reset(1)
    assert all(part[1].eq(spec.initial).all() for n in range(len(group.layers)) for part, spec in zip(
        pool.layer(n).values(), group.parts[n], strict=True))  # fmt: skip
    pool.restore(0, kept)
    for number in range(len(group.layers)):
        assert all(part[0].eq(number % 7).all() for part in pool.layer(number).values())
    checkpoints = CheckpointPool(pool, 3)
    assert checkpoints.tensor.shape == (4, -(-group.checkpoint_bytes // 16) * 16)


@pytest.mark.parametrize("name", ["gemma-3-27b", "deepseek-v3", "qwen3-next-80b-a3b", "kimi-linear-48b-a3b"])
def test_pools_of_a_known_model_hold_what_its_budget_says(name: str):
    layout = from_hf(model_config(name), page_tokens=4).shard(4)
    budget = layout.divide("128MiB", 20)
    num_bytes = 0
    for share in budget.shares:
        if share.name == "checkpoint":
            states = StatePool.from_group(share.group, 0, "cpu")
            num_bytes += CheckpointPool(states, share.num_units).memory_bytes()
        elif isinstance(share.group, StateGroup):
            num_bytes += StatePool.from_group(share.group, share.num_units, "cpu").memory_bytes()
        else:
            num_bytes += TokenPool.from_group(share.group, share.num_units, "cpu").memory_bytes()
    assert num_bytes == 2**27 - budget.spare_bytes
    assert budget.spare_bytes >= 0


def test_layers_of_a_known_model_with_shared_layers_are_found_by_number():
    layout = from_hf(model_config("gemma-3n-e4b"), page_tokens=4)
    capacity = {group.name: 1 for group in layout.paged_groups}
    pools = Pools(layout, capacity, num_rows=1, max_tokens=4, device="cpu")
    num_shared = 0
    for number in range(len(layout.layers)):
        layer = pools.layer(number)
        assert layer.group.layers[layer.index] == layer.source == layout.source(number)
        num_shared += layer.source != number
    assert num_shared == len(layout.layers) - sum(len(group.layers) for group in layout.paged_groups) > 0


def group_of(*kinds: object) -> PagedGroup | StateGroup:
    return Layout(list(kinds)).groups[0]  # type: ignore[arg-type]


def test_groups_that_a_pool_cannot_hold_are_refused():
    indexed = group_of(LatentAttention(entry=latent(48, 16, "bfloat16"), index=index_keys(32, "bf16")))
    scaled = group_of(LatentAttention(entry=latent(48, 16, "float8_e4m3fn"), index=index_keys(32, "fp8")))
    for group in (indexed, scaled):
        with pytest.raises(ConfigError, match="not latent, index"):
            TokenPool.from_group(group, 1, "cpu")  # type: ignore[arg-type]
    flash = from_hf(model_config("deepseek-v4-flash"))
    with pytest.raises(ConfigError, match="group csa"):
        TokenPool.from_group(flash.group("csa"), 1, "cpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give a PagedGroup"):
        TokenPool.from_group(flash.group("state"), 1, "cpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give a StateGroup"):
        StatePool.from_group(flash.group("csa"), 1, "cpu")  # type: ignore[arg-type]
