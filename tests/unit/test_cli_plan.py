"""`pagoda plan`: expectations are sums from the models' published dimensions, written out."""

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagoda.cli import main
from pagoda.layout import model_config, model_names

MiB, GiB = 2**20, 2**30
# Llama-3.1-8B: keys and values, 32 layers, 8 KV heads of 128, bfloat16.
LLAMA_TOKEN = 2 * 32 * 8 * 128 * 2
LLAMA_PAGE = 16 * LLAMA_TOKEN
# Qwen3-Next: 12 attention layers of 2 KV heads of 256; 36 gated delta nets, 16 key and 32 value heads of 128:
# three columns of a convolution over queries, keys and values in bfloat16, and a float32 state.
QWEN_PAGE = 16 * 2 * 12 * 2 * 256 * 2
QWEN_STATE = 36 * ((2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 4)
# GPT-OSS-20B: 12 layers of either kind, 8 KV heads of 64, bfloat16.
OSS_PAGE = 16 * 2 * 12 * 8 * 64 * 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def text_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a plan that succeeds prints."""

    def run(*arguments: str) -> str:
        assert main(["plan", *arguments]) == 0
        text, errors = capsys.readouterr()
        assert errors == ""
        return text

    return run


@pytest.fixture
def json_of(text_of: Callable[..., str]) -> Callable[..., Any]:
    """The object that a plan prints, in strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not valid JSON")

    return lambda *arguments: json.loads(text_of(*arguments, "--json"), parse_constant=refuse)


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line that a plan that fails prints."""

    def run(*arguments: str) -> str:
        assert main(["plan", *arguments]) == 1
        text, error = capsys.readouterr()
        assert text == ""
        assert error.startswith("pagoda: ")
        assert error.endswith("\n")
        assert error[:-1].isprintable()  # one line, and nothing that moves a cursor
        return error.removeprefix("pagoda: ")[:-1]

    return run


def fact(text: str, label: str) -> str:
    """What stands beside a label, over all lines that have it."""
    found = re.findall(rf"^ +{label}  +(.+(?:\n {{8,}}\S.*)*)", text, re.MULTILINE)
    assert found, f"{label} is not told"
    return " | ".join(re.sub(r"\s+", " ", each) for each in found)


def row(text: str, name: str, table: int = 0) -> list[str]:
    """The cells of a group's row: of the sizes, or of the division (1)."""
    lines = [line for line in text.split("\n") if re.match(rf" +{name}  .*│", line)]
    return [cell.strip() for cell in re.split(r"│|  +", lines[table]) if cell.strip()]


def shown(size: float) -> str:
    """Bytes as people read them: exact below a MiB, else with two decimals at most."""
    if size < MiB:
        return f"{size:,.2f}".rstrip("0").rstrip(".") + " B"
    power = 2 if size < GiB else 3 if size < 2**40 else 4
    return f"{round(size / 1024**power, 2):,.2f}".rstrip("0").rstrip(".") + " " + "_KMGT"[power] + "iB"


# Sizes


def test_a_token_and_a_request_of_llama(json_of, text_of):
    plan = json_of("llama-3.1-8b")
    assert LLAMA_TOKEN == 131_072
    assert plan["token_bytes"] == LLAMA_TOKEN
    assert plan["request_bytes"] == 131_072 * LLAMA_TOKEN  # its own limit of 131,072 tokens: 16 GiB
    assert (plan["context"], plan["context_from"], plan["model_context"]) == (131_072, "model", 131_072)
    assert (plan["layers"], plan["ranks"], plan["resume_step"]) == (32, 1, 16)
    assert plan["dtypes"] == {"kv": ["bfloat16"], "index": [], "state": []}
    assert plan["state_bytes"] is plan["checkpoint_bytes"] is plan["budget"] is None
    (group,) = plan["groups"]
    assert group == {
        "name": "full",
        "layers": 32,
        "unit": "page",
        "window": None,
        "sink_tokens": 0,
        "ratio": 1,
        "page_tokens": 16,
        "unit_bytes": LLAMA_PAGE,
        "token_bytes": LLAMA_TOKEN,
        "request_units": 131_072 // 16,
        "request_bytes": 16 * GiB,
        "copies": 1,
    }
    text = text_of("llama-3.1-8b")
    assert (
        text.split("\n")[0].strip() == "llama-3.1-8b · 32 layers · bfloat16 · one rank · pages of 16 tokens"
    )
    assert "request of 128k tokens" in text
    assert row(text, "full") == ["full", "32", "every token", "16", "2 MiB", "131,072 B", "8,192", "16 GiB"]
    assert fact(text, "per token") == "131,072 B"
    assert fact(text, "per request") == "16 GiB for 128k tokens"
    assert fact(text, "reuse") == "cached prefixes are reused in multiples of 16 tokens"
    assert fact(text, "context") == "128k tokens, the model's limit"
    assert "for the cache" not in text  # no memory was given


def test_windows_keep_the_last_tokens(json_of, text_of):
    def pages_at_most(length: int, window: int, page: int) -> int:
        """Walk: at each token, the pages that its window touches."""
        return max((n - 1) // page - max(0, n - window) // page + 1 for n in range(1, length + 1))

    groups = {group["name"]: group for group in json_of("gpt-oss-20b", "--context", "4k")["groups"]}
    assert groups["window"]["window"] == 128
    assert groups["window"]["unit_bytes"] == groups["full"]["unit_bytes"] == OSS_PAGE
    assert groups["window"]["request_units"] == pages_at_most(4096, 128, 16) == 9
    assert groups["full"]["request_units"] == 4096 // 16
    text = text_of("gpt-oss-20b", "--context", "4k")
    assert row(text, "window")[2] == "last 128 tokens"
    assert row(text, "all")[-2:] == [shown(OSS_PAGE // 16), shown((9 + 256) * OSS_PAGE)]
    # A window gives back what it takes: its figure is no part of the sum below it.
    assert row(text, "window")[5] == f"({shown(OSS_PAGE // 16)})"
    assert row(text, "full")[5] == shown(OSS_PAGE // 16)
    assert fact(text, "per token") == (
        "24,576 B; windows and states do not grow with the length (in parentheses: until the window is full)"
    )


def test_a_request_has_one_state(json_of, text_of):
    assert QWEN_STATE == 77_266_944
    plan = json_of("qwen3-next-80b-a3b", "--context", "32k")
    assert plan["state_bytes"] == plan["checkpoint_bytes"] == QWEN_STATE
    assert plan["request_bytes"] == 2048 * QWEN_PAGE + QWEN_STATE
    assert plan["dtypes"]["state"] == ["bfloat16", "float32"]
    state = plan["groups"][-1]
    assert (state["unit"], state["layers"], state["request_units"]) == ("state", 36, 1)
    assert state["page_tokens"] is state["token_bytes"] is state["window"] is None
    text = text_of("qwen3-next-80b-a3b", "--context", "32k")
    assert row(text, "state") == [
        "state",
        "36",
        "one state per request",
        "–",
        "73.69 MiB",
        "–",
        "1 state",
        "73.69 MiB",
    ]
    assert fact(text, "reuse").endswith("multiples of 16 tokens, up to a checkpoint")
    assert fact(text, "checkpoint") == "73.69 MiB, a whole state"


def test_compressed_attention_has_an_entry_for_several_tokens(json_of, text_of):
    # An entry has 448 + 2·64 bytes, and 8 of scales; a page is padded to a multiple of 576. 32 entries of a
    # page of 128 tokens at ratio 4 with keys of an indexer, 128 + 4 bytes each; 1 entry at ratio 128.
    csa_page = 21 * (-(-32 * 584 // 576) * 576 + 32 * 132)
    hca_page = 20 * (-(-584 // 576) * 576)
    plan = json_of("deepseek-v4-flash")
    groups = {group["name"]: group for group in plan["groups"]}
    assert (groups["csa"]["unit_bytes"], groups["hca"]["unit_bytes"]) == (csa_page, hca_page)
    assert plan["token_bytes"] == (csa_page + hca_page) / 128  # 3,991.5: no whole number
    assert isinstance(plan["token_bytes"], float)
    assert isinstance(groups["hca"]["token_bytes"], int)
    assert plan["resume_step"] == 128
    assert plan["dtypes"]["kv"] == ["float8_e4m3fn", "bfloat16"]
    text = text_of("deepseek-v4-flash")
    assert row(text, "csa")[2] == "one entry per 4 tokens"
    assert row(text, "hca")[2] == "one entry per 128 tokens"
    assert fact(text, "per token").startswith("3,991.5 B; ")
    # A checkpoint has 127 entries of 43 windows, and 4 tokens of the compressors of 21 layers in float32.
    checkpoint = 43 * 127 * 584 + 21 * 4 * 2 * 2 * (512 + 128) * 4
    assert plan["checkpoint_bytes"] == checkpoint
    assert fact(text, "checkpoint") == f"{shown(checkpoint)}, of a state of {shown(plan['state_bytes'])}"
    alone = json_of("deepseek-v4-flash", "--memory", "40GiB", "--checkpoints", "0")
    kept = json_of("deepseek-v4-flash", "--memory", "40GiB", "--checkpoints", "100")
    padding = csa_page + hca_page + kept["state_bytes"] + checkpoint
    each = kept["request_bytes"] + 100 * checkpoint
    assert kept["budget"]["requests"] == (40 * GiB - padding) // each
    assert alone["budget"]["requests"] == (40 * GiB - padding) // alone["request_bytes"]
    assert alone["budget"]["requests_float"] > kept["budget"]["requests_float"]


def test_where_nothing_grows(json_of, text_of):
    # Mamba-2.8B: 64 layers of 5,120 channels; 16 of state and 3 columns of convolution, all float32.
    state_bytes = 64 * 5120 * (16 + 3) * 4
    plan = json_of("mamba-2.8b", "--memory", "1GiB")
    assert (plan["token_bytes"], plan["request_bytes"]) == (0, state_bytes)
    # A request has a state and two checkpoints of it; one of each is padding.
    assert plan["budget"]["requests"] == (GiB // state_bytes - 2) // 3
    assert plan["budget"]["tokens"] is plan["budget"]["longest_request"] is None
    assert plan["budget"]["more_tokens"] is None
    text = text_of("mamba-2.8b", "--memory", "1GiB")
    assert fact(text, "longest") == "a single request of any length fits"
    assert fact(text, "per token").startswith("0 B; ")
    reuse = "cached prefixes are reused in multiples of {} tokens, up to a checkpoint"
    assert fact(text, "reuse") == reuse.format(16)
    assert fact(text_of("mamba-2.8b", "--page-tokens", "64"), "reuse") == reuse.format(64)
    text = text_of("mamba-2.8b", "--memory", "1GiB", "--checkpoints", "0")
    assert fact(text, "1 GiB more") == f"adds {GiB // state_bytes}.000 requests of 8k tokens"


def test_the_context_is_given_or_the_model_s_or_8k(json_of, text_of):
    assert fact(text_of("mamba-2.8b"), "context") == "8k tokens, the default: the model has no limit"
    assert json_of("mamba-2.8b")["context_from"] == "default"
    assert json_of("mamba-2.8b")["context"] == 8192
    plan = json_of("qwen3-8b", "--context", "1M")
    assert (plan["context"], plan["context_from"], plan["model_context"]) == (2**20, "given", 40_960)
    beyond = fact(text_of("qwen3-8b", "--context", "1M"), "context")
    assert beyond == "1M tokens, as given; the model was made for 40k"


def test_dtypes_and_pages(json_of):
    whole = json_of("llama-3.1-8b", "--context", "1000")
    halved = json_of("llama-3.1-8b", "--kv-dtype", "fp8", "--page-tokens", "64", "--context", "1000")
    assert halved["token_bytes"] == LLAMA_TOKEN // 2
    assert halved["groups"][0]["page_tokens"] == 64
    # 1,000 tokens are 63 pages of 16, or 16 of 64.
    assert whole["request_bytes"] == 63 * 16 * LLAMA_TOKEN
    assert halved["request_bytes"] == 16 * 64 * LLAMA_TOKEN // 2
    # DeepSeek-V3.2 has an indexer whose keys are quantised whatever the rest is.
    assert json_of("deepseek-v3.2")["dtypes"] == {"kv": ["bfloat16"], "index": ["float8_e4m3fn"], "state": []}
    # DeepSeek-V3's 512 + 64 values for 61 layers; with scales 656 bytes.
    assert json_of("deepseek-v3")["token_bytes"] == 61 * (512 + 64) * 2
    assert json_of("deepseek-v3", "--kv-dtype", "fp8_ds_mla")["token_bytes"] == 61 * 656
    assert json_of("deepseek-v3", "--kv-dtype", "fp8")["token_bytes"] == 61 * (512 + 64)


def test_dtypes_of_indexers_and_states(json_of):
    # An indexer's key of 128: fp8 with a float32 scale, or halves of a byte with a scale for each 32.
    sizes = {
        dtype: json_of("deepseek-v3.2", "--kv-dtype", "fp8", "--index-dtype", dtype)["token_bytes"]
        for dtype in ("fp8", "fp4", "bf16")
    }
    assert sizes == {"fp8": 61 * (656 + 132), "fp4": 61 * (656 + 68), "bf16": 61 * (656 + 256)}
    halved = json_of("qwen3-next-80b-a3b", "--state-dtype", "bf16")
    assert halved["state_bytes"] == QWEN_STATE - 36 * 32 * 128 * 128 * 2
    # A ring of 128 entries of 584 bytes, each with its position, in 43 layers grows by three; so do rows
    # of float32 in two sorts:
    # 21 layers of two halves of 512 and 128, 20 of 512, values and scores each.
    rows = 21 * 2 * (512 + 128) * 2 * 4 + 20 * 512 * 2 * 4
    longer, usual = (json_of("deepseek-v4-flash", "--unaccepted", n)["state_bytes"] for n in "41")
    assert longer - usual == 3 * (43 * (584 + 4) + rows)


# Ranks


@pytest.mark.parametrize(("ranks", "kv_heads", "times"), [(2, 4, None), (8, 1, None), (16, 1, 2), (64, 1, 8)])
def test_heads_are_divided_or_repeated(ranks: int, kv_heads: int, times: int | None, json_of, text_of):
    plan = json_of("llama-3.1-8b", "--tp", str(ranks))
    text = text_of("llama-3.1-8b", "--tp", str(ranks))
    assert plan["token_bytes"] == LLAMA_TOKEN // 8 * kv_heads
    assert f"one of {ranks} ranks" in text
    assert [group["copies"] for group in plan["groups"]] == [times or 1]
    if times is None:
        assert " keep " not in text
    else:
        assert fact(text, "ranks").startswith(
            f"full: {ranks} ranks together keep {times} times as much as a single rank would"
        )


def test_what_all_heads_share_is_on_every_rank(json_of, text_of):
    alone, of_eight = json_of("deepseek-v3"), json_of("deepseek-v3", "--tp", "8")
    assert alone["token_bytes"] == of_eight["token_bytes"]
    assert [plan["groups"][0]["copies"] for plan in (alone, of_eight)] == [1, 8]
    assert fact(text_of("deepseek-v3", "--tp", "8"), "ranks") == "latent: every rank keeps a full copy"
    assert json_of("llama-3.1-8b", "--tp", "8")["groups"][0]["copies"] == 1
    assert {group["copies"] for group in json_of("deepseek-v4-pro", "--tp", "8")["groups"]} == {8}


def test_what_is_repeated_in_part(json_of, text_of):
    # Mamba-Codestral: 64 layers; 128 heads of 64, 8 groups, a state of 128. On 16 ranks each keeps a group of
    # its own, as if there were 16; states of heads are divided.
    conv, groups, state = 128 * 64 * 3 * 2, 2 * 128 * 3 * 2, 128 * 64 * 128 * 4
    copies = (conv + 16 * groups + state) / (conv + 8 * groups + state)
    (group,) = json_of("mamba-codestral-7b", "--tp", "16")["groups"]
    assert 1 < copies < 1.01
    assert group["copies"] == int(copies * 10**6) / 10**6
    assert f"keep {copies:.3f} times" in fact(text_of("mamba-codestral-7b", "--tp", "16"), "ranks")


# Memory


def test_memory_is_divided(json_of, text_of):
    asked = ("llama-3.1-8b", "--memory", "80GiB", "--weights", "16GiB", "--context", "128k")
    pages = 64 * GiB // LLAMA_PAGE - 1  # one is padding
    budget = json_of(*asked)["budget"]
    assert (budget["memory_bytes"], budget["weights_bytes"], budget["cache_bytes"]) == (
        80 * GiB, 16 * GiB, 64 * GiB,
    )  # fmt: skip
    assert budget["shares"] == [
        {"pool": "full", "unit": "page", "units": pages, "bytes": 64 * GiB, "percent": 100.0}
    ]
    assert budget["mix"] == [{"tokens": 131_072, "share": 1.0}]
    assert budget["tokens"] == budget["longest_request"] == pages * 16 == 524_272
    assert pages / 8192 == pytest.approx(3.9999, abs=1e-4)
    # Rounded down: the padding is missing to the fourth.
    assert (budget["requests"], budget["requests_float"]) == (3, 3.999877)
    assert (budget["context_requests"], budget["context_requests_float"]) == (3, 3.999877)
    assert budget["spare_bytes"] == 0
    assert budget["more_tokens"] == GiB // LLAMA_TOKEN == 8192
    assert budget["more_requests"] == 8_192 / 131_072 == 0.0625
    text = text_of(*asked)
    assert "80 GiB of memory − 16 GiB of weights = 64 GiB for the cache\n" in text
    assert row(text, "full", table=1) == ["full", "32,767", "64 GiB", "100.0%", "█" * 20]
    assert fact(text, "tokens") == "524,272 in total"
    assert fact(text, "requests") == "3 of 128k tokens at once (3.99)"
    assert fact(text, "longest") == "a single request of 524,272 tokens fits; the model was made for 128k"
    assert fact(text, "1 GiB more") == "adds 8,192 tokens or 0.062 requests of 128k tokens"
    assert "not included" not in text


def test_without_weights_that_is_said(text_of):
    text = text_of("llama-3.1-8b", "--memory", "80GiB", "--tp", "2")
    assert "80 GiB for the cache on each rank\n" in text
    assert fact(text, "weights") == "not included: --weights subtracts them from --memory"


@pytest.mark.parametrize("checkpoints", [0, 2])
def test_pages_and_states_share_memory(checkpoints: int, json_of):
    plan = json_of(
        "qwen3-next-80b-a3b", "--memory", "40GiB", "--context", "32k", "--checkpoints", str(checkpoints)
    )
    budget = plan["budget"]
    # A checkpoint of a recurrent state is all of it.
    each = 2048 * QWEN_PAGE + (1 + checkpoints) * QWEN_STATE
    requests = (40 * GiB - QWEN_PAGE - 2 * QWEN_STATE) // each
    assert budget["requests"] == budget["context_requests"] == requests
    units = {share["pool"]: share["units"] for share in budget["shares"]}
    assert [share["unit"] for share in budget["shares"]] == ["page", "state", "checkpoint"]
    assert units["full"] >= requests * 2048
    assert units["state"] >= requests
    assert units["checkpoint"] >= requests * checkpoints
    taken = [
        (units[pool] + 1) * size
        for pool, size in (("full", QWEN_PAGE), ("state", QWEN_STATE), ("checkpoint", QWEN_STATE))
    ]
    assert [share["bytes"] for share in budget["shares"]] == taken
    assert budget["spare_bytes"] == 40 * GiB - sum(taken) >= 0
    assert [share["percent"] for share in budget["shares"]] == [
        round(100 * part / (40 * GiB), 1) for part in taken
    ]
    # One request alone: without its states and the padding, the rest is whole pages.
    left = 40 * GiB - (2 + checkpoints + 1) * QWEN_STATE
    assert budget["longest_request"] == (left // QWEN_PAGE - 1) * 16


def test_checkpoints_of_a_request_are_told(json_of, text_of):
    hybrid, llama = ("qwen3-next-80b-a3b", "--memory", "40GiB"), ("llama-3.1-8b", "--memory", "40GiB")
    assert fact(text_of(*hybrid), "checkpoints") == "2 per request, the default"
    assert json_of(*hybrid) == json_of(*hybrid, "--checkpoints", "2")
    assert json_of(*hybrid)["budget"]["checkpoints"] == 2
    for number in ("1", "2"):
        assert (
            fact(text_of(*hybrid, "--checkpoints", number), "checkpoints")
            == f"{number} per request, as given"
        )
    assert fact(text_of(*hybrid, "--checkpoints", "0"), "checkpoints") == "none: no cached prefix is reused"
    assert fact(text_of(*hybrid), "padding").startswith("one more page, state or checkpoint per pool")
    # Without states they are not mentioned unless somebody asks for them.
    assert "checkpoint" not in text_of(*llama)
    assert fact(text_of(*llama, "--checkpoints", "2"), "checkpoints") == "no effect: no layer has a state"


def test_a_mix_of_lengths(json_of, text_of):
    asked = ("llama-3.1-8b", "--memory", "64GiB", "--mix", "2k:3,32k:1")
    mean = (3 * 2048 // 16 + 1 * 32_768 // 16) / 4  # pages of an average request: 608
    budget = json_of(*asked)["budget"]
    assert budget["mix"] == [{"tokens": 2048, "share": 0.75}, {"tokens": 32_768, "share": 0.25}]
    assert budget["requests_float"] == int(32_767 / mean * 10**6) / 10**6 == 53.893092
    assert budget["requests"] == 53
    assert budget["context_requests_float"] == 3.999877
    told = fact(text_of(*asked), "requests")
    assert told.startswith(
        "53 of the mix at once (53.89): 75% of 2k, 25% of 32k | 3 of 128k tokens at once (3.99)"
    )
    # The same in other words: decimals, blanks, a length twice, a weight left out.
    for same in ("2k:1.5,32k:0.5", "2048:6, 32k:2", "2k,2k:2,32k", "32k:1,2k:3"):
        assert json_of(*asked[:-1], same)["budget"] == budget


def test_a_mix_may_fit_where_the_context_does_not(json_of, text_of):
    asked = ("llama-3.1-8b", "--memory", "8GiB", "--mix", "1k")
    budget = json_of(*asked)["budget"]
    assert budget["requests"] == (8 * GiB // LLAMA_PAGE - 1) // 64
    assert (budget["context_requests"], budget["context_requests_float"]) == (0, 0)
    assert "| 0 of 128k tokens" in fact(text_of(*asked), "requests")


def test_windows_hold_steps_in_flight(json_of, text_of):
    asked = ("gpt-oss-20b", "--memory", "8GiB", "--context", "4k", "--in-flight")
    for in_flight, each in (("0", 9), ("1", 10), ("8", 10), ("9", 11)):
        budget = json_of(*asked, in_flight)["budget"]
        assert budget["in_flight"] == int(in_flight)
        assert budget["requests"] == (8 * GiB // OSS_PAGE - 2) // (each + 256)
    assert fact(text_of(*asked, "1"), "in flight") == "1 step: windows need more pages"
    assert "no effect" in fact(text_of("llama-3.1-8b", "--memory", "80GiB", "--in-flight", "2"), "in flight")


def test_windows_hold_a_chunk_besides(json_of, text_of):
    asked = ("gpt-oss-20b", "--memory", "8GiB", "--context", "4k", "--chunk")
    # 9 pages of a window; where a request gets 2 tokens of the chunk, 10, and the rest of the chunk once.
    for chunk, each, once in ((1, 9, 0), (8192, 10, 8190 // 16)):
        units = {share["pool"]: share["units"] for share in json_of(*asked, str(chunk))["budget"]["shares"]}
        requests = (8 * GiB // OSS_PAGE - 2 - once) // (each + 256)
        assert json_of(*asked, str(chunk))["budget"]["requests"] == requests
        assert units["window"] >= each * requests + once
    assert fact(text_of(*asked, "8k"), "chunk") == "8k tokens of prefill per step: windows need more pages"
    assert "no effect" in fact(text_of("llama-3.1-8b", "--memory", "80GiB", "--chunk", "8k"), "chunk")


# What does not fit


def test_not_one_request_fits(error_of):
    error = error_of("llama-3.1-8b", "--memory", "8GiB", "--context", "128k")
    assert "one request of 131,072 tokens needs 16 GiB of cache, but only 8 GiB are available; " in error
    assert f"the longest that fits has {(8 * GiB // LLAMA_PAGE - 1) * 16:,} tokens" in error
    assert error.endswith(
        "Try more --memory, a shorter --context, --kv-dtype fp8 or more --tp ranks"
    )  # fmt: skip
    assert "8 GiB are available after the weights" in error_of(
        "llama-3.1-8b", "--memory", "24GiB", "--weights", "16GiB"
    )


def test_a_page_of_padding_is_missing(error_of, json_of):
    error = error_of("llama-3.1-8b", "--memory", "16GiB", "--context", "128k")
    assert f"needs {16 * GiB + LLAMA_PAGE:,} B of cache, padding included" in error
    assert f"only {16 * GiB:,} B are available" in error
    enough = str(16 * GiB + LLAMA_PAGE)
    assert json_of("llama-3.1-8b", "--memory", enough, "--context", "128k")["budget"]["requests"] == 1


@pytest.mark.parametrize(
    ("arguments", "helps", "does_not"),
    [
        (["deepseek-v3", "--memory", "4GiB"], ["--kv-dtype fp8"], ["--tp"]),  # every rank keeps all
        (["llama-3.1-8b", "--memory", "4GiB", "--kv-dtype", "fp8"], ["--tp"], ["--kv-dtype"]),
        (["llama-3.1-8b", "--memory", "1GiB", "--tp", "8"], ["--kv-dtype fp8"], ["--tp"]),  # 1 head per rank
        (["smollm2-135m", "--memory", "90M"], ["--tp"], []),  # 3 heads: not over 2 ranks, but over 3
        (["deepseek-v4-pro", "--memory", "4GiB"], ["shorter --context"], ["--tp", "--kv-dtype"]),
        (["mamba-2.8b", "--memory", "1M"], ["--tp"], ["--kv-dtype", "--context"]),
        (
            ["qwen3-next-80b-a3b", "--memory", "5G", "--checkpoints", "1"],
            ["fewer --checkpoints"],
            ["--chunk"],
        ),
        (["qwen3-next-80b-a3b", "--memory", "5G"], ["fewer --checkpoints"], []),
        (["qwen3-next-80b-a3b", "--memory", "5G", "--checkpoints", "0"], [], ["--checkpoints"]),
        (["llama-3.1-8b", "--memory", "5G"], [], ["--checkpoints"]),
        (["llama-3.1-8b", "--memory", "5G", "--checkpoints", "1", "--chunk", "8k"], [], ["fewer", "smaller"]),
        (["gemma-3-27b", "--memory", "2G", "--chunk", "8k"], ["a smaller --chunk"], ["--checkpoints"]),
        (["llama-3.1-8b", "--memory", "8G", "--mix", "1k,1M"], ["shorter lengths in --mix"], ["--context"]),
    ],
)
def test_only_ways_out_that_help_are_told(
    arguments: list[str], helps: list[str], does_not: list[str], error_of
):
    ways = error_of(*arguments).partition("Try ")[2]
    assert ways.startswith("more --memory")
    assert all(way in ways for way in helps)
    assert not any(way in ways for way in does_not)


def test_not_even_a_token_fits(error_of):
    assert "not even 1 token fits" in error_of("llama-3.1-8b", "--memory", "0")
    # A state, two checkpoints and one of each for padding, and no page.
    tight = str(5 * QWEN_STATE)
    assert "not even 1 token fits" in error_of("qwen3-next-80b-a3b", "--memory", tight, "--checkpoints", "2")
    many = error_of("qwen3-next-80b-a3b", "--memory", "1GiB", "--checkpoints", "1000")
    assert "not even 1 token fits" in many
    assert f"needs {shown(1003 * QWEN_STATE + (2**18 // 16 + 1) * QWEN_PAGE)} of cache" in many
    one_page = str(5 * QWEN_STATE + 2 * QWEN_PAGE)
    error = error_of("qwen3-next-80b-a3b", "--memory", one_page, "--checkpoints", "2")
    assert "the longest that fits has 16 tokens" in error


# Bad values


LLAMA = ["llama-3.1-8b"]
FITS = [*LLAMA, "--memory", "80GiB"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        *(([*LLAMA, "--memory", bad], "--memory: ") for bad in ("80XiB", "-1", "", "1e9", "inf", "9" * 500)),
        *(([*LLAMA, "--context", bad], "--context: ") for bad in ("128q", "-1", "0", "", "1.3", "9" * 500)),
        *(([*LLAMA, "--tp", bad], "--tp: ") for bad in ("0", "-1", "x", "", "1.5", "²", "9" * 30, "9" * 500)),
        (
            [*LLAMA, "--tp", "3"],
            "--tp: layer 0: 8 KV heads can be neither divided among 3 ranks nor repeated",
        ),
        *(([*LLAMA, "--page-tokens", bad], "--page-tokens: ") for bad in ("0", "x", "-16", "9" * 30)),
        (["deepseek-v4-pro", "--page-tokens", "16"], "--page-tokens of hca: give a multiple of 128"),
        *(
            ([*LLAMA, "--kv-dtype", bad], "--kv-dtype: ")
            for bad in ("x", "int32", "", "fp8_ds_mla", "\x1b[1m")
        ),
        ([*LLAMA, "--index-dtype", "x"], "--index-dtype: give one of"),
        ([*LLAMA, "--state-dtype", "fp8"], "--state-dtype: give one of"),
        (["deepseek-v4-pro", "--kv-dtype", "fp8_e5m2"], "--kv-dtype: entries of deepseek_v4 are 'fp8'"),
        (["mamba-2.8b", "--kv-dtype", "fp8_ds_mla"], "--kv-dtype: 'fp8_ds_mla' is for latent attention"),
        *(([*LLAMA, "--unaccepted", bad], "--unaccepted: ") for bad in ("0", "x", "-1", "1.5", "9" * 30)),
        ([*LLAMA, "--like", "x"], "--like: unknown family 'x': give one of "),
        *(
            ([*FITS, "--mix", bad], "--mix: ")
            for bad in (
                *("", ",", "nonsense", "2k:", ":3", "2k:x", "2k:-1", "2k:0", "2k:0.0", "2k:1e9", "2k:nan"),
                *("2k:inf", "2k:1/3", "2k:1:2", "0:1", "2k:1,-1", "2k;3", "2k:" + "9" * 500),
            )
        ),
        *(([*FITS, "--weights", bad], "--weights: ") for bad in ("x", "-1", "80GiB", "1TiB")),
        *(([*FITS, "--checkpoints", bad], "--checkpoints: ") for bad in ("x", "-1", "1.5", "9" * 30)),
        *(([*FITS, "--chunk", bad], "--chunk: ") for bad in ("x", "-1", "0", "9" * 30)),
        *(([*LLAMA, f"--{name}", "1"], f"--{name}: give --memory") for name in ("weights", "mix", "chunk")),
        ([*LLAMA, "--checkpoints", "1"], "--checkpoints: give --memory"),
        *(([f"--{name}", "1"], f"--{name}: name a model") for name in ("memory", "tp", "page-tokens", "mix")),
        *(([f"--{name}", "1"], f"--{name}: name a model") for name in ("index-dtype", "unaccepted", "like")),
    ],
)
def test_bad_values_are_one_line(arguments: list[str], says: str, error_of):
    error = error_of(*arguments)
    assert error.startswith(says)
    assert len(error) < 1000


def test_numbers_may_be_huge(json_of, text_of, error_of):
    for arguments in (
        ["llama-3.1-8b", "--context", str(2**62)],
        ["llama-3.1-8b", "--page-tokens", str(2**62)],
        ["llama-3.1-8b", "--tp", str(2**62)],
        ["llama-3.1-8b", "--memory", "4095P"],
        ["gemma-3-27b", "--memory", "4095P", "--chunk", str(2**40), "--context", str(2**33)],
        ["qwen3-next-80b-a3b", "--memory", "4095P", "--checkpoints", str(10**9)],
    ):
        assert max(map(len, text_of(*arguments).split("\n"))) <= 100
        json_of(*arguments)
    assert json_of("llama-3.1-8b", "--context", str(2**62))["request_bytes"] == 2**62 * LLAMA_TOKEN
    budget = json_of("llama-3.1-8b", "--memory", "4095P")["budget"]
    assert budget["tokens"] == (4095 * 2**50 // LLAMA_PAGE - 1) * 16
    assert "one request of 1,152,921,504,606,846,976 tokens needs" in error_of(
        "llama-3.1-8b", "--memory", "1P", "--context", str(2**60)
    )


# Which model


def write(path: Path, value: Any) -> str:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def test_a_path_works_too(tmp_path: Path, json_of, text_of):
    file = write(tmp_path / "config.json", model_config("llama-3.1-8b"))
    by_name = json_of("llama-3.1-8b")
    for path in (file, str(tmp_path)):
        plan = json_of(path)
        assert plan["config"] == path
        assert {**plan, "config": "", "model": ""} == {**by_name, "config": "", "model": ""}


def test_a_name_comes_before_a_path(tmp_path: Path, json_of, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("llama-3.1-8b").mkdir()
    write(Path("llama-3.1-8b/config.json"), model_config("qwen3-8b"))
    assert json_of("llama-3.1-8b")["layers"] == 32
    assert json_of("./llama-3.1-8b")["layers"] == 36


def test_a_type_that_is_not_known_may_be_like_one_that_is(tmp_path: Path, json_of, error_of):
    file = write(tmp_path / "config.json", {**model_config("llama-3.1-8b"), "model_type": "nova"})
    error = error_of(file)
    assert "model_type 'nova' is unknown" in error
    assert "--like llama" in error
    assert json_of(file, "--like", "llama")["token_bytes"] == LLAMA_TOKEN


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("llama-3.1-8", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("gpt-oss", "gpt-oss-20b"),
        ("deepseek-v4", "deepseek-v4-pro"),
    ],
)
def test_names_that_are_close(name: str, near: str, error_of):
    error = error_of(name)
    assert f"'{name}' is neither a model that comes with Pagoda nor" in error
    assert re.search(rf"Did you mean [^?]*\b{re.escape(near)}\b[^?]*\?", error)
    assert "path of a config.json" in error


@pytest.mark.parametrize(
    "name",
    [
        "",
        "zzzz",
        "x" * 5000,
        "a/" * 3000,
        "a\0b",
        "a\nb",
        "\x1b[31mred",
        "\u202eabc",
        "\udcff",
        "日本" * 60,
        "–",
    ],
)
def test_odd_names(name: str, error_of):
    pytest.importorskip("wcwidth", reason="needs wcwidth")
    error = error_of(name)
    assert "is neither a model that comes with Pagoda nor" in error
    assert "Did you mean" not in error
    assert len(error) < 400


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not valid JSON"),
        (b"\x80\x81\x00\xff" * 100, "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"[1, 2]", "does not contain a JSON object"),
        (b"null", "does not contain a JSON object"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"{}", "config has no model_type"),
        (b'{"version": "1.0", "model": {"type": "BPE"}}', "config has no model_type"),  # a tokenizer.json
        (b'{"model_type": "nova\\u001b[31m\\n"}', "model_type 'nova\\x1b[31m\\n' is unknown"),
        (b'{"model_type": "llama", "num_hidden_layers": 0}', "num_hidden_layers should be an integer"),
        (
            b'{"model_type": "llama", "num_key_value_heads": "many"}',
            "num_key_value_heads should be an integer",
        ),
    ],
)
def test_files_that_are_no_config(content: bytes, says: str, tmp_path: Path, error_of):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    assert says in error_of(str(file))
    assert says in error_of(str(tmp_path))


def test_paths_that_lead_nowhere(tmp_path: Path, error_of, monkeypatch: pytest.MonkeyPatch):
    assert "config.json' cannot be read: No such file" in error_of(str(tmp_path))
    assert "nor a readable file or folder" in error_of(str(tmp_path / "missing.json"))
    file = write(tmp_path / "broken\nin two.json", "{")
    assert "broken\\nin two.json' is not valid JSON" in error_of(file)
    os.mkfifo(tmp_path / "fifo")  # nobody writes: reading would wait for ever
    assert "is not a regular file" in error_of(str(tmp_path / "fifo"))
    if os.path.exists("/dev/zero"):
        assert "is not a regular file" in error_of("/dev/zero")  # it has no end
    real = os.stat

    def locked(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if str(path).startswith("/locked"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", locked)
    assert "nor a readable file or folder" in error_of("/locked/config.json")


def test_a_config_cannot_paint_the_terminal(tmp_path: Path, text_of):
    config = {**model_config("llama-3.1-8b"), "_name_or_path": "\x1b[31mred\n\u202e" + "long" * 100}
    text = text_of(write(tmp_path / "config.json", config))
    assert all(line.isprintable() and len(line) <= 100 for line in text.split("\n"))
    assert text.strip().startswith("\\x1b[31mred\\n\\u202elong")


# All models


def kv_heads(name: str) -> set[int]:
    config = model_config(name)
    config = config.get("text_config", config)
    return {config["num_key_value_heads"]} if config.get("num_key_value_heads") else set()


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", model_names())
def test_every_model_is_planned(name: str, ranks: int, json_of, text_of, error_of):
    asked = [name, "--memory", "400GiB", "--context", "32k", "--tp", str(ranks)]
    if any(heads % ranks and ranks % heads for heads in kv_heads(name)):
        assert "KV heads can be neither divided" in error_of(*asked)
        return
    plan, text = json_of(*asked), text_of(*asked)
    lines = text.split("\n")
    assert max(map(len, lines)) <= 100
    assert "…" not in text  # nothing is cut
    assert lines[0].strip().startswith(f"{name} · {plan['layers']} layers · ")
    for group in plan["groups"]:
        cells = row(text, group["name"])
        units = "1 state" if group["unit"] == "state" else f"{group['request_units']:,}"
        assert cells[1] == str(group["layers"])
        assert cells[-2:] == [units, shown(group["request_bytes"])]
        assert shown(group["unit_bytes"]) in cells
        assert group["request_bytes"] == group["request_units"] * group["unit_bytes"]
        if group["token_bytes"] is not None:
            assert group["token_bytes"] == group["unit_bytes"] / group["page_tokens"]
            assert cells[3:6] == [
                f"{group['page_tokens']:,}", shown(group["unit_bytes"]),
                f"({shown(group['token_bytes'])})" if group["window"] else shown(group["token_bytes"]),
            ]  # fmt: skip
    assert plan["request_bytes"] == sum(group["request_bytes"] for group in plan["groups"])
    assert fact(text, "per request") == f"{shown(plan['request_bytes'])} for 32k tokens"
    assert fact(text, "per token").startswith(shown(plan["token_bytes"]))
    budget = plan["budget"]
    unit_bytes = {group["name"]: group["unit_bytes"] for group in plan["groups"]}
    each = plan["request_bytes"]
    if plan["state_bytes"]:
        unit_bytes["checkpoint"] = plan["checkpoint_bytes"]
        each += budget["checkpoints"] * plan["checkpoint_bytes"]
    assert [share["pool"] for share in budget["shares"]] == list(unit_bytes)
    for share in budget["shares"]:
        is_group = share["pool"] != "checkpoint"  # the table of sizes has the groups only
        assert row(text, share["pool"], table=int(is_group))[:4] == [
            share["pool"], f"{share['units']:,}", shown(share["bytes"]), f"{share['percent']:.1f}%",
        ]  # fmt: skip
        assert share["bytes"] == (share["units"] + 1) * unit_bytes[share["pool"]]
    assert sum(share["bytes"] for share in budget["shares"]) + budget["spare_bytes"] == 400 * GiB
    requests = (400 * GiB - sum(unit_bytes.values())) // each
    assert budget["requests"] == budget["context_requests"] == requests
    assert requests <= budget["requests_float"] < requests + 1
    hundredths = round(budget["requests_float"] * 10**6) // 10**4
    assert fact(text, "requests") == (
        f"{requests:,} of 32k tokens at once ({hundredths // 100:,}.{hundredths % 100:02})"
    )
    assert "exactly" not in text
    assert row(text, "spare") == ["spare", shown(budget["spare_bytes"])]


def test_the_models_are_listed(json_of, text_of):
    text, models = text_of(), {model["name"]: model for model in json_of()["models"]}
    assert list(models) == model_names()
    assert max(map(len, text.split("\n"))) <= 100
    for name in model_names():
        assert len(re.findall(rf"^ +{re.escape(name)} .*│", text, re.MULTILINE)) == 1
    assert models["llama-3.1-8b"] == {
        "name": "llama-3.1-8b", "layers": 32, "groups": {"full": 32}, "token_bytes": LLAMA_TOKEN,
        "window_bytes": 0, "state_bytes": 0, "context": 131_072,
    }  # fmt: skip
    assert models["qwen3-next-80b-a3b"]["state_bytes"] == QWEN_STATE
    assert models["gpt-oss-20b"]["window_bytes"] == 9 * OSS_PAGE
    assert re.search(r"llama-3\.1-8b +full × 32 +│ +131,072 B +– +128k\n", text)
    assert re.search(r"qwen3-next-80b-a3b +full × 12, state × 36 +│ +24,576 B +73\.69 MiB +256k\n", text)
    assert re.search(r"mamba-2\.8b +state × 64 +│ +– +23\.75 MiB +–\n", text)
    assert "pagoda plan llama-3.1-8b --memory 80GiB" in text  # how to go on
    assert "config.json" in text


# The terminal


@pytest.mark.parametrize("columns", [20, 80, 100, 300])
def test_at_most_100_columns(columns: int, text_of, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    mix = ",".join(f"{length}k:{length}" for length in range(1, 40))
    for arguments in (
        [],
        ["deepseek-v4-pro", "--memory", "80GiB", "--tp", "16", "--checkpoints", "3", "--mix", mix],
        ["gemma-3n-e4b", "--memory", "80GiB", "--weights", "7.5GB", "--chunk", "8k", "--page-tokens", "1"],
    ):
        text = text_of(*arguments)
        assert max(map(len, text.split("\n"))) <= 100
        assert "…" not in text


def test_colours_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch, text_of):
    asked = ["llama-3.1-8b", "--memory", "80GiB"]
    plain = text_of(*asked)
    assert "\033" not in plain
    monkeypatch.delenv("NO_COLOR", raising=False)
    painted = Terminal()
    monkeypatch.setattr("sys.stdout", painted)
    main(["plan", *asked])
    assert "\033[1mllama-3.1-8b" in painted.getvalue()
    assert re.sub("\033\\[[0-9;]*m", "", painted.getvalue()) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    unpainted = Terminal()
    monkeypatch.setattr("sys.stdout", unpainted)
    main(["plan", *asked])
    assert unpainted.getvalue() == plain
    monkeypatch.delenv("NO_COLOR")
    as_json = Terminal()
    monkeypatch.setattr("sys.stdout", as_json)
    main(["plan", *asked, "--json"])
    assert json.loads(as_json.getvalue())["layers"] == 32


def test_a_stream_without_box_drawing(monkeypatch: pytest.MonkeyPatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert main(["plan", "llama-3.1-8b"]) == 0
    assert b"128k tokens, the model's limit" in out.buffer.getvalue()  # type: ignore[attr-defined]


def test_help_tells_of_every_option(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--help"])
    assert caught.value.code == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert text.isascii()  # argparse writes it, and a stream of another alphabet would fail
    options = (
        "memory",
        "weights",
        "context",
        "tp",
        "kv-dtype",
        "page-tokens",
        "mix",
        "checkpoints",
        "chunk",
        "in-flight",
        "like",
        "index-dtype",
        "state-dtype",
        "unaccepted",
    )
    for option in options:
        assert re.search(rf"--{option} [A-Z:,.]+ [a-zA-Z]", text), option
    assert "subtracted from --memory" in text
    assert "pagoda plan llama-3.1-8b" in text
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "plan" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--nonsense"], ["a", "b"], ["llama-3.1-8b", "--memory"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    assert caught.value.code == 2
    assert "usage: pagoda" in capsys.readouterr().err


def test_the_keys_of_the_json_are_documented(json_of):
    import pagoda.cli._plan

    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(keys, value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    documented = set(re.findall(r"\w+", pagoda.cli._plan.__doc__ or ""))
    found = keys(json_of("llama-3.1-8b", "--memory", "80GiB", "--tp", "16"))
    models = json_of()["models"]
    assert found | set(models[0]) <= documented
