"""`pagoda generate`, `pagoda chat` and the tour with a model: they say what plain transformers says."""

import io
import itertools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("gguf", reason="needs gguf")

from pagoda import models
from pagoda.cli import _demo as demo
from pagoda.cli import main
from pagoda.cli._talk import speaker as speaking
from pagoda.cli._tours.pen import Pen
from pagoda.errors import MissingError
from unit.tiny_talker import save

PAGE = 16
NUMBERS = re.compile(
    r"([\d,]+) prompt tokens?, ([\d,]+) from the cache · first token after [\d.]+ s · "
    r"(\d+) tokens?(?:, [\d.]+ per second)?(, stopped)?"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("talker") / "model")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that can read the handbook byte by byte."""
    return save(tmp_path_factory.mktemp("talker") / "large", context=16384)


class Plain:
    """What transformers alone says."""

    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer = models.load(folder, device="cpu")

    def prompt(self, *messages: tuple[str, str]) -> list[int]:
        turns = [{"role": role, "content": content} for role, content in messages]
        found = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True)
        return list(found["input_ids"])

    def continued(self, prompt: list[int], max_tokens: int, **choice: Any) -> list[int]:
        ids = torch.tensor([prompt])
        options = choice or {"do_sample": False}
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **options
        )
        return output[0, len(prompt) :].tolist()

    def text(self, tokens: list[int]) -> str:
        """As it is shown: no control characters but new lines and tabs."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: ascii(found[0])[1:-1], text)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Plain:
    return Plain(folder)


def run(command: str, *arguments: str) -> int:
    return main([command, "--device", "cpu", "--memory", "16MiB", *arguments])


# ── one question ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def interrupts_arrive() -> Iterator[None]:
    """What runs in the background of a shell ignores them, and so would its tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_generate_says_what_transformers_says(folder: Path, plain: Plain, capsys: pytest.CaptureFixture[str]):
    assert run("generate", "What is the sky?", "--model", str(folder), "--max-tokens", "24") == 0
    told, numbers = capsys.readouterr()
    prompt = plain.prompt(("user", "What is the sky?"))
    answer = plain.continued(prompt, 24)
    assert told == plain.text(answer) + "\n"
    found = NUMBERS.fullmatch(numbers.strip())
    assert found is not None, numbers
    assert found.groups() == (str(len(prompt)), "0", str(len(answer)), None)


def test_generate_with_a_system_prompt(folder: Path, plain: Plain, capsys: pytest.CaptureFixture[str]):
    arguments = ["--model", str(folder), "--max-tokens", "8", "--system", "Be short."]
    assert run("generate", "Why?", *arguments) == 0
    prompt = plain.prompt(("system", "Be short."), ("user", "Why?"))
    told, numbers = capsys.readouterr()
    assert told == plain.text(plain.continued(prompt, 8)) + "\n"
    assert numbers.startswith(f"{len(prompt)} prompt tokens")


def test_generate_raw_continues_the_text(folder: Path, plain: Plain, capsys: pytest.CaptureFixture[str]):
    assert run("generate", "Once upon the", "--raw", "--model", str(folder), "--max-tokens", "8") == 0
    prompt = plain.tokenizer("Once upon the")["input_ids"]
    told, numbers = capsys.readouterr()
    assert told == plain.text(plain.continued(prompt, 8)) + "\n"
    assert numbers.startswith(f"{len(prompt)} prompt tokens")


def test_generate_draws_tokens_at_a_temperature(
    folder: Path, plain: Plain, capsys: pytest.CaptureFixture[str]
):
    prompt = plain.prompt(("user", "Why?"))
    torch.manual_seed(5)
    expected = plain.text(plain.continued(prompt, 16, do_sample=True, temperature=1.5))
    assert expected != plain.text(plain.continued(prompt, 16))
    torch.manual_seed(5)
    arguments = ["--model", str(folder), "--max-tokens", "16", "--temperature", "1.5"]
    assert run("generate", "Why?", *arguments) == 0
    assert capsys.readouterr().out == expected + "\n"


def test_an_answer_ends_where_a_turn_ends(folder: Path, plain: Plain, tmp_path: Path):
    """The tokenizer's end of a turn counts, also where the model does not know of it."""
    model, tokenizer = models.load(folder, device="cpu")
    prompt = plain.prompt(("user", "Why?"))
    answer = plain.continued(prompt, 12)
    end = next(token for token in answer[3:] if token not in answer[:3])
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    speaker = speaking.Speaker(model, tokenizer, max_tokens=12)
    found = speaker.ask([{"role": "user", "content": "Why?"}])
    assert found.num_tokens == answer.index(end) + 1
    assert found.hit_tokens is None  # no cache was asked
    assert "from the cache" not in str(found)


def test_one_token_is_no_tokens(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert run("generate", "x", "--raw", "--model", str(folder), "--max-tokens", "1") == 0
    numbers = capsys.readouterr().err
    assert numbers.startswith("1 prompt token, 0 from the cache · ")
    assert numbers.endswith(" · 1 token\n")


def test_text_of_a_model_moves_no_cursor():
    assert speaking._harmless("a\x1b[2Jb\r\x07\x9b\n\tc é 🙂") == "a\\x1b[2Jb\\r\\x07\\x9b\n\tc é 🙂"


def without_template(folder: Path, into: Path) -> Path:
    shutil.copytree(folder, into)
    (into / "chat_template.jinja").unlink()
    return into


def test_a_model_without_a_template(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bare = str(without_template(folder, tmp_path / "bare"))
    assert run("generate", "Why?", "--model", bare) == 1
    assert "has no chat template: give --raw" in capsys.readouterr().err
    assert run("generate", "Why?", "--model", bare, "--raw", "--max-tokens", "2") == 0


def test_a_template_that_refuses(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    other = without_template(folder, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    assert run("generate", "Why?", "--model", str(other)) == 1
    error = capsys.readouterr().err
    assert "its chat template failed: no system role; try without --system" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "--temperature: give 0 or more"),
        (["--temperature", "nan"], "--temperature: give 0 or more"),
        (["--temperature", "warm"], "--temperature: give 0 or more, such as 0.7, not 'warm'"),
        (["--max-tokens", "0"], "--max-tokens: give 1 or more"),
        (["--max-tokens", "many"], "--max-tokens: 'many' is not a number of tokens"),
        (["--memory", "much"], "--memory: 'much' is not a size in bytes"),
        (["--memory", "1"], "memory"),
        (["--dtype", "int7"], "dtype: give one of"),
        (["--model", "/no/such"], "model: '/no/such' is not a folder"),
        (["--model", ""], "model: "),
    ],
)
@pytest.mark.parametrize("command", [["generate", "Why?"], ["chat"]])
def test_nonsense_is_one_line(
    command: list[str], arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(*command, "--model", str(folder), *arguments) == 1
    told, error = capsys.readouterr()
    assert error.startswith(f"pagoda: {message}")
    assert error.count("\n") == 1
    assert told == ""


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("x" * 600, "prompt: it has 600 tokens, but the model reads at most 512"), ("", "prompt: it is empty")],
)
def test_prompts_that_cannot_be_answered(
    prompt: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert run("generate", prompt, "--raw", "--model", str(folder)) == 1
    assert message in capsys.readouterr().err


def test_an_answer_stays_in_the_context(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert run("generate", "x" * 507, "--raw", "--model", str(folder)) == 0
    found = NUMBERS.fullmatch(capsys.readouterr().err.strip())
    assert found is not None
    assert int(found[3]) <= 5


def test_settings_of_a_model_that_draws_do_not_matter(
    folder: Path, plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Many models come with a temperature; without --temperature the likeliest token is taken still."""
    shutil.copytree(folder, lively := tmp_path / "lively")
    settings = json.loads((lively / "generation_config.json").read_text())
    settings |= {"do_sample": True, "temperature": 1.9, "top_p": 0.95, "top_k": 40}
    (lively / "generation_config.json").write_text(json.dumps(settings))
    assert run("generate", "Why?", "--model", str(lively), "--max-tokens", "12") == 0
    told, numbers = capsys.readouterr()
    assert told == plain.text(plain.continued(plain.prompt(("user", "Why?")), 12)) + "\n"
    assert NUMBERS.fullmatch(numbers.strip()), numbers  # and nothing besides is told


def in_process(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_without_transformers_it_says_what_to_install():
    done = in_process(
        "import sys; sys.modules['transformers'] = None\n"
        "from pagoda.cli import main\n"
        "sys.exit(main(['generate', 'Why?']))"
    )
    assert done.returncode == 1
    assert "pip install 'pagoda-kv[hf]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "module"),
    [("'generate', 'Why?'", "transformers"), ("'chat'", "pagoda.cli._talk.conversation")],
)
def test_an_interrupt_while_it_is_imported(command: str, module: str, folder: Path):
    """Seconds pass there, and people think better of it."""
    done = in_process(
        "import sys\n"
        "from pagoda.cli import main\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        f"sys.exit(main([{command}, '--device', 'cpu', '--model', {str(folder)!r}]))"
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_other_commands_do_not_wait_for_transformers():
    done = in_process(
        "import sys\nfrom pagoda.cli import main\nmain(['demo', 'tree'])\nmain(['plan'])\n"
        "sys.exit('transformers' in sys.modules)"
    )
    assert done.returncode == 0


# ── a conversation ──────────────────────────────────────────────────────────────────────────────────


def talk(monkeypatch: pytest.MonkeyPatch, folder: Path, lines: list[str], *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return run("chat", "--model", str(folder), *arguments)


def numbers_of(told: str) -> list[tuple[int, int, int]]:
    """Prompt tokens, those from the cache, and new ones, of each answer."""
    return [tuple(int(n.replace(",", "")) for n in found[:3]) for found in NUMBERS.findall(told)]


def test_a_chat_reuses_what_was_said(
    folder: Path, plain: Plain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    questions = ["What is the sky made of?", "And the sea?", "Then why?"]
    assert talk(monkeypatch, folder, ["", *questions], "--max-tokens", "20", "--system", "Be short.") == 0
    told, errors = capsys.readouterr()
    assert errors == ""
    turns, known, expected = [("system", "Be short.")], [], []
    for question in questions:
        turns.append(("user", question))
        prompt = plain.prompt(*turns)
        answer = plain.continued(prompt, 20)
        assert f"> {question}\n{plain.text(answer)}\n" in told
        turns.append(("assistant", plain.text(answer)))
        # Whole pages of what an earlier call computed; the last token of an answer never is.
        shared = [
            next((n for n, (a, b) in enumerate(zip(prompt[:-1], old, strict=False)) if a != b), len(old))
            for old in known
        ]
        expected.append((len(prompt), max(shared, default=0) // PAGE * PAGE, len(answer)))
        known.append((prompt + answer)[:-1])
    assert numbers_of(told) == expected
    assert expected[1][1] > 0
    assert expected[2][1] > expected[1][1]


def test_bytes_that_are_no_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"W\xff?\nAnd?\n"), encoding="utf-8"))
    assert run("chat", "--model", str(folder), "--max-tokens", "4") == 0
    assert len(numbers_of(capsys.readouterr().out)) == 2
    for raw in ([], ["--raw"]):  # as Python gives arguments that are no text
        assert run("generate", "W\udcff?", "--model", str(folder), "--max-tokens", "4", *raw) == 0


def test_commands_of_a_chat(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    question = "What is the sky made of, and why is it blue?"
    lines = [question, "/stats", "/tree", "/new", question, "/clear", "/new", question]
    lines += ["/attic", "/help", "/quit", "never read"]
    assert talk(monkeypatch, folder, lines, "--max-tokens", "8") == 0
    told = dict(enumerate(re.split(r"^> ", capsys.readouterr().out, flags=re.MULTILINE)))
    assert "1 call, 1 served" in told[2]
    assert '"<|im_start|>user\\nWhat' in told[3]
    first, again, cleared = (numbers_of(told[n])[0] for n in (1, 5, 8))
    assert first[1] == 0
    assert again == (
        first[0],
        (first[0] - 1) // PAGE * PAGE,
        first[2],
    )  # a new conversation finds the old one
    assert cleared == first
    assert "unknown command" in told[9]
    assert "unknown command" not in told[10]
    assert all("/stats" in told[n] and "/quit" in told[n] for n in (9, 10))
    assert len(told) == 12  # nothing is read after /quit


def test_a_full_context_loses_its_oldest_turns(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    lines = [f"{n}" * 90 for n in range(1, 8)]
    assert talk(monkeypatch, folder, lines, "--max-tokens", "8", "--system", "Be short.") == 0
    told = re.split(r"^> ", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    lengths = [numbers_of(each)[0][0] for each in told]
    full = [n for n, each in enumerate(told) if "the context of 512 tokens is full" in each]
    assert len(lengths) == 7
    assert max(lengths) <= 512 - 8
    assert full
    for n in full:
        assert lengths[n] <= (512 - 8) // 2  # so that the next question does not find it full again
        assert re.search(r"oldest (question and its|\d questions and their) answers? were dropped", told[n])
    assert not any(later == earlier + 1 for earlier, later in itertools.pairwise(full))
    assert lengths[1] > lengths[0]


def test_a_question_that_is_too_long_is_told_and_forgotten(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert talk(monkeypatch, folder, ["Why?", "x" * 600, "Why?"], "--max-tokens", "8") == 0
    told = re.split(r"^> ", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    assert "shorten the question, or give a smaller --max-tokens" in told[1]
    first, last = numbers_of(told[0])[0], numbers_of(told[2])[0]
    assert first[0] < last[0] < 3 * first[0] + 16  # the first turn is there, the long question is not


def test_raw_chats_continue_the_text(
    folder: Path, plain: Plain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert talk(monkeypatch, folder, ["Once upon", "the"], "--raw", "--max-tokens", "4") == 0
    answer = plain.text(plain.continued(plain.tokenizer("Once upon")["input_ids"], 4))
    told = numbers_of(capsys.readouterr().out)
    assert told[1][0] == len(plain.tokenizer(f"Once upon\n{answer}\nthe")["input_ids"])


def test_an_interrupt_stops_the_answer_and_keeps_the_chat(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    put, tokens = speaking._Live.put, []

    def put_and_interrupt(self: Any, value: Any) -> None:
        put(self, value)
        tokens.append(value)
        if len(tokens) == 4:  # the prompt and three tokens
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(speaking._Live, "put", put_and_interrupt)
    question = "What is the sky made of?"
    assert talk(monkeypatch, folder, [question, "/new", question], "--max-tokens", "24") == 0
    told = capsys.readouterr().out
    stopped, again = NUMBERS.findall(told)
    assert stopped[2] in ("3", "4")  # the token that was being computed may still come
    assert stopped[3] == ", stopped"
    assert again[3] == ""
    assert int(again[2]) > 4
    assert int(again[1]) == (int(again[0]) - 1) // PAGE * PAGE  # what was computed stayed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_before_the_first_token_forgets_the_question(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ends, calls = speaking.Speaker._ends, []

    def ends_and_interrupt(self: Any) -> Any:
        calls.append(self)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return ends(self)

    monkeypatch.setattr(speaking.Speaker, "_ends", ends_and_interrupt)
    assert talk(monkeypatch, folder, ["Long" * 20, "Why?"], "--max-tokens", "4") == 0
    told = capsys.readouterr().out
    assert "stopped; the question was dropped" in told
    ((length, _, _),) = numbers_of(told)
    assert length < 80


def test_a_second_interrupt_does_not_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    put, tokens = speaking._Live.put, []

    def put_and_interrupt_twice(self: Any, value: Any) -> None:
        put(self, value)
        tokens.append(value)
        if len(tokens) == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(speaking._Live, "put", put_and_interrupt_twice)
    assert talk(monkeypatch, folder, ["Why?", "And?"], "--max-tokens", "8") == 0
    told = capsys.readouterr().out
    assert "stopped; the question was dropped" in told
    assert len(numbers_of(told)) == 1


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_chat_in_a_terminal(folder: Path):
    """Typed lines, Ctrl-C at the prompt, Ctrl-D at the end."""
    master, slave = os.openpty()
    command = [
        sys.executable,
        "-m",
        "pagoda",
        "chat",
        "--model",
        str(folder),
        "--device",
        "cpu",
        "--max-tokens",
        "4",
    ]
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb"}
    with subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells in the background ignore it
    ) as chat:
        os.close(slave)
        told = ""

        def until(text: str, nudge: Callable[[], None] = lambda: None) -> None:
            """Reads on until it is told, and forgets all before it. While nothing comes, nudges."""
            nonlocal told
            silences = 0
            while text not in told:
                assert silences < 60, told
                if select.select([master], [], [], 2)[0]:
                    told += os.read(master, 4096).decode(errors="replace")
                else:
                    silences += 1
                    nudge()
            told = told.partition(text)[2]

        def press() -> None:
            chat.send_signal(signal.SIGINT)

        try:
            until("Ctrl-D ends the chat.")
            until("> ")
            os.write(master, b"Why?\n")
            until("from the cache")
            until("> ")
            press()
            # Python's `input` sleeps through an interrupt that comes before it waits: a person presses again.
            until("Ctrl-D or /quit ends", press)
            until("> ")
            os.write(master, b"\x04")
            assert chat.wait(60) == 0
        finally:
            chat.kill()
    os.close(master)


# ── the tour ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def there(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model in the place of the real one."""
    monkeypatch.setattr("pagoda.models._load.smollm2", lambda: large)


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise MissingError("smollm2: pip could not fetch it. Where there is network, do this and that")

    monkeypatch.setattr("pagoda.models._load.smollm2", refused)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_tour_with_a_model(there: None, large: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    assert main(["demo"]) == 0
    told, errors = capsys.readouterr()
    assert errors == ""
    assert "\033" not in told
    assert max(map(len, told.split("\n"))) <= 90
    assert "── The pool" not in told
    intro, cold, warm, times, stats, strip, tree, evicted = re.split(r"\n\d+\. ", told)[1:]
    plain = Plain(large)
    from pagoda.cli._tours import talk

    handbook = (Path(talk.__file__).parent / "handbook.txt").read_text().strip()
    prompts = [plain.prompt(("system", handbook), ("user", question)) for question in talk.QUESTIONS]
    assert f"{len(prompts[0]):,} tokens with a question" in intro
    # Without a cache, and with one: the same words, and only those of the handbook are reused.
    columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
    shared = len(list(columns)) // PAGE * PAGE
    for number, (question, prompt) in enumerate(zip(talk.QUESTIONS, prompts, strict=True)):
        words = plain.text(plain.continued(prompt, talk.MAX_TOKENS)).split()
        for told_here in (cold, warm):
            said = told_here.split(f"? {question}\n")[1].split(f"     {len(prompt):,} prompt tokens")[0]
            # The tour breaks lines between words, and words that are longer than a line.
            assert "".join(said.split()).rstrip("…") == "".join(words).rstrip("…")
        hits = 0 if number == 0 else shared
        assert f"{len(prompt):,} prompt tokens, {hits:,} from the cache" in warm
    assert warm.count("the same answer") == len(prompts)
    assert "All 4 answers are the same" in warm
    assert len(re.findall(r"without +[\d.]+ s  [█▏▎▍▌▋▊▉]+", times)) == 4
    assert len(re.findall(r"with  +[\d.]+ s  [█▏▎▍▌▋▊▉]+", times)) == 4
    assert times.count("tokens reused") == 3
    assert "4 calls, 4 served" in stats
    cells = "".join(line.strip() for line in strip.split("\n")[1:])
    assert set(cells) <= set("1234·")
    cached = int(re.search(r"([\d,]+) tokens cached", stats)[1].replace(",", ""))
    assert len(cells.replace("·", "")) == cached // PAGE
    assert cells.count("1") >= len(prompts[0]) // PAGE
    assert '"<|im_start|>system\\nYou' in tree
    # The bakery took the end of the handbook's pages; asked again, the handbook takes them back.
    found = re.search(r"(\d+) pages were evicted", evicted)
    assert found is not None
    assert int(found[1]) > 0
    hits = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) of [\d,]+ tokens reused", evicted)]
    assert hits[0] == 0
    assert 0 < hits[1] < hits[2] == (len(prompts[0]) - 1) // PAGE * PAGE


def test_the_tour_in_colour_says_the_same(there: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    demo.run("talk", "cpu", out)
    assert "\033[36m1\033[0m" in out.getvalue()  # a page of the first question
    assert "\033[36mH\033[0m" in out.getvalue()


def test_an_answer_that_differs_is_no_success(
    there: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from pagoda.cli._tours import talk

    monkeypatch.setattr(
        talk.Speaker, "ask", lambda self, *args: speaking.Answer(str(self.cache), 5000, 0, None, 1, 0.1, 0.1)
    )
    assert main(["demo"]) == 1
    assert "was answered differently with the cache" in capsys.readouterr().err


def test_without_a_model_there_are_two_tours(missing: None, capsys: pytest.CaptureFixture[str]):
    assert main(["demo"]) == 0
    told, errors = capsys.readouterr()
    assert told.lstrip().startswith("The tour with a real model is not available. smollm2: pip could not")
    assert "── The pool" in told
    assert "── The tree" in told
    assert errors == ""


def test_without_a_model_there_is_no_talk(missing: None, capsys: pytest.CaptureFixture[str]):
    assert main(["demo", "talk"]) == 1
    told, errors = capsys.readouterr()
    assert errors.startswith("pagoda: smollm2: pip could not fetch it.")
    assert "── The pool" not in told


def test_without_transformers_there_are_two_tours():
    done = in_process(
        "import sys; sys.modules['transformers'] = None\n"
        "from pagoda.cli import main\nsys.exit(main(['demo']))"
    )
    assert done.returncode == 0, done.stderr
    assert "The tour with a real model is not available. pagoda.hf needs transformers" in done.stdout
    assert "── The tree" in done.stdout


@pytest.mark.parametrize("text", ["handbook", "bakery"])
def test_texts_of_the_tour_come_with_the_package(text: str):
    from pagoda.cli._tours import talk

    assert len(talk._text(text).split()) > 250


def test_live_text_goes_on_in_one_line():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    pen = Pen(out)
    pen.live("one ")
    pen.live("twö")
    pen.say("!", indent=0)
    assert out.buffer.getvalue() == b"one tw?!\n"  # type: ignore[attr-defined]
