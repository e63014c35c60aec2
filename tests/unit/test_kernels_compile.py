"""Every Triton kernel compiles for GPUs that are not here: the interpreter takes more than the compiler."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton")

pytestmark = pytest.mark.long

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("capability", [80, 90], ids=["A100", "H200"])
def test_every_kernel_compiles(capability: int, tmp_path: Path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    done = subprocess.run(
        [sys.executable, TESTS / "unit" / "compile_kernels.py", str(capability)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {name: int(number) for name, number in (line.split() for line in done.stdout.splitlines())}
    sources = (TESTS.parent / "src" / "pagoda" / "kernels").glob("*fused.py")
    # What is launched: kernels have arguments that make no variants; helpers of kernels have not.
    kernels = {
        name
        for source in sources
        for name in re.findall(r"@triton\.jit\([^)]*\)(?:  #[^\n]*)?\s*def (\w+)\(", source.read_text())
    }
    assert found.keys() == kernels
    # `Launch` looks these up once: an argument that made a variant would get what another had compiled.
    only = (
        "_copy_states", "_count", "_fill", "_fill_rows", "_restore_states", "_save_states", "_set_table",
        "_write_table",
    )  # fmt: skip
    assert {found[name] for name in only} == {1}  # the program itself counts those of attention
