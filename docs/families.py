"""The page docs/families.md. In: the cases that the tests run; out: the page's text.

    python docs/families.py            writes the page
    python docs/families.py --check    exits 1 if the page is not what this makes

`pagoda.hf` says whether a family is served, for the models of tests/differential/test_hf_families.py. That
test compares their answers with plain transformers, and fails if the page differs."""

from __future__ import annotations

import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_suffix(".md")
NONE = "–"


def page() -> str:
    """The text of docs/families.md. Cost: makes every tiny model once, some seconds."""
    if (tests := str(Path(__file__).parents[1] / "tests")) not in sys.path:
        sys.path.insert(0, tests)
    from differential import hf_checks

    models = {case: hf_checks.model_of(case) for case in hf_checks.CASES}
    rows = [
        (f"`{hf_checks.family(case)}`", _variant(case), _layers(model), _served(model))
        for case, model in models.items()
    ]
    rows.sort(key=lambda row: row[3] != "served")  # served ones first, else as they come
    num_families, num_served = (
        len({row[0] for row in rows}),
        len({row[0] for row in rows if row[3] == "served"}),
    )
    blocks = (
        "# Families",
        f"""
        Which model types `pagoda.hf` serves: {num_served} of the {num_families} that layouts know. The others
        go to plain `generate`, for the reason given here. [hf.md](hf.md) says which calls are served.
        `docs/families.py` generates this page from the models that the tests run.
        """,
        _table(("model type", "variant", "layers", "served, or why not"), rows),
        "## What is tested",
        """
        Each line is a tiny random model in float32 on a CPU, with weights so large that an answer depends on
        its whole prompt, and a cache so small that prompts evict each other. Tokens must equal those of plain
        `generate` of the same model, and logits must be equal up to rounding. Tests of served models:
        """,
        "\n".join(f"- {_first_line(check)}" for check in hf_checks.SERVED),
        "Test of models that are not served:",
        "\n".join(f"- {_first_line(check)}" for check in hf_checks.REFUSED),
        """
        Vision models are given text alone; a call with images goes to plain `generate`. Batches, sampling,
        beams, assistants, streamers, interruptions, threads and half precision are tested with four of the
        families, which cover all kinds of layers that are served: `tests/differential/test_hf_generate.py`.
        """,
        "## Making this page",
        "```\npython docs/families.py            # writes it\n"
        "python docs/families.py --check    # exits 1 if it differs from what the code generates\n```",
    )
    return "\n\n".join(map(_fill, blocks)) + "\n"


def _variant(case: str) -> str:
    return case.partition(", ")[2] or NONE


def _layers(model: Any) -> str:
    """How many layers of which kind a model has, as its layout says."""
    from pagoda.layout import from_hf

    layout = from_hf(model.config.get_text_config(decoder=True), kv_dtype=model.dtype)
    kinds = Counter(_words(type(kind).__name__) for layer in layout.layers for kind in layer)
    return ", ".join(f"{count} {name}" for name, count in kinds.items())


def _words(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower().removesuffix(" attention")


def _served(model: Any) -> str:
    from pagoda.hf._families import served_layout

    if not hasattr(model, "generate"):
        return "part of a larger model: it cannot generate"
    found = served_layout(model)
    return found if isinstance(found, str) else "served"


def _first_line(check: Any) -> str:
    return str(check.__doc__).strip()


def _fill(block: str) -> str:
    """A paragraph in lines of one width; tables, lists, headings and code as they are."""
    if block.startswith(("|", "#", "`", "-")):
        return block
    return textwrap.fill(" ".join(block.split()), width=120, break_long_words=False, break_on_hyphens=False)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ("---",) * len(head), *rows))


def main(arguments: list[str]) -> int:
    """Write the page, or check it. Returns the exit status."""
    if arguments not in ([], ["--check"]):
        print("usage: python docs/families.py [--check]", file=sys.stderr)
        return 2
    made = page().encode()
    if not arguments:
        PAGE.write_bytes(made)
        return 0
    if not PAGE.exists() or PAGE.read_bytes() != made:
        print(f"{PAGE} is not what {Path(__file__).name} makes: run it without --check", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
