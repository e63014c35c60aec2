"""The lines of the table: what is measured, against what, and the goals."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from bench.attention.step import Shape, decode, extend

ROTATED = 64  # dimensions of a latent that are not its value


class Line(NamedTuple):
    """A line of the table. `beside` names lines whose times, added up, are compared with this one's."""

    name: str
    shape: Shape
    limit: str = "copy"
    has_peers: bool = False
    beside: tuple[str, ...] = ()
    goals: tuple[tuple[str, float], ...] = ()  # a column of ratios, and the least


def lines(divisor: int) -> list[Line]:
    """Return all lines, with fewer rows and tokens if `divisor` is not 1."""

    def rows(n: int) -> int:
        return max(2, n // divisor)

    def tokens(n: int) -> int:
        return max(64, n // divisor)

    def queries(n: int) -> int:
        return max(4, n // divisor)

    lengths = np.exp(np.random.default_rng(0).uniform(np.log(100), np.log(60_000), rows(64)))
    uneven = Shape(tuple(tokens(int(n)) for n in lengths), (1,) * len(lengths))
    batch, context, chunk = rows(64), tokens(4_096), queries(512)
    at_once, uneven_name = f"decode, {batch} × {context:,}", f"decode, {batch} uneven rows"
    shapes = [(batch, context), (rows(256), tokens(1_024)), (rows(8), tokens(32_768))]
    found: list[Line] = []

    def add(name: str, shape: Shape, **about: Any) -> None:
        goals = tuple(about.pop("goals", {}).items())
        found.append(Line(name, shape, **about, goals=goals))

    fast = {"of the limit": 0.97, "of cuDNN": 0.95}
    for n, length in shapes:
        add(f"decode, {n} × {length:,}", decode(n, length), has_peers=True, goals=fast)
    add(
        f"decode, 1 × {tokens(32_768):,}",
        decode(1, tokens(32_768)),
        has_peers=True,
        goals={"of cuDNN": 1.0},
    )
    add(uneven_name, uneven, goals={"of the limit": 0.9})
    same = {"times its speed": 0.95}
    for page in (1, 64):
        add(f"{at_once}, page {page}", decode(batch, context, page=page), beside=(at_once,), goals=same)
        add(f"{uneven_name}, page {page}", uneven._replace(page=page), beside=(uneven_name,), goals=same)
    for n, length in shapes:
        name, fp8 = f"decode, {n} × {length:,}", decode(n, length, dtype="float8_e4m3fn")
        add(f"{name}, fp8", fp8, beside=(name,), goals={"times its speed": 1.7})
    add(
        f"latent decode, {batch} × {context:,}",
        decode(batch, context, heads=128, kv_heads=1, k_dim=512 + ROTATED, v_dim=512, is_latent=True),
        limit="matmul",
        goals={"of the limit": 0.4},
    )
    for dim in (64, 96, 256):
        add(f"{at_once}, heads of {dim}", decode(batch, context, k_dim=dim, v_dim=dim))
    window = tokens(1_024)
    add(f"{at_once}, window {window:,}", decode(batch, context, window=window))
    fast = {"of cuDNN": 0.68}
    compute: Any = {"limit": "matmul", "has_peers": True}
    add(f"extend, {queries(8_192):,}", extend(queries(8_192), 0), **compute, goals=fast)
    for count, cached, goals in ((1_024, 31_744, fast), (256, 32_768, {}), (64, 32_768, {})):
        count, cached = queries(count), tokens(cached)
        name = f"extend, {count:,} on {cached:,}"
        add(name, extend(count, cached), **compute, goals=goals)
    alone = f"extend, {chunk:,} on {context:,}"
    add(alone, extend(chunk, context), **compute)
    add(
        "both in one step",
        Shape((context,) * batch + (context + chunk,), (1,) * batch + (chunk,)),
        beside=(at_once, alone),
        goals={"times its speed": 1 / 1.1},
    )
    return found
