"""Workload generator for prefix-cache benchmarks.  Depends on numpy only.

Every phase is a deterministic function of (seed, scale); it knows nothing about
the implementation under test.  Token arrays are np.int32, slot ranges are
described by their first slot (a sequence owns ``[base, base + n)``; bases are
aligned to 256, so they are page-exact for every page size used here).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

VOCAB = 128_000
SLOT_ALIGN = 256


@dataclass
class Op:
    tokens: np.ndarray
    base: int = 0  # first slot (insert only)
    # Length shared with what is already in the tree at this point, for page_tokens=1
    # (round it down for larger pages); -1 = unknown.  Random tokens can extend a
    # shared prefix by one with probability ~1/VOCAB, so treat it as near-exact.
    expect_hit: int = -1


@dataclass
class Workload:
    build: list[Op] = field(default_factory=list)
    match_hit: list[Op] = field(default_factory=list)
    match_split: list[Op] = field(default_factory=list)
    match_miss: list[Op] = field(default_factory=list)
    cycle: list[tuple[Op, Op]] = field(default_factory=list)  # (prompt, prompt+output)
    chunked: list[Op] = field(default_factory=list)  # growing prefixes of one long prompt
    evict_build: list[Op] = field(default_factory=list)
    evict_steps: list[int] = field(default_factory=list)
    evict_refill: list[Op] = field(default_factory=list)


class _Slots:
    def __init__(self) -> None:
        self.next = SLOT_ALIGN  # slot 0.. is a padding page

    def take(self, n: int) -> int:
        base = self.next
        self.next += (n + SLOT_ALIGN - 1) // SLOT_ALIGN * SLOT_ALIGN
        return base


def make(seed: int = 0, scale: float = 1.0, leaves: int = 10_000) -> Workload:
    rng = np.random.default_rng(seed)
    slots = _Slots()
    w = Workload()

    def toks(n: int) -> np.ndarray:
        return rng.integers(1, VOCAB, size=int(n), dtype=np.int32)

    # (a) build: roots x conversations x turns, shared system prompt of 512-1500
    # tokens, every turn adds 150-550 tokens; 200*5*5 = 5,000 sequences, ~2,050
    # tokens on average.  Conversations are interleaved, turn order is kept.
    n_roots = max(2, int(200 * scale))
    n_conv, n_turn = 5, 5
    seqs: list[np.ndarray] = []
    pending: list[list[np.ndarray]] = []
    sys_len: list[int] = []
    for _ in range(n_roots):
        sysp = toks(rng.integers(512, 1501))
        sys_len.append(len(sysp))
        for _ in range(n_conv):
            cur, turns = sysp, []
            for _ in range(n_turn):
                cur = np.concatenate([cur, toks(rng.integers(150, 551))])
                turns.append(cur)
            pending.append(turns)
    order = np.repeat(np.arange(len(pending)), n_turn)
    rng.shuffle(order)
    cursor = [0] * len(pending)
    root_seen = [False] * n_roots
    for c in order:
        k, r = cursor[c], c // n_conv
        s = pending[c][k]
        shared = len(pending[c][k - 1]) if k else (sys_len[r] if root_seen[r] else 0)
        cursor[c] += 1
        root_seen[r] = True
        seqs.append(s)
        w.build.append(Op(s, slots.take(len(s)), shared))

    # (b) matches.  hit: an old turn plus a fresh 300-token user message, the hit
    # ends exactly on a node boundary, 1,200-1,800 tokens long.
    n_match = len(seqs)
    pool = [s for s in seqs if 1200 <= len(s) <= 1800]
    for _ in range(n_match):
        s = pool[rng.integers(len(pool))]
        w.match_hit.append(Op(np.concatenate([s, toks(300)]), expect_hit=len(s)))
    # split: the hit ends inside a node (about 1,500 tokens in), forcing a split.
    longs = [s for s in seqs if len(s) >= 1900]
    for _ in range(max(50, n_match // 5)):
        s = longs[rng.integers(len(longs))]
        cut = int(rng.integers(1300, 1700))
        w.match_split.append(Op(np.concatenate([s[:cut], toks(300)]), expect_hit=cut))
    for _ in range(max(50, n_match // 5)):
        w.match_miss.append(Op(toks(2000), expect_hit=0))

    # (e) request cycle: a returning conversation, 300 new prompt tokens, 128 output.
    for _ in range(max(50, n_match // 5)):
        s = seqs[rng.integers(len(seqs))]
        prompt = np.concatenate([s, toks(300)])
        full = np.concatenate([prompt, toks(128)])
        base = slots.take(len(full))
        w.cycle.append((Op(prompt, base), Op(full, base)))

    # (f) one 128k-token prompt prefilled in 8k chunks.
    long_len = 131_072 if scale >= 0.5 else 32_768
    p = toks(long_len)
    base = slots.take(long_len)
    for end in range(8192, long_len + 1, 8192):
        w.chunked.append(Op(p[:end], base))

    # (c) eviction tree: `leaves` leaves under 200 roots, unique tails of 64-512.
    leaves = max(200, int(leaves * scale))
    roots = [toks(rng.integers(512, 1501)) for _ in range(n_roots)]
    for i in range(leaves):
        s = np.concatenate([roots[i % n_roots], toks(rng.integers(64, 513))])
        w.evict_build.append(Op(s, slots.take(len(s))))
    rng.shuffle(w.evict_build)
    w.evict_steps = [int(x) for x in rng.integers(64, 513, size=max(40, int(200 * scale)))]
    for _ in w.evict_steps:
        s = np.concatenate([roots[rng.integers(n_roots)], toks(rng.integers(64, 513))])
        w.evict_refill.append(Op(s, slots.take(len(s))))
    return w


if __name__ == "__main__":
    w = make()
    L = np.array([len(o.tokens) for o in w.build])
    print("build", len(L), "mean", L.mean(), "min", L.min(), "max", L.max())
    H = np.array([o.expect_hit for o in w.match_hit])
    print("match_hit", len(H), "mean hit", H.mean())
    print("evict leaves", len(w.evict_build), "steps", len(w.evict_steps))
