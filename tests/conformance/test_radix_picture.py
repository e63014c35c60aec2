"""contracts/radix.md: `root_node`, and the picture of it."""

import inspect
import io
import sys
import time
from typing import Any

import pytest

from conformance.prefixes import PAGE_SIZES, insert, match
from pagoda.compat import RadixCacheManager, format_radix_tree, print_radix_tree
from pagoda.errors import ArgumentError


@pytest.fixture
def forked(device: str) -> RadixCacheManager:
    """1 3 6 7 over the leaves 87 66 and 9 77, with the former locked."""
    manager = RadixCacheManager(device)
    manager.insert_prefix([1, 3, 6, 7, 87, 66], range(10, 16))
    manager.insert_prefix([1, 3, 6, 7, 9, 77], range(20, 26))
    handle, _ = manager.match_prefix([1, 3, 6, 7, 87, 66])
    manager.lock_handle(handle)
    return manager


def nodes_of(root: Any) -> list[Any]:
    nodes, stack = [], [root]
    while stack:
        nodes.append(stack.pop())
        stack += reversed(nodes[-1].children)
    return nodes


# --- root_node


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_an_empty_tree_has_a_root(device: str, page_size: int) -> None:
    manager = RadixCacheManager(device, page_size)
    root = manager.root_node
    assert root.is_root()
    assert (root.parent, root.children, root.length, root.ref_count) == (None, (), 0, 0)
    assert root.tokens.tolist() == root.slots.tolist() == []
    assert type(root.uuid) is type(root.timestamp) is int
    assert root.is_leaf()  # nothing stands below


def test_a_node_tells_all_of_itself(forked: RadixCacheManager) -> None:
    root = forked.root_node
    assert root.is_root()
    assert not root.is_leaf()
    (stem,) = root.children
    nine, eighty_seven = stem.children  # in order of their first token, not of their birth
    assert [it.tokens.tolist() for it in (stem, nine, eighty_seven)] == [[1, 3, 6, 7], [9, 77], [87, 66]]
    assert [it.slots.tolist() for it in (stem, nine, eighty_seven)] == [[10, 11, 12, 13], [24, 25], [14, 15]]
    assert [it.length for it in (root, stem, nine, eighty_seven)] == [0, 4, 2, 2]
    assert [it.ref_count for it in (stem, nine, eighty_seven)] == [1, 0, 1]
    assert [it.is_leaf() for it in (stem, nine, eighty_seven)] == [False, True, True]
    assert not any(it.is_root() for it in (stem, nine, eighty_seven))
    assert stem.parent is root
    assert nine.parent is eighty_seven.parent is stem
    assert len({it.uuid for it in nodes_of(root)}) == 4


def test_a_view_is_complete_whatever_the_size(device: str) -> None:
    manager = RadixCacheManager(device)
    for branch in range(1500):
        first = branch * 100
        manager.insert_prefix([branch, *range(70)], range(first, first + 71))
    nodes = nodes_of(manager.root_node)
    assert len(nodes) == 1501
    assert [node.tokens[0] for node in nodes[1:]] == list(range(1500))
    assert all(node.length == len(node.tokens) == len(node.slots) == 71 for node in nodes[1:])


def test_a_view_is_of_one_moment_and_cannot_be_changed(forked: RadixCacheManager) -> None:
    root = forked.root_node
    before = format_radix_tree(root)
    forked.reset()
    assert format_radix_tree(root) == before
    stem = root.children[0]
    for name in ("uuid", "tokens", "slots", "ref_count", "timestamp", "length", "parent", "children"):
        with pytest.raises(AttributeError):
            setattr(stem, name, None)
    for array in (stem.tokens, stem.slots):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5


def test_looking_changes_nothing(forked: RadixCacheManager) -> None:
    first, again = (
        [(it.uuid, it.timestamp, it.ref_count, it.length) for it in nodes_of(forked.root_node)]
        for _ in range(2)
    )
    assert first == again
    forked.check()


def test_timestamps_are_a_counter_of_calls() -> None:
    """Two managers, the same calls; one takes its time."""

    def timestamps(pause_s: float) -> list[list[int]]:
        manager, found = RadixCacheManager("cpu"), []

        def look() -> None:
            time.sleep(pause_s)
            found.append([node.timestamp for node in nodes_of(manager.root_node)])

        manager.insert_prefix([1, 3, 87], [1, 2, 3])
        look()
        manager.insert_prefix([1, 3, 9], [4, 5, 6])
        look()
        handle, _ = manager.match_prefix([1, 3, 87])
        manager.lock_handle(handle)
        look()
        manager.insert_prefix([5], [7])
        look()
        manager.lock_handle(handle, unlock=True)
        look()
        return found

    at_once = timestamps(0)
    assert at_once == timestamps(0.01)
    newest = [max(times) for times in at_once]
    assert newest == sorted(set(newest))  # every call that uses is later than the one before


def test_the_root_has_one_number_and_nobody_else_has_it(device: str) -> None:
    manager = RadixCacheManager(device)
    numbers: list[set[int]] = []
    for turn in range(3):
        assert manager.root_node.uuid == 0  # empty
        manager.insert_prefix([1, 2, 3], [4, 5, 6])
        manager.insert_prefix([1, 2, 9], [7, 8, 9])
        root = manager.root_node
        assert root.uuid == 0
        numbers.append({node.uuid for node in nodes_of(root)[1:]})
        assert len(numbers[-1]) == 3
        if turn:
            manager.reset()
        else:
            manager.evict(4)
    assert len(set.union({0}, *numbers)) == 1 + 3 * 3  # never used again


def test_a_deep_tree_can_be_looked_at(device: str) -> None:
    manager = RadixCacheManager(device)
    depth = 400
    for length in range(1, depth + 1):  # each insert leaves the last one's path one token earlier
        manager.insert_prefix(
            [*[1] * (depth - length), 2], range(length * 1000, length * 1000 + depth - length + 1)
        )
    text = format_radix_tree(manager.root_node, max_depth=10**6)
    assert len(text.splitlines()) == len(nodes_of(manager.root_node)) + 1
    manager.check()


# --- the picture


def test_argument_names_are_part_of_the_contract() -> None:
    for call in (print_radix_tree, format_radix_tree):
        parameters = [it.replace(annotation=it.empty) for it in inspect.signature(call).parameters.values()]
        wanted = "root, max_depth=10, show_ref_count=True, show_timestamp=False"
        assert ", ".join(map(str, parameters)) == wanted


def test_the_picture_of_a_forked_tree(forked: RadixCacheManager) -> None:
    root = forked.root_node
    stem = root.children[0]
    nine, eighty_seven = stem.children
    heading, *lines = format_radix_tree(root).splitlines()
    assert heading == "Radix tree: 3 nodes, 8 tokens"
    assert lines == [
        "[R] #0 tokens=[] slots=[] ref=1",
        f"└── #{stem.uuid} tokens=[1, 3, 6, 7] slots=[10, 11, 12, 13] ref=1",
        f"    ├── [L] #{nine.uuid} tokens=[9, 77] slots=[24, 25] ref=0",
        f"    └── [L] #{eighty_seven.uuid} tokens=[87, 66] slots=[14, 15] ref=1",
    ]


def test_bars_go_on_beside_what_hangs_below(device: str) -> None:
    manager = RadixCacheManager(device)
    for number, tokens in enumerate(([1, 5], [1, 6], [2, 5], [2, 6])):
        manager.insert_prefix(tokens, [10 * number, 10 * number + 1])
    lines = format_radix_tree(manager.root_node, show_ref_count=False).splitlines()[1:]
    marks = [line.split("#")[0] for line in lines]
    assert marks == [
        "[R] ",
        "├── ",
        "│   ├── [L] ",
        "│   └── [L] ",
        "└── ",
        "    ├── [L] ",
        "    └── [L] ",
    ]


@pytest.mark.parametrize("show_ref_count", [True, False])
@pytest.mark.parametrize("show_timestamp", [True, False])
def test_what_is_shown_can_be_chosen(
    forked: RadixCacheManager, show_ref_count: bool, show_timestamp: bool
) -> None:
    root = forked.root_node
    text = format_radix_tree(root, show_ref_count=show_ref_count, show_timestamp=show_timestamp)
    for node, line in zip(nodes_of(root), text.splitlines()[1:], strict=True):
        words = line.split("#")[1].split()
        assert (f"ref={node.ref_count}" in words) == show_ref_count
        assert (f"ts={node.timestamp}" in words) == show_timestamp


def test_tokens_and_slots_are_cut_at_30_characters(device: str) -> None:
    manager = RadixCacheManager(device)
    manager.insert_prefix(range(10), range(10))
    line = format_radix_tree(manager.root_node).splitlines()[-1]
    tokens = line.split("tokens=")[1].split(" slots=")[0]
    assert tokens == "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]"
    assert len(tokens) == 30  # just as long as it may be
    manager.reset()
    manager.insert_prefix(range(11), range(11))
    line = format_radix_tree(manager.root_node).splitlines()[-1]
    for cut in (line.split("tokens=")[1].split(" slots=")[0], line.split("slots=")[1].split(" ref=")[0]):
        assert cut == "[0, 1, 2, 3, 4, 5, 6, 7, 8,..."
        assert len(cut) == 30


def test_levels_below_max_depth_are_left_out_and_said(device: str) -> None:
    manager = RadixCacheManager(device)
    for number, tokens in enumerate(([1, 2, 3], [1, 2, 4], [1, 5])):
        manager.insert_prefix(tokens, [10 * number, 10 * number + 1, 10 * number + 2][: len(tokens)])
    root = manager.root_node
    whole = format_radix_tree(root).splitlines()
    assert format_radix_tree(root, max_depth=3).splitlines() == whole
    shape = [line.split("#")[0] for line in format_radix_tree(root, max_depth=2).splitlines()]
    assert shape[1:] == ["[R] ", "└── ", "    ├── ", "    │   └── ...", "    └── [L] "]
    shape = [line.split("#")[0] for line in format_radix_tree(root, max_depth=0).splitlines()]
    assert shape[1:] == ["[R] ", "└── ..."]
    for depth in range(4):  # the heading tells of the whole tree
        assert format_radix_tree(root, max_depth=depth).splitlines()[0] == "Radix tree: 5 nodes, 5 tokens"


def test_an_empty_tree_is_a_root(device: str) -> None:
    lines = format_radix_tree(RadixCacheManager(device).root_node).splitlines()
    assert lines == ["Radix tree: 0 nodes, 0 tokens", "[R] #0 tokens=[] slots=[] ref=0"]


def test_any_node_can_stand_at_the_top(forked: RadixCacheManager) -> None:
    stem = forked.root_node.children[0]
    lines = format_radix_tree(stem).splitlines()
    assert lines[0] == "Radix tree: 3 nodes, 8 tokens"
    assert lines[1].startswith(f"#{stem.uuid} tokens=[1, 3, 6, 7]")
    assert [line[:8] for line in lines[2:]] == ["├── [L] ", "└── [L] "]


def test_print_prints_what_format_gives(
    forked: RadixCacheManager, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ((), (1,), (10, False), (10, True, True)):
        print_radix_tree(forked.root_node, *arguments)
        assert capsys.readouterr().out == format_radix_tree(forked.root_node, *arguments) + "\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_stream_without_box_drawing_gets_plain_characters(
    forked: RadixCacheManager, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    print_radix_tree(forked.root_node)
    stream.flush()
    heading, *lines = raw.getvalue().decode(encoding).splitlines()
    assert heading == "Radix tree: 3 nodes, 8 tokens"
    assert [line.split("#")[0] for line in lines] == ["[R] ", "`-- ", "    |-- [L] ", "    `-- [L] "]


@pytest.mark.parametrize(("root", "max_depth"), [(None, 10), ("tree", 10), (3, 10)])
def test_what_is_no_tree_is_refused(root: Any, max_depth: Any) -> None:
    for call in (format_radix_tree, print_radix_tree):
        with pytest.raises(ArgumentError):
            call(root, max_depth)


@pytest.mark.parametrize("max_depth", [-1, 1.5, None, "3"])
def test_what_is_no_depth_is_refused(forked: RadixCacheManager, max_depth: Any) -> None:
    for call in (format_radix_tree, print_radix_tree):
        with pytest.raises(ArgumentError):
            call(forked.root_node, max_depth)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_slots_of_pages_are_consecutive(device: str, page_size: int) -> None:
    manager = RadixCacheManager(device, page_size)
    insert(manager, [1, 2], [7, 3])
    (node,) = manager.root_node.children
    wanted = [*range(7 * page_size, 8 * page_size), *range(3 * page_size, 4 * page_size)]
    assert node.slots.tolist() == wanted
    assert match(manager, [1, 2])[1] == [7, 3]
