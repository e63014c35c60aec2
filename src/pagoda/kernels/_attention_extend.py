"""How many programs compute the extend rows of a step. In: sizes of the step and of tiles; out: a number.

A program computes one tile of queries over one part of its row's keys. In a graph the sizes are bounds, and
programs that find nothing to do cost time, so that the bound is close: the work list cuts rows into parts
only as long as there are fewer tiles than places for programs.
"""

from __future__ import annotations

from pagoda._native import EXTEND_SHARE, EXTEND_TILE

__all__ = ["num_extend_programs"]


def num_extend_programs(
    num_rows: int, num_tokens: int, num_parts: int, tile_rows: int, group: int, target: int
) -> int:
    """Return the most programs per KV head for at most `num_rows` extend rows of `num_tokens` queries.

    `tile_rows` is the number of pairs (query, head) in a tile, `num_parts` the most parts of a row, and
    `target` the number of programs that the work list was made for.
    """
    num_tiles = num_tokens * group // tile_rows + num_rows
    # A row has more than one part only if target / EXTEND_SHARE / tiles of EXTEND_TILE queries is above one;
    # there are no fewer of those tiles than rows, and no fewer than tokens / EXTEND_TILE.
    split = target // EXTEND_SHARE * (EXTEND_TILE * group + tile_rows) // tile_rows
    return min(num_tiles * num_parts, max(num_tiles, split))
