"""Writes to a terminal. In: text; out: indented lines, numbered titles, and colours where they are wanted."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import TextIO

from pagoda.errors import PagodaError

__all__ = ["Pen"]

INDENT = 3
Mistake = tuple[str, Callable[[], object], type[PagodaError]]  # description, call, expected error


class Pen:
    """Writes to one stream, 80 to 100 columns wide; in colour only on a terminal without NO_COLOR."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.has_colour = out.isatty() and "NO_COLOR" not in os.environ
        self.width = min(100, max(80, shutil.get_terminal_size((100, 24)).columns)) - INDENT
        self.num_titles = 0

    def part(self, text: str) -> None:
        self.num_titles = 0
        self._write(f"\n{self.paint('1;36', f'── {text} ' + '─' * (self.width - 1 - len(text)))}")

    def title(self, text: str) -> None:
        self.num_titles += 1
        self._write(f"\n{self.paint('1', f'{self.num_titles}. {text}')}")

    def say(self, text: str = "", indent: int = INDENT) -> None:
        """Write lines, indented."""
        for line in text.split("\n"):
            self._write(" " * indent + line if line else "")

    def live(self, text: str) -> None:
        """Write text without ending the line."""
        self._write(text, end="")

    def _write(self, text: str, end: str = "\n") -> None:
        try:
            print(text, file=self.out, end=end, flush=True)
        except UnicodeEncodeError:  # the stream's encoding lacks some characters
            print(text.encode("ascii", "replace").decode(), file=self.out, end=end, flush=True)

    def paint(self, colour: str, text: str) -> str:
        return f"\033[{colour}m{text}\033[0m" if self.has_colour else text

    def wrap(self, text: str) -> str:
        """Return text wrapped to the width, with a hanging indent."""
        return "\n".join(textwrap.wrap(text, self.width, subsequent_indent="  ", break_on_hyphens=False))

    def make(self, mistakes: Sequence[Mistake]) -> None:
        """Make mistakes on purpose and show the error that each raises."""
        for what, mistake, kind in mistakes:
            try:
                mistake()
            except kind as error:
                kind_name = type(error).__name__
                lines = self.wrap(f"{what}: {kind_name}: {error}")
                self.say(lines.replace(kind_name, self.paint("31", kind_name), 1))
            else:
                raise PagodaError(f"{what}: no error was raised")
