"""The extension with its glue, built with ASan and UBSan: the tests of what crosses into it run on that."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pagoda

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
COMPILER = os.environ.get("CXX", "g++")
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
TESTS = [
    "tests/unit/test_arrays.py",
    "tests/unit/test_attention_native.py",
    "tests/unit/test_free_list.py",
    "tests/unit/test_manager.py",
    "tests/unit/test_manager_hostile.py",
    "tests/unit/test_manager_scale.py",
    "tests/unit/test_pools_apply.py",
    "tests/unit/test_tree.py",
    "tests/unit/test_tree_hostile.py",
    "tests/unit/test_tree_listeners.py",
    "tests/unit/test_tree_rules.py",
    "tests/property/test_free_list_machine.py",
    "tests/property/test_manager_machine.py",
    "tests/property/test_threads.py",
    "tests/property/test_tree_machine.py",
]
# An editable install finds the package by a hook, which would win over the path.
RUN = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
import pagoda._native, pytest
assert pagoda._native.__file__.startswith(sys.argv[1]), pagoda._native.__file__
plugins = [word for name in ("cacheprovider", "benchmark", "xdist") for word in ("-p", f"no:{name}")]
sys.exit(pytest.main(["-q", *plugins, *sys.argv[2:]]))
"""


def library(name: str) -> str:
    path = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return path.stdout.strip()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with an extension that is built with the sanitizers."""
    tools = {
        tool: shutil.which(tool, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        for tool in ("cmake", "ninja")
    }
    if None in tools.values() or shutil.which(COMPILER) is None:
        pytest.skip("needs cmake, ninja and a C++ compiler")
    if not Path(library("libasan.so")).is_absolute():
        pytest.skip(f"{COMPILER} comes without the sanitizers")
    build = tmp_path_factory.mktemp("build")
    options = [
        "-GNinja",
        f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DCMAKE_CXX_COMPILER={COMPILER}",
        f"-DCMAKE_CXX_FLAGS={SANITIZE}",
        f"-DCMAKE_MODULE_LINKER_FLAGS={SANITIZE}",
    ]
    for command in ([tools["cmake"], str(ROOT), *options], [tools["ninja"]]):
        done = subprocess.run([str(word) for word in command], cwd=build, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    place = tmp_path_factory.mktemp("site")
    package = Path(pagoda.__file__).parent
    shutil.copytree(package, place / "pagoda", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for extension in build.glob("_native*.so"):
        shutil.copy(extension, place / "pagoda")
    return place


def test_the_sanitizers_find_nothing_in_what_crosses_into_the_core(site: Path):
    environment = os.environ | {
        "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}",
        "CUDA_VISIBLE_DEVICES": "",  # the sanitizer and a GPU's driver want the same addresses
        "LD_PRELOAD": f"{library('libasan.so')}:{library('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(site), *TESTS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
