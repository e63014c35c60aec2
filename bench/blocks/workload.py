"""The requests for a block manager, and their expected hits. Depends on numpy only.

Everything is a function of the seed and independent of the implementation. `Expected` computes the right hits
from the tokens alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

VOCAB = 151_936  # most ids need three bytes
TURNS = 5
CONVERSATIONS = 5
HIT, PROMPT = 1_500, 2_000
RUNNING, STEPS = 256, 256


@dataclass
class Workload:
    prompts: list[Tokens] = field(default_factory=list)  # conversations turn by turn, interleaved
    lookups: list[Tokens] = field(default_factory=list)  # 1,500 tokens of a prompt, 100 of their own
    prefixes: list[Tokens] = field(default_factory=list)  # 1,500 tokens each
    hits: list[Tokens] = field(default_factory=list)  # one for each prefix: 500 tokens more
    running: list[Tokens] = field(default_factory=list)  # prompts of 1,000 to 1,015 tokens
    sampled: Tokens = field(default_factory=lambda: np.zeros((0, 0), np.int32))  # [steps, running]


def make(seed: int = 0, scale: float = 1.0) -> Workload:
    """200 beginnings of 512 to 1,500 tokens, 5 conversations of each, 5 turns of 231 to 429 more tokens."""
    rng = np.random.default_rng(seed)
    work = Workload()

    def tokens(n: int) -> Tokens:
        return rng.integers(0, VOCAB, n, dtype=np.int32)

    num_roots = max(2, int(200 * scale))
    roots = [tokens(rng.integers(512, 1501)) for _ in range(num_roots)]
    said = [roots[i // CONVERSATIONS] for i in range(num_roots * CONVERSATIONS)]
    order = np.repeat(np.arange(len(said)), TURNS)
    rng.shuffle(order)
    for i in order:
        said[i] = np.concatenate((said[i], tokens(rng.integers(231, 430))))
        work.prompts.append(said[i])

    long = [prompt for prompt in work.prompts if len(prompt) >= HIT]
    for _ in work.prompts:
        work.lookups.append(np.concatenate((long[rng.integers(len(long))][:HIT], tokens(100))))
    work.prefixes = [tokens(HIT) for _ in range(max(100, int(500 * scale)))]
    work.hits = [np.concatenate((prefix, tokens(PROMPT - HIT))) for prefix in work.prefixes]
    work.running = [tokens(1_000 + rng.integers(16)) for _ in range(RUNNING)]
    work.sampled = rng.integers(0, VOCAB, (STEPS, RUNNING), dtype=np.int32)
    return work


class Expected:
    """The hits of requests that run one after the other, in whole pages, with at least one token to compute.

    A hit needs all its pages in the full group and, in a window group, those that the next query reads. Pages
    that have left a window can still be hit.
    """

    def __init__(self, page: int, window: int = 0) -> None:
        self.page, self.window = page, window
        self.full: set[bytes] = set()
        self.windowed: set[bytes] = set()

    def hit(self, tokens: Tokens) -> int:
        """Return the longest hit of these tokens now."""
        return self._hit(self._names(tokens), len(tokens)) * self.page

    def request(self, tokens: Tokens) -> int:
        """Return the hit of a request, which is then computed to its end."""
        names = self._names(tokens)
        hit = self._hit(names, len(tokens))
        self.full.update(names)
        self.windowed.update(names[hit:])
        return hit * self.page

    def _hit(self, names: list[bytes], num_tokens: int) -> int:
        most = (num_tokens - 1) // self.page
        end = next((i for i, name in enumerate(names[:most]) if name not in self.full), most)
        while (
            end > 0 and self.window and not self.windowed.issuperset(names[self._live(end * self.page) : end])
        ):
            end -= 1
        return end

    def _live(self, length: int) -> int:
        """Return the first page of a window that the query after `length` tokens reads."""
        return max(0, length - self.window + 1) // self.page if self.window else 0

    def _names(self, tokens: Tokens) -> list[bytes]:
        """Return one name per whole page, derived from all tokens up to its end."""
        names, name, step = [], b"", self.page
        for begin in range(0, len(tokens) - step + 1, step):
            name = hashlib.blake2b(name + tokens[begin : begin + step].tobytes(), digest_size=16).digest()
            names.append(name)
        return names
