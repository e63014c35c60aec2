"""The house: rooms import only what stands before them, and public names are documented."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import pagoda
import pagoda.tables

SOURCE = Path(pagoda.__file__).parent

# In the order of docs/layers.md. `pagoda` itself imports nothing before it is asked for a name.
ROOMS = [
    "errors", "layout", "_native", "ids", "tables", "tree", "manager", "kernels", "pools", "attention", "hf",
    "models", "compat", "pagoda", "cli", "__main__",
]  # fmt: skip
TORCH_FREE = {"errors", "layout", "ids", "tables", "tree", "manager"}


def room_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return "pagoda" if first == "__init__.py" else first.removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Dotted names of everything a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            # `from pagoda import kernels` is the room; `from pagoda import __version__` the root.
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def rooms_imported(path: Path) -> set[str]:
    parts = [name.split(".") for name in imports(path) if name.split(".")[0] == "pagoda"]
    return {names[1] if len(names) > 1 and names[1] in ROOMS else "pagoda" for names in parts}


def violations(source: Path) -> list[str]:
    files = sorted(source.rglob("*.py"))
    assert files
    return [
        f"{room_of(path)} imports {other}"
        for path in files
        for other in rooms_imported(path)
        if ROOMS.index(other) > ROOMS.index(room_of(path))
        or (other == "compat" and room_of(path) not in ("compat", "pagoda"))
    ]


def test_rooms_import_only_what_stands_before_them():
    assert violations(SOURCE) == []


def test_the_walk_finds_an_import_that_goes_upwards(tmp_path: Path, monkeypatch):
    (tmp_path / "ids.py").write_text("def f():\n    from pagoda.pools import TokenPool\n")
    (tmp_path / "pools").mkdir()
    (tmp_path / "pools" / "kv.py").write_text("from pagoda import compat, kernels\n")
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    assert violations(tmp_path) == ["ids imports pools", "pools imports compat"]


def test_the_control_plane_knows_no_torch():
    for path in SOURCE.rglob("*.py"):
        if room_of(path) in TORCH_FREE:
            assert not any(name.split(".")[0] == "torch" for name in imports(path)), path


def documented_members(thing: type) -> list[str]:
    return [
        name
        for name, member in vars(thing).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property))
    ]


def test_every_public_name_has_a_docstring():
    rooms = [
        *(getattr(pagoda, room) for room in pagoda._NAMES if room not in ("hf", "models")),
        pagoda.tables,
    ]
    for name, thing in ((name, getattr(room, name)) for room in rooms for name in room.__all__):
        assert inspect.getdoc(thing), name
        if not isinstance(thing, type) or issubclass(thing, BaseException):
            continue
        for member in documented_members(thing):
            text = inspect.getdoc(getattr(thing, member))
            assert text, f"{name}.{member}"


def test_all_is_what_can_be_imported():
    assert len(set(pagoda.__all__)) == len(pagoda.__all__)
    assert all(hasattr(pagoda, name) for name in pagoda.__all__)
    assert set(pagoda._ROOMS) == set(pagoda.__all__)
    assert set(pagoda.__all__) | set(pagoda._NAMES) <= set(dir(pagoda))
    with pytest.raises(AttributeError, match="no attribute 'KVPool'"):
        _ = pagoda.KVPool


def modules_after(program: str) -> set[str]:
    """The modules that a fresh interpreter has imported after a program."""
    told = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules, file=sys.stderr)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(told.stderr.split())


def test_importing_pagoda_imports_no_room():
    imported = modules_after("import pagoda; dir(pagoda)")
    assert {name for name in imported if name.startswith("pagoda.")} == set()
    assert not imported & {"numpy", "torch"}


@pytest.mark.parametrize(
    "program",
    [
        "import pagoda.errors, pagoda.layout, pagoda.ids, pagoda.tree, pagoda.manager",
        "import pagoda; pagoda.Manager, pagoda.PrefixTree, pagoda.from_hf, pagoda.draw_text",
        "import pagoda.cli; assert pagoda.cli.main(['plan', 'llama-3.1-8b']) == 0",
    ],
)
def test_sizing_and_planning_import_no_torch(program: str):
    imported = modules_after(program)
    assert "pagoda.layout" in imported
    assert not imported & {"torch", "pagoda.compat"}
