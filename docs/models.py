"""The page docs/models.md. In: the shipped configs, and figures that others published; out: the page's text.

    python docs/models.py            writes the page
    python docs/models.py --check    exits 1 if the page is not what this makes

Published figures are data here: their source, how they are printed, and which function of a Layout counts the
same thing. Everything else on the page is computed from the layouts."""

from __future__ import annotations

import functools
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from pagoda.layout import Layout, PagedGroup, StateGroup, from_hf, model_config, model_names
from pagoda.layout._numbers import show_bytes, show_tokens

PAGE = Path(__file__).with_suffix(".md")
SHORT = 8192  # tokens of the short request in the first table
NONE = "–"

Measure = Callable[[Layout], Fraction]


# What is counted. Bytes as the layers have to keep them, before they are divided into pages.


def token(layout: Layout) -> Fraction:
    """One more token, in the layers that keep every token."""
    return sum((g.unpadded_token_bytes for g in layout.paged_groups if g.window is None), Fraction(0))


def token_everywhere(layout: Layout) -> Fraction:
    """One token in every layer that has pages, as if windows freed nothing."""
    return sum((group.unpadded_token_bytes for group in layout.paged_groups), Fraction(0))


def request(length: int, requests: int = 1) -> Measure:
    """Keys, values and windows of requests of `length` tokens; without recurrent states and compressors."""

    def measure(layout: Layout) -> Fraction:
        groups = layout.paged_groups
        pages = sum(sum(g.layer_bytes(n, length).values()) for g in groups for n in g.layers)
        windows = state_part("window")(layout) + state_part("window_scales")(layout)
        return Fraction(requests * (pages + windows))

    return measure


def request_everywhere(length: int, requests: int = 1) -> Measure:
    """The same, as if windows freed nothing."""
    return lambda layout: token_everywhere(layout) * length * requests


def group_tokens(name: str, length: int) -> Measure:
    """So many tokens in the layers of one group."""
    return lambda layout: _paged(layout, name).unpadded_token_bytes * length


def entry(group: str, name: str) -> Measure:
    """One entry of one tensor of one layer."""

    def measure(layout: Layout) -> Fraction:
        (found,) = (each for each in _paged(layout, group).storage.entries if each.name == name)
        return Fraction(found.num_bytes)

    return measure


def _paged(layout: Layout, name: str) -> PagedGroup:
    (group,) = (group for group in layout.paged_groups if group.name == name)
    return group


def state(layout: Layout) -> Fraction:
    """All states of a request."""
    return Fraction(layout.state_group.state_bytes if layout.state_group else 0)


def state_part(name: str) -> Measure:
    """One part of a request's states, in all layers."""

    def measure(layout: Layout) -> Fraction:
        rows = layout.state_group.parts if layout.state_group else ()
        return Fraction(sum(part.num_bytes for parts in rows for part in parts if part.name == name))

    return measure


def saved(layout: Layout) -> Fraction:
    """How much less a token takes than if every layer were as those of the one paged group."""
    (group,) = layout.paged_groups
    return 1 - Fraction(len(group.layers), len(layout.layers))


# Published figures


@dataclass(frozen=True)
class Unit:
    """What a figure is given in: what we call it, and how many bytes it is."""

    name: str
    size: Fraction


B = Unit(" B", Fraction(1))
KB = Unit(" KB", Fraction(1000))
GB = Unit(" GB", Fraction(10**9))
MIB = Unit(" MiB", Fraction(2**20))
GIB = Unit(" GiB", Fraction(2**30))
TIMES = Unit(" ×", Fraction(1))
PERCENT = Unit(" %", Fraction(1, 100))


@dataclass(frozen=True)
class Source:
    """The source of a figure. `address` is empty if there is no stable one. `secondary` says how we know the
    figure if we did not read it there."""

    title: str
    address: str
    secondary: str = ""


INSIGHTS = Source("Insights into DeepSeek-V3, arXiv 2505.09343, Table 1", "https://arxiv.org/abs/2505.09343")
JAMBA = Source("Jamba-1.5, arXiv 2408.12570, Table 1", "https://arxiv.org/abs/2408.12570")
LLAMA = Source(
    "Hugging Face blog, Llama 3.1, inference memory requirements", "https://huggingface.co/blog/llama31"
)
VLLM_V4 = Source(
    "vLLM blog, DeepSeek V4 in vLLM, 2026-04-24",
    "https://vllm.ai/blog/deepseek-v4",
    "read in copies of the post, which have this path.",
)
V4 = Source("DeepSeek-V4, arXiv 2606.19348, introduction", "https://arxiv.org/abs/2606.19348")
FLASH_MLA = Source("FlashMLA, README", "https://github.com/deepseek-ai/FlashMLA")
HF_MEM_60 = Source("hf-mem, issue 60, with a log of vLLM", "https://github.com/alvarobartt/hf-mem/issues/60")
HF_MEM_70 = Source("hf-mem, pull request 70", "https://github.com/alvarobartt/hf-mem/pull/70")
KIMI = Source("Kimi Linear, arXiv 2510.26692, abstract", "https://arxiv.org/abs/2510.26692")
GEMMA = Source(
    "Gemma 3, arXiv 2503.19786, Table 3",
    "https://arxiv.org/abs/2503.19786",
    "quoted by others.",
)
LLAMA_CPP = Source(
    "log of llama.cpp as it starts",
    "",
    "seen in logs that users posted, which have no stable address: hearsay, unless you start llama.cpp. "
    "States of convolutions are in float32 there, so ours are too in these lines.",
)


@dataclass(frozen=True)
class Published:
    """A figure as it is printed elsewhere, and how ours is computed.

    `options` go to from_hf, `changes` into the config before. With `base`, a model and its options, the
    figure is a ratio to that model's. `number` is for figures that are not printed as one number. Of a
    figure that differs, `note` says why, and with the changes `explained_by` ours is the published one.
    """

    model: str
    counted: str
    measure: Measure
    printed: str
    unit: Unit
    source: Source
    options: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    base: tuple[str, Mapping[str, Any]] | None = None
    number: str = ""
    verdict: str = "agrees"
    note: str = ""
    explained_by: Mapping[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> Decimal:
        """The published number, with the digits it is printed with."""
        found = self.number or re.findall(r"\d[\d,]*(?:\.\d+)?", self.printed)[0]
        return Decimal(found.replace(",", ""))

    def ours(self, changes: Mapping[str, Any] | None = None) -> Fraction:
        """The same from our layouts, in the unit of the published one; with `changes` of the config."""
        measured = self.measure(layout_of(self.model, self.options, {**self.changes, **(changes or {})}))
        if self.base is not None:
            measured /= self.measure(layout_of(*self.base))
        return measured / self.unit.size


def layout_of(name: str, options: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Layout:
    """The layout of a shipped model; `changes` replace fields of its config, of the part about text if it has
    one."""
    config = model_config(name)
    config.get("text_config", config).update(changes or {})
    return from_hf(config, **options)


BF16 = {"kv_dtype": "bf16"}
FP16 = {"kv_dtype": "fp16"}
BF16_KEYS = {"kv_dtype": "bf16", "index_dtype": "bf16"}
FP8_LATENT = {"kv_dtype": "fp8_ds_mla", "index_dtype": "fp8"}
FP8_ENTRIES = {"kv_dtype": "fp8", "index_dtype": "fp4"}
FLOAT32_CONV = {"dtype": "float32"}
OLD_HEADS = {"num_key_value_heads": 16}
OLD_405B = "exactly twice ours: made with the 16 KV heads of the first upload; the config has 8 now"


def _llama(model: str, thousand: str, sixteen: str, hundred: str, **more: Any) -> list[Published]:
    """A line of the blog's table: its 1k is 1,024 tokens, its 16k and 128k are thousands, its GB are GiB."""
    lengths = {1_024: thousand, 16_000: sixteen, 128_000: hundred}
    return [
        Published(model, f"{length:,} tokens", request(length), printed, GIB, LLAMA, FP16, **more)
        for length, printed in lengths.items()
    ]


def _jamba(model: str, printed: str, **more: Any) -> Published:
    """A line of Jamba-1.5's table: 256K tokens, 16 bits, GB that are GiB, states not counted."""
    return Published(model, "262,144 tokens", request(262_144), printed, GIB, JAMBA, BF16, **more)


PUBLISHED: tuple[Published, ...] = (
    Published("deepseek-v3", "one token", token, "70.272 KB", KB, INSIGHTS, BF16),
    Published("qwen2.5-72b", "one token", token, "327.680 KB", KB, INSIGHTS, BF16),
    Published("llama-3.1-405b", "one token", token, "516.096 KB", KB, INSIGHTS, BF16),
    _jamba("jamba-1.5-mini", "4GB", note="without the states"),
    _jamba("llama-3.1-8b", "32GB"),
    _jamba("llama-3.1-70b", "80GB"),
    _jamba("llama-3.1-405b", "252GB", verdict="differs", note=OLD_405B, explained_by=OLD_HEADS),
    _jamba(
        "mistral-7b-v0.1",
        "32GB",
        verdict="differs",
        note="the published one leaves out the window of 4,096 tokens; without it ours is the same",
        explained_by={"sliding_window": None},
    ),
    *_llama("llama-3.1-8b", "0.125 GB", "1.95 GB", "15.62 GB"),
    *_llama("llama-3.1-70b", "0.313 GB", "4.88 GB", "39.06 GB"),
    *_llama(
        "llama-3.1-405b",
        "0.984 GB",
        "15.38 GB",
        "123.05 GB",
        verdict="differs",
        note=OLD_405B,
        explained_by=OLD_HEADS,
    ),
    Published(
        "deepseek-v4-pro",
        "1,048,576 tokens",
        request(2**20),
        "9.62 GiB",
        GIB,
        VLLM_V4,
        BF16_KEYS,
        note="with the windows, without the compressors' rows",
    ),
    Published(
        "deepseek-v3.2",
        "1,048,576 tokens",
        request(2**20),
        "83.9 GiB",
        GIB,
        VLLM_V4,
        BF16_KEYS,
        note="published for a stack like V3.2's",
    ),
    Published(
        "deepseek-v3.2",
        "1,048,576 tokens, to DeepSeek-V4-Pro",
        request(2**20),
        "8.7x",
        TIMES,
        VLLM_V4,
        BF16_KEYS,
        base=("deepseek-v4-pro", BF16_KEYS),
    ),
    Published(
        "deepseek-v4-pro",
        "1,048,576 tokens, to DeepSeek-V3.2",
        request(2**20),
        "10%",
        PERCENT,
        V4,
        FP8_ENTRIES,
        base=("deepseek-v3.2", FP8_LATENT),
        note="with indexer keys in fp4; with fp8 it would not",
    ),
    Published(
        "deepseek-v4-flash",
        "1,048,576 tokens, to DeepSeek-V3.2",
        request(2**20),
        "7%",
        PERCENT,
        V4,
        FP8_ENTRIES,
        base=("deepseek-v3.2", FP8_LATENT),
        note="with indexer keys in fp4; with fp8 it would not",
    ),
    Published(
        "deepseek-v3.2",
        "one token in one layer, without its indexer key",
        entry("latent", "latent"),
        "656 Bytes",
        B,
        FLASH_MLA,
        FP8_LATENT,
    ),
    Published(
        "gpt-oss-120b",
        "one token, full layers only",
        token,
        "36864",
        B,
        HF_MEM_60,
        BF16,
        note="what hf-mem counted then",
    ),
    Published(
        "gpt-oss-120b",
        "one token, windows unused",
        token_everywhere,
        "73,728 bytes/token",
        B,
        HF_MEM_60,
        BF16,
        note="what vLLM took",
    ),
    Published(
        "gpt-oss-120b",
        "78,384 tokens, windows unused",
        request_everywhere(78_384),
        "5.38 GiB",
        GIB,
        HF_MEM_60,
        BF16,
        note="vLLM's memory and the tokens it held",
    ),
    Published(
        "gpt-oss-20b", "32 requests of 8,192 tokens", request(8_192, 32), "6.09 GiB", GIB, HF_MEM_70, BF16
    ),
    Published(
        "gpt-oss-20b",
        "the same, windows unused",
        request_everywhere(8_192, 32),
        "12.00 GiB",
        GIB,
        HF_MEM_70,
        BF16,
    ),
    Published(
        "gpt-oss-20b",
        "131,072 tokens in the full layers",
        group_tokens("full", 131_072),
        "3072.00 MiB",
        MIB,
        LLAMA_CPP,
        FP16,
    ),
    Published(
        "gpt-oss-20b",
        "768 tokens in the window layers",
        group_tokens("window", 768),
        "18.00 MiB",
        MIB,
        LLAMA_CPP,
        FP16,
        note="the 768 are llama.cpp's: a window, a batch, padding",
    ),
    Published(
        "qwen3-next-80b-a3b",
        "state of a request",
        state,
        "75.38 MiB",
        MIB,
        LLAMA_CPP,
        changes=FLOAT32_CONV,
    ),
    Published(
        "qwen3-next-80b-a3b",
        "its recurrent part",
        state_part("recurrent"),
        "72.00 MiB",
        MIB,
        LLAMA_CPP,
        changes=FLOAT32_CONV,
    ),
    Published(
        "qwen3-next-80b-a3b",
        "its convolutions",
        state_part("conv"),
        "3.38 MiB",
        MIB,
        LLAMA_CPP,
        changes=FLOAT32_CONV,
    ),
    Published(
        "qwen3.5-27b",
        "262,144 tokens",
        request(262_144),
        "16384.00 MiB",
        MIB,
        LLAMA_CPP,
        FP16,
        note="logged for later models of the same shape",
    ),
    Published(
        "qwen3.5-27b",
        "state of a request",
        state,
        "149.62 MiB",
        MIB,
        LLAMA_CPP,
        changes=FLOAT32_CONV,
        note="as above",
    ),
    Published(
        "qwen3.5-27b",
        "its recurrent part",
        state_part("recurrent"),
        "144.00 MiB",
        MIB,
        LLAMA_CPP,
        changes=FLOAT32_CONV,
        note="as above",
    ),
    Published(
        "qwen3.5-27b",
        "its convolutions",
        state_part("conv"),
        "5.62 MiB",
        MIB,
        LLAMA_CPP,
        changes=FLOAT32_CONV,
        note="as above",
    ),
    Published(
        "kimi-linear-48b-a3b",
        "one token, less than with latent attention in every layer",
        saved,
        "up to 75%",
        PERCENT,
        KIMI,
        verdict="differs",
        note="the published one is that of three linear layers to one latent; here 7 of 27 are latent",
        explained_by={"num_hidden_layers": 28},
    ),
    Published(
        "gemma-3-27b",
        "32,768 tokens",
        request(32_768),
        "72.7 GB with cache, 54.0 GB without",
        GB,
        GEMMA,
        BF16,
        number="18.7",
        verdict="not explained",
        note="they are 18.7 GB apart, and even all tokens in all layers, windows unused, would be 16.6 GB",
    ),
)


# What the configs leave out, and how sure their values are


def leaves_out(name: str, *fields: str) -> bool:
    """Whether a config has none of these fields."""
    config = model_config(name)
    inner = config.get("text_config", {})
    return not any(config.get(each) or inner.get(each) for each in fields)


CAVEATS: Mapping[str, str] = {
    "deepseek-v3.2": "the number of layers that predict further tokens, which this page does not count.",
    "deepseek-v4-flash": "later revisions list more layers that predict further tokens.",
    "deepseek-v4-pro": "later revisions may list more such layers too.",
    "falcon-h1-34b": "its dtype.",
    "gemma-3n-e4b": "its dtype.",
    "jamba-1.5-mini": "its dtype, which is that of Jamba-v0.1.",
    "lfm2-1.2b": "how its config spells the list of layers today; the layers are the same in both spellings.",
    "llama-3.1-405b": "its dtype and its context. The first upload had 16 KV heads, today's has 8.",
    "llama-3.1-70b": "its dtype and its context.",
    "llama-3.1-8b": "its dtype.",
    "minimax-text-01": "its KV heads, which are those of its model card and of MiniMax-M1's config.",
    "qwen2.5-72b": "the file is the Instruct model's; the base model's context is said to be longer.",
    "zamba2-7b": "the names of its fields, which are those of the 2.7B's config; the width of a Mamba head, "
    "which follows from the shapes of its weights; which of the last layers have attention, from one source.",
}


# The page


@functools.cache
def page() -> str:
    """The text of docs/models.md. Made once: nothing that it says changes meanwhile."""
    parts = (_opening(), _models(), _published(), _origins(), _command())
    return "\n\n".join(_fill(block) for part in parts for block in part.strip().split("\n\n")) + "\n"


def _fill(block: str) -> str:
    """A paragraph or a list in lines of one width; tables, headings and code as they are."""
    if block.startswith(("|", "#", "```")):
        return block
    wrapper = textwrap.TextWrapper(width=120, break_long_words=False, break_on_hyphens=False)
    lines = []
    for item in re.split(r"\n(?=- )", block):
        wrapper.subsequent_indent = "  " if item.startswith("- ") else ""
        lines.append(wrapper.fill(" ".join(item.split())))
    return "\n".join(lines)


def _opening() -> str:
    return """
# Models

What each model that comes with Pagoda stores, and published figures beside ours. `docs/models.py` generates
this page from the layouts, and a test fails if the page differs.
"""


def _models() -> str:
    layouts = {name: layout_of(name, {}) for name in model_names()}
    rows = [_model_row(name, layout) for name, layout in layouts.items()]
    sizes = {group.name: group.page_tokens for each in layouts.values() for group in each.paged_groups}
    pages = ", ".join(f"{name} {sizes[name]}" for name in sorted(sizes))
    padded = [
        f"{_id(name)} {_number(layout.token_bytes)} B, {_number(token(layout), 2)} B without padding"
        for name, layout in layouts.items()
        if layout.token_bytes != token(layout)
    ]
    head = (
        "model",
        "groups × layers",
        "one token, B",
        f"request of {show_tokens(SHORT)}",
        "request of its context",
        "state per request",
        "checkpoint",
        "resume_step, tokens",
    )
    return f"""
## What they store

One rank; the model's own dtype, or bfloat16 if its config has none; recurrent states in float32; entries of
DeepSeek-V4 and indexer keys in fp8. KiB, MiB and GiB are powers of 1,024; 8k is 8,192 tokens.

- Bytes per token count the layers that keep every token; windows and states do not grow with the length.
- A request is the most that it holds while it grows token by token: whole pages, and its state.
- A checkpoint is what has to be kept of a state to resume from it.

{_table(head, rows)}

Tokens per page: {pages}. A window group is listed with its window in tokens. Pages of compressed groups are
padded, and a token counts its share of the padding: {"; ".join(padded)}.
"""


def _model_row(name: str, layout: Layout) -> tuple[str, ...]:
    context = layout.context
    states = layout.state_group
    grows = any(group.window is None for group in layout.paged_groups)
    return (
        f"{_id(name)} (`{name}`)",
        ", ".join(_group(group) for group in layout.groups),
        _number(layout.token_bytes) if grows else "0",
        _size(layout.request_bytes(SHORT)) if context is None or context >= SHORT else "beyond its context",
        f"{show_tokens(context)}: {_size(layout.request_bytes(context))}" if context else NONE,
        _size(states.state_bytes) if states else NONE,
        _size(states.checkpoint_bytes) if states else NONE,
        f"{layout.resume_step:,}",
    )


def _group(group: PagedGroup | StateGroup) -> str:
    window = group.window if isinstance(group, PagedGroup) else None
    return f"{group.name}{f' of {window:,}' if window else ''} × {len(group.layers)}"


def _published() -> str:
    head = ("model", "counted", "stored as", "published", "ours", "", "source")
    secondary = list(dict.fromkeys(each.source for each in PUBLISHED if each.source.secondary))
    marks = dict(zip(secondary, (" ¹", " ²", " ³"), strict=False))
    notes = "\n\n".join(f"{mark.strip()} Secondary: {source.secondary}" for source, mark in marks.items())
    rows = [
        (
            each.model,
            each.counted,
            _dtypes(each),
            each.printed,
            _ours(each),
            f"{each.verdict}: {each.note}" if each.note else each.verdict,
            _link(each.source) + marks.get(each.source, ""),
        )
        for each in PUBLISHED
    ]
    agree = sum(each.verdict == "agrees" for each in PUBLISHED)
    differ = sum(each.verdict == "differs" for each in PUBLISHED)
    return f"""
## Published figures beside ours

Our figure is what the layers have to keep, before it is divided into pages, in the unit that the published
figure means: some print GB and count GiB. The two agree if ours is within half a unit of the last digit
printed. Of {len(PUBLISHED)} figures {agree} agree. {differ} differ for the reason given; counted in that
way, ours equals the published one to its last digit. {len(PUBLISHED) - agree - differ} we cannot explain.

{_table(head, rows)}

{notes}
"""


def _link(source: Source) -> str:
    return f"[{source.title}]({source.address})" if source.address else source.title


def _ours(figure: Published) -> str:
    """Ours with two digits more than the published one, so that it shows how near they are."""
    places = -int(figure.value.as_tuple().exponent)
    return _number(figure.ours(), places + 2) + figure.unit.name


def _dtypes(figure: Published) -> str:
    """What from_hf was told, or what follows from the config."""
    if figure.changes == FLOAT32_CONV:
        return "float32"
    stored = str(figure.options.get("kv_dtype", "own"))
    index = figure.options.get("index_dtype")
    return f"{stored}, indexer keys {index}" if index else stored


def _origins() -> str:
    names = model_names()
    no_dtype = [name for name in names if leaves_out(name, "dtype", "torch_dtype")]
    no_context = [name for name in names if layout_of(name, {}).context is None]
    caveats = "\n".join(f"- `{name}`: {CAVEATS[name]}" for name in sorted(CAVEATS))
    return f"""
## Where the configs come from

`src/pagoda/layout/models` has {len(names)} files. Each is the model's config.json on Hugging Face, reduced
to the fields that decide what is stored, with the original names and nesting. Values were read in published
copies of those files, or where they are quoted. A test loads all of them with transformers' config classes
and compares the layers, except for MiniMax-Text-01, whose config needs code of its own.

What they leave out:

- A dtype: {_code(no_dtype)}. We assume bfloat16.
- A context: {_code(no_context)}. The table shows no request of their context.
- The pattern of layers of `gemma-3-27b`, five windows and then a full layer: we take its family's default.
- The dtype of recurrent states: we assume float32, since they accumulate rounding errors.
- Layers that predict further tokens: a config may count them, this page does not.
- Everything that stores nothing per token: experts, vocabularies, positions, encoders for images and sound.

What could not be verified, or differs in other revisions:

{caveats}
"""


def _command() -> str:
    return """
## Making this page

```
python docs/models.py            # writes it
python docs/models.py --check    # exits 1 if it differs from what the code generates
```

To add a model, add its config to `src/pagoda/layout/models`; to add a figure, a `Published` to
`docs/models.py`.
"""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = tuple(head)
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def _id(name: str) -> str:
    return str(model_config(name)["_name_or_path"])


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _size(num_bytes: int) -> str:
    """Bytes as people read them; KiB between the two units that Pagoda's messages use."""
    if 2**10 <= num_bytes < 2**20:
        return f"{_number(Fraction(num_bytes, 2**10), 2)} KiB"
    return show_bytes(num_bytes)


def _number(value: Fraction, places: int = 1) -> str:
    """A number with at most so many digits behind the point, halves rounded to even."""
    shown = f"{Decimal(round(value * 10**places)).scaleb(-places):,f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def main(arguments: list[str]) -> int:
    """Write the page, or check it. Returns the exit status."""
    if arguments not in ([], ["--check"]):
        print("usage: python docs/models.py [--check]", file=sys.stderr)
        return 2
    made = page().encode()
    if not arguments:
        PAGE.write_bytes(made)
        return 0
    if not PAGE.exists() or PAGE.read_bytes() != made:
        print(f"{PAGE} is not what {Path(__file__).name} makes: run it without --check", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
