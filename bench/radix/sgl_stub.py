"""Import SGLang's mem_cache modules standalone (CPU, no sgl-kernel/transformers).

``SGLANG_SRC`` names the directory that holds the unzipped wheel's ``sglang/``.
Real files are used for the modules in REAL, and the helpers in EXTRACT are compiled
from their real source; every other ``sglang.*`` module is an inert stub whose
attributes are empty classes or no-op functions.  Nothing of the measured code (radix
trees, the Rust core and its adapter, keys, components, LRU lists, session shim) is
stubbed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.util
import os
import sys
import sysconfig
import types
from array import array
from pathlib import Path
from typing import ClassVar

REAL = (
    "sglang.srt.environ",
    "sglang.srt.disaggregation.kv_events",
    "sglang.srt.mem_cache.base_prefix_cache",
    "sglang.srt.mem_cache.buffer_mode.storage_existence_cache",
    "sglang.srt.mem_cache.cache_init_params",
    "sglang.srt.mem_cache.cpp_utils",
    "sglang.srt.mem_cache.events",
    "sglang.srt.mem_cache.evict_policy",
    "sglang.srt.mem_cache.hicache_storage",
    "sglang.srt.mem_cache.radix_cache",
    "sglang.srt.mem_cache.rust_tree_core",
    "sglang.srt.mem_cache.storage_prefetch",
    "sglang.srt.mem_cache.unified_cache",
    "sglang.srt.mem_cache.unified_radix_cache",
    "sglang.srt.mem_cache.utils",
    "sglang.srt.rust_extensions",
    "sglang.srt.session.streaming_session",
    "sglang.srt.utils.poll_timer",
    "sglang.srt.utils.rank_consensus_checker",
)
# stub module -> (real file, names): helpers on the measured path whose module is too
# heavy to import.
EXTRACT = {
    "sglang.srt.utils": ("sglang/srt/utils/common.py", ("assert_int64_array",)),
}
# Construction-time answers for the plain allocator used here.
FIXED = {
    "sglang.srt.mem_cache.allocator.page_interleave": {
        "page_interleave_shard_size": lambda allocator: 1,
    },
}


def source() -> Path:
    src = os.environ.get("SGLANG_SRC")
    if not src or not (Path(src) / "sglang").is_dir():
        raise SystemExit("set SGLANG_SRC to the unzipped sglang wheel; see bench/radix/README.md")
    return Path(src)


def _is_real(name: str) -> bool:
    return any(name == r or name.startswith(r + ".") for r in REAL)


def _extract(file: Path, names: tuple[str, ...]) -> dict:
    """Compile only the named top-level functions of `file`."""
    body = [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef) and n.name in names]
    ns = {"array": array}
    exec(compile(ast.Module(body, []), str(file), "exec"), ns)
    return {n: ns[n] for n in names}


class _StubModule(types.ModuleType):
    __path__: ClassVar[list] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if _is_real(full) or any(r.startswith(full + ".") for r in REAL):
            return importlib.import_module(full)
        if name.islower():  # functions -> no-op callables
            obj = lambda *a, **k: None  # noqa: E731
        else:
            obj = type(name, (), {"__init__": lambda self, *a, **k: None})
        setattr(self, name, obj)
        return obj


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, src: Path):
        self.src = src

    def find_spec(self, name, path=None, target=None):
        if name != "sglang" and not name.startswith("sglang."):
            return None
        if not _is_real(name):
            return importlib.util.spec_from_loader(name, self, is_package=True)
        base = self.src.joinpath(*name.split("."))
        if (init := base / "__init__.py").exists():
            return importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(base)])
        if base.is_dir():  # namespace package
            return importlib.util.spec_from_loader(name, self, is_package=True)
        for suffix in (".py", sysconfig.get_config_var("EXT_SUFFIX")):
            if (file := base.with_name(base.name + suffix)).exists():
                return importlib.util.spec_from_file_location(name, file)
        return None

    def create_module(self, spec):
        mod = _StubModule(spec.name)
        mod.__dict__.update(FIXED.get(spec.name, {}))
        if spec.name in EXTRACT:
            file, names = EXTRACT[spec.name]
            mod.__dict__.update(_extract(self.src / file, names))
        return mod

    def exec_module(self, module):
        pass


def install() -> None:
    if not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder(source()))
