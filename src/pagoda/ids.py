"""Which ids are free, held or quarantined. In: how many; out: which.

Owns nothing but numbers: one native `FreeList` per id space (slots, pages, blocks, rows), on the host.
Invariants 1 to 4 of docs/invariants.md.
"""

from pagoda._native import FreeList

__all__ = ["FreeList"]
