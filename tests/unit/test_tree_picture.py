"""The picture of a tree: text, rich, JSON. Trees are made by hand; a real one where its evictions count."""

import importlib.util
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.errors import ArgumentError, ConfigError
from pagoda.tree import NodeView, PrefixTree, Tally, TreeCounts, _labels, draw_json, draw_rich, draw_text
from profiles import examples
from twin import PrefixTwin

# rich is an extra, and part of `dev`: a machine without it runs the rest.
HAS_RICH = importlib.util.find_spec("rich") is not None
DRAWINGS = [draw_text, draw_json, draw_rich] if HAS_RICH else [draw_text, draw_json]


class HandMade:
    """A tree that is only what a picture may ask for."""

    def __init__(self, views: Sequence[NodeView], page_tokens: int = 4) -> None:
        self.views, self.page_tokens = list(views), page_tokens
        self.asked: list[tuple[int, int]] = []

    def counts(self) -> TreeCounts:
        def tally(numbers: dict[int, int]) -> Tally:
            protected = sum(n for number, n in numbers.items() if leased[number])
            return Tally(sum(numbers.values()), sum(numbers.values()) - protected, protected)

        nodes = [view for view in self.views if view.parent is not None]
        leased = {view.number: view.leases > 0 for view in nodes}
        tokens = {view.number: view.end - view.begin for view in nodes}
        return TreeCounts(
            tally(tokens),
            (tally({number: n // self.page_tokens for number, n in tokens.items()}),),
            tally({view.number: len(view.checkpoints) for view in nodes}),
            len(nodes),
            sum(view.num_children == 0 for view in nodes),
            sum(view.leases for view in self.views if view.parent is None),
        )

    def nodes(
        self, max_nodes: int = 1000, max_tokens: int = 32, namespace: bytes | str | None = None
    ) -> list[NodeView]:
        self.asked.append((max_nodes, max_tokens))
        name = namespace.encode() if isinstance(namespace, str) else namespace
        pages = -(-max_tokens // self.page_tokens)
        matching = (view for view in self.views if name is None or view.namespace == name)
        return [
            view._replace(
                tokens=view.tokens[:max_tokens], columns=tuple(column[:pages] for column in view.columns)
            )
            for view in itertools.islice(matching, max_nodes)
        ]


def root(
    number: int, num_children: int, name: bytes = b"", leases: int = 0, dropped: bool = False
) -> NodeView:
    none = np.zeros(0, dtype=np.int32)
    return NodeView(number, None, name, dropped, 0, 0, 0, none, (none,), num_children, leases, 0, ())


def node(
    number: int,
    parent: NodeView,
    tokens: Sequence[int] | np.ndarray,
    *pages: Sequence[int],
    children: int = 0,
    leases: int = 0,
    used: int = 1,
    checkpoints: tuple[tuple[int, int], ...] = (),
) -> NodeView:
    return NodeView(
        number,
        parent.number,
        parent.namespace,
        parent.is_dropped,
        parent.level + 1,
        parent.end,
        parent.end + len(tokens),
        np.array(tokens, dtype=np.int32),
        tuple(np.array(ids, dtype=np.int32) for ids in pages),
        children,
        leases,
        used,
        checkpoints,
    )


def one_run(**more: Any) -> HandMade:
    top = root(0, 1)
    return HandMade([top, node(1, top, [1, 2, 3, 4], [1], **more)])


columns = pytest.importorskip("wcwidth", reason="needs wcwidth").width


def rendered(tree: Any, colours: str | None = None, **more: Any) -> str:
    """What rich prints on a terminal of 200 columns."""
    console = pytest.importorskip("rich.console")
    out, is_plain = io.StringIO(), colours is None
    terminal = console.Console(
        file=out, width=200, force_terminal=not is_plain, color_system=colours, no_color=is_plain
    )
    terminal.print(draw_rich(tree, **more))
    return out.getvalue()


# ── what it looks like ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def garden() -> HandMade:
    top, other = root(0, 2, leases=1), root(5, 1, b"tenant", leases=1, dropped=True)
    stem = node(1, top, range(11, 19), [1, 2], children=2, leases=1, used=9)
    return HandMade(
        [
            top,
            stem,
            node(2, stem, range(21, 25), [3], used=5),
            node(3, stem, range(31, 39), [4, 7], used=6),
            node(4, top, range(41, 61), [5, 6, 8, 9, 10], used=-1),
            other,
            node(6, other, range(71, 75), [12], leases=1, used=8),
        ]
    )


def test_the_text_line_by_line(garden: HandMade) -> None:
    assert draw_text(garden).split("\n") == [
        "44 tokens: 12 protected, 32 evictable · 5 nodes, 4 leaves, 2 leases · pages of 4",
        'namespace "", held by 1 lease',
        "├─ [11 12 13 14 15 16 17 18]                pages 1-2         8 tokens  1 lease",
        "│  ├─ [21 22 23 24]                         page 3            4 tokens  leaf, 2nd coldest",
        "│  └─ [31 32 33 34 35 36 37 38]             pages 4, 7        8 tokens  leaf, 3rd coldest",
        "└─ [41 42 43 44 45 46 47 48 49 50 51 52 …]  pages 5-6, 8-10  20 tokens  leaf, coldest, demoted",
        'namespace "tenant", dropped, held by 1 lease',
        "└─ [71 72 73 74]                            page 12           4 tokens  1 lease, leaf",
    ]


def test_the_text_with_words_and_bounds(garden: HandMade) -> None:
    def words(tokens: list[int]) -> str:
        return " ".join(f"word{token}" for token in tokens)

    # Three of the tree's nodes are in sight, so that nobody knows who is the coldest.
    assert draw_text(garden, max_nodes=4, max_tokens=2, tokenizer=words).split("\n") == [
        "44 tokens: 12 protected, 32 evictable · 5 nodes, 4 leaves, 2 leases · pages of 4",
        'namespace "", held by 1 lease',
        '├─ "word11 word12…"     pages 1-2   8 tokens  1 lease',
        '│  ├─ "word21 word22…"  page 3      4 tokens  leaf, used 5',
        '│  └─ "word31 word32…"  pages 4, 7  8 tokens  leaf, used 6',
        "└─ … 1 more child",
        "… 2 of 5 nodes are not drawn",
    ]


def test_one_namespace(garden: HandMade) -> None:
    assert draw_text(garden, namespace="tenant", max_tokens=0).split("\n") == [
        "of the whole tree: 44 tokens: 12 protected, 32 evictable · 5 nodes, 4 leaves, 2 leases · pages of 4",
        'namespace "tenant", dropped, held by 1 lease',
        "└─ […]  page 12  4 tokens  1 lease, leaf",
    ]
    assert draw_text(garden, namespace=b"nobody").split("\n")[1:] == ["nothing in this namespace"]
    assert [it["number"] for it in json.loads(draw_json(garden, namespace="tenant"))["nodes"]] == [5, 6]


def test_nothing_at_all() -> None:
    empty = HandMade([])
    nothing = "0 tokens: 0 protected, 0 evictable · 0 nodes, 0 leaves, 0 leases · pages of 4"
    assert draw_text(empty) == nothing
    assert rendered(empty) == nothing + "\n"
    picture = json.loads(draw_json(empty))
    assert (picture["nodes"], picture["is_cut"], picture["left_out"]) == ([], False, 0)


def test_groups_holes_and_checkpoints() -> None:
    top = root(0, 1)
    states = ((8, 0), (12, 5), (16, 2), (20, 3))
    run = node(1, top, range(20), [1, 2, 3, 9, 4], [-1, -1, 7, 8, -1], checkpoints=states)
    heading, _, line = draw_text(HandMade([top, run]), max_tokens=1, width=120).split("\n")
    assert heading.endswith("1 node, 1 leaf, 0 leases, 4 checkpoints · pages of 4")
    # Two groups share the room for pages: whole ranges are left out, never half of one.
    beside = "pages 1-3, 9, 4 | 2 holes, …  20 tokens  leaf, coldest, checkpoints 8→0 12→5 16→2 … 1 more"
    assert line == f"└─ [0 …]  {beside}"
    narrow = draw_text(HandMade([top, run]), max_tokens=1, width=60).split("\n")[-1]
    assert narrow == line[:59] + "…"


def test_every_page_id_that_is_known_is_told_in_order() -> None:
    top = root(0, 1)
    for ids, told in (
        ([7], "page 7 "),
        ([7, 8], "pages 7-8 "),
        ([8, 7], "pages 8, 7 "),
        ([7, 9, 10, 11], "pages 7, 9-11 "),
        ([-1], "page 1 hole "),
        ([-1, 1, -1, -1], "pages 1 hole, 1, 2 holes "),  # 18 columns: the most
        ([-1, 1, -1, -1, 5], "pages 1 hole, 1, … "),
        (range(1, 17), "pages 1-16 "),
        (range(1, 18), "pages 1-16, … "),  # sixteen are asked for
    ):
        tree = HandMade([top, node(1, top, range(4 * len(ids)), ids)])
        assert f"]  {told}" in draw_text(tree, width=1000), told


@pytest.mark.parametrize("kind", [PrefixTree, PrefixTwin])
def test_what_evict_takes_first_is_called_the_coldest(kind: Callable[[int], Any]) -> None:
    """A real tree: page after page goes off the tail of the leaf with rank 1."""
    rng = np.random.default_rng(3)
    tree, free = kind(2), iter(range(1, 1000))
    for _ in range(60):
        name, tokens = rng.choice(["a", "b"]), rng.integers(0, 3, 2 * rng.integers(1, 8)).astype(np.int32)
        lease = tree.lock(tree.match(tokens, str(name)))
        tree.insert(tokens[lease.length :], [next(free) for _ in tokens[lease.length :: 2]], lease)
        if rng.random() < 0.3:
            tree.demote(lease)
        if rng.random() < 0.95:
            tree.release(lease)
    assert tree.num_leases
    trimmed = 0
    while tree.evictable_tokens:
        leaves = [it for it in json.loads(draw_json(tree))["nodes"] if it.get("rank")]
        assert sorted(it["rank"] for it in leaves) == list(range(1, len(leaves) + 1))
        (coldest,) = [it for it in leaves if it["rank"] == 1]
        assert draw_text(tree).count("leaf, coldest") == 1
        assert tree.evict(1).page_ids.tolist() == coldest["pages"][0][-1:]
        trimmed += len(coldest["pages"][0]) > 1
    assert trimmed > 10
    assert "coldest" not in draw_text(tree)


def test_within_one_use_the_deeper_leaf_is_the_colder() -> None:
    top = root(0, 2)
    stem = node(2, top, [2] * 4, [2], children=1)
    tree = HandMade([top, node(1, top, [1] * 4, [1], used=7), stem, node(3, stem, [3] * 4, [3], used=7)])
    ranks = {it["number"]: it["rank"] for it in json.loads(draw_json(tree))["nodes"][1:]}
    assert ranks == {1: 2, 2: None, 3: 1}


def test_ranks_have_english_endings() -> None:
    top = root(0, 113)
    tree = HandMade([top, *(node(n, top, [n, 0, 0, 0], [n], used=n) for n in range(1, 114))])
    text = draw_text(tree)
    for ending in ("2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "101st", "111th", "113th"):
        assert f"leaf, {ending} coldest" in text


# ── text that means harm ─────────────────────────────────────────────────────────────────────────────

HOSTILE = {
    "a\nb\r\tc": r"a\nb\r\tc",
    "\x1b[31mred\x1b]0;title\x07": r"\x1b[31mred\x1b]0;title\x07",
    "\x9b31m\x00\x7f": r"\x9b31m\x00\x7f",
    'say "no" \\ yes': r"say \"no\" \\ yes",
    "\ud800x\udfff": r"\ud800x\udfff",
    "a\u202eb\u2066c\u200fd": r"a\u202eb\u2066c\u200fd",
    "line\u2028para\u2029nel\x85": r"line\u2028para\u2029nel\x85",
    "\ufeffzero\u200bwidth\u200d\U000e0041": r"\ufeffzero\u200bwidth\u200d\U000e0041",
    "e\u0301\u0302\u0303\u0304": "e\u0301\u0302" + r"\u0303\u0304",
    "[bold red]x[/bold red] [/] :smile: [link=http://a]b": "[bold red]x[/bold red] [/] :smile: [link=http://a]b",
    "│  └─ ├─": "│  └─ ├─",
    "": "",
}


@pytest.mark.parametrize(("text", "shown"), HOSTILE.items(), ids=ascii)
def test_no_text_breaks_the_drawing(text: str, shown: str) -> None:
    tree = one_run()
    lines = draw_text(tree, tokenizer=lambda tokens: text, width=200).split("\n")
    assert lines[2:] == [f'└─ "{shown}"  page 1  4 tokens  leaf, coldest']
    assert all(line.isprintable() for line in lines)
    assert "\n".join(lines).encode()
    assert rendered(tree, tokenizer=lambda tokens: text).split("\n")[2:] == [
        f'    └── "{shown}"  page 1  4 tokens  leaf, coldest',
        "",
    ]
    picture = draw_json(tree, tokenizer=lambda tokens: text)
    assert json.loads(picture)["nodes"][1]["text"] == text.replace("\ud800", "?").replace("\udfff", "?")


def test_wide_characters_keep_the_columns() -> None:
    texts = iter(["日本語のテキスト", "plain", "e\u0301a\u0308", "עברית", "😀😀", "日" * 400])
    top = root(0, 6)
    tree = HandMade([top, *(node(n, top, [n, 0, 0, 0], [n]) for n in range(1, 7))])
    lines = draw_text(tree, tokenizer=lambda tokens: next(texts)).split("\n")[2:]
    assert len({columns(line[: line.index("page ")]) for line in lines}) == 1
    assert all(columns(line) <= 100 for line in lines)
    # Right-to-left text turns round the digits that follow it: a Latin letter must come first.
    assert all(line[line.rindex('"') + 1 :].lstrip().startswith("page ") for line in lines)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"", '""'),
        ("bär".encode(), '"bär"'),
        (b"\xff\x00", r"b'\xff\x00'"),
        (b"a\nb\x1b[2J", r'"a\nb\x1b[2J"'),
        ("\u202eabc".encode(), r'"\u202eabc"'),
        (b"[red]", '"[red]"'),
    ],
)
def test_names_of_namespaces_are_escaped(name: bytes, shown: str) -> None:
    tree = HandMade([root(0, 0, name)])
    assert draw_text(tree).split("\n")[1:] == [f"namespace {shown}"]
    assert rendered(tree).split("\n")[1:] == [f"└── namespace {shown}", ""]
    json.loads(draw_json(tree))


@pytest.mark.parametrize("name", [b"n" * 10**6, b"\xff" * 10**6, "日".encode() * 10**6])
def test_a_long_name_is_cut(name: bytes) -> None:
    tree = HandMade([root(0, 0, name, leases=3, dropped=True)])
    (line,) = draw_text(tree).split("\n")[1:]
    assert columns(line) <= 100
    assert line.endswith(", dropped, held by 3 leases")
    assert len(rendered(tree)) < 300
    assert len(draw_json(tree).encode()) < 3000


def test_json_can_stand_in_a_script_element() -> None:
    picture = draw_json(one_run(), tokenizer=lambda tokens: "</script><!--")
    assert "<" not in picture
    assert json.loads(picture)["nodes"][1]["text"] == "</script><!--"


# ── tokenizers ───────────────────────────────────────────────────────────────────────────────────────


def test_a_tokenizer_has_decode_or_is_a_callable() -> None:
    class Both:
        def decode(self, tokens: list[int]) -> str:
            assert type(tokens) is list
            assert all(type(token) is int for token in tokens)
            return f"decoded {tokens}"

        def __call__(self, tokens: list[int]) -> str:
            raise AssertionError("those of Hugging Face encode when they are called")

    for tokenizer in (Both(), Both().decode):
        assert '"decoded [1, 2, 3, 4]"' in draw_text(one_run(), tokenizer=tokenizer)
        assert '"decoded [1, 2, 3, 4]"' in rendered(one_run(), tokenizer=tokenizer)
        assert '"text":"decoded [1, 2, 3, 4]"' in draw_json(one_run(), tokenizer=tokenizer)


def raises(tokens: list[int]) -> str:
    raise IndexError("out of the vocabulary")


@pytest.mark.parametrize(
    "bad", [raises, lambda tokens: None, lambda tokens: b"bytes", lambda: "", (1).__add__]
)
def test_a_tokenizer_that_fails_leaves_the_ids_of_that_run(bad: Callable[..., Any]) -> None:
    top = root(0, 2)
    tree = HandMade([top, node(1, top, [1, 2, 3, 4], [1]), node(2, top, [5, 6, 7, 8], [2])])

    def tokenizer(tokens: list[int]) -> Any:
        return bad(tokens) if tokens[0] == 1 else "fine"

    text = draw_text(tree, tokenizer=tokenizer)
    assert "├─ [1 2 3 4]  page 1" in text
    assert '└─ "fine"     page 2' in text
    assert "── [1 2 3 4]  page 1" in rendered(tree, tokenizer=tokenizer)
    assert [it.get("text") for it in json.loads(draw_json(tree, tokenizer=tokenizer))["nodes"]] == [
        None,
        None,
        "fine",
    ]


def test_a_tokenizer_does_not_swallow_an_interrupt() -> None:
    def interrupted(tokens: list[int]) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draw_text(one_run(), tokenizer=interrupted)


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_of_a_million_tokens_is_one_short_line() -> None:
    top = root(0, 1)
    tree = HandMade([top, node(1, top, np.arange(10**6), np.arange(1, 250_001))])
    given_tokens: list[int] = []

    def tokenizer(tokens: list[int]) -> str:
        given_tokens.append(len(tokens))
        return "x" * 10**6

    assert draw_text(tree).split("\n")[2] == (
        "└─ [0 1 2 3 4 5 6 7 8 9 10 11 …]  pages 1-16, …  1,000,000 tokens  leaf, coldest"
    )
    text = draw_text(tree, tokenizer=tokenizer)
    assert all(columns(line) <= 100 for line in text.split("\n"))
    assert 'x…"  pages 1-16, …  1,000,000 tokens  leaf, coldest' in text
    assert len(rendered(tree, tokenizer=tokenizer)) < 500
    assert len(draw_json(tree, tokenizer=tokenizer)) < 2000
    assert set(given_tokens) == {12}
    assert max(max_tokens for _, max_tokens in tree.asked) == 16 * 4
    # All of it, when all is asked for; the width still holds.
    assert all(columns(line) <= 100 for line in draw_text(tree, max_tokens=10**6).split("\n"))


@pytest.fixture(scope="module")
def chain() -> HandMade:
    views = [root(0, 1)]
    tokens, page = np.arange(4, dtype=np.int32), (np.ones(1, dtype=np.int32),)
    for n in range(1, 100_001):
        leaf = n == 100_000
        views.append(NodeView(n, n - 1, b"", False, n, 4 * n - 4, 4 * n, tokens, page, not leaf, 0, 1, ()))
    return HandMade(views)


def test_100_000_levels_stay_on_the_page(chain: HandMade) -> None:
    lines = draw_text(chain).split("\n")
    assert len(lines) == 1 + 200 + 2
    assert all(columns(line) <= 100 for line in lines)
    assert lines[9].startswith(" " * 21 + "└─ [0 1 2 3]")  # the eighth level, the last that is indented
    assert lines[10].startswith(" " * 24 + "⋮ level 9: [0 1 2 3]")
    assert lines[-2:] == [
        " " * 24 + "⋮ level 200: … 1 more child",
        "… 99,801 of 100,000 nodes are not drawn",
    ]
    lines = draw_text(chain, max_nodes=10_000, width=60).split("\n")
    assert len(lines) == 2 + 10_000 + 2  # the heading takes two
    assert max(map(columns, lines)) <= 60
    assert lines[-3].startswith(" " * 15 + "⋮ level 9999: [")
    lines = rendered(chain).split("\n")
    assert len(lines) == 1 + 200 + 2 + 1
    assert max(map(len, lines)) <= 100
    assert {line.index("level ") for line in lines[10:-2]} == {4 * 10}  # under the eighth level, all of them
    picture = draw_json(chain, max_nodes=10**6)
    assert len(picture) <= 65536
    parsed = json.loads(picture)
    assert parsed["left_out"] == 100_000 - (len(parsed["nodes"]) - 1) > 99_000
    assert parsed["is_cut"]


def test_many_children_and_many_namespaces_are_cut_and_said() -> None:
    top = root(0, 5000)
    tree = HandMade([top, *(node(n, top, [n, 0, 0, 0], [n]) for n in range(1, 5001))])
    lines = draw_text(tree, max_nodes=3).split("\n")
    assert lines[-2:] == ["└─ … 4,998 more children", "… 4,998 of 5,000 nodes are not drawn"]
    assert len(lines) == 6
    assert draw_text(tree, max_nodes=3, namespace="").split("\n")[-1] == "└─ … 4,998 more children"
    assert json.loads(draw_json(tree, max_nodes=3, namespace=""))["left_out"] == 4998
    roots = [root(n, 0, str(n).encode()) for n in range(5000)]
    assert len(draw_text(HandMade(roots)).split("\n")) == 201
    assert len(draw_json(HandMade(roots)).encode()) <= 65536


def test_the_tree_is_asked_for_no_more_than_the_bounds(garden: HandMade) -> None:
    for draw in DRAWINGS:
        garden.asked.clear()
        draw(garden, max_nodes=3, max_tokens=0)
        draw(garden, max_nodes=7, max_tokens=65)
        draw(garden, max_nodes=np.int64(7), max_tokens=10**30)
        assert garden.asked[:2] == [(3, 64), (7, 68)]  # whole pages, sixteen at least
        assert garden.asked[2][0] == 7
        assert garden.asked[2][1] < 2**31


@st.composite
def trees(draw: st.DrawFn) -> HandMade:
    """Any shape; parents come before their children, in no other order."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    views = [root(0, 0, draw(st.binary(max_size=20)), int(rng.integers(4)))]
    for number in range(1, draw(st.integers(0, 30)) + 1):
        above = int(rng.integers(max(0, number - draw(st.sampled_from([1, 9]))), number))
        num_pages = int(rng.integers(1, 6))
        views.append(
            node(
                number,
                views[above],
                rng.integers(0, 2 ** rng.integers(1, 31), 4 * num_pages),
                rng.integers(-1, 2 ** rng.integers(1, 31), num_pages),
                leases=int(rng.integers(3)),
                used=int(rng.integers(-5, 2**40)),
                checkpoints=tuple((int(n), int(n)) for n in rng.integers(0, 99, rng.integers(20))),
            )
        )
        views[above] = views[above]._replace(num_children=views[above].num_children + 1)
    return HandMade(views)


@settings(max_examples=examples(150))
@given(tree=trees(), texts=st.dictionaries(st.integers(0, 5), st.text(max_size=80)), sizes=st.data())
def test_json_is_valid_and_within_its_bytes(
    tree: HandMade, texts: dict[int, str], sizes: st.DataObject
) -> None:
    def tokenizer(tokens: list[int]) -> str:
        return texts[tokens[0] % 6]  # or a KeyError

    whole = draw_json(tree, max_bytes=10**7, tokenizer=tokenizer)
    assert [it["number"] for it in json.loads(whole)["nodes"]] == [
        view.number for view in sorted(tree.views, key=lambda view: view.level)
    ]
    assert not json.loads(whole)["is_cut"]
    most = -1
    for max_bytes in sorted(
        sizes.draw(st.lists(st.integers(1, len(whole.encode()) + 9), min_size=1, max_size=6))
    ):
        try:
            picture = draw_json(tree, max_bytes=max_bytes, tokenizer=tokenizer)
        except ArgumentError:
            assert most == -1, "more room, and it fails"
            assert max_bytes < 420
            continue
        assert len(picture.encode()) <= max_bytes
        parsed = json.loads(picture)
        numbers = {it["number"] for it in parsed["nodes"]}
        assert len(numbers) >= most
        most = len(numbers)
        assert all(it["parent"] is None or it["parent"] in numbers for it in parsed["nodes"])
        num_drawn = sum(it["parent"] is not None for it in parsed["nodes"])
        assert parsed["left_out"] + num_drawn == parsed["num_nodes"] == len(tree.views) - 1
        assert parsed["is_cut"] == (len(numbers) < len(tree.views))


# Characters whose width depends on what they stand beside: marks, flags, keycaps, skin tones, Hangul, Indic.
odd_text = st.text(
    'a世…"\n\x1b\u0301\u0903\u094d\u0915\u0d4e\u0e33\u1100\u1161\u11a8\u180b\u200d\u20e3\u2764\ufe0e\ufe0f'
    "\U0001f1e9\U0001f1ea\U0001f44d\U0001f3fd\U000e0020\ud800",
    max_size=60,
)


@settings(max_examples=examples(80))
@given(
    tree=trees(),
    text=st.text(max_size=300) | odd_text,
    width=st.integers(60, 140),
    max_nodes=st.integers(1, 40),
)
def test_text_never_leaves_its_width(tree: HandMade, text: str, width: int, max_nodes: int) -> None:
    lines = draw_text(tree, tokenizer=lambda tokens: text, width=width, max_nodes=max_nodes).split("\n")
    assert max(map(columns, lines)) <= width
    assert all(line.isprintable() for line in lines)
    drawn = sum(re.match(r'(│  |   )*([├└]─|⋮ level \d+:) "', line) is not None for line in lines)
    assert drawn == min(max_nodes, len(tree.views)) - 1
    assert len(lines) <= 2 * max_nodes + 4


def test_json_has_every_byte_it_may_have(garden: HandMade) -> None:
    whole = draw_json(garden)
    assert draw_json(garden, max_bytes=len(whole.encode()) + 1) == whole
    frame = len(draw_json(HandMade([])).encode())
    with pytest.raises(ArgumentError, match="max_bytes"):
        draw_json(HandMade([]), max_bytes=frame - 1)
    assert json.loads(draw_json(HandMade([]), max_bytes=frame))["nodes"] == []


def test_json_says_it_all(garden: HandMade) -> None:
    picture = json.loads(draw_json(garden, max_tokens=2))
    assert picture["page_tokens"] == 4
    assert picture["tokens"] == {"total": 44, "evictable": 32, "protected": 12}
    assert picture["columns"] == [{"total": 11, "evictable": 8, "protected": 3}]
    assert (picture["num_nodes"], picture["num_leaves"], picture["num_leases"]) == (5, 4, 2)
    assert [it["number"] for it in picture["nodes"]] == [0, 5, 1, 4, 6, 2, 3]
    assert picture["nodes"][1] == {
        "number": 5,
        "parent": None,
        "level": 0,
        "namespace": "tenant",
        "is_dropped": True,
        "leases": 1,
        "num_children": 1,
    }
    assert picture["nodes"][-1] == {
        "number": 3,
        "parent": 1,
        "level": 2,
        "begin": 8,
        "end": 16,
        "tokens": [31, 32],
        "text": None,
        "pages": [[4, 7]],
        "used": 6,
        "rank": 3,
        "num_checkpoints": 0,
        "checkpoints": [],
        "is_lost": False,
        "leases": 0,
        "num_children": 0,
    }


def test_what_nobody_finds_is_marked() -> None:
    tree = PrefixTree(2)
    tree.insert([1, 2, 3, 4], [1, 2], namespace="a")
    with tree.lock(tree.match([1, 2], "a")):
        tree.drop("a")
        assert draw_text(tree).split("\n")[-1].endswith("1 lease, lost, leaf")
        assert [it.get("is_lost") for it in json.loads(draw_json(tree))["nodes"]] == [None, True]


# ── colours, rich, arguments ─────────────────────────────────────────────────────────────────────────


def test_colours_tell_leased_coldest_and_evictable(garden: HandMade) -> None:
    lines = draw_text(garden, colour=True).split("\n")
    assert lines[2].startswith("├─ \033[33m[11 ")
    assert lines[3].startswith("│  ├─ \033[36m[21 ")
    assert lines[5].startswith("└─ \033[1;34m[41 ")
    assert all(line.endswith("\033[0m") for line in lines)
    bare = [line.replace("\033[0m", "") for line in lines]
    for code in ("33", "36", "1;34", "1"):
        bare = [line.replace(f"\033[{code}m", "") for line in bare]
    assert bare == draw_text(garden).split("\n")


def test_rich_draws_the_same_tree_in_colour(garden: HandMade) -> None:
    assert rendered(garden).split("\n") == [
        "44 tokens: 12 protected, 32 evictable · 5 nodes, 4 leaves, 2 leases · pages of 4",
        '├── namespace "", held by 1 lease',
        "│   ├── [11 12 13 14 15 16 17 18]  pages 1-2  8 tokens  1 lease",
        "│   │   ├── [21 22 23 24]  page 3  4 tokens  leaf, 2nd coldest",
        "│   │   └── [31 32 33 34 35 36 37 38]  pages 4, 7  8 tokens  leaf, 3rd coldest",
        "│   └── [41 42 43 44 45 46 47 48 49 50 51 52 …]  pages 5-6, 8-10  20 tokens  leaf, coldest, demoted",
        '└── namespace "tenant", dropped, held by 1 lease',
        "    └── [71 72 73 74]  page 12  4 tokens  1 lease, leaf",
        "",
    ]
    coloured = rendered(garden, colours="standard").split("\n")
    assert "\033[33m[11" in coloured[2]
    assert "\033[36m[21" in coloured[3]
    assert "\033[1;34m[41" in coloured[5]


@pytest.mark.parametrize("module", ["rich", "rich.tree", "rich.text"])
def test_without_rich_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    for name in [name for name in sys.modules if name == "rich" or name.startswith("rich.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'pagoda-kv\[rich\]'"):
        draw_rich(one_run())
    assert draw_text(one_run())
    assert draw_json(one_run())


@pytest.mark.parametrize("draw", DRAWINGS)
@pytest.mark.parametrize(
    "wrong",
    [
        {"max_nodes": 0},
        {"max_nodes": -(10**5000)},
        {"max_nodes": 1.5},
        {"max_nodes": True},
        {"max_nodes": None},
        {"max_tokens": -1},
        {"max_tokens": "12"},
        {"namespace": 7},
        {"namespace": ["a"]},
        {"tokenizer": 7},
        {"tokenizer": "gpt2"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_arguments(draw: Callable[..., Any], wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        draw(one_run(), **wrong)


@pytest.mark.parametrize(
    ("draw", "wrong"),
    [
        (draw_text, {"width": 59}),
        (draw_text, {"width": 80.0}),
        (draw_json, {"max_bytes": 0}),
        (draw_json, {"max_bytes": 20}),
        (draw_json, {"max_bytes": "1"}),
    ],
)
def test_wrong_arguments_of_one(draw: Callable[..., Any], wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        draw(one_run(), **wrong)


@pytest.mark.parametrize("draw", DRAWINGS)
@pytest.mark.parametrize("thing", [None, 7, "tree", {"nodes": 1}])
def test_what_is_no_tree(draw: Callable[..., Any], thing: Any) -> None:
    with pytest.raises(ArgumentError, match="tree"):
        draw(thing)


def test_without_wcwidth_text_still_keeps_its_width(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_labels, "_widths", lambda: None)
    text = "日本語 e\u0301 👩‍👩‍👧 naïve"
    label = _labels.token_label([1, 2, 3], text, False, 20)
    assert columns(label) <= 20
    assert label.startswith('"日本語')
