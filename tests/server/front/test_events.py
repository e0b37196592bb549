"""Events of a stream that are written from prepared bytes, and counters that processes share."""

import json
import math
import os

import pytest
from prometheus_client import CollectorRegistry, Histogram

from tpdet.requests.answer.choices import ChoiceWriter, envelope
from tpdet.requests.body.prepare import Call
from tpdet.requests.request import Request, SamplingParams
from tpdet.server.front.events import Event, EventWriter
from tpdet.server.front.tally import INTER_TOKEN_BUCKETS, SharedTally, new_tallies
from tpdet.text.outputs import TextDelta

KEY = ("r", 0)
HARD = '"\\/\b\f\n\r\t\0\x01\x1f\x7f\u2028\u2029é日🙂\ufffd'


def call(**how) -> Call:
    request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams())
    plain = {"stream": True, "include_usage": False, "continuous_usage": False, "logprobs": None}
    plain |= {"prompt_logprobs": None, "echo": False, "echoes": (), "token_names": False}
    plain |= {"kind": "completion", "token_ids": False, "model": 'm"\0'}
    return Call(group_id="g", created=1, requests=(request,), **plain | how)


def written(how: Call, text: str, prepared: bool, field: str = "text") -> bytes:
    """The third event of a stream, whose text, or other field, is `text`."""
    chunk = envelope(how, 7, "fp", stream=True)
    events = EventWriter(how, chunk, {KEY: ChoiceWriter(how, None, 0)}, {})
    "".join(events.pieces(Event(KEY, TextDelta("first"), 1)))
    for other in ("text", "reasoning"):  # the bytes of both kinds are prepared
        events.data(Event(KEY, TextDelta(**{other: "second"}), 2))
    event = Event(KEY, TextDelta(**{field: text}), 2)
    return events.data(event) if prepared else "".join(events.pieces(event)).encode()


@pytest.mark.parametrize("how", [{}, {"kind": "chat"}, {"include_usage": True}], ids=str)
def test_an_event_from_prepared_bytes_is_the_event(how):
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000)]))
    for text in ("", "a", HARD, every):
        assert written(call(**how), text, True) == written(call(**how), text, False)
    assert written(call(**how), "a", True) != written(call(**how), "b", True)


def test_an_event_of_reasoning_from_prepared_bytes_is_the_event():
    how = call(kind="chat")
    for text in ("a", HARD):
        found = written(how, text, True, "reasoning")
        assert found == written(how, text, False, "reasoning") != written(how, text, True)
    (choice,) = json.loads(found.removeprefix(b"data: "))["choices"]
    assert choice["delta"] == {"reasoning": HARD, "reasoning_content": HARD}


def test_usage_of_every_event_is_that_of_its_own():
    how = call(include_usage=True, continuous_usage=True)
    assert b'"completion_tokens":2' in written(how, "a", True)


def test_processes_count_in_rows_and_each_knows_the_sum():
    descriptor = new_tallies(2)
    first, second = SharedTally(descriptor, 0), SharedTally(descriptor, 1)
    os.close(descriptor)
    first.add("requests completed", 3)
    second.add("requests completed")
    assert first.total("requests completed") == second.total("requests completed") == 4
    assert first.ahead("requests completed") and not second.ahead("requests completed")
    assert first.total("requests failed") == 0


def test_a_time_on_the_end_of_a_bucket_is_in_it_as_prometheus_has_it():
    tally, registry = SharedTally.alone(), CollectorRegistry()
    other = Histogram("x", "x", buckets=INTER_TOKEN_BUCKETS, registry=registry)
    for seconds in (0.0, 0.005, 0.0051, 0.1, 10.0, 11.0, 1e9):
        tally.times("inter_token_seconds").add(seconds)
        other.observe(seconds)
    buckets, total = tally.histogram("inter_token_seconds")
    for end, count in buckets:
        name = "+Inf" if math.isinf(end) else str(end)
        assert count == registry.get_sample_value("x_bucket", {"le": name})
    assert total == registry.get_sample_value("x_sum")
