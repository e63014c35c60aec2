"""Saved states. In: rows of a `StatePool` and lengths; out: checkpoints, from which rows resume.

A checkpoint is one run of bytes with what a request needs of its state in all layers, so that it can be moved
elsewhere in one piece. Its tensor never moves (invariant 6).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch

from pagoda import kernels
from pagoda.errors import ArgumentError, ConfigError, InvariantError
from pagoda.layout._numbers import count
from pagoda.pools._arguments import AnyIds, filled, host_ids, require_range
from pagoda.pools._staging import Staging, staging_of
from pagoda.pools._state import StatePool

__all__ = ["CheckpointPool"]


class CheckpointPool:
    """`num_checkpoints` checkpoints of the states in a pool.

    `tensor` is [num_checkpoints + 1, checkpoint_bytes] uint8; checkpoint 0 is padding. `checkpoint_bytes` are
    the kept bytes of all parts of all layers, rounded up to a multiple of 16. Of a part that is kept as a
    whole, a checkpoint has all bytes; of a ring, the kept cells in the order of their positions.

    Errors: ConfigError, naming the argument.
    """

    def __init__(self, states: StatePool, num_checkpoints: int, *, staging: Staging | None = None) -> None:
        if not isinstance(states, StatePool):
            raise ConfigError(f"states: give a StatePool, not {type(states).__name__}")
        self.states = states
        self.num_checkpoints = count(num_checkpoints, "num_checkpoints", low=0)
        if self.num_checkpoints >= 2**31 - 1:
            raise ConfigError("num_checkpoints: checkpoint ids exceed 2^31: give fewer checkpoints")
        self.device = states.device
        self.checkpoint_bytes = states.regions().checkpoint_bytes
        self.tensor = filled((self.num_checkpoints + 1, self.checkpoint_bytes), torch.uint8, self.device)
        self._staging = staging_of(self.device, staging)
        self._at = self.tensor.data_ptr()
        self._lock = threading.RLock()

    def save(self, rows: AnyIds, lengths: AnyIds, checkpoint_ids: AnyIds) -> None:
        """Copy the state of row rows[i], which has lengths[i] tokens, to checkpoint checkpoint_ids[i].

        Cost: one staged copy and one launch, no synchronisation. Errors: ArgumentError if numbers of elements
        differ, a length is 0 or a checkpoint is given twice; OutOfRangeError; CaptureError.
        """
        self._move(kernels.save_states, rows, lengths, checkpoint_ids, checkpoint_ids, "checkpoint_ids")

    def restore(self, rows: AnyIds, lengths: AnyIds, checkpoint_ids: AnyIds) -> None:
        """Copy checkpoint checkpoint_ids[i], which was saved at lengths[i] tokens, to row rows[i].

        All of the row's state is written: what the checkpoint does not keep is reset. Cost and errors are
        those of `save`; no row may be given twice.
        """
        self._move(kernels.restore_states, rows, lengths, checkpoint_ids, rows, "rows")

    def _move(
        self,
        operation: Callable[[torch.Tensor, int, int, int, int, kernels.Regions, torch.Tensor], None],
        rows: AnyIds,
        lengths: AnyIds,
        checkpoint_ids: AnyIds,
        written: AnyIds,
        name: str,
    ) -> None:
        row = host_ids(rows, "rows")
        length = host_ids(lengths, "lengths")
        checkpoint = host_ids(checkpoint_ids, "checkpoint_ids")
        n = row.size
        if length.size != n or checkpoint.size != n:
            raise ArgumentError(
                f"there are {n} rows, {length.size} lengths and {checkpoint.size} checkpoint_ids: give one "
                "of each per row"
            )
        require_range(row, 0, self.states.num_rows, "rows", "rows")
        require_range(length, 1, 2**31 - 1, "lengths", "lengths")
        require_range(checkpoint, 0, self.num_checkpoints, "checkpoint_ids", "checkpoints")
        if np.unique(host_ids(written, name)).size != n:
            raise ArgumentError(f"{name} has a duplicate: give each once")
        if n == 0:
            return
        packed = np.concatenate([row, length, checkpoint]).astype(np.int32)
        (sent,) = self._staging.send(packed)
        with self._lock:
            operation(sent, 0, n, 2 * n, n, self.states.regions(), self.tensor)

    def memory_bytes(self) -> int:
        """Bytes of all checkpoints, padding included."""
        return self.tensor.nbytes

    def check(self) -> None:
        """Verify invariant 6. Errors: InvariantError."""
        if self.tensor.data_ptr() != self._at:
            raise InvariantError(6, "the checkpoints have moved")
        self._staging.check()
