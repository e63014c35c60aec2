"""The native core under ASan and UBSan, against a plain model: native/fuzz."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
COMPILER = os.environ.get("CXX", "g++")


pytestmark = pytest.mark.xdist_group("fuzz")  # built once


def build(native: Path, program: Path, optimise: str = "-O1") -> None:
    sources = [native / "fuzz" / "fuzz.cpp", *sorted((native / "core").glob("*.cpp"))]
    flags = ["-std=c++17", optimise, "-g", "-Wall", "-Wextra", "-Werror", "-fno-sanitize-recover=all"]
    command = [
        COMPILER,
        *flags,
        "-fsanitize=address,undefined",
        f"-I{native}",
        *map(str, sources),
        "-o",
        str(program),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if "cannot find -lasan" in done.stderr or "cannot find libasan" in done.stderr:
        pytest.skip(f"{COMPILER} comes without the sanitizers")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no {COMPILER} here")
    program = tmp_path_factory.mktemp("fuzz") / "fuzz"
    build(NATIVE, program)
    return program


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_core_agrees_with_a_plain_model_and_the_sanitizers_find_nothing(fuzz: Path, seed: int):
    done = subprocess.run([fuzz, str(seed), "20000"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok: ")


# Each is a mistake of the kind the fuzz is there for: file, what stands there, what would be wrong.
MISTAKES = [
    ("core/id_set.hpp", "if (word == 0) clear_above(i >> 6);", "if (word == 1) clear_above(i >> 6);"),
    ("core/free_list.cpp", "while (done-- > 0) unput(ids[done] - first_id_, at_once);", ""),
    ("core/page_table.cpp", "slots_out += end - begin;", "slots_out += end - begin + 1;"),
]


@pytest.mark.parametrize(("file", "right", "wrong"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_the_fuzz_finds_a_mistake(fuzz: Path, tmp_path: Path, file: str, right: str, wrong: str):
    native = tmp_path / "native"
    shutil.copytree(NATIVE, native)
    source = (native / file).read_text()
    assert source.count(right) == 1
    (native / file).write_text(source.replace(right, wrong))
    build(native, tmp_path / "broken", optimise="-O0")
    done = subprocess.run([tmp_path / "broken", "1", "2000"], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
