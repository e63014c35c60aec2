"""`pagoda chat`: a conversation. In: lines; out: streamed answers, each followed by a line of statistics.

Ctrl-C ends an answer after its next token, so that all of it stays cached, or at once before the first."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from pagoda.cli._talk.speaker import Message, Speaker
from pagoda.cli._tours.pen import Pen
from pagoda.errors import ArgumentError, PagodaError
from pagoda.hf import PrefixCache

__all__ = ["Conversation"]

PROMPT = "> "
HELP = """\
/stats  statistics of the cache            /new    start a new conversation
/tree   cached text, as a tree             /quit   end the chat, like Ctrl-D
/clear  empty the cache                    Ctrl-C  stop an answer; the chat goes on"""


class Conversation:
    """One conversation and the cache that serves it."""

    def __init__(self, speaker: Speaker, cache: PrefixCache, pen: Pen, system: list[Message]) -> None:
        self.speaker, self.cache, self.pen, self.system = speaker, cache, pen, system
        self.turns: list[Message] = []  # question, answer, question, answer, …

    def run(self, source: TextIO) -> None:
        """Answer line by line until the input ends or a line is /quit."""
        is_typed = source is sys.stdin and source.isatty()
        if is_typed:
            with suppress(ImportError):
                import readline  # noqa: F401 (`input` edits lines with it)
        while True:
            try:
                line = self._typed() if is_typed else self._piped(source)
                if line is None or line == "/quit":
                    return
                if line.startswith("/"):
                    self._obey(line)
                elif line:
                    self._answer(line)
            except PagodaError as error:
                self.pen.say(str(error), indent=0)
            except KeyboardInterrupt:
                if not is_typed:
                    raise
                self.pen.say("\nCtrl-D or /quit ends the chat", indent=0)

    def _typed(self) -> str | None:
        try:
            return input(PROMPT).strip()
        except EOFError:
            self.pen.say()
            return None

    def _piped(self, source: TextIO) -> str | None:
        """Return the next line, and show it as if it had been typed."""
        line = source.readline()
        if not line:
            return None
        self.pen.say(f"{PROMPT}{line.strip()}", indent=0)
        return line.strip()

    def _obey(self, command: str) -> None:
        if command == "/stats":
            self.pen.say(str(self.cache.stats()))
        elif command == "/tree":
            tree = self.cache.tree(
                self.speaker.tokenizer.decode, width=self.pen.width, colour=self.pen.has_colour
            )
            self.pen.say(tree)
        elif command == "/clear":
            self.cache.clear()
            self.pen.say("cache emptied; the conversation goes on")
        elif command == "/new":
            self.turns.clear()
            self.pen.say("new conversation; the cache is kept")
        else:
            if command != "/help":
                self.pen.say("unknown command; the commands are:")
            self.pen.say(HELP)

    def _answer(self, question: str) -> None:
        self.turns.append({"role": "user", "content": question})
        try:
            self._fit()
            with self._stopping():
                answer = self.speaker.ask([*self.system, *self.turns], self.pen.live)
        except KeyboardInterrupt:
            self.turns.pop()
            self.pen.say("stopped; the question was dropped", indent=0)
            return
        except BaseException:
            self.turns.pop()
            raise
        self.turns.append({"role": "assistant", "content": answer.text})
        self.pen.say(f"\n{self.pen.paint('2', str(answer))}\n", indent=0)

    def _fit(self) -> None:
        """Drop the oldest turns when the context is full, down to half of it: the rest has to be computed
        again, which should not happen for every question."""
        room = self.speaker.room
        if room is None or self._num_tokens() <= room:
            return
        turns, left_out = self.turns, 0
        while len(self.turns) > 1 and self._num_tokens() > room // 2:
            self.turns = self.turns[2:]
            left_out += 1
        if (length := self._num_tokens()) > room:
            self.turns = turns
            raise ArgumentError(
                f"prompt: it has {length:,} tokens, but the context has room for {room:,} and an answer of "
                f"{self.speaker.max_tokens:,}: shorten the question, or give a smaller --max-tokens"
            )
        questions = (
            "question and its answer were"
            if left_out == 1
            else f"{left_out} questions and their answers were"
        )
        self.pen.say(
            self.pen.paint(
                "2",
                f"the context of {self.speaker.context:,} tokens is full: the oldest {questions} dropped",
            ),
            indent=0,
        )

    def _num_tokens(self) -> int:
        return self.speaker.num_tokens([*self.system, *self.turns])

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Make Ctrl-C stop the answer instead of the program, once the answer has begun."""

        def stop(number: int, frame: object) -> None:
            if not self.speaker.is_answering or self.speaker.is_stopped:
                raise KeyboardInterrupt
            self.speaker.is_stopped = True

        if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
            yield
            return
        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
