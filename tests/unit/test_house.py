"""The house: rooms import only what stands before them, and public names are documented."""

import ast
import inspect
from pathlib import Path

import pagoda

SOURCE = Path(pagoda.__file__).parent

# In the order of docs/layers.md; `pagoda` itself re-exports everything but the command line.
ROOMS = [
    "errors", "_native", "layout", "ids", "tables", "tree", "manager", "kernels", "pools", "attention", "hf",
    "compat", "pagoda", "cli", "__main__",
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
    for name in pagoda.__all__:
        thing = getattr(pagoda, name)
        assert inspect.getdoc(thing), name
        if not isinstance(thing, type) or issubclass(thing, BaseException):
            continue
        for member in documented_members(thing):
            text = inspect.getdoc(getattr(thing, member))
            assert text, f"{name}.{member}"


def test_every_public_call_says_its_cost():
    for name in pagoda.__all__:
        thing = getattr(pagoda, name)
        if not isinstance(thing, type) or issubclass(thing, (BaseException, tuple)):
            continue
        for member in documented_members(thing):
            text = inspect.getdoc(getattr(thing, member)) or ""
            has_cost = any(word in text for word in ("O(", "Cost", "cost", "As `"))
            assert has_cost, f"{name}.{member} says no cost"


def test_all_is_what_can_be_imported():
    assert len(set(pagoda.__all__)) == len(pagoda.__all__)
    assert all(hasattr(pagoda, name) for name in pagoda.__all__)
