"""Stored answers: the outputs that they stand for end as those of the engine ended."""

import json

import msgspec
import pytest

from tests.lib.server.harness import write_tokenizer
from tpdet.audit.recorded import RecordedAnswer, digest_of
from tpdet.audit.replay import AnswerDigests
from tpdet.requests.answer.whole_answer import WholeAnswer
from tpdet.requests.body.prepare import Preparer
from tpdet.requests.body.work import prepare_call
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.request import TokenOutput
from tpdet.server.answers.stored import StoredAnswer, stored_outputs
from tpdet.text.tokenizer import Tokenizer, read_files

FACTS = EngineFacts("fp", "c0" * 32, "d1" * 32, 256, 512, (258,), 1, "fp2", "float32")
DIGESTS = AnswerDigests("aa" * 32, "bb" * 32)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t")
    write_tokenizer(folder)
    return Tokenizer.from_files(read_files(folder, None, None))


def call_of(tokenizer, **fields):
    body = {"prompt": "p", "max_tokens": 4, "seed": 1} | fields
    return prepare_call("completion", Preparer(FACTS, "m", tokenizer), body, "1")


def answered(call, tokenizer, outputs):
    """The whole answer made of (token id, log-probability, how it ended) for each choice."""
    whole = WholeAnswer(call, tokenizer, None)
    name = call.requests[0].request_id
    for index, choice in enumerate(outputs):
        for token, logprob, ended in choice:
            output = TokenOutput(name, index, token, logprob, weights=3, **ended)
            whole.assemblers[name].push_token(output)
    return whole


ENDS = {
    "length": ({}, [(97, -0.5, {}), (98, -1.0, {"finish_reason": "length"})]),
    "end of text": (
        {},
        [(97, -0.5, {}), (258, -1.0, {"finish_reason": "stop", "stop_token_id": 258})],
    ),
    "stop id": (
        {"stop_token_ids": [98]},
        [(97, -0.5, {}), (98, -1.0, {"finish_reason": "stop", "stop_token_id": 98})],
    ),
    "stop string": ({"stop": "bc"}, [(97, -0.5, {}), (98, -1.0, {}), (99, -0.25, {})]),
    "a stop string called grammar": ({"stop": "a"}, [(97, -0.5, {})]),
    "a stop string in the last token": (
        {"stop": "b", "max_tokens": 2},
        [(97, -0.5, {}), (98, -1.0, {"finish_reason": "length"})],
    ),
    "a complete form": ({}, [(97, -0.5, {}), (98, -1.0, {"finish_reason": "stop"})]),
    "a dead end": ({}, [(97, -0.5, {}), (98, -1.0, {"finish_reason": "length", "dead_end": True})]),
    "half a character": ({}, [(195, -0.5, {}), (195, -0.0, {"finish_reason": "length"})]),
    "nothing": ({"max_tokens": 0}, [(-1, 0.0, {"finish_reason": "length"})]),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_end_comes_out_as_it_went_in(tokenizer, name):
    fields, outputs = ENDS[name]
    call = call_of(tokenizer, **fields)
    whole = answered(call, tokenizer, [outputs])
    stored = StoredAnswer.of(whole, DIGESTS, 1, FACTS)
    again = msgspec.json.decode(msgspec.json.encode(stored), type=StoredAnswer)
    assert again == stored and again.fits(call, tokenizer)
    (request,), (answer,) = call.requests, again.answers
    replayed = WholeAnswer(call, tokenizer, None)
    for output in stored_outputs(request, 0, answer.outputs[0], 3):
        replayed.assemblers[request.request_id].push_token(output)
    one, other = (w.assemblers[request.request_id].choice(0) for w in (whole, replayed))
    assert one == other and one.finish_reason is not None
    assert list(map(list, *whole.tokens())) == list(map(list, *replayed.tokens()))


def test_an_answer_that_this_tokenizer_ends_elsewhere_does_not_fit(tokenizer):
    call = call_of(tokenizer, stop="b")
    whole = answered(call, tokenizer, [[(97, -0.5, {}), (98, -1.0, {})]])
    stored = StoredAnswer.of(whole, DIGESTS, 1, FACTS)
    assert stored.fits(call, tokenizer)
    assert not stored.fits(call_of(tokenizer, stop="a"), tokenizer)  # earlier
    assert not stored.fits(call_of(tokenizer, stop="c"), tokenizer)  # never
    assert not stored.fits(call_of(tokenizer, stop="b", n=2), tokenizer)


def test_what_is_stored_is_a_recorded_answer(tokenizer):
    """As `tpdet check` reads it, with the parameters that the digest covers in one spelling."""
    call = call_of(tokenizer, logprobs=0, stop_token_ids=[9, 7, 9], top_k=-1, user="u")
    whole = answered(call, tokenizer, [[(97, -0.5, {"finish_reason": "length"})]])
    stored = json.loads(msgspec.json.encode(StoredAnswer.of(whole, DIGESTS, 1, FACTS)))
    (answer,) = stored["answers"]
    assert answer["outputs"] == [
        {
            "token_ids": [97],
            "logprob_bits": ["bf000000"],
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    params = answer["params"]
    assert (params["seed"], params["logprobs"], params["top_k"]) == (None, None, 0)
    assert params["stop_token_ids"] == [7, 9] and answer["seed"] == 1
    assert (answer["contract"], answer["weights"]) == (FACTS.contract, FACTS.model_digest)
    record = msgspec.convert(answer, RecordedAnswer, str_keys=True)
    assert digest_of(record, (258,)) == record.replay_digest
