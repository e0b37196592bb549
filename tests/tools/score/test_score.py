"""`tpdet score`: its numbers are the engine's, bit for bit, in every circumstance."""

import io
import json
import math
import struct
import subprocess
import sys

import pytest

from tpdet import LLM, SamplingParams
from tpdet.cli import main

pytestmark = pytest.mark.long

TEXT = "The for statement is used to iterate: é, 東京, \x1b[0m\r\n" * 12
ONE_OF_TWO = {
    "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
SMALL = ("--device", "cpu", "--kv-pages", "16")


@pytest.fixture(scope="module")
def model(tiny_model):
    return str(tiny_model("qwen3", kv_heads=2))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("score") / "text.txt"
    path.write_bytes(TEXT.encode())
    return path


@pytest.fixture
def score(model, capsys):
    """A function that runs the command here and returns what it printed."""

    def run(*arguments):
        assert main(["score", model, *map(str, arguments), *SMALL]) == 0
        return capsys.readouterr().out

    return run


def bits(value):
    return struct.pack(">f", value).hex()


def parsed(output):
    """The first line, the tokens' lines and the last one."""
    head, *tokens, last = map(json.loads, output.splitlines())
    return head, tokens, last


@pytest.fixture(scope="module")
def answer(model):
    """What `LLM` says of the same text, and what its engine is."""
    with LLM(model, kv_pages=16, device="cpu") as llm:
        params = SamplingParams(max_tokens=0, prompt_logprobs=3)
        (found,) = llm.generate([TEXT], params)
        return found, llm.engine.runner.contracts.strict, llm.engine.runner.model_digest


def test_the_lines_are_the_engines_numbers_bit_for_bit(score, file, answer):
    found, contract, digest = answer
    head, tokens, last = parsed(score(file, "--json", "--top", 3))
    assert head == {
        "object": "score",
        "contract": contract,
        "model_digest": digest,
        "system_fingerprint": found.system_fingerprint,
        "dtype": "float32",
        "tokens": len(tokens),
    }
    assert tuple(line["id"] for line in tokens) == found.prompt_token_ids
    assert tokens[0]["logprob"] is None and tokens[0]["top"] == []
    for place, line in enumerate(tokens[1:], 1):
        entries = found.prompt_logprobs[place]
        mine = entries[line["id"]]
        assert line["object"] == "token" and line["position"] == place
        assert line["bits"] == bits(mine.logprob) == bits(line["logprob"])
        assert (line["rank"], line["text"]) == (mine.rank, mine.decoded_token)
        assert [other["rank"] for other in line["top"]] == [1, 2, 3]
        for other in line["top"]:
            theirs = entries[other["id"]]
            assert other["bits"] == bits(theirs.logprob) == bits(other["logprob"])
            assert (other["rank"], other["text"]) == (theirs.rank, theirs.decoded_token)
    values = [found.prompt_logprobs[i][t["id"]].logprob for i, t in enumerate(tokens) if i]
    assert last == {
        "object": "total",
        "scored": len(values),
        "sum": math.fsum(values),
        "mean": math.fsum(values) / len(values),
        "perplexity": math.exp(-math.fsum(values) / len(values)),
    }


def test_budget_and_the_way_to_give_a_text_change_no_byte(score, file, tmp_path, monkeypatch):
    """Ranks do not either: `tests/client/test_tp.py`."""
    given = ["--json", "--top", "2"]
    alone = score(file, *given)
    tokens = parsed(alone)[1]
    assert len(tokens) > 300  # more than a page
    assert score(file, *given, "--max-num-batched-tokens", "48", "--max-num-seqs", "4") == alone
    assert score("--prompt", TEXT, *given, "--no-enable-prefix-caching") == alone
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([line["id"] for line in tokens]))
    assert score("--tokens", ids, *given) == alone
    for data, flags in ((TEXT.encode(), ["-"]), (ids.read_bytes(), ["--tokens", "-"])):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert score(*flags, *given) == alone


def test_special_tokens_can_be_left_out_and_no_text_needs_a_tokenizer(score, tmp_path):
    usual, bare = (
        parsed(score("--prompt", "The list", "--json", *flags))[1]
        for flags in ([], ["--no-add-special-tokens"])
    )
    assert usual[0]["text"] == "<|endoftext|>"
    assert [line["id"] for line in usual[1:]] == [line["id"] for line in bare]
    assert usual[2]["bits"] != bare[1]["bits"]
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([line["id"] for line in bare]))
    silent = parsed(score("--tokens", ids, "--json", "--skip-tokenizer-init"))[1]
    assert silent == [line | {"text": None} for line in bare]


def test_a_person_reads_a_table_and_the_totals(score):
    found = score("--prompt", "The for\n\x1b[2J", "--top", 1)
    table, totals = found.split("\n\n")
    head, *rows = table.splitlines()
    assert head.split() == ["position", "id", "logprob", "bits", "rank", "text"]
    assert rows[0].split() == ["0", "1097", "-", "-", "-", "'<|endoftext|>'"]
    assert {row.index("'") for row in rows if "'" in row} == {head.index("text")}
    assert "\x1b" not in found and r"'\x1b'" in found
    assert [line.split("  ")[0] for line in totals.splitlines()] == [
        "tokens scored",
        "log-probability",
        "perplexity",
        "contract",
        "model digest",
        "fingerprint",
    ]


def test_a_text_as_long_as_the_context_is_scored_and_a_longer_one_is_not(
    score, model, tmp_path, capsys
):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([5] * 300))
    assert parsed(score("--tokens", ids, "--json", "--max-model-len", 300))[0]["tokens"] == 300
    assert main(["score", model, "--tokens", str(ids), "--max-model-len", "299", *SMALL]) == 2
    said = capsys.readouterr().err
    assert "has 300 tokens, over the context of 299: shorten it, or raise --max-model-len" in said


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (None, 66, "text does not exist: give a file, or --prompt TEXT"),
        (b"", 2, "text is empty: give a text"),
        (b"caf\xe9!", 2, "text is not UTF-8: byte 3 is 0xe9; convert it"),
        (b"[5, 6, 99999]", 2, "token id 99999 in prompt is outside the vocabulary [0, 1100)"),
        (b"[5, -1]", 2, "token id -1 in prompt is outside the vocabulary"),
        (b"[5]", 2, "has fewer than two tokens (1), and the first has no log-probability"),
        (b"[]", 2, "has fewer than two tokens (0)"),
        (b"[5, true]", 2, "Expected `int`, got `bool`"),
        (b"[5, 6.5]", 2, "Expected `int`, got `float`"),
        (b'{"ids": [5]}', 2, "Expected `array`, got `object`"),
        (b"[" * 5000, 2, "give a JSON list of ids, such as [5, 6, 7]"),
        (b"[5, 6", 2, "give a JSON list of ids, such as [5, 6, 7]"),
        (b"[\xff]", 2, "give a JSON list of ids, such as [5, 6, 7]"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(
    model, tmp_path, monkeypatch, capsys, content, code, message
):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    flags = ["--tokens"] if content and content[:1] in b"[{" else []
    assert main(["score", model, *flags, "text"]) == code
    said = capsys.readouterr().err
    assert message in said and said.startswith("tpdet: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m"], "give one of FILE, --prompt and --tokens, not none"),
        (["m", "a", "--prompt", "b"], "not FILE and --prompt"),
        (["m", "--prompt", "a", "--prompt", "b"], "not --prompt and --prompt"),
        (["m", "--tokens", "a", "--prompt", "b"], "not --prompt and --tokens"),
        (["m", "--prompt", ""], "--prompt is empty: give a text"),
        (["m", "--tokens", "a", "--no-add-special-tokens"], "leave it out beside --tokens"),
        (["m", "--prompt", "a", "--top", "101"], "--top 101"),
        (["m", "--prompt", "a", "--top", "-1"], "--top -1"),
        (["m", "--prompt", "a", "--max-model-len", "2x"], "--max-model-len: '2x'"),
        (["--prompt", "a"], "no model is given"),
        (["m", "--propmt", "a"], "did you mean --prompt?"),
    ],
)
def test_a_wrong_command_is_refused_before_a_model_is_looked_for(capsys, arguments, message):
    assert main(["score", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("tpdet: ") and said.count("\n") == 1


def test_a_text_needs_a_tokenizer(model, capsys):
    assert main(["score", model, "--prompt", "a", "--skip-tokenizer-init"]) == 2
    assert "leave --skip-tokenizer-init out" in capsys.readouterr().err


def test_standard_input_reaches_one_rank_only(capsys, monkeypatch):
    for name, value in ONE_OF_TWO.items():
        monkeypatch.setenv(name, value)
    assert main(["score", "m", "-"]) == 2
    assert "reaches one process only, not all 2 ranks: give a file" in capsys.readouterr().err


def test_parts_of_characters_are_named_in_ascii_in_the_table_and_in_json(model, monkeypatch):
    written = []
    for form in ([], ["--json"]):
        ascii_only = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
        monkeypatch.setattr(sys, "stdout", ascii_only)
        assert main(["score", model, "--prompt", "é", *SMALL, *form]) == 0
        written.append(ascii_only.buffer.getvalue().decode("ascii"))
    table, lines = written
    assert r"'bytes:\\xc3'" in table
    assert parsed(lines)[1][1]["text"] == r"bytes:\xc3"


def test_a_reader_that_leaves_gets_no_traceback(model):
    command = [sys.executable, "-m", "tpdet", "score", model, "--prompt", "The list", *SMALL]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    running.stdout.close()
    assert running.stderr.read() == b""
    assert running.wait() == 141
