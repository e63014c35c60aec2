"""Tables, pages and states as one rank has them, moved by deltas alone: the tensors of real pools.

In: deltas and what steps compute; out: what a row would read. Of each token's keys the first number is its
content, small enough to be exact in float32; a group of entries has the content of the last token of each
entry. A state has the content of the last token where a part is kept as a whole, and in rings that of each
token in its cell. A page or checkpoint keeps what was written last, whoever has it.
"""

import numpy as np
import torch

from pagoda.layout import Layout, TensorSpec
from pagoda.manager import Delta
from pagoda.pools import EntryPool, Pools
from property.manager_model import GroupModel


class Device:
    def __init__(self, layout: Layout, groups: list[GroupModel], pools: Pools) -> None:
        self.groups, self.pools = groups, pools
        self.shapes = [tuple(pools.tables[group.name].shape) for group in groups]
        sizes = [rows * pages for rows, pages in self.shapes]
        self.offsets = np.cumsum([0, *sizes]).tolist()
        self.flat = pools.flat_table.numpy()
        self.memory = [contents(pools[group.name]).numpy() for group in groups]
        assert [memory.shape for memory in self.memory] == [
            (group.total + 1, group.page_tokens // group.ratio) for group in groups
        ]
        self.in_flight: dict[int, list[set[int]]] = {}  # a step: pages of each group that it reads or writes
        self.parts: list[tuple[TensorSpec, np.ndarray]] = []  # parts of states; cells or numbers of each row
        if layout.state_group is not None:
            for layer, parts in zip(layout.state_group.layers, layout.state_group.parts, strict=True):
                tensors = pools.layer(layer).state
                self.parts += [(part, numbers(tensors[part.name], part)) for part in parts]

    def apply(self, delta: Delta) -> None:
        self.pools.apply(delta)

    def table(self, g: int) -> np.ndarray:
        return self.flat[self.offsets[g] : self.offsets[g + 1]].reshape(self.shapes[g])

    def place(self, index: int) -> tuple[int, int, int]:
        """Group, row and page of a place in the flat table."""
        g = next(g for g in range(len(self.groups)) if index < self.offsets[g + 1])
        row, page = divmod(index - self.offsets[g], self.shapes[g][1])
        return g, row, page

    # Pages

    def entries(self, g: int, row: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Positions from begin to end where an entry ends, and the pages and places of these entries."""
        size, ratio = self.groups[g].page_tokens, self.groups[g].ratio
        at = np.arange(begin + (-begin - 1) % ratio, end, ratio)
        return at, self.table(g)[row, at // size], at % size // ratio

    def write(self, row: int, begin: int, values: list[int]) -> None:
        """Compute a row from `begin` on. `values`: contents of all its tokens."""
        for g in range(len(self.groups)):
            at, pages, places = self.entries(g, row, begin, len(values))
            assert (pages > 0).all(), "tokens are computed that have no place"
            self.memory[g][pages, places] = np.array(values)[at]
        for part, tensor in self.parts:
            if part.kept is None:
                tensor[row] = values[-1]
                continue
            at = np.arange(max(begin, len(values) - tensor.shape[1]), len(values))
            held = at if part.holds_positions else np.array(values)[at]
            tensor[row, at % tensor.shape[1]] = held.reshape(-1, *[1] * (tensor.ndim - 2))

    def read(self, g: int, row: int, begin: int, end: int) -> dict[int, int]:
        """What the entries of a row between two positions hold, by position."""
        at, pages, places = self.entries(g, row, begin, end)
        return dict(zip(at.tolist(), self.memory[g][pages, places].astype(int).tolist(), strict=True))

    def pages(self, g: int, row: int, begin: int, end: int) -> set[int]:
        """Pages that hold tokens begin … end - 1 of a row."""
        if begin >= end:
            return set()
        size = self.groups[g].page_tokens
        ids = self.table(g)[row, begin // size : -(-end // size)].tolist()
        return set(ids)

    # States

    def has_state(self, row: int, values: list[int]) -> bool:
        """Whether the state of a row is that of tokens with these contents, and of nothing else."""
        length = len(values)
        for part, tensor in self.parts:
            if part.kept is None:
                if (tensor[row] != (values[-1] if values else part.initial)).any():
                    return False
                continue
            cells = tensor.shape[1]
            for position in range(max(0, length - part.kept), length):
                held = position if part.holds_positions else values[position]
                if (tensor[row, position % cells] != held).any():
                    return False
            if part.holds_positions:  # a cell has its own token, or none
                for cell, position in enumerate(tensor[row].tolist()):
                    is_own = 0 <= position < length <= position + cells and position % cells == cell
                    if position != -1 and not is_own:
                        return False
            if length == 0 and (tensor[row] != part.initial).any():
                return False
        return True


def contents(pool: object) -> torch.Tensor:
    """[pages, entries] of a group's first layer: the number that holds an entry's content."""
    if isinstance(pool, EntryPool):
        (name,) = pool.entries
        return pool.pages[name][0].view(torch.float32)
    return pool.k_buffer[0][:, 0, 0].reshape(-1, pool.page_tokens)


def numbers(tensor: torch.Tensor, part: TensorSpec) -> np.ndarray:
    """A part of the states of all rows, bytes as one number per cell."""
    return (tensor.view(torch.int32) if part.dtype == "uint8" else tensor).numpy()
