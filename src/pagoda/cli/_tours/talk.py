"""A tour with a real model: questions without and with a cache, its contents, and the cost of eviction."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from importlib import resources

from pagoda import hf, models
from pagoda.cli._talk.speaker import Answer, Message, Speaker
from pagoda.cli._tours.pen import INDENT, Pen
from pagoda.errors import PagodaError
from pagoda.hf import PrefixCache
from pagoda.layout import from_hf
from pagoda.layout._numbers import show_bytes

__all__ = ["run"]

MAX_TOKENS = 32  # of an answer
QUESTIONS = (
    "What is Pagoda?",
    "What is the mascot of Pagoda?",
    "What is the motto of Pagoda?",
    "What colour is the logo of Pagoda?",
)
BAKERY_QUESTION = "What is the name of the cat?"
COLOURS = ("36", "35", "33", "32")
MARGIN = INDENT + 2
PAGE_TOKENS = 16  # of the cache's pages


class _Tour:
    """A model, the texts in front of its questions, and the pen that shows its answers."""

    def __init__(self, pen: Pen, device: str) -> None:
        self.pen = pen
        begin = time.perf_counter()
        self.model, self.tokenizer = models.load(device=device)
        self.load_s = time.perf_counter() - begin
        self.speaker = Speaker(self.model, self.tokenizer, max_tokens=MAX_TOKENS)
        layout = from_hf(self.model.config)
        self.num_layers, self.token_bytes = len(layout.layers), int(layout.token_bytes)
        self.handbook, self.bakery = _text("handbook"), _text("bakery")

    def ask(self, text: str, question: str, before: Answer | None = None) -> Answer:
        """Ask one question about a text and stream the answer, which must be equal to `before`."""
        pen = self.pen
        pen.say(pen.paint("1", f"? {question}"))
        column = _Column(pen)
        answer = self.speaker.ask(_messages(text, question), column.write)
        found = "" if answer.hit_tokens is None else f", {answer.hit_tokens:,} from the cache"
        told = f"{answer.prompt_tokens:,} prompt tokens{found}; first token after {answer.first_s:.2f} s"
        if before is not None:
            if answer.text != before.text:
                raise PagodaError(f"{question!r} was answered differently with the cache: {answer.text!r}")
            told += "; the same answer"
        end = " …" if answer.num_tokens == MAX_TOKENS else ""
        pen.say(f"{end}\n{' ' * MARGIN}{pen.paint('2', told)}", indent=0)
        return answer

    def memory(self, num_tokens: int) -> int:
        """Return the bytes of a pool for so many tokens: whole pages, and one more for padding."""
        return (-(-num_tokens // PAGE_TOKENS) + 1) * PAGE_TOKENS * self.token_bytes

    # ── drawing ──────────────────────────────────────────────────────────────────────────────────

    def bar(self, name: str, answer: Answer, longest_s: float, note: str = "") -> None:
        """Draw a time to the first token as a bar, relative to the longest one."""
        width = self.pen.width - 65  # the text around the bar
        eighths = min(8 * width, max(1, round(answer.first_s / longest_s * width * 8)))
        bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
        self.pen.say(f"  {name:<9}{answer.first_s:6.2f} s  {bar:<{width}}  {note}".rstrip())

    def strip(self, cache: PrefixCache, owners: Mapping[str, int]) -> None:
        """Draw each page of the pool as a cell: which question computed it, · free."""
        num_pages = cache.stats().pool_bytes // (self.token_bytes * PAGE_TOKENS) - 1  # one is padding
        cells: list[str] = []
        for number, (name, count) in enumerate(owners.items()):
            cells += [self.pen.paint(COLOURS[number % len(COLOURS)], name)] * count
        cells += [self.pen.paint("2", "·")] * (num_pages - len(cells))
        for begin in range(0, num_pages, self.pen.width):
            self.pen.say("".join(cells[begin : begin + self.pen.width]))


class _Column:
    """Writes words as they arrive, wrapped at the margin."""

    def __init__(self, pen: Pen) -> None:
        self.pen, self.at, self.gap = pen, 0, ""

    def write(self, text: str) -> None:
        room = self.pen.width - MARGIN
        for word in re.findall(rf"\S{{1,{room}}}|\s+", text):
            if word.isspace():
                self.gap = " "
                continue
            if self.at + len(self.gap + word) > room:
                self.pen.live("\n")
                self.at = 0
            self.pen.live((self.gap if self.at else " " * MARGIN) + word)
            self.at += len(self.gap + word)
            self.gap = ""


def _text(name: str) -> str:
    return (resources.files("pagoda.cli._tours") / f"{name}.txt").read_text("utf-8").strip()


def _messages(text: str, question: str) -> list[Message]:
    return [{"role": "system", "content": text}, {"role": "user", "content": question}]


def run(pen: Pen, device: str) -> None:
    """Ask a real model without a cache, with a cache, and with a small one. Takes half a minute on two cores.

    Errors: MissingError without a model, ConfigError for an unavailable device."""
    tour = _Tour(pen, device)
    pen.part("A real model: what a cache saves")
    _introduce(tour)

    pen.title("Without a cache, the model reads the whole handbook for every question")
    cold = [tour.ask(tour.handbook, question) for question in QUESTIONS]

    memory = tour.memory(3 * cold[0].prompt_tokens)
    pen.title("The same questions after one line: cache = pagoda.hf.enable(model, memory)")
    pen.say(f"{show_bytes(memory)}: enough for three handbooks.")
    cache = tour.speaker.cache = hf.enable(tour.model, memory)
    warm, pages = [], {}
    for number, (question, before) in enumerate(zip(QUESTIONS, cold, strict=True), 1):
        stored = cache.stats().stored_tokens
        warm.append(tour.ask(tour.handbook, question, before))
        pages[str(number)] = (cache.stats().stored_tokens - stored) // PAGE_TOKENS
    pen.say(f"\nAll {len(cold)} answers are the same as without a cache.")

    pen.title("Time to the first token")
    _compare(tour, cold, warm)

    pen.title("Statistics: cache.stats()")
    pen.say(str(cache.stats()))

    pen.title("The pool, page by page: which question computed it")
    tour.strip(cache, pages)

    pen.title("Its contents: cache.tree(tokenizer.decode). All questions share the handbook")
    pen.say(cache.tree(tour.tokenizer.decode, width=pen.width, colour=pen.has_colour))
    cache.check()
    hf.disable(tour.model)

    _evict(tour, cold[0])


def _introduce(tour: _Tour) -> None:
    pen = tour.pen
    pen.title("A small model, and a long text in front of every question")
    num_tokens = tour.speaker.num_tokens(_messages(tour.handbook, QUESTIONS[0]))
    num_bytes = show_bytes(num_tokens * tour.token_bytes)
    pen.say(
        f"SmolLM2-135M-Instruct on {tour.model.device}, loaded in {tour.load_s:.1f} s: {tour.num_layers} "
        f"layers,\n{tour.token_bytes:,} bytes of keys and values per token. The text is a handbook of"
        f"\nPagoda: {num_tokens:,} tokens with a question, {num_bytes} of keys and values."
    )
    # A first call sets things up; no question should pay for that.
    tour.speaker.ask([{"role": "user", "content": "Good morning!"}])


def _compare(tour: _Tour, cold: list[Answer], warm: list[Answer]) -> None:
    pen, longest_s = tour.pen, max(answer.first_s for answer in cold + warm)
    for question, without, answer in zip(QUESTIONS, cold, warm, strict=True):
        pen.say(question)
        tour.bar("without", without, longest_s)
        times = f"{without.first_s / answer.first_s:.1f} times as fast"
        note = f"{times}, {answer.hit_tokens:,} tokens reused" if answer.hit_tokens else "fills the cache"
        tour.bar("with", answer, longest_s, note)


def _evict(tour: _Tour, before: Answer) -> None:
    """Ask about two texts that do not fit together: the colder one is evicted, beginning at its end."""
    pen, question = tour.pen, QUESTIONS[0]
    pen.title("Too little memory: 1.3 handbooks, and questions about a second text")
    pages = {"H": 0, "B": 0}
    with hf.cached(tour.model, tour.memory(int(1.3 * before.prompt_tokens))) as cache:
        tour.speaker.cache = cache

        def ask(owner: str, text: str, question: str, before: Answer | None = None) -> Answer:
            stored = cache.stats().stored_tokens
            answer = tour.ask(text, question, before)
            pages[owner] += (cache.stats().stored_tokens - stored) // PAGE_TOKENS
            other = "B" if owner == "H" else "H"
            pages[other] = cache.stats().cached_tokens // PAGE_TOKENS - pages[owner]
            tour.strip(cache, pages)
            return answer

        first = ask("H", tour.handbook, question, before)
        ask("B", tour.bakery, BAKERY_QUESTION)
        evicted = cache.stats().evicted_pages
        pen.say(f"{evicted} pages were evicted from the end of the handbook; the rest is still there.\n")
        again = ask("H", tour.handbook, question, before)
        once_more = ask("H", tour.handbook, question, before)
        pen.say("\nThe effect on the time to the first token:")
        for name, answer in (("empty", first), ("evicted", again), ("cached", once_more)):
            tour.bar(
                name,
                answer,
                first.first_s,
                f"{answer.hit_tokens:,} of {answer.prompt_tokens:,} tokens reused",
            )
        cache.check()
    tour.speaker.cache = None
