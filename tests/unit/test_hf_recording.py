"""The working copy of a call, against transformers' own cache and against a table of what should be where."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="needs transformers: its caches are what is compared with")

from transformers import DynamicCache, LlamaConfig, MistralConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from pagoda.hf import _recording as recording
from pagoda.hf._recording import RecordingCache, after_forward, before_forward

WINDOW = 6
HEADS, DIM = 2, 3
SIZES = {"hidden_size": 12, "num_attention_heads": 4, "num_key_value_heads": HEADS, "num_hidden_layers": 2}


def config_of(kind: str) -> Any:
    if kind == "full":
        return LlamaConfig(**SIZES)
    config = MistralConfig(**SIZES, sliding_window=WINDOW)
    if kind == "both":
        config.layer_types = ["sliding_attention", "full_attention"]
    return config


def contents(ids: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of columns, [rows, heads, columns, dim], that tell which column they are of."""
    places = torch.arange(HEADS * DIM).view(HEADS, 1, DIM)
    keys = (ids[:, None, :, None] * 100 + places * 10 + layer).float()
    return keys, -keys


class Compared:
    """A RecordingCache, transformers' cache, and what the columns are of."""

    def __init__(self, kind: str, rows: int, cached: int = 0) -> None:
        self.next = 1
        self.ids = self._fresh(rows, cached)  # [rows, columns]: each column of each row has its own number
        prompt = torch.cat([self.ids, self._fresh(rows, 4)], dim=1)
        self.prompt = prompt
        self.ours = RecordingCache(config_of(kind), prompt, cached)
        self.theirs = DynamicCache(config=config_of(kind))
        assert self.ours.is_known
        for each in (self.ours, self.theirs):
            each.activate_past_recording()  # or windows could not be cropped
        if cached:
            for layer in range(2):
                keys, values = contents(self.ids, layer)
                self.theirs.update(keys, values, layer)
                if isinstance(self.ours.layers[layer], DynamicSlidingWindowLayer):
                    keys, values = (side[..., -(WINDOW - 1) :, :] for side in (keys, values))
                self.ours.fill(layer, keys, values)
            self.theirs.crop(0)

    def _fresh(self, rows: int, columns: int) -> torch.Tensor:
        made = torch.arange(self.next, self.next + rows * columns).view(rows, columns)
        self.next += rows * columns
        return made

    def run(self, columns: int) -> None:
        """A pass through all layers."""
        ids = self._fresh(self.ids.shape[0], columns)
        self.ours.enter(ids)
        for layer in range(2):
            keys, values = contents(ids, layer)
            mine = self.ours.update(keys.clone(), values.clone(), layer)
            theirs = self.theirs.update(keys, values, layer)
            for a, b in zip(mine, theirs, strict=True):
                assert torch.equal(a, b)
        self.ours.arrive()
        self.ids = torch.cat([self.ids, ids], dim=1)

    def crop(self, columns: int) -> None:
        for each in (self.ours, self.theirs):
            each.crop(-columns)
        self.ids = self.ids[:, : self.ids.shape[1] - columns]

    def reorder(self, order: list[int]) -> None:
        for each in (self.ours, self.theirs):
            each.reorder_cache(torch.tensor(order))
        self.ids = self.ids[order]

    def repeat(self, times: int) -> None:
        for each in (self.ours, self.theirs):
            each.batch_repeat_interleave(times)
        self.ids = self.ids.repeat_interleave(times, dim=0)

    def select(self, rows: list[int]) -> None:
        for each in (self.ours, self.theirs):
            each.batch_select_indices(torch.tensor(rows))
        self.ids = self.ids[rows]

    def check(self) -> None:
        assert not self.ours.is_lost
        assert self.ours.num_columns == self.ids.shape[1] == self.ours.get_seq_length()
        assert torch.equal(self.ours.tokens(), self.ids)
        for layer, (mine, theirs) in enumerate(zip(self.ours.layers, self.theirs.layers, strict=True)):
            if not theirs.is_initialized:
                continue
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.values, theirs.values)
            assert mine.get_mask_sizes(3) == theirs.get_mask_sizes(3)
            first = self.first(layer)
            for begin, end in ((first, self.ids.shape[1]), (first, first + 1), (self.ids.shape[1] - 1,) * 2):
                if not first <= begin < end <= self.ids.shape[1]:
                    continue
                found = self.ours.columns(layer, begin, end)
                assert found is not None
                for a, b in zip(found, contents(self.ids[:, begin:end], layer), strict=True):
                    assert torch.equal(a, b)
            assert self.ours.columns(layer, 0, self.ids.shape[1] + 1) is None

    def first(self, layer: int) -> int:
        """The first column that can be copied out."""
        mine: Any = self.ours.layers[layer]
        return mine.begin if hasattr(mine, "begin") else 0


KINDS = ["full", "window", "both"]


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_it_follows_all_that_happens_to_rows_and_columns(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    both = Compared(kind, data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0, 1, 4, 7, 16])))
    both.check()
    for _ in range(data.draw(st.integers(1, 8))):
        rows = both.ids.shape[0]
        what = data.draw(st.sampled_from(["run", "run", "crop", "reorder", "repeat", "select", "forget"]))
        if what == "run":
            both.run(data.draw(st.integers(1, 9)))
            both.crop(0)  # transformers does so after each pass
        elif what == "crop":
            # As far back as the last pass, and one column stays.
            both.run(many := data.draw(st.integers(1, 9)))
            both.crop(data.draw(st.integers(0, many - 1)))
        elif what == "reorder" and both.ids.shape[1]:
            both.reorder(data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows)))
        elif what == "repeat" and rows < 8:
            both.repeat(2)
        elif what == "select":
            both.select(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows)))
        elif what == "forget":
            both.ours.forget(data.draw(st.integers(0, both.ids.shape[1])))
        both.check()


@pytest.mark.parametrize("kind", KINDS)
def test_room_is_made_when_there_is_none(kind: str) -> None:
    both = Compared(kind, 2, cached=16)
    for columns in (recording.MORE - 1, 1, 1, 1, 2 * recording.MORE, 1):
        both.run(columns)
        both.crop(0)
        both.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_cache_is_a_plain_one(kind: str) -> None:
    both = Compared(kind, 2, cached=7)
    both.run(3)
    both.crop(0)
    both.ours.close()
    assert type(both.ours) is DynamicCache
    assert [type(layer) for layer in both.ours.layers] == [type(layer) for layer in both.theirs.layers]
    for mine, theirs in zip(both.ours.layers, both.theirs.layers, strict=True):
        assert type(mine) in (DynamicLayer, DynamicSlidingWindowLayer)
        assert vars(mine).keys() == vars(theirs).keys()
    assert vars(both.ours).keys() == vars(both.theirs).keys()
    # It goes on as any other does.
    for each in (both.ours, both.theirs):
        each.update(*contents(torch.full((2, 2), 99), 0), 0)
    assert torch.equal(both.ours.layers[0].keys, both.theirs.layers[0].keys)


def test_what_is_returned_does_not_change_later() -> None:
    """Two go on from one closed cache: a new column is not written behind the other's back."""
    both = Compared("full", 1, cached=4)
    both.run(2)
    both.ours.close()
    keys = both.ours.layers[0].keys
    for number in (50, 60):
        twin = DynamicCache(config=config_of("full"))
        for layer in range(2):
            twin.update(both.ours.layers[layer].keys, both.ours.layers[layer].values, layer)
        twin.update(*contents(torch.full((1, 1), number), 0), 0)
        assert torch.equal(both.ours.layers[0].keys, keys)
        assert keys.shape[-2] == 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers_done", [0, 1])
def test_a_pass_that_is_broken_off(kind: str, layers_done: int) -> None:
    both = Compared(kind, 2)
    both.run(9)
    both.crop(0)
    ids = both._fresh(2, 3)
    both.ours.enter(ids)
    for layer in range(layers_done):
        both.ours.update(*contents(ids, layer), layer)
    assert both.ours.num_columns == 9
    assert torch.equal(both.ours.tokens(), both.ids)
    for layer in range(2):
        found = both.ours.columns(layer, 0, 9)
        assert found is not None
        assert torch.equal(found[0], contents(both.ids, layer)[0])
    assert not both.ours.is_lost
    both.ours.enter(ids)  # tried again: some layers have the columns twice now
    assert both.ours.is_lost


def test_the_end_of_the_prefill_is_told_once() -> None:
    both, told = Compared("both", 1, cached=7), []
    both.ours.on_prefill = lambda: told.append(both.ours.num_columns)
    both.run(4)
    both.run(1)
    assert told == [11]


def test_a_window_that_has_lost_columns_says_so() -> None:
    both = Compared("window", 1)
    both.run(20)
    both.ours.forget(16)
    assert both.ours.columns(0, 15, 20) is None
    assert both.ours.columns(0, 16, 20) is not None
    both.ours.forget(8)  # it has forgotten that already
    assert both.ours.columns(0, 15, 20) is None
    both.run(1)
    found = both.ours.columns(0, 16, 21)
    assert found is not None
    assert torch.equal(found[0], contents(both.ids[:, 16:], 0)[0])


def test_nothing_is_kept_of_a_reset_cache() -> None:
    both = Compared("both", 1)
    both.run(4)
    both.ours.reset()
    assert both.ours.is_lost


def test_layers_of_other_kinds_are_not_known() -> None:
    cache = RecordingCache(config_of("full"), torch.zeros(1, 3, dtype=torch.long), 0)

    class Odd(DynamicLayer):
        pass

    cache.layers[0] = Odd()
    assert not cache.is_known


# ── the hooks ───────────────────────────────────────────────────────────────────────────────────────


def test_other_caches_are_not_touched() -> None:
    for cache in (None, DynamicCache(), 3):
        assert before_forward(None, (), {"past_key_values": cache}) is None
        after_forward(None, (), {"past_key_values": cache}, None)
    assert before_forward(None, (), {}) is None


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.ones(1, 2, dtype=torch.long),), {}),
        ((), {"inputs_embeds": torch.zeros(1, 2, 12)}),
        ((), {}),
        ((), {"input_ids": torch.ones(2, dtype=torch.long)}),
        ((), {"input_ids": [[1, 2]]}),
    ],
)
def test_tokens_that_it_cannot_see_are_not_kept(args: Any, kwargs: dict[str, Any]) -> None:
    both = Compared("full", 1)
    kwargs = {**kwargs, "past_key_values": both.ours}
    before_forward(None, args, kwargs)
    assert both.ours.is_lost
    after_forward(None, args, kwargs, None)
    assert both.ours.is_lost


def test_a_prompt_that_is_passed_whole_is_cut() -> None:
    """As assisted decoding does, with some candidates behind it."""
    both = Compared("full", 1, cached=7)
    candidates = torch.cat([both.prompt, torch.tensor([[77, 78]])], dim=1)
    given = {
        "input_ids": candidates,
        "position_ids": torch.arange(13)[None],
        "attention_mask": torch.ones(1, 13),
        "past_key_values": both.ours,
    }
    _, kwargs = before_forward(None, (), given)
    assert torch.equal(kwargs["input_ids"], candidates[:, 7:])
    assert kwargs["position_ids"].tolist() == [list(range(7, 13))]
    assert kwargs["attention_mask"].shape == (1, 13)
    assert given["input_ids"].shape == (1, 13)  # what the caller has stays
    after_forward(None, (), kwargs, None)
    assert torch.equal(both.ours.tokens(), candidates)
    # Only the first pass is.
    _, kwargs = before_forward(None, (), {"input_ids": candidates, "past_key_values": both.ours})
    assert kwargs["input_ids"].shape == (1, 13)


def test_a_prompt_that_is_passed_in_part_is_not_cut() -> None:
    both = Compared("full", 1, cached=7)
    _, kwargs = before_forward(
        None, (), {"input_ids": both.prompt[:, 7:], "position_ids": None, "past_key_values": both.ours}
    )
    assert torch.equal(kwargs["input_ids"], both.prompt[:, 7:])
    assert not both.ours.is_lost
