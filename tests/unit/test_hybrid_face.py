"""compat/hybrid is a face of one Manager and one Pools: it owns no free-list, table or pool."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import pagoda.compat.hybrid
from conformance.hybrid_models import manager_of
from pagoda import FreeList, Manager, pools
from pagoda.pools import Pools

FOLDER = Path(inspect.getfile(pagoda.compat.hybrid)).parent
# What holds ids, tables or tensors of its own.
OWNERS = {"FreeList", "DeviceTable", "TokenPool", "EntryPool", "StatePool", "CheckpointPool", "PagePool"}
OWNERS |= {"BlockAllocator", "SlotAllocator", "PrefixTree", "ManagerCore", "Rank"}
BUILT = {"Manager", "Pools"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(FOLDER.glob("*.py")):
        yield path.name, ast.parse(path.read_text(encoding="utf-8"))


def called(tree: ast.AST) -> Iterator[str]:
    """The names that are called, and those whose methods are: X and Y of X(…) and Y.make(…)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            target = node.func
            while isinstance(target, ast.Attribute):
                target = target.value
            if isinstance(target, ast.Name):
                yield target.id


def owners_in(tree: ast.AST) -> set[str]:
    return OWNERS & set(called(tree))


def test_only_a_manager_and_pools_are_built() -> None:
    built: set[str] = set()
    for name, tree in modules():
        assert not owners_in(tree), name
        built |= BUILT & set(called(tree))
    assert built == BUILT


def test_free_lists_and_tables_are_not_even_imported() -> None:
    for name, tree in modules():
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        # EntryPool and BlockAllocator are types here: of a layer's pool, and what an allocator is.
        assert not imported & (OWNERS - {"EntryPool", "BlockAllocator"}), name


@pytest.mark.parametrize(
    "line", ["FreeList(4)", "pools = [StatePool.from_group(g, 3)]", "EntryPool(1, 1, 1, entries)"]
)
def test_the_walk_finds_what_is_built(line: str) -> None:
    assert owners_in(ast.parse(f"def make():\n    {line}"))


def test_a_manager_has_one_manager_and_one_pools_and_nothing_else_that_holds_ids() -> None:
    manager = manager_of("cpu")
    kinds = [type(value) for value in vars(manager).values()]
    assert kinds.count(Manager) == kinds.count(Pools) == 1
    owned = (FreeList, pools.DeviceTable, pools.TokenPool, pools.EntryPool, pools.StatePool)
    assert not [kind for kind in kinds if issubclass(kind, owned)]
    # Every tensor of the contract is one of the pools', except for the marks of rows: running, and lengths.
    held = {tensor.untyped_storage().data_ptr() for tensor in manager._pools.tensors()}
    for layer in manager.schemas:
        state, paged, table = (
            it[layer] for it in (manager.state_pools, manager.paged_pools, manager.block_tables)
        )
        tensors = [state.window, state.positions]
        if paged is not None:
            tensors += [paged.entries, table]
        assert {tensor.untyped_storage().data_ptr() for tensor in tensors} <= held
