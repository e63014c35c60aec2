"""Attention by the work list in plain torch: tasks, parts, and a merge by log-sum-exp, in float64.

In: a call; out: its outputs. It reads what a kernel reads, and asserts that the list has everything once:
every query is written by one task or merged from all of its parts, and every part has one writer.
"""

import itertools
import math
from typing import NamedTuple

import torch

from pagoda._native import DECODE_QUERIES
from pagoda.attention._call import Call

__all__ = ["attend"]

TILE = 64  # queries of an extend row that are computed together


class Partial(NamedTuple):
    """Softmax over some keys: [queries, heads] and [queries, heads, v_dim]; −inf and 0 without keys."""

    lse: torch.Tensor
    out: torch.Tensor


def attend(call: Call) -> None:
    """Compute a call; padding gives 0."""
    work = call.view.work
    assert work.has_list
    splits, runs, tasks = work.splits.tolist(), work.runs.tolist(), work.tasks.tolist()
    starts, lengths = call.batch.query_start_loc.tolist(), call.batch.lengths.tolist()
    counts = [end - begin for begin, end in itertools.pairwise(starts)]
    room: dict[int, Partial] = {}
    written: set[int] = set()
    call.out.zero_()

    def keep(row: int, part: int, first: int, partial: Partial) -> None:
        """Write the outputs of a row's queries from `first` on, or put them into their parts."""
        for number in range(len(partial.lse)):
            token = starts[row] + first + number
            one = Partial(*(each[number] for each in partial))
            if part < 0:
                assert token not in written
                written.add(token)
                call.out[token] = with_sinks(call, one).to(call.out.dtype)
            else:
                assert part + number not in room
                assert part + number < work.num_parts
                room[part + number] = one

    covered = [0] * len(counts)
    assert runs[0] == 0
    for begin, end in itertools.pairwise(runs):  # a program each
        for first_key, end_key, row, part, first_token, count, length, several in tasks[begin:end]:
            assert (first_token, count, length) == (starts[row], counts[row], lengths[row])
            assert 0 < count <= DECODE_QUERIES
            assert first_key < end_key
            num_parts = splits[row][0]
            assert several == (num_parts if num_parts > 1 and covered[row] == 0 else 0)
            covered[row] += 1
            keep(row, part, 0, over_keys(call, row, 0, count, first_key, end_key))
    for row, (num_parts, first_part) in enumerate(splits):
        count = counts[row]
        if count <= DECODE_QUERIES:
            assert covered[row] == num_parts
        else:
            assert 1 <= num_parts <= work.extend_parts
            for first in range(0, count, TILE):
                tile = min(TILE, count - first)
                begin, end = reach(call, row, first, tile)
                for p in range(num_parts):
                    cut = [begin + (end - begin) * at // num_parts for at in (p, p + 1)]
                    part = -1 if first_part < 0 else first_part + p * count + first
                    keep(row, part, first, over_keys(call, row, first, tile, *cut))
        for number in range(count if first_part >= 0 else 0):
            token = starts[row] + number
            assert token not in written
            written.add(token)
            parts = [room.pop(first_part + p * count + number) for p in range(num_parts)]
            lse, outs = (torch.stack(each) for each in zip(*parts, strict=True))
            total = lse.logsumexp(0)
            weights = torch.where(lse == -math.inf, 0, torch.exp(lse - total))
            merged = Partial(total, (weights[..., None] * outs).sum(0))
            call.out[token] = with_sinks(call, merged).to(call.out.dtype)
    assert not room
    assert written == set(range(starts[-1]))


def reach(call: Call, row: int, first: int, count: int) -> tuple[int, int]:
    """The keys that some queries of a row may read."""
    length = int(call.batch.lengths[row])
    num_queries = int(call.batch.query_start_loc[row + 1] - call.batch.query_start_loc[row])
    at = length - num_queries + first
    return max(0, at - call.window + 1) if call.window else 0, at + count


def over_keys(call: Call, row: int, first: int, count: int, begin: int, end: int) -> Partial:
    """Attention of `count` queries of a row over the keys from `begin` to `end`."""
    page_tokens, heads, kv_heads = call.view.page_tokens, call.queries.shape[1], call.keys.shape[1]
    there = torch.arange(begin, end, device=call.queries.device)
    pages = call.view.page_table[row, there // page_tokens].long()
    slots = torch.where(pages > 0, pages * page_tokens + there % page_tokens, 0)
    own = reach(call, row, first, 1)[1] - 1 + torch.arange(count, device=there.device)[:, None]
    is_read = (there <= own) & (pages > 0)
    if call.window:
        is_read &= there > own - call.window
    seen = is_read.any(0)
    k, v = (
        None if buffer is None else _rows(buffer, slots, seen) * scale
        for buffer, scale in ((call.keys, call.k_scale), (call.values, call.v_scale))
    )
    assert k is not None
    v = k[..., : call.out.shape[2]] if v is None else v
    start = int(call.batch.query_start_loc[row]) + first
    q = call.queries[start : start + count].double()
    k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
    logits = torch.einsum("qhd,nhd->qhn", q, k) * call.scale
    if call.softcap:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    logits = logits.masked_fill(~is_read[:, None], -math.inf)
    lse = logits.logsumexp(2) if end > begin else logits.new_full((count, heads), -math.inf)
    weights = torch.where(is_read[:, None], torch.exp(logits - lse[..., None]), 0)
    return Partial(lse, torch.einsum("qhn,nhd->qhd", weights, v))


def _rows(buffer: torch.Tensor, slots: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """[n, kv_heads, dim] float64; 0 where no query reads."""
    shown = buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer
    found = shown[slots].view(buffer.dtype).double()
    return found.masked_fill_(~seen[:, None, None], 0)


def with_sinks(call: Call, one: Partial) -> torch.Tensor:
    """[heads, v_dim]: sinks count in the denominator."""
    if call.sinks is None:
        return one.out
    return one.out * torch.sigmoid(one.lse - call.sinks.double())[:, None]
