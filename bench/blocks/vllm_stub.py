"""Import vLLM's v1 KV-cache core from an unzipped wheel, without what the rest of vLLM needs.

``VLLM_SRC`` names the folder that holds the wheel's ``vllm/``. The measured modules are the real ones:

    vllm.v1.core.{block_pool,kv_cache_utils,kv_cache_coordinator,kv_cache_manager,
                  single_type_kv_cache_manager,kv_cache_metrics}
    vllm.v1.{kv_cache_interface,kv_cache_spec_registry,kv_cache_layout,request}
    vllm.v1.{hisparse.block_pool,kv_hints}
    vllm.utils.{hashing,math_utils,network_utils}, vllm.distributed.kv_events

The rest are stubs that do nothing on the measured path; helpers on that path whose module is too heavy
(`_extract`) are compiled from their real source.

``python -m bench.blocks.vllm_stub WHEEL FOLDER`` unzips what is needed of the wheel.
"""

from __future__ import annotations

import ast
import bisect
import enum
import fnmatch
import logging
import os
import sys
import types
import zipfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

NEEDED = ("vllm/v1/*.py", "vllm/utils/*.py", "vllm/distributed/*.py", "vllm/multimodal/utils.py")


def unzip(wheel: str, folder: str) -> None:
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if any(fnmatch.fnmatch(name, each) for each in NEEDED):
                files.extract(name, folder)


def source() -> Path:
    src = os.environ.get("VLLM_SRC")
    if not src or not (Path(src) / "vllm").is_dir():
        raise SystemExit("set VLLM_SRC to the unzipped vllm wheel; see bench/blocks/README.md")
    return Path(src)


def _module(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)
    return module


def _package(name: str, path: Path) -> types.ModuleType:
    module = _module(name)
    module.__path__ = [str(path)]
    return module


def _extract(file: Path, names: set[str], namespace: dict[str, Any]) -> dict[str, Any]:
    """Compile only the named top-level classes and functions of `file`."""
    wanted = (ast.ClassDef, ast.FunctionDef)
    body = [
        node for node in ast.parse(file.read_text()).body if isinstance(node, wanted) and node.name in names
    ]
    exec(compile(ast.Module(body, []), str(file), "exec"), namespace)
    return {name: namespace[name] for name in names}


class _Anything:
    """Takes any arguments; stands where only annotations use it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


class SamplingParams:
    def __init__(self, max_tokens: int = 16, extra_args: Any = None, **more: Any) -> None:
        self.max_tokens = max_tokens
        self.extra_args = extra_args
        self.skip_reading_prefix_cache = False
        self.__dict__.update(more)

    def update_from_generation_config(self, *args: Any, **kwargs: Any) -> None:
        pass


class FinishReason(enum.IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


class StructuredOutputRequest:
    @staticmethod
    def from_sampling_params(_: Any) -> None:
        return None


class MambaAttentionBackendEnum(enum.Enum):
    MAMBA1 = "mamba1"
    MAMBA2 = "mamba2"
    LINEAR = "linear"
    GDN_ATTN = "gdn"


class _Platform:
    @staticmethod
    def register_custom_kv_cache_specs(vllm_config: Any) -> None:
        pass


def _init_logger(name: str) -> logging.Logger:
    logger = logging.getLogger(name)
    for level in ("debug", "info", "warning"):
        setattr(logger, f"{level}_once", lambda *args, **kwargs: None)
    return logger


def install() -> None:
    if "vllm" in sys.modules:
        return
    import torch

    root = source() / "vllm"
    _package("vllm", root)
    connector = "distributed.kv_transfer.kv_connector"
    for name in (
        *("v1", "v1.core", "v1.core.sched", "v1.hisparse", "v1.kv_offload", "v1.attention"),
        *("v1.attention.backends", "v1.metrics", "v1.structured_output", "distributed", "multimodal", "lora"),
        *("distributed.kv_transfer", connector, f"{connector}.v1", f"{connector}.v1.offloading"),
    ):
        _package(f"vllm.{name}", root / name.replace(".", "/"))

    logging.getLogger("vllm").setLevel(logging.ERROR)
    _module("vllm.logger", init_logger=_init_logger)
    _module("vllm.envs", VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=True)
    config = _package("vllm.config", root / "_no_such_folder")
    config.get_current_vllm_config_or_none = lambda: None
    for name in ("Vllm", "KVTransfer", "Cache", "Parallel", "Scheduler", "Model"):
        setattr(config, f"{name}Config", _Anything)
    _module("vllm.config.kv_events", KVEventsConfig=type("KVEventsConfig", (_Anything,), {}))
    _module("vllm.config.kv_transfer", KVTransferConfig=_Anything)
    _module(f"vllm.{connector}.factory", KVConnectorFactory=_Anything)

    utils = _package("vllm.utils", root / "utils")
    length = {"length_from_prompt_token_ids_or_embeds"}
    utils.__dict__.update(_extract(root / "utils/__init__.py", length, {"torch": torch}))
    size = _extract(root / "utils/torch_utils.py", {"get_dtype_size"}, {"torch": torch})
    _module("vllm.utils.torch_utils", PIN_MEMORY=False, **size)
    _module("vllm.utils.mem_utils", format_gib=lambda num_bytes: f"{num_bytes / 2**30:.2f}")

    _module("vllm.sampling_params", SamplingParams=SamplingParams, StructuredOutputsParams=_Anything)
    _module("vllm.pooling_params", PoolingParams=_Anything)
    inputs = ("MultiModalFeatureSpec", "MultiModalKwargsItem", "PlaceholderRange")
    _module("vllm.multimodal.inputs", **dict.fromkeys(inputs, _Anything))
    features = {"bisect": bisect, "MultiModalFeatureSpec": _Anything}
    window = _extract(root / "multimodal/utils.py", {"get_mm_features_in_window"}, features)
    _module("vllm.multimodal.utils", **window)
    _module("vllm.lora.request", LoRARequest=_Anything)
    engine = dict.fromkeys(("EngineCoreEvent", "EngineCoreEventType", "EngineCoreRequest"), _Anything)
    _module("vllm.v1.engine", FinishReason=FinishReason, **engine)
    _module("vllm.v1.structured_output.request", StructuredOutputRequest=StructuredOutputRequest)

    stats = {"BaseCacheStats", "CachingMetrics", "PrefixCacheStats", "PrefillStats", "KVCacheEvictionEvent"}
    names = {"dataclass": dataclass, "field": field, "deque": deque, "Any": Any}
    real = _extract(root / "v1/metrics/stats.py", stats, names)
    _module("vllm.v1.metrics.stats", RequestSpecDecodeMetrics=_Anything, **real)
    names = {
        "Generic": Generic,
        "Sequence": Sequence,
        "T": TypeVar("T"),
        "overload": overload,
        "torch": torch,
    }
    _module("vllm.v1.utils", **_extract(root / "v1/utils.py", {"ConstantList", "tensor_data"}, names))
    backends = "vllm.v1.attention.backends.registry"
    _module(backends, MambaAttentionBackendEnum=MambaAttentionBackendEnum)
    _module("vllm.platforms", current_platform=_Platform())
    hisparse = ("host_pool_bytes", "kv_cache_config", "kv_cache_groups")
    _module("vllm.v1.hisparse.layout", **{f"get_hisparse_{name}": None for name in hisparse})


if __name__ == "__main__":
    unzip(sys.argv[1], sys.argv[2])
