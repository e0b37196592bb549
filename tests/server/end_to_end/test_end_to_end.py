"""`tpdet serve` on a real model: one answer over HTTP at every TP size, alone and in a crowd.

One server a size, each asked the same questions by the `openai` client; then it is drained, or one
of its ranks is stopped, and nothing may stay behind.
"""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import time

import openai
import pytest

from tests.lib.server.served import STEP_TIMEOUT, Served, streams
from tests.lib.some_slow import some_slow

pytestmark = pytest.mark.long

LOSES = 2  # the size whose server ends by the loss of a rank
SIZES = (1, 2, pytest.param(4, marks=pytest.mark.slow))  # a Slurm step serves at 4
# Without blanks, so that a model of random weights comes to an end soon.
SCHEMA = {"anyOf": [{"enum": ["alpha", "beta"]}, {"type": "integer", "minimum": 0, "maximum": 999}]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
QUESTIONS = (
    {"prompt": "The for statement", "temperature": 0, "max_tokens": 12, "logprobs": 2},
    {"prompt": "A list is", "temperature": 0.9, "top_p": 0.9, "seed": 3, "max_tokens": 12},
    {"prompt": "Import", "temperature": 1.0, "seed": 4, "max_tokens": 8, "n": 4},
    {
        "prompt": "JSON:",
        "temperature": 1.0,
        "seed": 6,
        "max_tokens": 20,
        "response_format": FORMAT,
    },
    {
        "prompt": "Word:",
        "temperature": 1.0,
        "seed": 8,
        "max_tokens": 20,
        "structured_outputs": {"choice": ["alpha", "alphabet", "x/y"]},
    },
    {"prompt": list(range(40, 330)), "temperature": 0.7, "top_k": 20, "seed": 5, "max_tokens": 6},
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a module?"},
]


def arguments(question):
    """A question as the client's arguments: what OpenAI's completions lack goes beside them."""
    beside = {"top_k", "response_format", "structured_outputs"}
    assert "extra_body" not in question, "its fields would be lost: name them in `beside`"
    extra = {key: value for key, value in question.items() if key in beside}
    fields = {key: value for key, value in question.items() if key not in beside}
    return fields | {"extra_body": {"return_token_ids": True, **extra}}


def ask(client, question):
    """An answer without its id and time: its choices, then its fingerprint and replay digest."""
    fields = arguments(question)
    found = client.completions.create(model="tiny", **fields)
    return [
        (c.index, c.text, c.finish_reason, c.token_ids, c.logprob_bits, str(c.logprobs))
        for c in found.choices
    ], (found.system_fingerprint, found.model_extra["tpdet"]["replay_digest"])


def ask_streaming(client, question):
    """The same question streamed: text and ids of each choice, concatenated."""
    fields = arguments(question)
    texts: dict[int, str] = {}
    ids: dict[int, list] = {}
    for chunk in client.completions.create(model="tiny", stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            ids.setdefault(choice.index, []).extend(choice.token_ids or [])
    return texts, ids


def crowd(url, count):
    """All questions at once among `count` requests; the answers in order."""

    async def run():
        async with openai.AsyncOpenAI(
            base_url=url, api_key="none", timeout=240, max_retries=0
        ) as client:

            async def one(index):
                fields = arguments(QUESTIONS[index % len(QUESTIONS)])
                found = await client.completions.create(model="tiny", **fields)
                return [
                    (c.index, c.text, c.finish_reason, c.token_ids, c.logprob_bits, str(c.logprobs))
                    for c in found.choices
                ]

            return await asyncio.gather(*(one(index) for index in range(count)))

    return asyncio.run(run())


def chat(client, stream, **fields):
    """A chat answer's text."""
    settings = {"temperature": 0.8, "seed": 9, "max_tokens": 10} | fields
    found = client.chat.completions.create(model="tiny", messages=CHAT, stream=stream, **settings)
    if not stream:
        return found.choices[0].message.content
    return "".join(c.choices[0].delta.content or "" for c in found if c.choices)


@pytest.fixture(scope="module")
def answers(tiny_model, tmp_path_factory):
    """A function of a size: every answer at that size, and how its server ended."""
    model = tiny_model("qwen3", kv_heads=2, layers=1)

    @functools.cache
    def at(tp):
        served = Served(model, tmp_path_factory.mktemp(f"tp{tp}"), tp)
        client = served.client
        alone = [ask(client, question) for question in QUESTIONS]
        return {
            "names": [names for _, names in alone],
            "alone": [choices for choices, _ in alone],
            "greedy_again": ask(client, QUESTIONS[0]),
            "streamed": [ask_streaming(client, question) for question in QUESTIONS],
            "crowd": crowd(served.url, 32),
            "chat": [chat(client, stream) for stream in (False, True)],
            "json": [
                chat(client, stream, response_format=FORMAT, max_tokens=20)
                for stream in (False, True)
            ],
            "models": [m.id for m in client.models.list().data],
            "ready_tp": served.ready["tp"],
            "end": lose_a_rank(served, 0, signal.SIGSTOP) if tp == LOSES else served.end(),
        }

    return at


@pytest.mark.parametrize("tp", SIZES)
def test_an_answer_has_the_same_bits_at_every_size(answers, tp):
    assert answers(tp)["alone"] == answers(1)["alone"]
    assert answers(tp)["names"] == answers(1)["names"]
    assert answers(tp)["greedy_again"] == (answers(tp)["alone"][0], answers(tp)["names"][0])
    assert answers(tp)["ready_tp"] == tp and answers(tp)["models"] == ["tiny"]


@pytest.mark.parametrize("tp", SIZES)
def test_an_answer_follows_its_schema(answers, tp):
    (choice,) = answers(tp)["alone"][4]
    assert (choice[2], choice[1] in ("alpha", "alphabet", "x/y")) == ("stop", True)
    (choice,) = answers(tp)["alone"][3]
    assert choice[2] == "stop" and answers(tp)["json"] == [answers(1)["json"][0]] * 2
    for text in (choice[1], *answers(tp)["json"]):
        found = json.loads(text)
        assert found in ("alpha", "beta") or (type(found) is int and 0 <= found <= 999)


@pytest.mark.parametrize("tp", SIZES)
def test_a_stream_concatenates_to_the_answer(answers, tp):
    for (texts, ids), choices in zip(answers(tp)["streamed"], answers(tp)["alone"], strict=True):
        assert [texts[c[0]] for c in choices] == [c[1] for c in choices]
        assert [ids[c[0]] for c in choices] == [c[3] for c in choices]


@pytest.mark.parametrize("tp", SIZES)
def test_thirty_two_at_once_get_the_answers_of_one_alone(answers, tp):
    for index, choices in enumerate(answers(tp)["crowd"]):
        assert choices == answers(1)["alone"][index % len(QUESTIONS)], index


@pytest.mark.parametrize("tp", SIZES)
def test_chat_is_the_same_streamed_or_not_at_every_size(answers, tp):
    whole, streamed = answers(tp)["chat"]
    assert whole == streamed == answers(1)["chat"][0]


def test_answers_differ_where_they_should(answers):
    """Negative control: another seed or choice is another answer."""
    four = answers(1)["alone"][2]
    assert len({choice[1] for choice in four}) > 1


@pytest.mark.parametrize("tp", [tp for tp in SIZES if tp != LOSES])
def test_a_drained_server_ends_with_0(answers, tp):
    assert answers(tp)["end"] == 0


def lose_a_rank(served, rank, number):
    """What is left of a server while it streams when a rank gets a signal."""
    threads, outcomes, _ = streams(served, 3)
    begin = time.monotonic()
    os.kill(served.pid(rank), number)
    code = served.end(None, wait=STEP_TIMEOUT + 30)
    for thread in threads:
        thread.join(20)
    decided = json.loads((served.run / "exit.json").read_text())["exit"]
    return {
        "codes": (code, decided),
        "outcomes": outcomes,
        "seconds": time.monotonic() - begin,
        "log": served.log.read_text(),
    }


def check_a_lost_rank(lost):
    assert lost["codes"] == (75, 75), lost["log"]
    assert all(isinstance(outcome, Exception) for outcome in lost["outcomes"]), lost["outcomes"]
    assert lost["seconds"] < STEP_TIMEOUT + 25


def test_a_stopped_rank_ends_every_stream_and_the_server(answers):
    check_a_lost_rank(answers(LOSES)["end"])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_lost_rank_ends_every_stream_and_the_server(tiny_model, tmp_path, rank, number):
    """Ranks are killed by `test_faults`, too."""
    served = Served(tiny_model("qwen3", kv_heads=2), tmp_path, 2)
    check_a_lost_rank(lose_a_rank(served, rank, number))


REFUSALS = [
    (["--model", "/nowhere"], 66, "is not a directory"),
    (["--tp", "3"], 2, "size 3 does not fit"),
    (["--surprise", "1"], 2, "surprise"),
    (["--dtype", "int8"], 2, "dtype"),
    (["--max-model-len", "100000"], 2, "over the model's context"),
    (["--host", "0.0.0.0"], 2, "--api-key-file"),
    (["--tokenizer", "./nothere"], 66, "tokenizer './nothere' is not a directory"),
]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    some_slow(REFUSALS[:2], REFUSALS),  # `commands` refuses each without a process
)
def test_refusals_at_start_have_their_exit_codes(tiny_model, tmp_path, flags, code, message):
    command = [sys.executable, "-m", "tpdet", "serve", "--run-dir", str(tmp_path / "run")]
    if "--model" not in flags:
        command += ["--model", str(tiny_model("qwen3", kv_heads=2))]
    done = subprocess.run([*command, "--port", "0", *flags], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert not (tmp_path / "run" / "ready.json").exists()
