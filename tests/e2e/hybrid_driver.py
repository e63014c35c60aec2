"""An engine over `Manager` and `Pools` that runs a model of transformers. In: prompts; out: greedy answers
with the logits behind them, and the hit of each request.

`Engine` plans steps as an engine does: prompts in chunks that end at cuts, requests side by side, commits
that come `delay` steps after their step was planned. It knows nothing of the model but its `StepModel`, and
the model remembers nothing between steps: whatever a step reads was stored in the pools by earlier steps, or
put there by deltas.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Protocol

import torch

from pagoda import Batch, CapacityError, Delta, Layout, Manager, Pools

__all__ = ["Engine", "Request", "StepModel"]


class StepModel(Protocol):
    """A model whose memory is in pools."""

    layout: Layout

    def forward(self, pools: Pools, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the tokens of a step, [tokens] int64; return logits behind the last one of each row."""
        ...


@dataclass(eq=False)
class Request:
    """A prompt to be answered with `num_new` tokens, and what has become of it."""

    prompt: list[int]
    num_new: int
    row: int = 0  # 0 while it is not running
    hits: list[int] = field(default_factory=list)  # of each time it was admitted
    cuts: tuple[int, ...] = ()
    logits: list[torch.Tensor] = field(default_factory=list)  # [vocabulary], behind each answered token

    answer: list[int] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        return self.prompt + self.answer

    @property
    def is_done(self) -> bool:
        return len(self.answer) == self.num_new


class Engine:
    """Runs requests to their ends.

    `chunks` are the most tokens of a prompt that a row computes in one step, one after the other, and
    `keeps_cuts` says whether chunks end at cuts. If it `waits`, a request is not admitted while another
    computes what it could hit. `edit` may change a delta before the pools see it, so that tests can show what
    they would notice.
    """

    def __init__(
        self,
        model: StepModel,
        capacity: dict[str, int],
        *,
        num_rows: int = 4,
        max_tokens: int = 192,
        checkpoint_interval: int = 32,
        delay: int = 0,
        chunks: Sequence[int] = (64,),
        keeps_cuts: bool = True,
        waits: bool = False,
        edit: Callable[[Delta], Delta] | None = None,
    ) -> None:
        self.model = model
        self.manager = Manager(
            model.layout,
            capacity,
            num_rows=num_rows,
            max_tokens=max_tokens,
            checkpoint_interval=checkpoint_interval,
        )
        self.pools = Pools(model.layout, capacity, num_rows=num_rows, max_tokens=max_tokens, device="cpu")
        self.delay, self.keeps_cuts, self.waits, self.edit = delay, keeps_cuts, waits, edit
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preempted = 0
        self._chunks: Iterator[int] = cycle(chunks)
        self._in_flight: list[tuple[int, list[tuple[Request, int, list[int]]]]] = []

    def generate(self, prompts: Sequence[Sequence[int]], num_new: int) -> list[Request]:
        """Answer prompts side by side, as many at a time as fit, in their order."""
        requests = [Request(list(prompt), num_new) for prompt in prompts]
        self.waiting += requests
        self.run()
        return requests

    def run(self) -> None:
        """Run all requests to their ends, and apply what the last step left to save."""
        while self.waiting or self.running:
            self.step()
        self.drain()
        self._idle()
        self.manager.check()
        self.pools.check()

    def step(self) -> None:
        """Admit what fits, compute one step, and commit the one that was planned `delay` steps before."""
        self._admit()
        planned = [(request, count) for request in list(self.running) if (count := self._count(request))]
        if not planned:
            self.drain()
            return
        counts = [count for _, count in planned]
        delta = self._apply(self.manager.plan([request.row for request, _ in planned], counts))
        parts = [
            request.text[end - count : end]
            for (request, count), end in zip(planned, delta.lengths.tolist(), strict=True)
        ]
        tokens = torch.tensor([token for part in parts for token in part])
        logits = self.model.forward(self.pools, self.pools.batch(delta), tokens)
        for (request, _), end, row_logits in zip(planned, delta.lengths.tolist(), logits, strict=True):
            if end == len(request.text):
                request.answer.append(int(row_logits.argmax()))
                request.logits.append(row_logits)
        steps = [(request, request.row, part) for (request, _), part in zip(planned, parts, strict=True)]
        self._in_flight.append((delta.step, steps))
        while len(self._in_flight) > self.delay:
            self._commit()
        self.manager.check()

    def drain(self) -> None:
        """Commit all steps in flight."""
        while self._in_flight:
            self._commit()

    def fork(self, request: Request, suffixes: Sequence[Sequence[int]], num_new: int) -> list[Request]:
        """Let new requests continue the computed tokens of a running one, each with tokens of its own."""
        self.drain()
        length = self.manager.committed(request.row)
        rows = self.manager.fork(request.row, len(suffixes))
        forks = [
            Request([*request.text[:length], *suffix], num_new, row)
            for row, suffix in zip(rows.tolist(), suffixes, strict=True)
        ]
        self.running += forks
        return forks

    def cancel(self, request: Request) -> None:
        """End a running request, whatever of it is still in flight."""
        self.manager.release(request.row)
        self.running.remove(request)
        request.row = 0

    def _admit(self) -> None:
        while self.waiting:
            text = self.waiting[0].text
            if self.waits and self.manager.pending(text):
                return
            if not self.manager.can_admit(text):
                if self.running or self._in_flight:
                    return
                self._idle()
            request, admitted = self.waiting.pop(0), self.manager.admit(text)
            request.row, request.cuts = admitted.row, admitted.cuts
            request.hits.append(admitted.hit)
            self.running.append(request)

    def _count(self, request: Request) -> int:
        """How many tokens of a request the next step computes. Preempts the request if they do not fit."""
        if request.is_done:
            return 0  # its last steps are in flight
        computed = self.manager.computed(request.row)
        count = min(len(request.text) - computed, next(self._chunks))
        if self.keeps_cuts:
            count = min([count, *(cut - computed for cut in request.cuts if cut > computed)])
        try:
            if (more := computed + count - self.manager.reserved(request.row)) > 0:
                self.manager.reserve(request.row, more)
        except CapacityError:
            self.num_preempted += 1
            self.cancel(request)
            self.waiting.append(request)
            return 0
        return count

    def _idle(self) -> None:
        """Plan a step that computes nothing, so that planned saves are carried out and rows and pages that
        wait for a fence are free."""
        self._apply(self.manager.plan())
        self.manager.pass_fence(self.manager.step - 1)

    def _apply(self, delta: Delta) -> Delta:
        delta = delta if self.edit is None else self.edit(delta)
        self.pools.apply(delta)
        return delta

    def _commit(self) -> None:
        step, parts = self._in_flight.pop(0)
        for request, row, part in parts:
            if request.row != row:
                continue  # cancelled since
            self.manager.commit(row, part)
            if request.is_done and self.manager.committed(row) == len(request.text) - 1:
                self.cancel(request)
        self.manager.pass_fence(step)
