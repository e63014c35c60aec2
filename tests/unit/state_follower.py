"""States and checkpoints as the tokens they have seen, moved by deltas alone. In: deltas; out: states.

A state that is wrong, or of another length than the delta says, fails where it is used.
"""

from collections.abc import Mapping, Sequence

from pagoda.manager import Delta

State = tuple[int, ...]


class StateFollower:
    """`states` of rows and `checkpoints`, by id. What a step computes is added to the states of its rows."""

    def __init__(self) -> None:
        self.states: dict[int, State] = {}
        self.checkpoints: dict[int, State] = {}

    def apply(self, delta: Delta, tokens: Mapping[int, Sequence[int]]) -> None:
        """Do what a delta says, and compute its step. `tokens`: by row, at least those the step computes."""
        written = delta.saves[2].tolist()
        assert len(set(written)) == len(written), "two saves write one checkpoint"
        for row, length, id in zip(*(part.tolist() for part in delta.saves), strict=True):
            assert len(self.states[row]) == length, "a state is saved that has moved on"
            self.checkpoints[id] = self.states[row]
        begun = [*delta.restores[0].tolist(), *delta.resets.tolist(), *delta.state_copies[1].tolist()]
        assert len(set(begun)) == len(begun), "a state is written twice"
        for row, length, id in zip(*(part.tolist() for part in delta.restores), strict=True):
            assert len(self.checkpoints[id]) == length
            self.states[row] = self.checkpoints[id]
        for row in delta.resets.tolist():
            self.states[row] = ()
        sources, targets = (part.tolist() for part in delta.state_copies)
        assert not set(sources) & set(targets)
        for source, target in zip(sources, targets, strict=True):
            self.states[target] = self.states[source]
        parts = (delta.rows.tolist(), delta.lengths.tolist(), delta.counts.tolist())
        for row, length, count in zip(*parts, strict=True):
            assert self.states[row] == tuple(tokens[row][: length - count]), "the state of another prefix"
            self.states[row] = tuple(tokens[row][:length])
            assert len(self.states[row]) == length
