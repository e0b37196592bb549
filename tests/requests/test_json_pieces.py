"""Long work in pieces: the same JSON, the same scores, and turns for everybody."""

import asyncio
import json
import math
import time

import pytest

from tpdet.control.row_messages import SampledToken
from tpdet.requests.answer.json_pieces import Each, json_pieces, to_json
from tpdet.requests.answer.prompt_scores import PromptScores, messages_of
from tpdet.requests.body.answer_size import check_answer_size
from tpdet.requests.body.limits import MAX_PART_LOGPROBS
from tpdet.requests.body.problems import ApiError
from tpdet.requests.body.schema import CompletionBody
from tpdet.requests.request import Candidate, PromptOutput
from tpdet.server.front.pace import CHUNK_CHARACTERS, SLICE_SECONDS, Turns

VALUE = {
    "a": [], "b": {}, "c": [1, None, 2.5], "d": "x\u20ac\n\"\\" * 9000,
    "e": {"f": [{"g": [1]}, {}]},
    "h": list(range(1500)), "i": ((), (1, 2)), "j": [[1, 2], [3]], "k": True, "\u00e9": -9999.0,
}  # fmt: skip


def test_pieces_are_the_json_of_the_whole():
    assert "".join(json_pieces(VALUE)).encode() == to_json(VALUE)
    lazy = VALUE | {
        "l": Each(iter([{"x": 1}, None])),
        "m": Each([]),
        "n": iter([VALUE, {}]),
        "o": iter([]),
    }
    plain = VALUE | {"l": [{"x": 1}, None], "m": [], "n": [VALUE, {}], "o": []}
    assert "".join(json_pieces(lazy)).encode() == to_json(plain)
    assert max(map(len, json_pieces(VALUE))) < 100_000 < len(json.dumps(VALUE))
    with pytest.raises(ValueError, match="JSON"):
        list(json_pieces({"x": [math.nan]}))


def test_scores_travel_in_bounded_parts():
    width = 20
    length = 2 * MAX_PART_LOGPROBS // width
    tops = tuple(tuple(Candidate(i + k, -0.5 * k) for k in range(width)) for i in range(length))
    values = (None, *(-0.25 * i for i in range(length - 2)), -math.inf)
    prompts = [
        PromptOutput("a", values, ((), *tops[1:]), tuple(range(length))),
        PromptOutput("b", (None, -1.0), ((), ()), (0, 9)),
    ]
    scores = {"a": PromptScores(), "b": PromptScores()}
    messages = list(messages_of(prompts))
    assert len(messages) > 2
    for message in messages:
        assert sum(part.size for part in message) <= MAX_PART_LOGPROBS
        for part in message:
            scores[part.request_id].add(part)
    ids = list(range(length))
    found = list(scores["a"].tokens(ids))
    assert found[0] is None
    assert found[1:] == [SampledToken(i, values[i], tops[i], i) for i in ids[1:]]
    assert list(scores["b"].tokens([7, 8])) == [None, SampledToken(8, -1.0, (), 9)]
    with pytest.raises(ValueError, match="argument"):
        list(scores["b"].tokens([7]))


def test_an_evaluation_batch_is_admitted():
    body = CompletionBody(prompt="", echo=True, logprobs=1, max_tokens=1)
    size = {"chat": False, "echo": True, "logprobs": 1, "max_tokens": 1}
    check_answer_size([2048] * 64, body, **size)
    check_answer_size([16_380] * 64, body, **size)
    with pytest.raises(ApiError, match="1048640 log-probabilities"):
        check_answer_size([16_384] * 64, body, **size)


def test_many_long_pieces_of_work_delay_others_no_more_than_one_does():
    """Twenty at once: between two turns of a bystander there is a slice or two of its thread."""

    def work():
        for _ in range(100):
            until = time.perf_counter() + SLICE_SECONDS / 4
            while time.perf_counter() < until:
                pass
            yield "x" * 3000

    async def run() -> tuple[list[float], list[bytes]]:
        pace, pauses = Turns(), []

        async def bystander() -> None:
            while True:
                began = time.thread_time()  # other processes of a busy machine do not count
                await asyncio.sleep(0)
                pauses.append(time.thread_time() - began)

        async def one() -> list[bytes]:
            return [chunk async for chunk in pace.chunks(work())]

        watcher = asyncio.create_task(bystander())
        found = await asyncio.gather(*(one() for _ in range(20)))
        watcher.cancel()
        return sorted(pauses), found[0]

    pauses, chunks = asyncio.run(run())
    assert pauses[int(0.9 * len(pauses))] < 4 * SLICE_SECONDS
    assert b"".join(chunks) == b"x" * 300_000
    assert all(len(chunk) >= CHUNK_CHARACTERS for chunk in chunks[:-1])
