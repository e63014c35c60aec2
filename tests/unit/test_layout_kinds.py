"""Kinds of layers and their entries: bytes by hand-written sums, what is refused, what cannot change."""

import copy
import math
import pickle
from dataclasses import dataclass, fields, replace
from fractions import Fraction

import pytest
import torch

from pagoda.errors import ConfigError
from pagoda.layout import (
    CompressedAttention,
    Entry,
    FullAttention,
    GatedDelta,
    KimiDelta,
    Kind,
    LatentAttention,
    Layout,
    Lightning,
    Mamba1,
    Mamba2,
    RingWindow,
    SharedAttention,
    ShortConv,
    Storage,
    TensorSpec,
    WindowAttention,
    compressed_fp8,
    from_hf,
    index_keys,
    latent,
    latent_fp8,
    model_config,
    plain,
)
from pagoda.layout._entries import DTYPES, dtype_name
from pagoda.layout._kinds import RecurrentKind

V4_ENTRY = compressed_fp8(512, 64)


def csa(**changes):
    sizes = {
        "entry": V4_ENTRY,
        "window": 128,
        "head_dim": 512,
        "ratio": 4,
        "overlap": True,
        "index": index_keys(128, "fp8"),
        "index_dim": 128,
    }
    return CompressedAttention(**{**sizes, **changes})


def hca(**changes):
    sizes = {"entry": V4_ENTRY, "window": 128, "head_dim": 512, "ratio": 128, "overlap": False}
    return CompressedAttention(**{**sizes, **changes})


def entry_bytes(kind):
    return {entry.name: entry.num_bytes for entry in kind.storage.entries}


def state_bytes(kind):
    return {part.name: part.num_bytes for part in kind.state}


KINDS = {
    "full": FullAttention(kv_heads=8, k_dim=192, v_dim=128),
    "window": WindowAttention(kv_heads=8, k_dim=64, v_dim=64, window=128, sink_tokens=4),
    "latent": LatentAttention(entry=latent(512, 64, "bf16")),
    "latent, indexed": LatentAttention(entry=latent_fp8(512, 64), index=index_keys(128, "fp8")),
    "shared": SharedAttention(layer=0),
    "ring": RingWindow(entry=V4_ENTRY, window=128),
    "csa": csa(),
    "hca": hca(),
    "gated delta": GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4),
    "kimi delta": KimiDelta(heads=32, dim=128, kernel=4),
    "mamba 1": Mamba1(channels=8192, state_dim=16, kernel=4),
    "mamba 2": Mamba2(heads=128, head_dim=64, groups=8, state_dim=128, kernel=4),
    "short conv": ShortConv(channels=2048, kernel=3),
    "lightning": Lightning(heads=64, dim=128),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


class TestPagedBytes:
    def test_keys_and_values_of_different_widths(self):
        kind = FullAttention(kv_heads=8, k_dim=192, v_dim=128, dtype="bf16")
        assert (
            entry_bytes(kind)
            == {"keys": 8 * 192 * 2, "values": 8 * 128 * 2}
            == {"keys": 3072, "values": 2048}
        )
        assert kind.storage == Storage("full", kind.storage.entries, ratio=1, window=None, sink_tokens=0)
        assert [part.shape for entry in kind.storage.entries for part in entry.parts] == [(8, 192), (8, 128)]
        assert kind.state == ()
        assert kind.checkpoint_bytes == 0

    @pytest.mark.parametrize(
        ("dtype", "width"), [("fp32", 4), ("bf16", 2), ("fp16", 2), ("fp8", 1), ("fp8_e5m2", 1)]
    )
    def test_every_dtype_of_keys_and_values(self, dtype, width):
        kind = FullAttention(kv_heads=2, k_dim=3, v_dim=5, dtype=dtype)
        assert entry_bytes(kind) == {"keys": 6 * width, "values": 10 * width}

    def test_a_window_says_how_long_its_tokens_live(self):
        kind = WindowAttention(kv_heads=8, k_dim=64, v_dim=32, window=128, sink_tokens=4)
        assert entry_bytes(kind) == {"keys": 8 * 64 * 2, "values": 8 * 32 * 2}
        assert (kind.storage.name, kind.storage.window, kind.storage.sink_tokens) == ("window", 128, 4)
        assert WindowAttention(kv_heads=8, k_dim=64, v_dim=64, window=1).storage.sink_tokens == 0

    def test_latent_attention_with_and_without_an_indexer(self):
        # DeepSeek-V3: 512 + 64 values of bf16.
        assert entry_bytes(LatentAttention(entry=latent(512, 64, "bf16"))) == {"latent": (512 + 64) * 2}
        indexed = LatentAttention(entry=latent(512, 64, "bf16"), index=index_keys(128, "fp8"))
        assert entry_bytes(indexed) == {"latent": 1152, "index": 128 + 4}
        assert indexed.storage.name == "latent"

    def test_latent_attention_without_rotated_keys(self):
        assert latent(512, 0, "fp8").num_bytes == 512

    def test_fp8_latent_entry_of_656_bytes(self):
        entry = latent_fp8(512, 64)
        # 512 values, 4 float32 scales of 128 values each, 64 rotated bf16.
        assert [(part.name, part.num_bytes) for part in entry.parts] == [
            ("latent", 512),
            ("scale", 16),
            ("rope", 128),
        ]
        assert entry.num_bytes == 656
        assert entry.page_bytes(64) == 64 * 656

    def test_compressed_entry_of_584_bytes_and_its_pages(self):
        # 448 values of fp8, 64 rotated bf16, 7 scales of 64 values each and a byte of padding.
        assert V4_ENTRY.data_bytes == 448 + 128 == 576
        assert V4_ENTRY.scale_bytes == 7 + 1
        assert V4_ENTRY.num_bytes == 584
        assert [part.num_bytes for part in V4_ENTRY.scales] == [7, 1]
        pages = {1: 1_152, 2: 1_728, 32: 19_008, 64: 37_440}
        assert {entries: V4_ENTRY.page_bytes(entries) for entries in pages} == pages
        # The same numbers again: least multiples of 576 that hold the entries.
        assert pages == {entries: math.ceil(entries * 584 / 576) * 576 for entries in pages}

    def test_compressed_entry_whose_scales_need_no_padding(self):
        entry = compressed_fp8(576, 64)  # 512 values, 8 scales
        assert [part.name for part in entry.scales] == ["scale"]
        assert entry.num_bytes == 512 + 128 + 8

    @pytest.mark.parametrize(
        ("dtype", "num_bytes"), [("fp8", 132), ("fp8_e5m2", 132), ("fp4", 68), ("bf16", 256), ("fp32", 512)]
    )
    def test_index_keys_of_128_values(self, dtype, num_bytes):
        # fp8: 128 + a float32; fp4: 64 + 4 scales, one per 32 values; else no scales.
        assert index_keys(128, dtype).num_bytes == num_bytes

    def test_entries_of_later_models_are_data(self):
        values = TensorSpec("values", (512,), "fp8")
        entry_528 = Entry("compressed", (values,), (TensorSpec("scale", (512 // 32,), "float8_e8m0fnu"),))
        assert entry_528.num_bytes == 512 + 16 == 528
        values = TensorSpec("values", (512 // 2,), "float4_e2m1fn_x2")
        entry_288 = Entry(
            "compressed", (values,), (TensorSpec("scale", (512 // 16,), "fp8"),), page_multiple=256
        )
        assert entry_288.num_bytes == 256 + 32 == 288
        assert entry_288.page_bytes(3) == 1_024  # 864 to the next multiple of 256
        kinds = [hca(entry=entry, window=4) for entry in (entry_528, entry_288)]
        assert [entry_bytes(kind) for kind in kinds] == [{"compressed": 528}, {"compressed": 288}]
        assert [state_bytes(kind)["window"] for kind in kinds] == [4 * 512, 4 * 256]
        assert [state_bytes(kind)["window_scales"] for kind in kinds] == [4 * 16, 4 * 32]

    def test_pages_are_padded_once_and_not_an_entry_at_a_time(self):
        entry = Entry("e", (TensorSpec("a", (10,), "uint8"),), page_multiple=16)
        assert [entry.page_bytes(n) for n in (0, 1, 2, 3, 8, 9)] == [0, 16, 32, 32, 80, 96]

    def test_shared_attention_keeps_nothing(self):
        kind = SharedAttention(layer=0)
        assert (kind.storage, kind.state, kind.checkpoint_bytes) == (None, (), 0)


class TestStateBytes:
    def test_gated_delta(self):
        kind = GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=64, kernel=4)
        # Queries, keys and values through the convolution, 3 columns of bf16; states of float32.
        channels = 16 * 128 + 16 * 128 + 32 * 64
        assert state_bytes(kind) == {"conv": channels * 3 * 2, "recurrent": 32 * 128 * 64 * 4}
        assert [part.shape for part in kind.state] == [(6144, 3), (32, 128, 64)]
        assert kind.storage is None
        assert kind.checkpoint_bytes == 6144 * 6 + 1_048_576

    def test_kimi_delta(self):
        kind = KimiDelta(heads=32, dim=128, kernel=4)
        assert state_bytes(kind) == {"conv": 3 * 32 * 128 * 3 * 2, "recurrent": 32 * 128 * 128 * 4}

    def test_mamba_1(self):
        # Jamba: 28 layers of it weigh 14,680,064 B of states and 1,376,256 B of convolutions.
        kind = Mamba1(channels=8192, state_dim=16, kernel=4)
        assert state_bytes(kind) == {"conv": 1_376_256 // 28, "recurrent": 14_680_064 // 28}

    def test_mamba_2(self):
        kind = Mamba2(heads=128, head_dim=64, groups=8, state_dim=128, kernel=4)
        channels = 128 * 64 + 2 * 8 * 128
        assert state_bytes(kind) == {"conv": channels * 3 * 2, "recurrent": 128 * 64 * 128 * 4}

    @pytest.mark.parametrize(
        ("kernel", "expected"), [(1, {}), (2, {"conv": 4096}), (3, {"conv": 2048 * 2 * 2})]
    )
    def test_short_conv(self, kernel, expected):
        assert state_bytes(ShortConv(channels=2048, kernel=kernel)) == expected

    def test_a_kernel_of_one_leaves_no_convolution(self):
        for kind in (
            GatedDelta(key_heads=1, value_heads=1, key_dim=2, value_dim=2, kernel=1),
            KimiDelta(heads=1, dim=2, kernel=1),
            Mamba1(channels=4, state_dim=1, kernel=1),
            Mamba2(heads=1, head_dim=2, groups=1, state_dim=2, kernel=1),
        ):
            assert state_bytes(kind) == {"recurrent": 16}

    def test_lightning(self):
        assert state_bytes(Lightning(heads=64, dim=128)) == {"recurrent": 64 * 128 * 128 * 4}

    def test_dtypes_of_convolution_and_state_are_apart(self):
        kind = Mamba1(channels=10, state_dim=3, kernel=4, dtype="fp32", state_dtype="bf16")
        assert state_bytes(kind) == {"conv": 10 * 3 * 4, "recurrent": 10 * 3 * 2}


class TestCompressed:
    """DeepSeek-V4, after the facts of its family."""

    def test_ring(self):
        kind = RingWindow(entry=V4_ENTRY, window=128)
        # A row has its entry, data and scales, and an int32 that says which position it holds.
        assert state_bytes(kind) == {"window": 128 * 576, "window_scales": 128 * 8, "positions": 128 * 4}
        assert kind.storage is None
        # The next token reads itself and 127 before it.
        assert kind.checkpoint_bytes == 127 * 584

    @pytest.mark.parametrize("unaccepted", [1, 2, 5, 64])
    def test_rings_and_rows_grow_with_what_is_not_accepted(self, unaccepted):
        extra = unaccepted - 1
        assert RingWindow(entry=V4_ENTRY, window=128, unaccepted=unaccepted).ring == 128 + extra
        assert csa(unaccepted=unaccepted).compressor_tokens == 2 * 4 + extra
        assert hca(unaccepted=unaccepted).compressor_tokens == 128 + extra
        assert state_bytes(csa(unaccepted=unaccepted)) == {
            "window": (128 + extra) * 576,
            "window_scales": (128 + extra) * 8,
            "positions": (128 + extra) * 4,
            "main_values": (8 + extra) * 2 * 512 * 4,
            "main_scores": (8 + extra) * 2 * 512 * 4,
            "index_values": (8 + extra) * 2 * 128 * 4,
            "index_scores": (8 + extra) * 2 * 128 * 4,
        }
        assert state_bytes(hca(unaccepted=unaccepted)) == {
            "window": (128 + extra) * 576,
            "window_scales": (128 + extra) * 8,
            "positions": (128 + extra) * 4,
            "main_values": (128 + extra) * 512 * 4,
            "main_scores": (128 + extra) * 512 * 4,
        }

    def test_checkpoints_do_not_grow_with_what_is_not_accepted(self):
        # CSA resumes with 127 entries of the window and the 4 rows before the cut, main and indexer.
        expected = 127 * 584 + 4 * (2 * 2 * 512 + 2 * 2 * 128) * 4
        assert {csa(unaccepted=n).checkpoint_bytes for n in (1, 2, 9)} == {expected}
        assert {hca(unaccepted=n).checkpoint_bytes for n in (1, 2, 9)} == {127 * 584}

    @pytest.mark.parametrize("unaccepted", [1, 5])
    @pytest.mark.parametrize("window", [1, 2, 128])
    def test_what_checkpoints_keep(self, window, unaccepted):
        """The query after a checkpoint reads window − 1 positions before its own. An entry of CSA is made of
        its own block and the one before; one of HCA is made of its own block, which is empty where it begins.
        """
        given = {"window": window, "unaccepted": unaccepted}
        for kind, block in (
            (RingWindow(entry=V4_ENTRY, **given), None), (csa(**given), 4), (hca(**given), 0),
        ):  # fmt: skip
            for part in kind.state:
                is_ring = part.name in {"window", "window_scales", "positions"}
                assert part.kept == (window - 1 if is_ring else block), part.name
                assert part.holds_positions == (part.name == "positions")
                in_bytes = part.num_bytes // part.shape[0] * part.kept
                assert part.checkpoint_bytes == (0 if part.name == "positions" else in_bytes)
            assert kind.checkpoint_bytes == sum(part.checkpoint_bytes for part in kind.state)

    def test_scores_begin_at_minus_infinity_positions_at_none_and_all_else_at_zero(self):
        for kind in (csa(), hca(), RingWindow(entry=V4_ENTRY, window=128)):
            for part in kind.state:
                begins = -math.inf if part.name.endswith("scores") else -1 if part.name == "positions" else 0
                assert part.initial == begins, part.name

    def test_pages(self):
        assert (csa().storage.name, csa().storage.ratio) == ("csa", 4)
        assert (hca().storage.name, hca().storage.ratio) == ("hca", 128)
        assert entry_bytes(csa()) == {"compressed": 584, "index": 132}
        assert entry_bytes(hca()) == {"compressed": 584}
        assert csa().storage.window is None

    @pytest.mark.parametrize(
        ("model", "heads", "exact", "at_128", "at_256", "state_mib"),
        [
            ("deepseek-v4-flash", (21, 20, 2), 3_850.25, 3_991.5, 3_899.25, 14.7),
            ("deepseek-v4-pro", (30, 31, 0), 5_511.4375, 5_724.0, 5_586.75, 22.2),
        ],
    )
    def test_whole_models(self, model, heads, exact, at_128, at_256, state_mib):
        num_csa, num_hca, num_ring = heads
        layout = from_hf(model_config(model))
        found = [kinds[0] for kinds in layout.layers]
        assert sum(type(kind) is RingWindow for kind in found) == num_ring
        assert sum(isinstance(kind, CompressedAttention) and kind.overlap for kind in found) == num_csa
        assert sum(isinstance(kind, CompressedAttention) and not kind.overlap for kind in found) == num_hca
        assert {group.name for group in layout.groups} == {"csa", "hca", "state"}
        assert len(layout.groups) == 3
        unpadded = Fraction(num_csa * (584 + 132), 4) + Fraction(num_hca * 584, 128)
        assert sum(group.unpadded_token_bytes for group in layout.paged_groups) == unpadded == exact
        assert layout.page_tokens == {"csa": 128, "hca": 128}
        padded = Fraction(num_csa * (19_008 + 32 * 132) + num_hca * 1_152, 128)
        assert layout.token_bytes == padded == at_128
        wide = from_hf(model_config(model), page_tokens=256)
        assert wide.token_bytes == Fraction(num_csa * (37_440 + 64 * 132) + num_hca * 1_728, 256) == at_256
        num_layers = num_csa + num_hca + num_ring
        row = num_layers * 128 * (584 + 4) + num_csa * 8 * (2_048 + 512) * 4 + num_hca * 128 * 1_024 * 4
        assert layout.state_group.state_bytes == row
        assert round(row / 2**20, 1) == state_mib

    def test_layers_of_flash_and_pro_stand_in_their_order(self):
        flash = [kinds[0] for kinds in from_hf(model_config("deepseek-v4-flash")).layers]
        pro = [kinds[0] for kinds in from_hf(model_config("deepseek-v4-pro")).layers]
        assert (len(flash), len(pro)) == (43, 61)
        assert [type(kind) for kind in flash[:2]] == [RingWindow, RingWindow]
        assert [kind.ratio for kind in pro[:2]] == [128, 128]
        for found in (flash, pro):
            assert all(
                kind.ratio == (4 if number % 2 == 0 else 128) for number, kind in list(enumerate(found))[2:]
            )


BAD_SIZES = [0, -1, 1.0, 1.5, "8", None, [8], 2**62 + 1, 10**5_000, float("nan")]


def integer_fields():
    for name, kind in KINDS.items():
        for each in fields(kind):
            value = getattr(kind, each.name)
            if isinstance(value, int) and not isinstance(value, bool):
                yield pytest.param(kind, each.name, id=f"{name}: {each.name}")


class TestRefused:
    @pytest.mark.parametrize(("kind", "field"), list(integer_fields()))
    def test_sizes_that_are_none(self, kind, field):
        may_be_zero = field in ("sink_tokens", "layer", "index_dim")
        for bad in BAD_SIZES:
            if bad == 0 and may_be_zero:
                continue
            with pytest.raises(ConfigError, match=field):
                replace(kind, **{field: bad})

    @pytest.mark.parametrize(
        "bad", ["", "int4", "float64", "bfloat", None, 16, "uint8", "int32", "fp4", ["bf16"]]
    )
    def test_dtypes_that_keys_and_values_do_not_have(self, bad):
        with pytest.raises(ConfigError, match=r"^dtype: give one of float32, bfloat16, .*bf16"):
            FullAttention(kv_heads=1, k_dim=1, v_dim=1, dtype=bad)
        with pytest.raises(ConfigError, match=r"^state_dtype: give one of"):
            Lightning(heads=1, dim=1, state_dtype=bad)

    @pytest.mark.parametrize("bad", [None, 584, "compressed", V4_ENTRY.parts])
    def test_entries_that_are_none(self, bad):
        with pytest.raises(ConfigError, match=r"^entry: give an Entry"):
            RingWindow(entry=bad, window=4)
        with pytest.raises(ConfigError, match=r"^entry: give an Entry"):
            LatentAttention(entry=bad)
        if bad is not None:
            with pytest.raises(ConfigError, match=r"^index: give an Entry"):
                LatentAttention(entry=V4_ENTRY, index=bad)

    def test_an_indexer_without_its_dimension_and_the_reverse(self):
        with pytest.raises(ConfigError, match="index and index_dim"):
            csa(index=None)
        with pytest.raises(ConfigError, match="index and index_dim"):
            csa(index_dim=0)

    @pytest.mark.parametrize("bad", ["no", 2, None])
    def test_overlap_is_yes_or_no(self, bad):
        """'no' is true: it would double the compressor's rows without a word."""
        with pytest.raises(ConfigError, match="overlap"):
            hca(overlap=bad)

    @pytest.mark.parametrize("shape", [(0,), (-1,), (1, 0), ("a",), (1.5,), (None,), 5, None])
    def test_parts_of_no_shape(self, shape):
        with pytest.raises(ConfigError, match="shape of x"):
            TensorSpec("x", shape, "bf16")

    @pytest.mark.parametrize("shape", [(), (3,), (3, 2)])
    @pytest.mark.parametrize("bad", [4, -1, 1.5, "a", True])
    def test_keeping_more_than_there_is(self, shape, bad):
        with pytest.raises(ConfigError, match="kept of x"):
            TensorSpec("x", shape, "bf16", kept=bad)

    @pytest.mark.parametrize(
        ("shape", "dtype", "kept", "bad"),
        [((3,), "int32", 2, 1), ((3, 1), "int32", 2, True), ((3,), "float32", 2, True),
         ((3,), "int32", None, True)],
    )  # fmt: skip
    def test_positions_that_a_length_does_not_give(self, shape, dtype, kept, bad):
        with pytest.raises(ConfigError, match="holds_positions of x"):
            TensorSpec("x", shape, dtype, kept=kept, holds_positions=bad)

    def test_parts_of_no_dtype(self):
        with pytest.raises(ConfigError, match="dtype of x"):
            TensorSpec("x", (1,), "int3")

    @pytest.mark.parametrize("parts", [(), [], ("a",), (None,), 5, None])
    def test_entries_without_parts(self, parts):
        with pytest.raises(ConfigError, match="entry e: give at least one TensorSpec"):
            Entry("e", parts)

    @pytest.mark.parametrize("bad", [0, -1, 1.5, "a", None])
    def test_pages_padded_to_nothing(self, bad):
        with pytest.raises(ConfigError, match="page_multiple of e"):
            Entry("e", (TensorSpec("a", (1,), "uint8"),), page_multiple=bad)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: latent_fp8(500, 64),
            lambda: latent_fp8(512, -1),
            lambda: latent_fp8(512, 64, block=0),
            lambda: latent_fp8("512", 64),
            lambda: latent_fp8(None, 64),
            lambda: latent(0, 64, "bf16"),
            lambda: latent(512, -1, "bf16"),
            lambda: compressed_fp8(64, 64),
            lambda: compressed_fp8(64, 65),
            lambda: compressed_fp8(0, 0),
            lambda: compressed_fp8(512, 64, block=0),
            lambda: compressed_fp8(512, 64, scale_multiple=0),
            lambda: compressed_fp8("512", 64),
            lambda: index_keys(100, "fp4"),
            lambda: index_keys(0, "fp8"),
            lambda: index_keys("a", "fp8"),
            lambda: index_keys(128, "fp3"),
            lambda: plain("keys", 0, 1, "bf16"),
            lambda: plain("keys", 1, None, "bf16"),
        ],
    )
    def test_entries_that_cannot_be(self, make):
        with pytest.raises(ConfigError):
            make()


class TestDtypes:
    @pytest.mark.parametrize("name", DTYPES)
    def test_widths_are_those_of_torch(self, name):
        assert DTYPES[name] == getattr(torch, name).itemsize

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ("bf16", "bfloat16"),
            ("BF16", "bfloat16"),
            ("torch.float16", "float16"),
            (torch.bfloat16, "bfloat16"),
            (torch.float8_e4m3fn, "float8_e4m3fn"),
            ("fp8", "float8_e4m3fn"),
            ("fp8_e5m2", "float8_e5m2"),
            ("half", "float16"),
            ("float", "float32"),
        ],
    )
    def test_names(self, given, expected):
        assert dtype_name(given, "dtype") == expected
        assert FullAttention(kv_heads=1, k_dim=1, v_dim=1, dtype=given).dtype == expected


class TestFrozen:
    @kinds
    def test_no_field_can_be_changed(self, kind):
        for each in fields(kind):
            with pytest.raises(AttributeError):
                setattr(kind, each.name, getattr(kind, each.name))
        for name in ("pages", "state", "checkpoint_bytes"):
            with pytest.raises(AttributeError):
                setattr(kind, name, None)
        with pytest.raises(AttributeError):
            kind.something_new = 1
        for entry in kind.storage.entries if kind.storage else ():
            with pytest.raises(AttributeError):
                entry.page_multiple = 2
            with pytest.raises(AttributeError):
                entry.parts[0].shape = (1,)

    @kinds
    @pytest.mark.parametrize(
        "again", [copy.copy, copy.deepcopy, lambda kind: pickle.loads(pickle.dumps(kind)), replace]
    )
    def test_copies_are_equal_and_hash_the_same(self, kind, again):
        other = again(kind)
        assert other == kind
        assert hash(other) == hash(kind)
        assert other.state == kind.state
        assert other.storage == kind.storage
        assert {kind: 1}[other] == 1

    def test_kinds_that_differ_are_not_equal(self):
        assert len(set(KINDS.values())) == len(KINDS)
        full = KINDS["full"]
        assert replace(full, v_dim=64) != full
        window = WindowAttention(kv_heads=8, k_dim=192, v_dim=128, window=5)
        assert window != full
        assert csa(unaccepted=2) != csa()

    def test_short_names_of_dtypes_make_equal_kinds(self):
        sizes = {"kv_heads": 1, "k_dim": 1, "v_dim": 1}
        assert FullAttention(**sizes, dtype="bf16") == FullAttention(**sizes, dtype=torch.bfloat16)

    def test_lists_given_to_entries_are_copied(self):
        parts = [TensorSpec("a", [2, 3], "uint8")]
        entry = Entry("e", parts)
        parts.append(TensorSpec("b", (9,), "uint8"))
        assert entry.num_bytes == 6
        assert hash(entry) == hash(Entry("e", (TensorSpec("a", (2, 3), "uint8"),)))


# As anybody would write it: without postponed annotations, so that types of fields are types.
@dataclass(frozen=True, kw_only=True)
class CrossAttention(Kind):
    """Keys and values of a text that is read once: a state."""

    heads: int
    tokens: int

    @property
    def state(self):
        return (TensorSpec("cross", (self.tokens, self.heads), "bf16"),)

    def shard(self, ranks):
        return replace(self, heads=self.heads // ranks)


class TestKept:
    def test_a_checkpoint_keeps_everything_by_default(self):
        assert TensorSpec("x", (3, 2), "bf16").checkpoint_bytes == 12
        assert TensorSpec("x", (), "float32").checkpoint_bytes == 4

    def test_or_the_last_cells(self):
        for kept in range(4):
            assert TensorSpec("x", (3, 2), "bf16", kept=kept).checkpoint_bytes == kept * 2 * 2
        assert TensorSpec("x", (), "float32", kept=0).checkpoint_bytes == 0


class TestOwnKinds:
    def test_a_kind_of_ones_own(self):
        """`Kind` is public, and errors of `from_hf` send people to describe layers themselves."""
        layout = Layout([CrossAttention(heads=4, tokens=10)])
        assert layout.state_group.state_bytes == 4 * 10 * 2
        assert layout.shard(2).state_group.state_bytes == 2 * 10 * 2

    def test_what_is_kept_is_computed_once(self):
        """Many layers of a model are one value; equality, hash and copies are those of its fields."""
        for kind in (csa(), FullAttention(kv_heads=1, k_dim=2, v_dim=3)):
            fresh = replace(kind)
            assert kind.storage is kind.storage
            assert kind.state is kind.state
            assert kind == fresh
            assert hash(kind) == hash(fresh)
            with pytest.raises(AttributeError):
                kind.storage = None
        assert csa().state[0].name == "window"

    def test_sizes_of_ones_own_kind_are_checked(self):
        with pytest.raises(ConfigError, match="tokens"):
            CrossAttention(heads=4, tokens=0)

    @pytest.mark.parametrize("kind", [Kind, RecurrentKind])
    def test_what_has_no_shard_cannot_be_made(self, kind):
        with pytest.raises(TypeError):
            kind()


class TestSharding:
    """One layer at a time; whole models are in test_layout_groups.py."""

    @pytest.mark.parametrize(
        ("heads", "ranks", "expected"),
        [(8, 1, 8), (8, 2, 4), (8, 8, 1), (8, 16, 1), (2, 8, 1), (6, 3, 2), (1, 7, 1)],
    )
    def test_kv_heads_are_divided_or_repeated(self, heads, ranks, expected):
        full = FullAttention(kv_heads=heads, k_dim=3, v_dim=5, dtype="fp8").shard(ranks)
        assert full == FullAttention(kv_heads=expected, k_dim=3, v_dim=5, dtype="fp8")
        window = WindowAttention(kv_heads=heads, k_dim=3, v_dim=5, window=7, sink_tokens=2).shard(ranks)
        assert window == WindowAttention(kv_heads=expected, k_dim=3, v_dim=5, window=7, sink_tokens=2)

    @pytest.mark.parametrize(("heads", "ranks"), [(8, 3), (3, 2), (8, 12), (6, 4), (3, 8)])
    def test_kv_heads_that_neither_divide_nor_repeat(self, heads, ranks):
        with pytest.raises(ConfigError, match=rf"^{heads} KV heads can be neither divided among {ranks} "):
            FullAttention(kv_heads=heads, k_dim=3, v_dim=5).shard(ranks)

    @pytest.mark.parametrize("name", ["latent", "latent, indexed", "shared", "ring", "csa", "hca"])
    @pytest.mark.parametrize("ranks", [1, 2, 3, 8, 1000])
    def test_what_all_heads_share_is_whole_on_every_rank(self, name, ranks):
        assert KINDS[name].shard(ranks) == KINDS[name]

    @pytest.mark.parametrize(
        "name", ["gated delta", "kimi delta", "mamba 1", "mamba 2", "short conv", "lightning"]
    )
    @pytest.mark.parametrize("ranks", [1, 2, 4, 8])
    def test_states_of_all_ranks_make_up_the_whole(self, name, ranks):
        kind = KINDS[name]
        part = kind.shard(ranks)
        assert {name: size * ranks for name, size in state_bytes(part).items()} == state_bytes(kind)

    @pytest.mark.parametrize(
        "name", ["gated delta", "kimi delta", "mamba 1", "mamba 2", "short conv", "lightning"]
    )
    def test_states_are_never_repeated(self, name):
        for ranks in (3, 5, 2**20):
            with pytest.raises(ConfigError, match=f"cannot be divided among {ranks} ranks"):
                KINDS[name].shard(ranks)

    def test_gated_delta_divides_keys_and_values(self):
        kind = KINDS["gated delta"].shard(16)
        assert (kind.key_heads, kind.value_heads) == (1, 2)
        with pytest.raises(ConfigError, match="16 linear heads cannot be divided among 32 ranks"):
            KINDS["gated delta"].shard(32)

    def test_groups_of_mamba_2_are_repeated_when_ranks_outnumber_them(self):
        kind = Mamba2(heads=128, head_dim=64, groups=1, state_dim=128, kernel=4).shard(4)
        assert (kind.heads, kind.groups) == (32, 1)
        # 32 heads' inputs and both projections of the repeated group.
        assert state_bytes(kind) == {"conv": (32 * 64 + 2 * 128) * 3 * 2, "recurrent": 32 * 64 * 128 * 4}
        with pytest.raises(ConfigError, match="3 Mamba groups can be neither divided among 2 ranks"):
            Mamba2(heads=6, head_dim=1, groups=3, state_dim=1, kernel=4).shard(2)
