"""The tensors that hold keys, values and states. In: layouts, deltas; out: tensors.

`Pools` has the pools and tables of one rank and follows a manager's deltas; `Pools.batch` returns what
kernels read about a step, `Pools.layer` a layer of the model, `Layer.at` its entries for the tokens of a
step (`LayerStep`). `TokenPool` holds keys and values by slot, `EntryPool` pages of entries as bytes,
`StatePool` the states of running requests, `CheckpointPool` saved states, `DeviceTable` a matrix of ids.
`Staging` copies host arrays to a device without waiting for it. Tensors are allocated once and never move,
and none is read back. Invariants 6 and 7.
"""

from pagoda.pools._batch import Batch, GroupBatch, HostBatch, Work
from pagoda.pools._checkpoints import CheckpointPool
from pagoda.pools._entries import EntryPool
from pagoda.pools._kv import TokenPool
from pagoda.pools._layer import Layer
from pagoda.pools._layer_step import LayerStep
from pagoda.pools._rank import Pools
from pagoda.pools._staging import Staging
from pagoda.pools._state import StatePool, StateSpec
from pagoda.pools._table import DeviceTable

__all__ = [
    "Batch",
    "CheckpointPool",
    "DeviceTable",
    "EntryPool",
    "GroupBatch",
    "HostBatch",
    "Layer",
    "LayerStep",
    "Pools",
    "Staging",
    "StatePool",
    "StateSpec",
    "TokenPool",
    "Work",
]
