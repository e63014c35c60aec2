"""Layouts: which layers share ids, page sizes, what is kept of a request, resuming, ranks, and that nothing
can be changed."""

import copy
import functools
import pickle
from dataclasses import replace
from fractions import Fraction

import pytest

from pagoda._native import first_live_token
from pagoda.errors import ArgumentError, ConfigError, PagodaError
from pagoda.layout import (
    CompressedAttention,
    Entry,
    FullAttention,
    GatedDelta,
    LatentAttention,
    Layout,
    Mamba1,
    Mamba2,
    Need,
    PagedGroup,
    RingWindow,
    SharedAttention,
    ShortConv,
    StateGroup,
    TensorSpec,
    WindowAttention,
    from_hf,
    index_keys,
    latent,
    model_config,
    model_names,
    plain,
)


def full(heads=1, dim=1, dtype="fp8"):
    return FullAttention(kv_heads=heads, k_dim=dim, v_dim=dim, dtype=dtype)


def window(size, sinks=0, heads=1):
    return WindowAttention(kv_heads=heads, k_dim=1, v_dim=1, dtype="fp8", window=size, sink_tokens=sinks)


def compressed(ratio, overlap=False):
    entry = plain("compressed", 1, 4, "fp8")
    return CompressedAttention(entry=entry, window=4, head_dim=4, ratio=ratio, overlap=overlap)


STATE = Mamba1(channels=4, state_dim=2, kernel=3, dtype="fp8", state_dtype="fp8")  # 8 + 8 B


def layers_of(layout):
    return {group.name: group.layers for group in layout.groups}


class TestGroups:
    def test_one_kind_is_one_group(self):
        assert layers_of(Layout([full()] * 3)) == {"full": (0, 1, 2)}

    def test_equal_layers_share_a_group_wherever_they_stand(self):
        layout = Layout([window(4), full(), window(4), STATE, full(), STATE])
        assert layers_of(layout) == {"window": (0, 2), "full": (1, 4), "state": (3, 5)}
        assert [group.name for group in layout.paged_groups] == ["window", "full"]

    def test_states_come_last_though_they_stand_first(self):
        layout = Layout([STATE, full(), window(4)])
        assert list(layers_of(layout)) == ["full", "window", "state"]
        assert layout.state_group is layout.groups[-1]

    def test_groups_of_one_kind_are_numbered_in_the_order_of_their_first_layer(self):
        layout = Layout([window(8), full(2), window(4), full(3), window(8), window(4, sinks=1), full(3)])
        assert layers_of(layout) == {
            "window": (0, 4),
            "full": (1,),
            "window-2": (2,),
            "full-2": (3, 6),
            "window-3": (5,),
        }
        assert [layout.group(name).window for name in ("window", "window-2", "window-3")] == [8, 4, 4]

    def test_geometry_and_dtype_make_groups(self):
        layout = Layout([full(2, 4), full(4, 2), full(2, 4, "bf16"), full(2, 4)])
        assert layers_of(layout) == {"full": (0, 3), "full-2": (1,), "full-3": (2,)}

    def test_all_states_are_one_group_however_they_differ(self):
        layout = Layout([STATE, ShortConv(channels=5, kernel=2, dtype="fp8"), STATE])
        assert layers_of(layout) == {"state": (0, 1, 2)}
        assert layout.state_group.state_bytes == 16 + 5 + 16
        assert [[part.name for part in parts] for parts in layout.state_group.parts] == [
            ["conv", "recurrent"],
            ["conv"],
            ["conv", "recurrent"],
        ]

    def test_attention_beside_a_state_in_one_layer(self):
        layout = Layout([[full(), STATE], STATE, [full(), STATE], []])
        assert layers_of(layout) == {"full": (0, 2), "state": (0, 1, 2)}
        assert layout.layer_bytes(0, 3) == {"keys": 3, "values": 3, "conv": 8, "recurrent": 8}
        assert layout.layer_bytes(1, 3) == {"conv": 8, "recurrent": 8}
        assert layout.layer_bytes(3, 3) == {}

    def test_two_states_in_one_layer_are_one_row(self):
        ring = RingWindow(entry=plain("e", 1, 3, "fp8"), window=2)
        layout = Layout([[ring, STATE]])
        assert layout.state_group.layers == (0,)
        assert (
            layout.state_group.state_bytes == 2 * (3 + 4) + 16
        )  # two rows of the ring, each with its position
        assert layout.state_group.checkpoint_bytes == 3 + 16

    def test_shared_layers_keep_nothing_and_name_their_source(self):
        layout = Layout([full(), window(4), SharedAttention(layer=0), SharedAttention(layer=1)])
        assert layers_of(layout) == {"full": (0,), "window": (1,)}
        assert [layout.source(layer) for layer in range(4)] == [0, 1, 0, 1]
        assert layout.layer_bytes(2, 100) == {}
        assert layout.token_bytes == 2

    def test_a_layout_that_stores_nothing(self):
        layout = Layout([[], []])
        assert (layout.groups, layout.token_bytes, layout.request_bytes(100)) == ((), 0, 0)
        assert "nothing stored" in repr(layout)
        with pytest.raises(ConfigError, match="stores nothing"):
            layout.divide("1GiB", 8)

    def test_a_short_convolution_of_kernel_1_makes_no_group(self):
        assert Layout([ShortConv(channels=4, kernel=1)]).groups == ()

    @pytest.mark.parametrize("model", ["deepseek-v4-flash", "deepseek-v4-pro"])
    def test_compressed_models_have_three_groups(self, model):
        layout = from_hf(model_config(model))
        ratios = model_config(model)["compress_ratios"][: len(layout.layers)]
        by_ratio = {r: tuple(n for n, ratio in enumerate(ratios) if ratio == r) for r in (4, 128)}
        found = layers_of(layout)
        assert found == {"csa": by_ratio[4], "hca": by_ratio[128], "state": tuple(range(len(ratios)))}

    def test_shared_layers_of_gemma_3n(self):
        layout = from_hf(model_config("gemma-3n-e4b"))
        # 35 layers, each fifth full; the last 15 read layer 18 or 19, the last of their kind before.
        assert layout.group("full").layers == (4, 9, 14, 19)
        assert layout.group("window").layers == tuple(n for n in range(20) if n % 5 != 4)
        assert [layout.source(n) for n in (20, 23, 24, 28, 29, 33, 34)] == [18, 18, 19, 18, 19, 18, 19]

    def test_groups_are_found_by_name(self):
        layout = Layout([full(), STATE])
        assert isinstance(layout.group("full"), PagedGroup)
        assert isinstance(layout.group("state"), StateGroup)
        for unknown in ("window", "", None, 3, ["full"]):
            with pytest.raises(ArgumentError, match="only full, state"):
                layout.group(unknown)

    def test_repr_is_for_people(self):
        layout = Layout([full(), full(), STATE], name="tiny")
        assert repr(layout) == "Layout(tiny: 3 layers; full × 2, state × 1)"


class TestPageSizes:
    def test_where_nobody_says(self):
        layout = Layout(
            [
                full(),
                window(4),
                LatentAttention(entry=latent(4, 0, "fp8")),
                compressed(4),
                compressed(6, True),
            ]
        )
        assert layout.page_tokens == {"full": 16, "window": 16, "latent": 64, "hca": 12, "csa": 12}

    def test_one_number_for_all(self):
        layout = Layout([full(), window(4), compressed(4)], 32)
        assert layout.page_tokens == {"full": 32, "window": 32, "hca": 32}

    def test_a_number_by_name_and_the_rest_as_usual(self):
        layout = Layout([full(), window(4), window(8)], {"window-2": 3})
        assert layout.page_tokens == {"full": 16, "window": 16, "window-2": 3}
        assert [group.page_bytes for group in layout.paged_groups] == [32, 32, 6]

    def test_no_group_is_padded_to_another(self):
        layout = Layout([full(3, 5), full(3, 5), window(4)], {"full": 7, "window": 2})
        assert layout.group("full").page_bytes == 2 * 7 * (15 + 15)
        assert layout.group("window").page_bytes == 2 * 2
        assert layout.resume_step == 14

    def test_names_that_no_group_has(self):
        with pytest.raises(ConfigError, match="no paged group 'state', only full"):
            Layout([full(), STATE], {"state": 16})
        with pytest.raises(ConfigError, match="no paged group 'fall', only full"):
            Layout([full()], {"fall": 16})

    @pytest.mark.parametrize("sizes", [{"full": 16}, 0, -5, "16"])
    def test_page_tokenss_are_checked_where_there_are_only_states(self, sizes):
        with pytest.raises(ConfigError, match="page_tokens"):
            Layout([STATE], sizes)

    @pytest.mark.parametrize(
        "bad", [0, -1, 1.5, "16", [16], 2**63, {"full": 0}, {"full": "16"}, {"full": 1.0}]
    )
    def test_sizes_that_are_none(self, bad):
        with pytest.raises(ConfigError, match="page_tokens of full"):
            Layout([full()], bad)

    def test_pages_end_where_entries_of_all_ratios_do(self):
        for bad in (64, 130, 1):
            with pytest.raises(ConfigError, match="page_tokens of csa: give a multiple of 128"):
                Layout([compressed(4, True), compressed(128)], bad)
        assert Layout([compressed(4, True), compressed(128)], 384).group("hca").entries_per_page == 3
        with pytest.raises(ConfigError, match="multiple of 4"):
            PagedGroup("csa", (0,), compressed(4).storage, 6, 6)

    def test_pages_divide_the_step_at_which_requests_resume(self):
        with pytest.raises(ConfigError, match="resume_step: give a multiple of the page_tokens of full, 4"):
            PagedGroup("full", (0,), full().storage, 4, 6)
        assert [
            group.resume_step for group in Layout([full(), window(4)], {"full": 6, "window": 4}).groups
        ] == [
            12,
            12,
        ]
        with pytest.raises(ConfigError, match=r"page_tokens: .* give sizes that divide each other"):
            Layout([full(), window(4)], {"full": 2**61, "window": 3})

    def test_bytes_a_token_are_exact_fractions(self):
        entry = Entry("e", (TensorSpec("a", (10,), "uint8"),), page_multiple=16)
        group = Layout([LatentAttention(entry=entry)] * 2, 3).paged_groups[0]
        assert group.page_bytes == group.unit_bytes == 2 * 32
        assert group.token_bytes == Fraction(64, 3)
        assert group.unpadded_token_bytes == 20


class TestFirstLiveToken:
    def test_by_hand(self):
        # Whole steps of 8: with 8 to 15 committed a query of 5 still reads from 4 on, with 16 from 12 on.
        assert [first_live_token(n, 5, 8) for n in (0, 7, 8, 15, 16, 23, 24)] == [0, 0, 0, 0, 8, 8, 16]
        # A window of 1 reads nothing before the next token; one of 9 all of the step before.
        assert [first_live_token(n, 1, 8) for n in (7, 8, 16)] == [0, 8, 16]
        assert [first_live_token(n, 9, 8) for n in (16, 17, 24)] == [8, 8, 16]
        assert [first_live_token(n, 10, 8) for n in (16, 17, 24)] == [0, 0, 8]
        assert first_live_token(20, 4, 3) == 15
        assert first_live_token(2**62, 2, 2**62) == 0
        assert first_live_token(2**62, 2, 1) == 2**62 - 1

    @pytest.mark.parametrize(
        "bad", [(-1, 1, 1), (0, 0, 1), (0, 1, 0), (2**63, 1, 1), (0, None, 1), (0, 1, 1.5)]
    )
    def test_numbers_that_are_none(self, bad):
        with pytest.raises(ArgumentError, match=r"committed|window|resume_step"):
            first_live_token(*bad)


class TestOneRequest:
    def test_pages_of_full_attention(self):
        group = Layout([full()], 4).paged_groups[0]
        assert [group.peak_units(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
        assert [group.peak_units(n, 100, 3) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]

    def test_pages_of_a_window(self):
        group = Layout([window(5)], 4).paged_groups[0]
        # With 11 stored, the next query, 11, reads 7 to 11: pages 1 (4 to 7) and 2.
        assert group.live_pages(11) == (range(1, 3),)
        # With 12 stored, it reads 8 to 12: page 2 alone is there.
        assert group.live_pages(12) == (range(2, 3),)
        assert group.live_pages(0) == (range(0),)
        # The page before the last whole one, which may have just been committed, and what follows it.
        assert group.peak_units(1000) == 2
        assert group.peak_units(1000, step=2) == 3  # 4 to 11, and 12
        assert group.peak_units(1000, step=5) == 3  # 4 to 15
        assert group.peak_units(4, step=4) == 1
        # With one step in flight a row holds three steps: 4 to 13.
        assert group.peak_units(1000, in_flight=1) == 3
        assert group.peak_units(1000, step=2, in_flight=1) == 4  # 4 to 16

    def test_windows_are_given_up_where_requests_resume(self):
        group = Layout([full(), window(5)], {"full": 8, "window": 2}).group("window")
        # 15 committed: the whole 8 need 4 to 7, and 0 to 3 go with them; 16 committed: 0 to 7 go.
        assert group.peak_units(1000) == 8
        assert [group.peak_units(n) for n in (2, 15, 16, 17)] == [1, 8, 8, 8]
        assert group.peak_units(1000, in_flight=1) == 9

    def test_pages_of_a_window_with_sinks(self):
        group = Layout([window(4, sinks=5)], 4).paged_groups[0]
        assert group.live_pages(5) == (range(2),)
        assert group.live_pages(20) == (range(2), range(4, 5))
        assert [group.peak_units(n) for n in (8, 9, 1000)] == [2, 3, 4]
        assert group.layer_bytes(0, 20) == {"keys": 3 + 5, "values": 3 + 5}

    def test_layer_bytes_are_what_the_next_token_reads(self):
        layout = Layout([full(2, 3), window(5), STATE])
        assert layout.layer_bytes(0, 7) == {"keys": 42, "values": 42}
        assert layout.layer_bytes(1, 3) == {"keys": 3, "values": 3}
        assert layout.layer_bytes(1, 100) == {"keys": 4, "values": 4}
        assert layout.layer_bytes(2, 0) == layout.layer_bytes(2, 10**9) == {"conv": 8, "recurrent": 8}

    def test_layer_bytes_of_a_group_are_those_of_its_layers_alone(self):
        layout = Layout([full(2, 3), window(5), STATE])
        paged, windowed, states = layout.groups
        assert paged.layer_bytes(0, 7) == {"keys": 42, "values": 42}
        assert states.layer_bytes(2, 7) == {"conv": 8, "recurrent": 8}
        for group, others in ((paged, (1, 2, 3)), (windowed, (0, 2)), (states, (0, 1, -1))):
            assert all(group.layer_bytes(other, 7) == {} for other in others)
        for group in layout.groups:
            with pytest.raises(ConfigError, match="length"):
                group.layer_bytes(0, -1)

    def test_token_bytes_count_what_grows(self):
        layout = Layout([full(2, 3), window(5), STATE])
        assert layout.token_bytes == 12
        assert Layout([window(5), STATE]).token_bytes == 0

    def test_request_bytes_are_whole_pages_and_a_row(self):
        layout = Layout([full(2, 3), window(5), STATE], {"full": 4, "window": 2})
        # 9 tokens: 3 pages of 48 B; a window of 5, given up 4 tokens at a time, in pages of 2: 4 pages of
        # 4 B for the tokens 0 to 7; one row.
        assert layout.request_bytes(9) == 3 * 48 + 4 * 4 + 16
        assert layout.request_bytes(9, step=4) == layout.request_bytes(9, 1, 1) == 3 * 48 + 5 * 4 + 16
        assert layout.request_bytes(0) == 16

    @pytest.mark.parametrize("bad", [-1, 1.5, "9", None, 2**62 + 1, pytest.param(10**5_000, id="huge")])
    def test_lengths_that_are_none(self, bad):
        layout = Layout([full(), window(3)])
        for ask in (layout.request_bytes, layout.resume_lengths, lambda n: layout.layer_bytes(0, n)):
            with pytest.raises(ConfigError, match="length"):
                ask(bad)
        for group in layout.paged_groups:
            layer_bytes = functools.partial(group.layer_bytes, group.layers[0])
            for ask in (group.live_pages, group.peak_units, layer_bytes):
                with pytest.raises(ConfigError, match="length"):
                    ask(bad)

    @pytest.mark.parametrize("bad", [0, -1, 1.5, "9", None])
    def test_steps_that_are_none(self, bad):
        with pytest.raises(ConfigError, match="step"):
            Layout([full()]).request_bytes(9, bad)

    @pytest.mark.parametrize("bad", [-1, 1.5, "9", None])
    def test_depths_that_are_none(self, bad):
        with pytest.raises(ConfigError, match="in_flight"):
            Layout([full()]).request_bytes(9, in_flight=bad)

    @pytest.mark.parametrize("bad", [-1, 2, 10**18, pytest.param(10**5_000, id="huge"), 1.0, "0", None])
    def test_layers_that_are_none(self, bad):
        layout = Layout([full(), full()])
        with pytest.raises(ArgumentError, match="layer: "):
            layout.source(bad)
        with pytest.raises(ArgumentError, match="layer: "):
            layout.layer_bytes(bad, 1)

    def test_huge_lengths_cost_nothing(self):
        layout = Layout([full(), window(3), STATE])
        assert layout.request_bytes(2**62) == 2**58 * 32 + 2 * 32 + 16
        assert len(layout.resume_lengths(2**62)) == 2**58 - 1


class TestResuming:
    def test_needs_of_a_hybrid(self):
        layout = Layout([full(), window(5), STATE], {"full": 2, "window": 4})
        assert layout.resume_step == 4
        assert layout.resume_needs(12) == (
            Need("full", pages=(range(6),)),
            # The query at 12 reads 8 to 12.
            Need("window", pages=(range(2, 3),)),
            Need("state", checkpoint_bytes=16),
        )
        assert layout.resume_needs(0) == (Need("full"), Need("window"), Need("state"))

    def test_a_window_of_one_needs_nothing_of_the_past(self):
        need = Layout([window(1)], 4).resume_needs(8)[0]
        assert [list(pages) for pages in need.pages] == [[]]

    def test_lengths(self):
        layout = Layout([full(), window(5)], {"full": 6, "window": 4})
        assert list(layout.resume_lengths(36)) == [12, 24]
        assert list(layout.resume_lengths(37)) == [12, 24, 36]
        assert list(layout.resume_lengths(12)) == list(layout.resume_lengths(0)) == []

    def test_states_alone_resume_where_pages_would_end(self):
        layout = Layout([STATE])
        assert layout.resume_step == layout.state_group.resume_step == 16
        assert list(layout.resume_lengths(49)) == [16, 32, 48]
        assert layout.resume_needs(32) == (Need("state", checkpoint_bytes=16),)
        with pytest.raises(ArgumentError, match="multiples of 16"):
            layout.resume_needs(8)
        assert Layout([STATE], {}).resume_step == 16

    def test_states_alone_resume_at_multiples_of_page_tokens(self):
        layout = Layout([STATE, []], 5)
        assert (layout.resume_step, layout.page_tokens) == (5, {})
        assert list(layout.resume_lengths(11)) == [5, 10]
        assert layout.shard(2).resume_step == 5
        assert layout != Layout([STATE, []])
        assert pickle.loads(pickle.dumps(layout)) == layout

    def test_states_resume_where_all_pages_end(self):
        layout = Layout([STATE, full(), window(4)], {"full": 4, "window": 6})
        assert layout.resume_step == layout.state_group.resume_step == 12

    @pytest.mark.parametrize("bad", [1, 13, -12, 2.0, "12", None, pytest.param(10**5_000 + 1, id="huge")])
    def test_lengths_at_which_nothing_resumes(self, bad):
        layout = Layout([full(), window(5)], {"full": 6, "window": 4})
        with pytest.raises(ArgumentError, match="length: "):
            layout.resume_needs(bad)

    @pytest.mark.parametrize(
        ("model", "num_csa", "num_layers"), [("deepseek-v4-flash", 21, 43), ("deepseek-v4-pro", 30, 61)]
    )
    def test_compressed_models(self, model, num_csa, num_layers):
        layout = from_hf(model_config(model))
        assert layout.resume_step == 128
        needs = {need.group: need for need in layout.resume_needs(256)}
        assert needs["csa"].pages == needs["hca"].pages == (range(2),)
        # A window's 127 entries in every layer; in CSA layers the 4 rows before, main and indexer, float32.
        assert needs["state"].checkpoint_bytes == num_layers * 127 * 584 + num_csa * 4 * (2_048 + 512) * 4


class TestRefused:
    @pytest.mark.parametrize("layers", [None, 5, "full", full(), {"a": 1}, iter([full()]), {full()}])
    def test_what_is_no_list_of_layers(self, layers):
        with pytest.raises(ConfigError, match=r"^layers: give a list"):
            Layout(layers)

    def test_no_layers(self):
        with pytest.raises(ConfigError, match=r"^layers: give at least one"):
            Layout([])

    @pytest.mark.parametrize("layer", [None, 5, "full", FullAttention, [None], [full(), "x"], [[full()]], {}])
    def test_what_is_no_layer(self, layer):
        with pytest.raises(ConfigError, match=r"^layers\[1\]: give a Kind"):
            Layout([full(), layer])

    @pytest.mark.parametrize("layer", [1, 2, 3, 100])
    def test_sharing_what_is_not_before_or_keeps_no_pages(self, layer):
        with pytest.raises(ConfigError, match=rf"layers\[2\] shares layer {layer}: give an earlier layer"):
            Layout([full(), STATE, SharedAttention(layer=layer), full()])

    def test_sharing_a_layer_that_shares(self):
        with pytest.raises(ConfigError, match=r"layers\[2\] shares layer 1"):
            Layout([full(), SharedAttention(layer=0), SharedAttention(layer=1)])

    def test_two_things_of_one_name_in_a_layer(self):
        for layer in ([full(), window(3)], [STATE, STATE], [full(), full(2)]):
            with pytest.raises(ConfigError, match=r"layers\[1\] stores duplicate names"):
                Layout([full(), layer])
        with pytest.raises(ConfigError, match="stores duplicate names"):
            Layout([LatentAttention(entry=index_keys(4, "bf16"), index=index_keys(8, "bf16"))])

    @pytest.mark.parametrize("name", ["state", "checkpoint"])
    def test_pages_named_like_states_or_checkpoints(self, name):
        """A capacity has one number per name."""

        class Named(FullAttention):
            @property
            def storage(self):
                return replace(super().storage, name=name)

        kind = Named(kv_heads=1, k_dim=1, v_dim=1)
        with pytest.raises(ConfigError, match=f"name of a Storage: '{name}' is reserved"):
            Layout([kind, STATE])
        assert layers_of(Layout([kind])) == {name: (0,)}

    @pytest.mark.parametrize("bad", [0, -1, 1.5, "8k"])
    def test_contexts_that_are_none(self, bad):
        with pytest.raises(ConfigError, match="context"):
            Layout([full()], context=bad)


class TestSharding:
    def test_heads_are_divided_and_page_tokenss_kept(self):
        layout = Layout([full(4), window(8, heads=2), STATE], {"full": 3, "window": 5}, name="m", context=9)
        half = layout.shard(2)
        assert half == Layout([full(2), window(8, heads=1), STATE.shard(2)], {"full": 3, "window": 5})
        assert (half.name, half.context, half.page_tokens) == ("m", 9, {"full": 3, "window": 5})

    def test_one_rank_holds_all(self):
        for model in model_names():
            layout = from_hf(model_config(model))
            assert layout.shard(1) == layout

    def test_the_error_names_the_layer(self):
        with pytest.raises(ConfigError, match="layer 1: 3 KV heads can be neither divided among 2 ranks"):
            Layout([full(2), full(3)]).shard(2)

    @pytest.mark.parametrize("bad", [0, -1, 1.5, "2", None])
    def test_ranks_that_are_none(self, bad):
        with pytest.raises(ConfigError, match="ranks"):
            Layout([full(2)]).shard(bad)

    def test_groups_that_become_equal_by_repeating_heads(self):
        """4 KV heads divided by 4 and 2 KV heads repeated on 4: one head each, so one geometry."""
        layout = Layout([full(4), full(2)])
        assert layers_of(layout) == {"full": (0,), "full-2": (1,)}
        rank = layout.shard(4)
        assert [kinds[0].kv_heads for kinds in rank.layers] == [1, 1]
        assert rank.token_bytes == 2 + 2
        assert rank.page_tokens["full"] == 16

    def test_groups_that_become_one_have_one_page_tokens(self):
        """Ranks of one model share ids: a page of 16 tokens cannot become one of 32 on the way."""
        with pytest.raises(
            ConfigError, match="full-2 merges with another group on 4 ranks: give both the same page_tokens"
        ):
            Layout([full(4), full(2)], {"full": 16, "full-2": 32}).shard(4)

    # KV heads, and heads or channels of states, of the models that come with Pagoda; from their configs.
    HEADS = {  # noqa: RUF012
        "bamba-9b": (8, 128),
        "falcon-h1-34b": (4, 32),
        "gemma-3-27b": (16, None),
        "gemma-3n-e4b": (2, None),
        "gpt-oss-120b": (8, None),
        "gpt-oss-20b": (8, None),
        "jamba-1.5-mini": (8, 8192),
        "kimi-linear-48b-a3b": (None, 32),
        "lfm2-1.2b": (8, 2048),
        "llama-3.1-405b": (8, None),
        "llama-3.1-70b": (8, None),
        "llama-3.1-8b": (8, None),
        "mamba-2.8b": (None, 5120),
        "mamba-codestral-7b": (None, 128),
        "minimax-text-01": (8, 64),
        "mistral-7b-v0.1": (8, None),
        "qwen2.5-72b": (8, None),
        "qwen3-235b-a22b": (4, None),
        "qwen3-8b": (8, None),
        "qwen3-next-80b-a3b": (2, 16),
        "qwen3.5-27b": (4, 16),
        "smollm2-135m": (3, None),
        "zamba2-7b": (32, 112),
        "deepseek-v3": (None, None),
        "deepseek-v3.2": (None, None),
        "deepseek-v4-flash": (None, None),
        "deepseek-v4-pro": (None, None),
    }

    def test_every_model_is_listed_above(self):
        assert sorted(self.HEADS) == model_names()

    @pytest.mark.parametrize("ranks", [2, 4, 8])
    @pytest.mark.parametrize("model", sorted(HEADS))
    def test_models_on_ranks(self, model, ranks):
        layout = from_hf(model_config(model))
        kv_heads, state_heads = self.HEADS[model]
        if kv_heads == 3:
            with pytest.raises(ConfigError, match="layer 0: 3 KV heads can be neither divided"):
                layout.shard(ranks)
            return
        rank = layout.shard(ranks)
        assert rank.page_tokens == layout.page_tokens
        assert layers_of(rank) == layers_of(layout)
        # Heads that are repeated make the sum over ranks larger by so much.
        copies = 1 if kv_heads is None else max(1, Fraction(ranks, kv_heads))
        for mine, whole in zip(rank.paged_groups, layout.paged_groups, strict=True):
            if kv_heads is None:
                assert mine == whole
            else:
                assert mine.page_bytes * ranks == whole.page_bytes * copies
        if state_heads is None:
            assert rank.state_group == layout.state_group
            return
        for mine, whole in zip(rank.state_group.parts, layout.state_group.parts, strict=True):
            sizes = {part.name: part.num_bytes for part in mine}
            assert sizes.keys() == {part.name for part in whole}
            for part in whole:
                if part.name == "recurrent" or model not in ("bamba-9b", "falcon-h1-34b", "zamba2-7b"):
                    assert sizes[part.name] * ranks == part.num_bytes

    @pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (4, 1), (8, 1)])
    def test_mamba_2_groups_are_repeated(self, ranks, groups):
        bamba = from_hf(model_config("bamba-9b")).shard(ranks)
        # 128 heads of 64, one group of 128 states on every rank; convolution of 3 columns, bf16.
        conv = (128 // ranks * 64 + 2 * groups * 128) * 3 * 2
        assert {parts[0].num_bytes for parts in bamba.state_group.parts} == {conv}
        falcon = from_hf(model_config("falcon-h1-34b")).shard(ranks)
        conv = (32 // ranks * 128 + 2 * max(1, 2 // ranks) * 256) * 3 * 2
        assert {parts[0].num_bytes for parts in falcon.state_group.parts} == {conv}

    def test_more_ranks_than_linear_heads_are_refused(self):
        with pytest.raises(ConfigError, match="layer 0: 16 linear heads cannot be divided among 32 ranks"):
            from_hf(model_config("qwen3-next-80b-a3b")).shard(32)


LAYOUTS = {
    "one of each": lambda: Layout(
        [[full(2), STATE], window(4, 1), SharedAttention(layer=0), compressed(4, True), []],
        {"full": 3},
        name="x",
    ),
    "delta": lambda: Layout([GatedDelta(key_heads=1, value_heads=2, key_dim=3, value_dim=4, kernel=4)]),
    "mamba": lambda: Layout([Mamba2(heads=2, head_dim=3, groups=1, state_dim=4, kernel=4)]),
    "flash": lambda: from_hf(model_config("deepseek-v4-flash"), unaccepted=3),
    "gemma": lambda: from_hf(model_config("gemma-3n-e4b"), page_tokens={"full": 32}),
}
layouts = pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS.keys())
ATTRIBUTES = [name for name, member in vars(Layout).items() if name[0] != "_" and not callable(member)]


class TestFrozen:
    @pytest.mark.parametrize("name", [*ATTRIBUTES, "something_new"])
    def test_attributes_cannot_be_set(self, name):
        layout = Layout([full(), STATE])
        with pytest.raises((AttributeError, PagodaError)):
            setattr(layout, name, None)

    @layouts
    def test_groups_cannot_be_changed(self, make):
        for group in make().groups:
            for name in ("name", "layers", "unit_bytes", "something_new"):
                with pytest.raises(AttributeError):
                    setattr(group, name, getattr(group, name, None))

    def test_answers_are_copies(self):
        layout = Layout([full()])
        layout.page_tokens["full"] = 99
        layout.layer_bytes(0, 3)["keys"] = 99
        assert layout.page_tokens == {"full": 16}
        assert layout.layer_bytes(0, 3) == {"keys": 3, "values": 3}

    def test_arguments_are_copied(self):
        layers, sizes = [[full()], [full()]], {"full": 4}
        layout = Layout(layers, sizes)
        before = (layout.layers, layout.groups, hash(layout))
        layers[0].append(STATE)
        layers.append([STATE])
        sizes["full"] = 8
        assert (layout.layers, layout.groups, hash(layout)) == before

    @layouts
    @pytest.mark.parametrize("asked", [False, True], ids=["never asked", "asked before"])
    @pytest.mark.parametrize(
        "again", [copy.copy, copy.deepcopy, lambda layout: pickle.loads(pickle.dumps(layout))]
    )
    def test_copies_are_equal(self, make, again, asked):
        layout = make()
        if asked:
            assert layout.paged_groups is not None
            assert layout.resume_step
        other = again(layout)
        assert other == layout
        assert hash(other) == hash(layout)
        assert (other.name, other.context, other.page_tokens) == (
            layout.name,
            layout.context,
            layout.page_tokens,
        )
        assert other.groups == layout.groups
        assert other.request_bytes(1000) == layout.request_bytes(1000)
        assert repr(other) == repr(layout)

    @layouts
    def test_made_again_it_is_equal(self, make):
        assert make() == make()
        assert len({make(), make()}) == 1

    def test_what_differs_is_not_equal(self):
        layout = Layout([full(), window(4)])
        others = [
            Layout([window(4), full()]),
            Layout([full(), window(5)]),
            Layout([full(), window(4)], {"full": 8}),
            Layout([full(), window(4), []]),
            Layout([full(), window(4, 1)]),
        ]
        assert all(other != layout for other in others)
        assert len({layout, *others}) == 6
        assert layout != layout.groups
        assert layout == Layout([full(), [window(4)]], {"window": 16}, name="other", context=5)

    def test_budgets_and_needs_are_values(self):
        layout = Layout([full(), STATE])
        budget = layout.divide(10**4, 8)
        assert budget == layout.divide(10**4, 8)
        assert pickle.loads(pickle.dumps(budget)) == budget
        assert len({budget, layout.divide(10**4, 8)}) == 1
        with pytest.raises(AttributeError):
            budget.spare_bytes = 0
        assert hash(layout.resume_needs(16)[0]) == hash(layout.resume_needs(16)[0])
