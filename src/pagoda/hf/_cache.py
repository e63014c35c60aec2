"""A `model.generate` that computes each prefix once. In: calls of `generate`; out: the same answers.

generate(**inputs) ─► read_call ─┬─► Memory.find ─► RecordingCache ─► transformers ─► Memory.keep ─► output
                                 └─ a reason ─► transformers, without the cache
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers import GenerationMixin, PreTrainedModel

from pagoda.errors import ArgumentError, ConfigError, PagodaError
from pagoda.hf._arguments import Prompts, Reason, read_call
from pagoda.hf._families import served_layout
from pagoda.hf._identity import Look, settings
from pagoda.hf._memory import Memory, Tokens
from pagoda.hf._recording import MORE, RecordingCache, after_forward, before_forward
from pagoda.layout import Layout
from pagoda.layout._numbers import counted, num_bytes, show_bytes
from pagoda.tree import draw_text

__all__ = ["Call", "PrefixCache", "Stats", "cached", "disable", "enable"]

# At most so many reasons are counted separately, each truncated to so many letters: some quote the caller's
# arguments, and servers run for a long time.
MOST_REASONS, MOST_LETTERS = 50, 200
OTHER_REASONS: Reason = "other reasons"


@dataclass(frozen=True)
class Call:
    """One call of `generate`: `hit_tokens` of its `prompt_tokens` came from the cache. `reason` is why it was
    not served, if it was not."""

    prompt_tokens: int
    hit_tokens: int
    reason: Reason | None = None


@dataclass(frozen=True)
class Stats:
    """Statistics of a cache. `str` formats them for people."""

    calls: int
    served: int  # calls that used the cache
    prompt_tokens: int  # of served calls
    hit_tokens: int  # prompt tokens that came from the cache
    stored_tokens: int  # tokens written into the pools so far
    cached_tokens: int  # tokens in the cache now
    evicted_pages: int
    memory_bytes: int  # as given to `enable`
    pool_bytes: int  # bytes of the pools, at most memory_bytes
    working_bytes: int  # the largest working copy of a call, in addition to the pools
    # By reason; after 50 different ones, "other reasons".
    refused: Mapping[Reason, int]  # calls that were not served: calls = served + the sum of these
    not_stored: Mapping[Reason, int]  # sequences of served calls that were not stored

    def __str__(self) -> str:
        share = f" ({self.hit_tokens / self.prompt_tokens:.0%})" if self.prompt_tokens else ""
        lines = [
            f"{counted(self.calls, 'call')}, {self.served:,} served",
            f"{self.hit_tokens:,} of {counted(self.prompt_tokens, 'prompt token')} came from the cache"
            + share,
            f"{counted(self.cached_tokens, 'token')} cached; {self.stored_tokens:,} stored so far, "
            f"{counted(self.evicted_pages, 'page')} evicted",
            f"pools of {show_bytes(self.pool_bytes)} in {show_bytes(self.memory_bytes)}; "
            f"largest working copy {show_bytes(self.working_bytes)}",
        ]
        lines += [f"{count:,} not served: {reason}" for reason, count in sorted(self.refused.items())]
        lines += [f"{count:,} not stored: {reason}" for reason, count in sorted(self.not_stored.items())]
        return "\n".join(lines)


class PrefixCache:
    """The prefix cache of one model, made by `enable`.

    Several threads may call the model. Keys and values are in pools on the model's device; when the model
    changes its device or dtype, new, empty pools replace them."""

    def __init__(self, model: PreTrainedModel, memory: int | str) -> None:
        self._model = model
        if isinstance(memory, bool):
            raise ConfigError(f"memory: give bytes, or text such as '4GiB', not {memory}")
        self._memory_bytes = num_bytes(memory)
        self._lock = threading.RLock()  # guards the counts and `_memory`
        self._last = threading.local()
        self._counts: Counter[str] = Counter()
        self._refused: Counter[Reason] = Counter()
        self._not_stored: Counter[Reason] = Counter()
        self._working_bytes = 0
        self._layout: Layout | Reason = ""
        self._memory: Memory | None = None
        self._made_for: tuple[Any, ...] | None = None  # device, dtype, config settings
        self._is_closed = False
        self._renew()

    # ── looking at it ───────────────────────────────────────────────────────────────────────────────

    def stats(self) -> Stats:
        """Return counts of calls, tokens and bytes, and why calls were not served."""
        with self._lock:
            memory, counts = self._memory, self._counts
            held = None if memory is None else memory.manager.stats()
            return Stats(
                counts["calls"],
                counts["served"],
                counts["prompt_tokens"],
                counts["hit_tokens"],
                counts["stored_tokens"],
                0 if held is None else held.cached_tokens,
                0 if held is None else held.evicted_pages,
                self._memory_bytes,
                0 if memory is None else memory.pool_bytes,
                self._working_bytes,
                MappingProxyType(dict(self._refused)),
                MappingProxyType(dict(self._not_stored)),
            )

    def last(self) -> Call | None:
        """Return the call of `generate` that ended last in this thread, or None before the first one."""
        found: Call | None = getattr(self._last, "call", None)
        return found

    def tree(
        self, decode: Any = None, *, max_nodes: int = 200, width: int = 100, colour: bool = False
    ) -> str:
        """Draw the cached prefixes, one line per node. `decode` is a tokenizer or its `decode` method.

        Errors: ArgumentError."""
        memory = self._memory
        if memory is None:
            return f"nothing is cached: {self._layout}"
        return draw_text(
            memory.manager.tree, tokenizer=decode, max_nodes=max_nodes, width=width, colour=colour
        )

    def clear(self) -> None:
        """Empty the cache. Counts in `stats` are kept."""
        with self._lock:
            if self._memory is not None:
                self._memory.clear()

    def check(self) -> None:
        """Verify the manager and the pools, page by page. Errors: InvariantError."""
        if self._memory is not None:
            self._memory.check()

    def __repr__(self) -> str:
        stats = self.stats()
        return f"PrefixCache({stats.cached_tokens:,} tokens in {show_bytes(stats.memory_bytes)})"

    # ── a call ──────────────────────────────────────────────────────────────────────────────────────

    def generate(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], namespace: str
    ) -> Any:
        """Run `plain(*args, **kwargs)` with cached prefixes filled in. Errors: those of `plain`."""
        prompts = self._reason() or read_call(self._model, args, kwargs)
        if isinstance(prompts, str):
            return self._pass_on(prompts, plain, args, kwargs)
        memory = self._memory
        if memory is None:  # another thread moved the model
            return self._pass_on("the model is being moved", plain, args, kwargs)
        try:
            look = Look(self._model)
        except (RuntimeError, TypeError, ValueError):  # tensors without memory of their own
            return self._pass_on("weights of an unknown kind", plain, args, kwargs)
        if look.drops:
            return self._pass_on("a part of the model is in training mode", plain, args, kwargs)
        space = "".join((namespace, "@", look.identity)).encode(errors="surrogatepass")
        cache, hit_tokens = self._begin(memory, prompts, space)
        if isinstance(cache, str):
            return self._pass_on(cache, plain, args, kwargs)
        # Not referenced while the model runs: if it is moved or disabled, its pools are freed at once.
        pools = weakref.ref(memory)
        del memory
        cache.on_prefill = lambda: self._keep_prompts(pools(), prompts, cache, space)
        call = Call(sum(row.size for row in prompts.tokens), hit_tokens)
        self._note(call)
        output: Any = None
        try:
            output = plain(*args, **{**kwargs, "past_key_values": cache})
            return output
        finally:
            # Even after an interruption, what all layers have is valid if the weights are unchanged.
            try:
                if look.is_still(self._model):
                    cache.settle()
                    self._keep_all(pools(), prompts, cache, space, output)
                if getattr(output, "past_key_values", None) is cache:
                    cache.trim()
            except Exception as error:
                self._note_loss(error)
            finally:
                cache.close()
                self._last.call = call  # nested calls may have replaced it

    def _begin(self, memory: Memory, prompts: Prompts, space: bytes) -> tuple[RecordingCache | Reason, int]:
        """Return the cache that a call begins with, and the number of its tokens."""
        rows = prompts.ids.repeat_interleave(prompts.copies, dim=0)
        try:
            found = memory.find(prompts.tokens, prompts.pads, prompts.copies, space, MORE)
        except torch.OutOfMemoryError:
            return "no memory for the working copy", 0
        except PagodaError as error:  # the model can run without the cache
            return f"lookup failed: {error}", 0
        config = self._model.config.get_text_config(decoder=True)
        cache = RecordingCache(config, rows, 0 if found is None else found.num_columns)
        if not cache.is_known:
            return "layers of an unknown kind", 0
        if found is None:
            return cache, 0
        for number, (keys, values) in found.layers.items():
            cache.fill(number, keys, values)
        with self._lock:
            self._working_bytes = max(self._working_bytes, found.num_bytes)
        return cache, found.num_tokens

    def _keep_prompts(
        self, memory: Memory | None, prompts: Prompts, cache: RecordingCache, space: bytes
    ) -> None:
        """Store the prompts as soon as they are computed, for other calls, and so that windows can drop
        columns."""
        if memory is None:  # the pools are gone
            cache.is_lost = True
            return
        rows = cache.tokens()[:: prompts.copies, : prompts.length].cpu().numpy()
        for row, tokens, pad in zip(rows, prompts.tokens, prompts.pads, strict=True):
            if not np.array_equal(row[pad:], tokens):  # input_ids were modified during the call
                cache.is_lost = True
                return
        for number, (tokens, pad) in enumerate(zip(prompts.tokens, prompts.pads, strict=True)):
            self._keep(memory, tokens, cache, number * prompts.copies, pad, space)
        step = memory.layout.resume_step
        try:
            cache.forget(min(pad + (prompts.length - pad) // step * step for pad in prompts.pads))
        except torch.OutOfMemoryError:
            cache.is_lost = True

    def _keep_all(
        self, memory: Memory | None, prompts: Prompts, cache: RecordingCache, space: bytes, output: Any
    ) -> None:
        """Store what a call has computed, as far as every layer has it."""
        if memory is None or cache.is_lost:
            return
        rows = cache.tokens().cpu().numpy().astype(np.int32)
        answers = None
        if prompts.is_beams:
            # Only the chosen beams can come again.
            answers = [] if output is None else _sequences(output)
        for number, row in enumerate(rows):
            pad = prompts.pads[min(number // prompts.copies, len(prompts.pads) - 1)]
            if answers is not None and not any(_begins(answer, row) for answer in answers):
                continue
            tokens = _ended(row[pad:], prompts.length - pad, prompts.end_tokens)
            self._keep(memory, tokens, cache, number, pad, space)

    def _keep(
        self, memory: Memory, tokens: Tokens, cache: RecordingCache, row: int, pad: int, space: bytes
    ) -> None:
        def columns(layer: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor] | None:
            found = cache.columns(layer, pad + begin, pad + end)
            return None if found is None else (found[0][row], found[1][row])

        try:
            stored = memory.keep(tokens, columns, space)
        except Exception as error:  # the model's output is valid nevertheless
            self._note_loss(error)
            return
        with self._lock:
            self._counts["stored_tokens"] += stored

    def _note_loss(self, error: Exception) -> None:
        with self._lock:
            _count(self._not_stored, f"{type(error).__name__}: {error}")

    def _pass_on(
        self, reason: Reason, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = Call(0, 0, reason)
        self._note(call)
        try:
            return plain(*args, **kwargs)
        finally:
            self._last.call = call

    def _note(self, call: Call) -> None:
        self._last.call = call
        with self._lock:
            self._counts["calls"] += 1
            if call.reason is not None:
                _count(self._refused, call.reason)
                return
            self._counts["served"] += 1
            self._counts["prompt_tokens"] += call.prompt_tokens
            self._counts["hit_tokens"] += call.hit_tokens

    # ── the model ───────────────────────────────────────────────────────────────────────────────────

    def _reason(self) -> Reason | None:
        """Return why no call can be served now, or None. Follows the model to another device or dtype."""
        model = self._model
        if model.training:
            return "the model is in training mode"
        if torch.is_autocast_enabled(model.device.type):
            return "autocast is on"
        try:
            self._renew()
        except (ConfigError, torch.OutOfMemoryError) as error:
            return f"no pools on the model's device: {error}"
        return self._layout if isinstance(self._layout, str) else None

    def _renew(self) -> None:
        """Make new pools if the model's device, dtype or layout has changed. Errors: ConfigError."""
        model = self._model
        made_for = model.device, model.dtype, settings(model.config)
        with self._lock:
            if self._made_for == made_for or self._is_closed:
                return
            layout, before = served_layout(model), self._made_for
            if before is not None and before[:2] == made_for[:2] and layout == self._layout:
                self._made_for = made_for  # the config has changed, but not the layout
                return
            self._memory, self._made_for, self._layout = None, None, layout
            if not isinstance(layout, str):
                self._memory = Memory(layout, self._memory_bytes, model.device)
            self._made_for = made_for

    def _close(self) -> None:
        """Free the pools, even if this object is still referenced. Counts are kept."""
        with self._lock:
            self._memory, self._layout, self._is_closed = None, "the cache is disabled", True


def _count(counts: Counter[Reason], reason: Reason) -> None:
    reason = reason[:MOST_LETTERS]
    counts[reason if reason in counts or len(counts) < MOST_REASONS else OTHER_REASONS] += 1


def _sequences(output: Any) -> list[Tokens]:
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    return list(sequences.cpu().numpy().astype(np.int32))


def _begins(answer: Tokens, row: Tokens) -> bool:
    return row.size <= answer.size and bool((answer[: row.size] == row).all())


def _ended(tokens: Tokens, prompt: int, end_tokens: frozenset[int]) -> Tokens:
    """Return a sequence up to its end token: shorter sequences of a batch are padded behind it."""
    if not end_tokens:
        return tokens
    ends = np.flatnonzero(np.isin(tokens[prompt:], list(end_tokens)))
    return tokens if ends.size == 0 else tokens[: prompt + int(ends[0]) + 1]


class _Generate:
    """Replaces a model's `generate`. Copies and pickles of the model get the original."""

    def __init__(self, model: PreTrainedModel, cache: PrefixCache) -> None:
        self.model, self.cache = model, cache
        self.plain: Callable[..., Any] = model.generate  # type: ignore[assignment]
        self.own = model.__dict__.get("generate")  # an earlier replacement, to be restored
        functools.update_wrapper(self, self.plain)

    def __call__(self, *args: Any, namespace: str = "", **kwargs: Any) -> Any:
        if not isinstance(namespace, str):
            raise ArgumentError(f"namespace: give text, not {type(namespace).__name__}")
        return self.cache.generate(self.plain, args, kwargs, namespace)

    def __reduce__(self) -> Any:
        return getattr, (self.model, "generate")


def _target(model: Any) -> PreTrainedModel:
    """Return the model whose `generate` runs, inside peft adapters or torch.compile."""
    inner = getattr(model, "_orig_mod", model)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    if not isinstance(inner, PreTrainedModel) or not isinstance(inner, GenerationMixin):
        raise ConfigError(
            f"model: give a transformers model with generate, not {type(model).__name__}: "
            "AutoModelForCausalLM.from_pretrained(…) returns one"
        )
    return inner


def enable(model: Any, memory: int | str = "1GiB") -> PrefixCache:
    """Make every later `model.generate()` reuse the prefixes that earlier ones computed.

    `memory` is the size of the pools on the model's device. In addition, each call needs a working copy, as
    without a cache. `generate` gets one more keyword, `namespace`: two namespaces never share prefixes. Calls
    that cannot be served run the plain `generate`; `stats().refused` counts them by reason. Errors:
    ConfigError if `model` cannot generate or already has a cache, or if `memory` is too small."""
    target = _target(model)
    if isinstance(target.__dict__.get("generate"), _Generate):
        raise ConfigError("model: it already has a cache: call pagoda.hf.disable(model) first")
    cache = PrefixCache(target, memory)
    _unhook(target)
    target.register_forward_pre_hook(before_forward, with_kwargs=True)
    target.register_forward_hook(after_forward, with_kwargs=True)
    target.__dict__["generate"] = _Generate(target, cache)
    return cache


def disable(model: Any) -> None:
    """Restore a model's plain `generate` and free its cache. Errors: ArgumentError if it has no cache."""
    target = _target(model)
    found = target.__dict__.get("generate")
    if not isinstance(found, _Generate):
        raise ArgumentError("model: it has no cache: call pagoda.hf.enable(model) first")
    del target.__dict__["generate"]
    if found.own is not None:
        target.__dict__["generate"] = found.own
    _unhook(target)
    found.cache._close()


def _unhook(model: PreTrainedModel) -> None:
    """Remove our hooks, also those that were copied along with the model."""
    for hooks, with_kwargs, ours in (
        (model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs, before_forward),
        (model._forward_hooks, model._forward_hooks_with_kwargs, after_forward),
    ):
        for key in [key for key, hook in hooks.items() if hook is ours]:
            del hooks[key]
            with_kwargs.pop(key, None)


@contextmanager
def cached(model: Any, memory: int | str = "1GiB") -> Iterator[PrefixCache]:
    """Enable a cache for the duration of a `with` block. Errors: those of `enable`."""
    cache = enable(model, memory)
    try:
        yield cache
    finally:
        disable(model)
