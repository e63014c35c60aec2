"""Drawings of a tree: as text, for rich, as JSON. In: a tree; out: a drawing of bounded size.

One line per node::

    20 tokens: 8 protected, 12 evictable · 3 nodes, 2 leaves, 1 lease · pages of 4
    namespace ""
    └─ "You are a bear."       pages 1-2   8 tokens  1 lease
       ├─ " Do you dance?"     page 3      4 tokens  leaf, coldest
       └─ " What do you eat?"  pages 4, 7  8 tokens  leaf, 2nd coldest

`coldest` is the leaf that `evict` trims first. A node marked `lost` cannot be found any more and is evicted
first once no lease protects it. Ranks are shown only if the drawing covers the whole tree; otherwise
`used 7` is the call counter at the last use.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pagoda.errors import ArgumentError, ConfigError
from pagoda.tree._labels import clip, columns_of, decode
from pagoda.tree._sight import NODE_PAGES, Drawable, Reader, Sight, integer, look, reader
from pagoda.tree._values import NodeView

if TYPE_CHECKING:
    from rich.tree import Tree

__all__ = ["draw_json", "draw_rich", "draw_text"]

MIN_WIDTH = 60
RICH_DEPTH, RICH_COLUMNS = 8, 60  # indented levels, columns for tokens
JSON_TEXT, JSON_CHECKPOINTS = 256, 16  # per node: characters, checkpoints
# By mood: terminal code, rich style.
COLOURS = {
    "leased": ("33", "yellow"),
    "evictable": ("36", "cyan"),
    "coldest": ("1;34", "bold blue"),
    "inner": ("0", "none"),
    "name": ("1", "bold"),
    "cut": ("2", "dim"),
}


def draw_text(
    tree: Drawable,
    *,
    namespace: bytes | str | None = None,
    max_nodes: int = 200,
    max_tokens: int = 12,
    tokenizer: Any = None,
    width: int = 100,
    colour: bool = False,
) -> str:
    """Draw the tree with box-drawing characters: counts, then one line per namespace and per node.

    At most `max_nodes` nodes and namespaces are drawn, each with at most `max_tokens` tokens, on lines of
    `width` columns (60 or more); the drawing says what is left out. `tokenizer` is an object with
    `decode(list of ids)`, or such a callable; if it fails, ids are shown. `colour` marks leased, evictable
    and coldest nodes with terminal codes. Errors: ArgumentError.
    """
    width, read = integer("width", width, MIN_WIDTH), reader(tokenizer)
    sight = look(tree, namespace, max_nodes, max_tokens)
    lines = list(sight.lines(deepest=width // 12))
    beside = [sight.beside(line.view) if line.view and line.level else ("", "", "") for line in lines]
    # The columns on the right get the width they need; tokens get what is left, up to what they need.
    pages_width, tokens_width, notes_width = (
        max((columns_of(cells[at]) for cells in beside), default=0) for at in range(3)
    )
    room = max(width // 3, width - pages_width - tokens_width - notes_width - 6)
    left = [
        line.bars + sight.label(line.view, read, max(8, room - len(line.bars)))
        if line.view and line.level
        else line.bars + sight.title(line, width)
        for line in lines
    ]
    node_width = max(
        (columns_of(text) for text, cells in zip(left, beside, strict=True) if cells[0]), default=0
    )
    drawn = [("name", "", text) for text in _folded(sight.heading(), width)]
    for line, text, (pages, tokens, notes) in zip(lines, left, beside, strict=True):
        if pages:
            text += " " * (node_width - columns_of(text))
            text = f"{text}  {pages:<{pages_width}}  {tokens:>{tokens_width}}  {notes}".rstrip()
        if columns_of(text) > width:
            text = clip(text, width)
        drawn.append((sight.mood(line), line.bars, text.removeprefix(line.bars)))
    if footing := sight.footing():
        drawn.append(("cut", "", footing))
    if not colour:
        return "\n".join(bars + text for _, bars, text in drawn)
    return "\n".join(f"{bars}\033[{COLOURS[mood][0]}m{text}\033[0m" for mood, bars, text in drawn)


def draw_rich(
    tree: Drawable,
    *,
    namespace: bytes | str | None = None,
    max_nodes: int = 200,
    max_tokens: int = 12,
    tokenizer: Any = None,
) -> Tree:
    """Draw the tree as a `rich.tree.Tree`, with leased, evictable and coldest nodes in different colours.

    Arguments are those of `draw_text`. No text is read as markup. Errors: ConfigError if rich is not
    installed; ArgumentError.
    """
    try:
        from rich.text import Text
        from rich.tree import Tree
    except ImportError:
        raise ConfigError("draw_rich needs rich: pip install 'pagoda-kv[rich]'") from None
    read, sight = reader(tokenizer), look(tree, namespace, max_nodes, max_tokens)
    top = Tree(Text(" · ".join(sight.heading()), "bold"), guide_style="dim")
    branches = [top]  # the last branch of each level
    for line in sight.lines(RICH_DEPTH):
        style = COLOURS[sight.mood(line)][1]
        if line.view and line.level:
            text = Text(sight.label(line.view, read, RICH_COLUMNS), style)
            text.append("  ".join(["", *filter(None, sight.beside(line.view))]))
        else:
            text = Text(sight.title(line, RICH_COLUMNS), style)
        if line.level > RICH_DEPTH:
            text = Text.assemble((f"level {line.level}: ", "dim"), text)
        del branches[min(line.level, RICH_DEPTH + 1) + 1 :]
        branches.append(branches[-1].add(text))
    if footing := sight.footing():
        top.add(Text(footing, "dim"))
    return top


def draw_json(
    tree: Drawable,
    *,
    max_bytes: int = 65536,
    namespace: bytes | str | None = None,
    max_nodes: int = 1000,
    max_tokens: int = 12,
    tokenizer: Any = None,
) -> str:
    """Draw the tree as one JSON object of at most `max_bytes` bytes of UTF-8.

    `nodes` is flat, since parsers limit nesting, and ordered by level: parents come before their children,
    and a cut drops the deepest nodes. `parent` is the `number` of the parent, null for a namespace, which has
    a name instead of tokens. `rank` 1 is the leaf that evict trims first; null unless the drawing covers the
    whole tree. `is_cut` says whether something is missing, `left_out` how many nodes; for one namespace,
    `left_out` is a lower bound. The text contains no "<", so it can be embedded in a script element. Errors:
    ArgumentError, also if `max_bytes` is too small for a drawing without nodes.
    """
    max_bytes, read = integer("max_bytes", max_bytes, 1), reader(tokenizer)
    sight = look(tree, namespace, max_nodes, max_tokens)
    counts, in_all = sight.counts, sight.num_nodes + sight.left_out
    head: dict[str, object] = {
        "page_tokens": sight.page_tokens,
        "tokens": counts.tokens._asdict(),
        "columns": [tally._asdict() for tally in counts.columns],
        "states": counts.states._asdict(),
        "num_nodes": counts.nodes,
        "num_leaves": counts.leaves,
        "num_leases": counts.leases,
    }
    # The longest possible frame: `false` is longer than `true`, and no count is larger than this.
    room = max_bytes - len(_dumped({**head, "is_cut": False, "left_out": in_all, "nodes": []}))
    if room < 0:
        raise ArgumentError(f"max_bytes: {max_bytes} is too small for a drawing without nodes; give more")
    nodes: list[bytes] = []
    num_drawn = 0
    for view in sorted(sight.views, key=lambda view: view.level):
        node = _dumped(_node(sight, view, read))
        room -= len(node) + 1  # its comma
        if room < 0:
            break
        nodes.append(node)
        num_drawn += view.parent is not None
    left_out = in_all - num_drawn
    is_cut = left_out > 0 or len(nodes) < len(sight.views)
    frame = _dumped({**head, "is_cut": is_cut, "left_out": left_out, "nodes": []})
    return (frame.removesuffix(b"]}") + b",".join(nodes) + b"]}").decode()


def _folded(parts: list[str], width: int) -> list[str]:
    """Join parts into lines of at most `width` columns."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f" · {part}"
        else:
            lines.append(clip(part, width))
    return lines


def _node(sight: Sight, view: NodeView, read: Reader | None) -> dict[str, object]:
    node: dict[str, object] = {"number": view.number, "parent": view.parent, "level": view.level}
    if view.parent is None:
        name = view.namespace.decode("utf-8", "backslashreplace")
        node |= {"namespace": name[:JSON_TEXT], "is_dropped": view.is_dropped}
    else:
        tokens = sight.tokens(view)
        text = decode(read, tokens)
        node |= {
            "begin": view.begin,
            "end": view.end,
            "tokens": tokens,
            "text": text[:JSON_TEXT] if text is not None else None,
            "pages": [column[:NODE_PAGES].tolist() for column in view.columns],
            "used": view.used,
            "rank": sight.ranks.get(view.number),
            "num_checkpoints": len(view.checkpoints),
            "checkpoints": view.checkpoints[:JSON_CHECKPOINTS],
            "is_lost": view.is_lost,
        }
    return node | {"leases": view.leases, "num_children": view.num_children}


def _dumped(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # "<" occurs only in strings, where its escape means the same; lone surrogates have no UTF-8.
    return text.replace("<", "\\u003c").encode("utf-8", "replace")
