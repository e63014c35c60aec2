"""Dividing memory: examples by hand, bad arguments, huge budgets. All small budgets are in
tests/property/test_layout_sizing.py."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch

from pagoda.errors import ConfigError
from pagoda.layout import (
    FullAttention,
    Layout,
    RingWindow,
    ShortConv,
    WindowAttention,
    from_hf,
    model_config,
    model_names,
    plain,
)

FULL = FullAttention(kv_heads=1, k_dim=2, v_dim=2)  # 8 B a token
WINDOW = WindowAttention(kv_heads=1, k_dim=1, v_dim=1, dtype="fp8", window=5)  # 2 B a token
STATE = ShortConv(channels=10, kernel=2, dtype="fp8")  # 10 B a state
# 3 entries of 4 B with a position of 4 B each; 1 entry in a checkpoint.
RING = RingWindow(entry=plain("e", 1, 4, "fp8"), window=2, unaccepted=2)


class TestByHand:
    def test_full_attention(self):
        layout = Layout([FULL], 4)  # pages of 32 B
        budget = layout.divide(11 * 32 + 31, 8)
        assert budget.capacity() == {"full": 10}  # one page is padding
        assert budget.requests == budget.num_requests == 5
        assert budget.num_tokens == 40
        assert budget.spare_bytes == 31
        assert budget.shares[0].num_bytes == 11 * 32
        assert layout.max_requests(11 * 32, 8) == 5
        assert layout.max_requests(11 * 32 - 1, 8) == 4
        assert layout.memory_for(5, 8) == 11 * 32
        assert layout.memory_for(0, 8) == 32  # padding

    def test_a_fraction_of_a_request(self):
        budget = Layout([FULL], 4).divide(12 * 32, [8])
        assert budget.requests == Fraction(11, 2)
        assert budget.num_requests == 5

    def test_a_mix_counts_with_its_weights(self):
        # 3 of 4 requests need 1 page and 1 of 4 needs 5: 2 on average.
        for mix in (
            {4: 3, 20: 1},
            {4: 0.75, 20: 0.25},
            [4, 4, 4, 20],
            {4: Fraction(3, 7), 20: Fraction(1, 7)},
        ):
            budget = Layout([FULL], 4).divide(13 * 32, mix)
            assert budget.requests == 6
            assert budget.capacity() == {"full": 12}

    @pytest.mark.parametrize(
        "make",
        [
            np.array,
            lambda mix: np.array(mix, dtype=np.int16),
            torch.tensor,
            tuple,
            iter,
            lambda mix: (each for each in mix),
            Counter,
        ],
    )
    def test_lengths_may_be_any_iterable(self, make):
        assert Layout([FULL], 4).divide(13 * 32, make([4, 4, 4, 20])).requests == 6

    def test_one_length_may_be_any_integer(self):
        for length in (8, np.int64(8), np.array(8), torch.tensor(8)):
            assert Layout([FULL], 4).divide(11 * 32, length).requests == 5

    def test_one_of_the_longest_fits_though_the_mix_hardly_has_any(self):
        mix = {4: 10**6, 80: 1}
        layout = Layout([FULL], 4)
        assert layout.divide(21 * 32, mix).capacity() == {"full": 20}
        with pytest.raises(
            ConfigError, match=r"a request of 80 tokens needs 672 B of cache.* but only 671 B are available"
        ):
            layout.divide(21 * 32 - 1, mix)

    def test_three_groups(self):
        layout = Layout([FULL, WINDOW, STATE], {"full": 4, "window": 2})
        # A request of 9: 3 pages of 32 B; 4 pages of 4 B, because the window of 5 in pages of 2 is given up
        # where pages of both end, every 4 tokens; a state of 10 B and a checkpoint of 10 B.
        padding, each = 32 + 4 + 10 + 10, 3 * 32 + 4 * 4 + 10 + 10
        assert layout.max_requests(padding + 7 * each, 9, checkpoints=1) == 7
        assert layout.max_requests(padding + 7 * each - 1, 9, checkpoints=1) == 6
        budget = layout.divide(padding + 7 * each, 9, checkpoints=1)
        assert budget.capacity() == {"full": 21, "window": 28, "state": 7, "checkpoint": 7}
        assert [(share.name, share.group) for share in budget.shares] == [
            *((group.name, group) for group in layout.groups), ("checkpoint", layout.state_group),
        ]  # fmt: skip
        assert budget.spare_bytes == 0

    def test_checkpoints_have_a_pool_of_their_own(self):
        layout = Layout([RING])
        # 4 states and 8 checkpoints, and one of each for padding.
        memory = 24 * (4 + 1) + 4 * (8 + 1)
        budget = layout.divide(memory, 100, checkpoints=2)
        assert budget.capacity() == {"state": 4, "checkpoint": 8}
        assert [share.num_bytes for share in budget.shares] == [24 * 5, 4 * 9]
        assert budget.num_tokens is None
        assert layout.max_requests(memory, 100, checkpoints=2) == 4
        assert layout.max_requests(memory - 1, 100, checkpoints=2) == 3
        assert layout.memory_for(4, 100, checkpoints=2) == memory
        assert layout.memory_for(0, 100, checkpoints=2) == 24 + 4
        # Without checkpoints, the pool is one of padding.
        assert layout.divide(24 * 5 + 4, 100, checkpoints=0).capacity() == {"state": 4, "checkpoint": 0}
        assert layout.max_requests(24 * 5 + 3, 100, checkpoints=0) == 3
        # One request of any length, with its checkpoints.
        assert layout.longest_request(24 * 2 + 4 * 3, checkpoints=2) is None
        assert layout.longest_request(24 * 2 + 4 * 3 - 1, checkpoints=2) == 0

    def test_two_checkpoints_per_request_by_default(self):
        layout = Layout([FULL, RING], 1)
        memory = (8 + 24 + 4) + 4 * (8 + 24 + 2 * 4)
        assert layout.memory_for(4, 1) == memory
        assert layout.divide(memory, 1).capacity() == {"full": 4, "state": 4, "checkpoint": 8}
        assert layout.max_requests(memory, 1) == 4
        # The same memory has room for a fifth without them: 5 × (8 + 24) B. Or for a token more of one.
        assert layout.max_requests(memory, 1, checkpoints=0) == 5
        assert layout.longest_request(memory) == 16
        assert layout.longest_request(memory, checkpoints=0) == 17

    def test_checkpoints_do_nothing_without_states(self):
        layout = Layout([FULL, WINDOW])
        assert {layout.divide(1000, 20, checkpoints=n) for n in (0, 2, 50)} == {layout.divide(1000, 20)}
        assert "checkpoint" not in layout.divide(1000, 20).capacity()

    def test_checkpoints_of_no_bytes(self):
        """A window of one token reads nothing of the past, so there is nothing to keep."""
        layout = Layout([RingWindow(entry=plain("e", 1, 4, "fp8"), window=1)])
        assert (layout.state_group.state_bytes, layout.state_group.checkpoint_bytes) == (8, 0)
        budget = layout.divide(8 * 5, 100, checkpoints=3)
        assert budget.capacity() == {"state": 4, "checkpoint": 12}
        assert layout.max_requests(8 * 5, 100, checkpoints=3) == 4
        assert layout.longest_request(8 * 2, checkpoints=3) is None

    def test_a_chunk_is_held_by_windows_and_by_nothing_else(self):
        layout = Layout([WINDOW], 2)
        assert layout.max_requests(4 * (1 + 3), 100) == 1
        # 9 tokens at once are 8 more than one: 4 pages of 2.
        assert layout.max_requests(4 * (1 + 3 + 4) - 1, 100, chunk=9) == 0
        assert layout.max_requests(4 * (1 + 3 + 4), 100, chunk=9) == 1
        # A second one takes its 3 pages: what it gets of the chunk the first does not.
        assert layout.max_requests(4 * (1 + 3 + 4 + 3) - 1, 100, chunk=9) == 1
        assert layout.max_requests(4 * (1 + 3 + 4 + 3), 100, chunk=9) == 2
        # In pages of 4 the first takes 2 and 2 more. A second one takes 3 if it gets 2 tokens of the chunk,
        # and the 7 that are left still fill the other's.
        layout = Layout([WINDOW], 4)
        assert [layout.memory_for(n, 100, chunk=9) // 8 - 1 for n in (0, 1, 2)] == [0, 4, 7]
        # However many there are, 4 get 2 tokens each at most.
        assert layout.memory_for(100, 100, chunk=9) // 8 - 1 == 2 * 100 + 4
        # Short ones never hold more than all their tokens.
        assert layout.memory_for(2, 5, chunk=9) // 8 - 1 == 4
        assert Layout([FULL], 4).max_requests(352, 8, chunk=10**6) == 5

    def test_steps_in_flight_are_held_by_windows(self):
        layout = Layout([FULL, WINDOW], {"full": 4, "window": 2})
        # Tokens 0 to 7, and with d steps in flight the 2 d that follow.
        assert [
            layout.memory_for(2, 9, in_flight=d) - layout.memory_for(1, 9, in_flight=d) for d in range(3)
        ] == [3 * 32 + held * 4 for held in (4, 5, 5)]
        assert layout.longest_request(4 * 32 + 5 * 4) == 12
        assert layout.longest_request(4 * 32 + 5 * 4, in_flight=1) == 8
        assert layout.max_requests(4 * 32 + 5 * 4, 12, in_flight=1) == 0

    def test_the_longest_request(self):
        layout = Layout([FULL], 4)
        assert layout.longest_request(11 * 32) == 40
        assert layout.longest_request(11 * 32 - 1) == 36
        assert layout.longest_request(2 * 32) == 4
        assert layout.longest_request(2 * 32 - 1) == layout.longest_request(0) == 0

    def test_any_length_fits_where_nothing_grows(self):
        # A state, two checkpoints, and one of each for padding.
        layout = Layout([STATE])
        assert layout.longest_request(50) is None
        assert layout.longest_request(49) == 0
        assert Layout([WINDOW, STATE], 2).longest_request(4 * 4 + 50) is None
        # Two pages are less than a full window takes: 3 tokens may lie in 2 pages, 4 in 3 with the next.
        assert Layout([WINDOW, STATE], 2).longest_request(3 * 4 + 50) == 4


class TestModels:
    def test_llama_8b_on_one_device(self):
        layout = from_hf(model_config("llama-3.1-8b"))
        # 60 GiB are 30,720 pages of 2 MiB, one of them padding; 8,192 tokens are 512 pages.
        assert layout.max_requests("60GiB", 8192) == 30_719 // 512 == 59
        assert layout.longest_request("60GiB") == 30_719 * 16

    def test_flash_at_a_million_tokens(self):
        layout = from_hf(model_config("deepseek-v4-flash"))
        # 2^20 tokens are 8,192 blocks of 21 × (19,008 + 4,224) + 20 × 1,152 B, and a row of 15,420,416 B with
        # 43 × 128 positions. A checkpoint has 43 windows of 127 entries, and 4 tokens of 21 compressors.
        block, row = 21 * (19_008 + 32 * 132) + 20 * 1_152, 15_420_416 + 43 * 128 * 4
        checkpoint = 43 * 127 * 584 + 21 * 4 * (2_048 + 512) * 4
        each, padding = 8_192 * block + row + 2 * checkpoint, block + row + checkpoint
        assert layout.max_requests("80GiB", 2**20) == (80 * 2**30 - padding) // each == 20

    @pytest.mark.parametrize("model", model_names())
    def test_every_model_divides_a_device(self, model):
        layout = from_hf(model_config(model))
        budget = layout.divide("64GiB", {1024: 8, 8192: 1}, chunk=2048, checkpoints=1)
        names = {group.name for group in layout.groups}
        assert budget.capacity().keys() == (names | {"checkpoint"} if layout.state_group else names)
        assert budget.num_requests >= 1
        assert 0 <= budget.spare_bytes < 2**30

    def test_a_rank_holds_more_requests_than_the_whole_model_would(self):
        layout = from_hf(model_config("llama-3.1-70b"))
        assert layout.shard(8).max_requests("40GiB", 4096) >= 8 * layout.max_requests("40GiB", 4096)


class TestRefused:
    LAYOUT = Layout([FULL, WINDOW, STATE])

    @pytest.mark.parametrize(
        "memory", [-1, 1.5, None, "", "80Gi", "many", [1], 2**63, pytest.param(10**5_000, id="huge")]
    )
    def test_memory(self, memory):
        for ask in (
            lambda: self.LAYOUT.divide(memory, 8),
            lambda: self.LAYOUT.max_requests(memory, 8),
            lambda: self.LAYOUT.longest_request(memory),
        ):
            with pytest.raises(ConfigError, match=r"^memory: "):
                ask()

    @pytest.mark.parametrize(
        "mix",
        [
            {},
            [],
            (),
            None,
            "8192",
            b"8",
            0,
            -1,
            1.5,
            [0],
            [8, -8],
            [8, "8"],
            [None],
            {0: 1},
            {"8": 1},
            {8: 0},
            {8: -1},
            {8: None},
            {8: "half"},
            {8: "1/0"},
            {8: [1]},
            {8: float("nan")},
            {8: float("inf")},
            {8: 1j},
            2**63,
            {8: 1, 2**63: 1},
            {8, 16},
            np.array([8, 0]),
            np.array([8.0]),
            np.array([[8]]),
            np.array([], dtype=int),
            iter([]),
            (each for each in ["8"]),
            pytest.param({8: -(10**5_000)}, id="hugely negative weight"),
            pytest.param({10**5_000: 1}, id="huge length"),
            pytest.param({10**5_000: 0}, id="huge length, no weight"),
        ],
    )
    def test_mixes(self, mix):
        with pytest.raises(ConfigError, match="mix"):
            self.LAYOUT.divide("1GiB", mix)

    @pytest.mark.parametrize("bad", [0, -1, 1.5, "512", None])
    def test_chunks(self, bad):
        for ask in (
            lambda: self.LAYOUT.divide("1GiB", 8, chunk=bad),
            lambda: self.LAYOUT.max_requests("1GiB", 8, chunk=bad),
            lambda: self.LAYOUT.longest_request("1GiB", chunk=bad),
        ):
            with pytest.raises(ConfigError, match="chunk"):
                ask()

    @pytest.mark.parametrize("bad", [-1, 1.5, "1", None])
    def test_checkpoints(self, bad):
        with pytest.raises(ConfigError, match="checkpoints"):
            self.LAYOUT.divide("1GiB", 8, checkpoints=bad)
        with pytest.raises(ConfigError, match="checkpoints"):
            self.LAYOUT.max_requests("1GiB", 8, checkpoints=bad)

    @pytest.mark.parametrize("bad", [0, -1, 1.5, "8", None, 2**63])
    def test_lengths(self, bad):
        with pytest.raises(ConfigError, match="length"):
            self.LAYOUT.max_requests("1GiB", bad)
        with pytest.raises(ConfigError, match="length"):
            self.LAYOUT.memory_for(1, bad)

    @pytest.mark.parametrize("bad", [-1, 1.5, "1", None, 2**63])
    def test_steps_in_flight(self, bad):
        for ask in (
            lambda: self.LAYOUT.divide("1GiB", 8, in_flight=bad),
            lambda: self.LAYOUT.max_requests("1GiB", 8, in_flight=bad),
            lambda: self.LAYOUT.memory_for(1, 8, in_flight=bad),
            lambda: self.LAYOUT.longest_request("1GiB", in_flight=bad),
        ):
            with pytest.raises(ConfigError, match="in_flight"):
                ask()

    @pytest.mark.parametrize("bad", [-1, 1.5, "8", None, 2**63])
    def test_numbers_of_requests(self, bad):
        with pytest.raises(ConfigError, match="requests"):
            self.LAYOUT.memory_for(bad, 8)

    def test_nothing_fits(self):
        with pytest.raises(ConfigError, match=r"or shorter requests, or fewer checkpoints$"):
            self.LAYOUT.divide(0, 8)
        with pytest.raises(ConfigError, match=r"give more memory or shorter requests$"):
            self.LAYOUT.divide(0, 8, checkpoints=0)
        with pytest.raises(ConfigError, match=r"give more memory or shorter requests$"):
            Layout([FULL]).divide(0, 8)
        assert self.LAYOUT.max_requests(0, 8) == 0
        assert self.LAYOUT.longest_request(0) == 0


class TestHuge:
    """Nothing here counts up to 2^60: it would never end."""

    @pytest.mark.parametrize(
        "model", ["llama-3.1-8b", "gemma-3-27b", "qwen3-next-80b-a3b", "deepseek-v4-pro"]
    )
    def test_budgets(self, model):
        layout = from_hf(model_config(model))
        budget = layout.divide(2**60, {1000: 0.9, 10**6: 0.1}, chunk=8192, checkpoints=3)
        assert sum(share.num_bytes for share in budget.shares) + budget.spare_bytes == 2**60
        assert budget.spare_bytes < 2**40
        assert layout.max_requests(2**60, 1000) > 10**6
        assert layout.longest_request(2**60) > 10**9

    def test_tiny_pages(self):
        layout = Layout([FullAttention(kv_heads=1, k_dim=1, v_dim=1, dtype="fp8"), STATE], 1)
        assert layout.divide(2**62, [1, 3, 7]).num_requests > 10**15

    def test_lengths(self):
        layout = Layout([FULL, WINDOW, STATE])
        assert layout.max_requests(2**62, 2**62) == 0
        assert layout.max_requests(2**62, 2**50) > 0

    def test_long_mixes(self):
        layout = from_hf(model_config("deepseek-v4-pro"))
        assert layout.divide(2**60, list(range(1, 1_000))).num_requests > 10**6

    def test_odd_weights(self):
        mix = {length: 1 / length for length in range(1, 300)} | {1000: 1e-300}
        assert Layout([FULL, WINDOW, STATE]).divide(2**60, mix).num_requests > 10**6
