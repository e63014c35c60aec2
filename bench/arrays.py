"""The cost of an array argument on its way into native code, the call itself included."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bench.measure import microseconds, save, table
from pagoda._native import sum_ids


def run() -> None:
    arguments = {
        "numpy int32": np.array([1], dtype=np.int32),
        "numpy int64": np.array([1], dtype=np.int64),
        "torch int32, CPU": torch.tensor([1], dtype=torch.int32),
        "torch int64, CPU": torch.tensor([1], dtype=torch.int64),
        "list": [1],
    }
    rows: list[dict[str, Any]] = [
        {"argument": name, "µs": microseconds(lambda array=array: sum_ids(array), 5000)}
        for name, array in arguments.items()
    ]
    table("a native call with one array argument of one element", rows)
    save("arrays", rows)
