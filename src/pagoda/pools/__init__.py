"""The tensors that hold keys, values and states. In: geometry, ids; out: tensors.

`TokenPool` holds K and V by slot, `EntryPool` pages of entries as bytes, `StatePool` per-row states,
`DeviceTable` a copy of a host table, and `Staging` carries host arrays to a device without waiting for it.
`Pools` are the pools and tables of one rank, which follow a manager's deltas. Tensors are made once and never
move; nothing here reads one back. Invariants 6 and 7.
"""

from pagoda.pools._entries import EntryPool
from pagoda.pools._kv import TokenPool
from pagoda.pools._rank import Pools
from pagoda.pools._staging import Staging
from pagoda.pools._state import StatePool, StateSpec
from pagoda.pools._table import DeviceTable

__all__ = ["DeviceTable", "EntryPool", "Pools", "Staging", "StatePool", "StateSpec", "TokenPool"]
