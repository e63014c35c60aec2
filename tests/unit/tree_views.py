"""What tests look at in a tree, native or twin."""

from typing import Any

HOLE = -1


def lists(arrays: Any) -> list[list[int]]:
    return [array.tolist() for array in arrays]


def runs(tree: Any) -> list[tuple[int, int]]:
    """Begin and end of each node, roots left out, parents before children."""
    return [(view.begin, view.end) for view in tree.nodes() if view.level > 0]


def told(tree: Any) -> list[Any]:
    events: list[Any] = []
    tree.listen(events.append)
    return events


def shape(event: Any) -> tuple[Any, ...]:
    tokens, columns = event.tokens.tolist(), lists(event.columns)
    return (type(event).__name__, event.position, event.parent, tokens, columns, event.states)
