"""The native core under ASan and UBSan, against a plain model: native/fuzz."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
COMPILER = os.environ.get("CXX", "g++")


pytestmark = [pytest.mark.long, pytest.mark.xdist_group("fuzz")]  # built once


# A program of native/fuzz and the files of native/core it runs.
TREE = [
    "extra_keys",
    "prefix_tree",
    "prefix_tree_find",
    "prefix_tree_insert",
    "prefix_tree_lease",
    "prefix_tree_removal",
    "prefix_tree_view",
    "runs",
    "scan",
]
PROGRAMS = {
    "fuzz": ["free_list"],
    "fuzz_tree": TREE,
    "fuzz_memory": [
        *TREE,
        "checkpoint_order",
        "delta",
        "free_list",
        "manager",
        "manager_admit",
        "manager_grow",
        "manager_pages",
        "manager_room",
        "manager_states",
        "manager_step",
        "manager_view",
        "page_table",
        "window_pages",
        "work_list",
    ],
    "fuzz_work": ["delta", "work_list"],
}
FLAGS = ["-std=c++17", "-g", "-Wall", "-Wextra", "-Werror", "-fno-sanitize-recover=all"]
SANITIZE = "-fsanitize=address,undefined"


def run(*command: object) -> None:
    done = subprocess.run([COMPILER, *map(str, command)], capture_output=True, text=True)
    if "cannot find -lasan" in done.stderr or "cannot find libasan" in done.stderr:
        pytest.skip(f"{COMPILER} comes without the sanitizers")
    assert done.returncode == 0, done.stderr


def build(native: Path, program: str, place: Path, ready: dict[str, Path], optimise: str = "-O1") -> Path:
    """The program, from what is compiled already and what is not."""
    objects = []
    for source in [
        native / "fuzz" / f"{program}.cpp",
        *(native / "core" / f"{name}.cpp" for name in PROGRAMS[program]),
    ]:
        if source.stem not in ready:
            ready[source.stem] = place / f"{source.stem}.o"
            run(*FLAGS, optimise, SANITIZE, f"-I{native}", "-c", source, "-o", ready[source.stem])
        objects.append(ready[source.stem])
    run(SANITIZE, *objects, "-o", place / program)
    return place / program


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def compiled(place: Path) -> dict[str, Path]:
    """The object of each source, once for all programs and tests."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no {COMPILER} here")
    ready: dict[str, Path] = {}
    for program in PROGRAMS:
        build(NATIVE, program, place, ready)
    return ready


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_core_agrees_with_a_plain_model_and_the_sanitizers_find_nothing(
    compiled: dict[str, Path], place: Path, program: str, seed: int
):
    done = subprocess.run([place / program, str(seed), "20000"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok: ")


# Mistakes that the fuzz must find: program, file, the code as it is, and as it would be wrong.
MISTAKES = [
    ("fuzz", "core/id_set.hpp", "if (word == 0) clear_above(i >> 6);", "if (word == 1) clear_above(i >> 6);"),
    ("fuzz", "core/free_list.cpp", "while (done-- > 0) unput(ids[done] - first_id_, at_once);", ""),
    ("fuzz_tree", "core/child_table.hpp", ">= ((i - hole) & mask_)", "> ((i - hole) & mask_)"),
    ("fuzz_tree", "core/runs.cpp", "if (run.tail == chunk) rest.tail = copy;", ""),
    ("fuzz_tree", "core/prefix_tree.cpp", "up.is_trimmed = true;", ""),
    ("fuzz_tree", "core/prefix_tree.cpp", "up.locks = low.locks > 0 ? 1 : 0;", "up.locks = low.locks;"),
    ("fuzz_tree", "core/prefix_tree_lease.cpp", "at.used = cold_;", ""),
    ("fuzz_tree", "core/prefix_tree_removal.cpp", "at.is_trimmed = true;", ""),
    ("fuzz_tree", "core/runs.cpp", "if (has_keys_) {", "if (false) {"),
    (
        "fuzz_tree",
        "core/prefix_tree_removal.cpp",
        "} else if (is_listened_ && !is_lost(node)) {  // it stays, but cannot be found",
        "} else if (false) {",
    ),
    ("fuzz_memory", "core/prefix_tree_removal.cpp", "rests.reserve(plan.cuts_.size());", ""),
    ("fuzz_memory", "core/manager_step.cpp", "waiting_.reserve(num_rows, fence(is_touched));", ""),
    ("fuzz_memory", "core/manager_admit.cpp", "abandon(number, num_writes);", "(void)num_writes;"),
    ("fuzz_memory", "core/manager_admit.cpp", "request.copies.reserve(", "request.ranges.reserve("),
    ("fuzz_memory", "core/manager_room.cpp", "group.cached.move_duplicates(page, duplicate);", ""),
    ("fuzz_memory", "core/manager_step.cpp", "group.cached.unlink_duplicate(group.place(rows[i], p));", "{}"),
    (
        "fuzz_memory",
        "core/manager_states.cpp",
        "if (!is_kept) return free_checkpoint(save.id);",
        "if (!is_kept) return;",
    ),
    (
        "fuzz_memory",
        "core/manager_states.cpp",
        "if (cuts.back().length < length) continue;  // the step ran past it",
        "",
    ),
    (
        "fuzz_memory",
        "core/manager_states.cpp",
        "copied != 0 ? copied : static_cast<int32_t>(parent);",
        "static_cast<int32_t>(parent);\n  (void)copied;",
    ),
    ("fuzz_memory", "core/manager_states.cpp", "if (last != nullptr) keep(number, *last);", ""),
    ("fuzz_memory", "core/manager_states.cpp", "restores_.add(number, match.length, match.state_id);", ""),
    ("fuzz_memory", "core/manager_states.cpp", "if (row.computed == row.committed) return;", "return;"),
    (
        "fuzz_memory",
        "core/manager_states.cpp",
        "for (auto* each : {&saves_.rows, &saves_.lengths, &saves_.ids}) grow(*each, num_due);",
        "",
    ),
    ("fuzz_memory", "core/prefix_tree.cpp", "if (follows_states_) note_checkpoints(above, upper);", ""),
    (
        "fuzz_memory",
        "core/prefix_tree.cpp",
        "for (auto& spare : spares_) spare.reserve(most_checkpoints_);",
        "",
    ),
    ("fuzz_memory", "core/checkpoint_order.cpp", "  first_.remove(id);\n", ""),
    ("fuzz_work", "core/work_list.cpp", "std::min(num_rows, target - 1);", "0 * num_rows;"),
    (
        "fuzz_work",
        "core/work_list.cpp",
        "std::min(length, ceil_div(from + room, kBoundary) * kBoundary);",
        "std::min(length, from + room);",
    ),
    (
        "fuzz_work",
        "core/work_list.cpp",
        "if (part != (first < 0 ? -1 : first + covered[1] * count))",
        "if (part < -1 && first == count)",
    ),
    (
        "fuzz_work",
        "core/work_list.cpp",
        "length - from <= room + slack ? length : cut;",
        "length - from <= room + 2 * slack ? length : cut;",
    ),
    (
        "fuzz_work",
        "core/work_list.cpp",
        "work.runs[p] < (p == 0 ? 0 : work.runs[p - 1]) || (p == 0 && work.runs[p] != 0)",
        "p == 0 && work.runs[p] != 0",
    ),
]


@pytest.mark.parametrize(
    ("program", "file", "right", "wrong"), MISTAKES, ids=[f"{m[1]} {m[2]}" for m in MISTAKES]
)
def test_the_fuzz_finds_a_mistake(
    compiled: dict[str, Path], tmp_path: Path, program: str, file: str, right: str, wrong: str
):
    native = tmp_path / "native"
    shutil.copytree(NATIVE, native)
    source = (native / file).read_text()
    assert source.count(right) == 1
    (native / file).write_text(source.replace(right, wrong))
    # A header may be part of everything; a source is part of itself.
    changed = Path(file)
    ready = {
        name: each for name, each in compiled.items() if changed.suffix == ".cpp" and name != changed.stem
    }
    broken = build(native, program, tmp_path, ready, "-O0")
    done = subprocess.run([broken, "1", "20000"], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
