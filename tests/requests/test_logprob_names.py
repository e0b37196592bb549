"""Log-probabilities that people read: bytes join to the text, and no alternative is lost."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.text.made_tokenizers import sentencepiece_like
from tpdet.control.row_messages import SampledToken
from tpdet.requests.answer.choices import LogprobWriter
from tpdet.requests.request import Candidate, SamplingParams, TokenOutput
from tpdet.text.outputs import ChoiceAssembler
from tpdet.text.tokenizer import Tokenizer

CALL = SimpleNamespace(token_names=False, logprobs=4)
MOST = 300


@pytest.fixture(scope="module")
def tokenizers(our_tokenizer):
    return our_tokenizer, Tokenizer(sentencepiece_like(), {}, None)


def sampled(token_id: int, others=()) -> SampledToken:
    top = tuple(Candidate(other, -1.0 - place) for place, other in enumerate(others))
    return SampledToken(token_id, -0.5, top, 1)


def text_of(tokenizer, ids, skip) -> str:
    params = SamplingParams(max_tokens=len(ids), skip_special_tokens=skip)
    assembler = ChoiceAssembler(tokenizer, params)
    ends = [None] * (len(ids) - 1) + ["length"]
    for id_, end in zip(ids, ends, strict=True):
        assembler.push(
            TokenOutput(request_id="r", choice=0, token_id=id_, logprob=-0.5, finish_reason=end)
        )
    return assembler.answer(0).text


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, MOST), min_size=1, max_size=12), skip=st.booleans())
def test_bytes_of_the_shown_tokens_are_those_of_the_text(tokenizers, ids, skip):
    """At a text's start the blank is not theirs that the decoder strips."""
    for tokenizer in tokenizers:
        text = text_of(tokenizer, ids, skip)
        whole = LogprobWriter(CALL, tokenizer, skip).chat([sampled(id_) for id_ in ids])["content"]
        shown = [i for i, id_ in enumerate(ids) if tokenizer.token(id_, skip) is not None]
        joined = b"".join(bytes(whole[i]["bytes"]) for i in shown)
        assert joined.decode(errors="replace") == text
        one_by_one = LogprobWriter(CALL, tokenizer, skip)
        pieces = [one_by_one.chat([sampled(id_)])["content"][0] for id_ in ids]
        assert pieces == whole
        resumed = LogprobWriter(CALL, tokenizer, skip)
        resumed.pass_over([sampled(id_) for id_ in ids[:2]])
        assert resumed.chat([sampled(id_) for id_ in ids[2:]])["content"] == whole[2:]


def test_an_alternative_has_the_bytes_that_it_would_have_added(tokenizers):
    _, tokenizer = tokenizers
    the, a, end, half = map(
        [tokenizer.token(id_) for id_ in range(tokenizer.vocab_size)].index,
        ("▁th", "▁a", "</s>", "<0xF0>"),
    )
    writer = LogprobWriter(CALL, tokenizer)
    first, second = writer.chat([sampled(the, (a, end)), sampled(the, (a, half, 10_000))])[
        "content"
    ]
    assert (first["token"], bytes(first["bytes"])) == (" th", b"th")
    assert [(e["token"], bytes(e["bytes"])) for e in first["top_logprobs"]] == [
        (" a", b"a"),
        ("</s>", b"</s>"),
    ]
    assert bytes(second["bytes"]) == b" th"
    assert [(e["token"], e["bytes"]) for e in second["top_logprobs"]] == [
        (" a", list(b" a")),
        (r"bytes:\xf0", [0xF0]),
        ("token_id:10000", None),
    ]


def test_by_number_tokens_still_have_their_bytes(tokenizers):
    call = SimpleNamespace(token_names=True, logprobs=1)
    for tokenizer in tokenizers:
        (entry,) = LogprobWriter(call, tokenizer).chat([sampled(70)])["content"]
        assert entry["token"] == "token_id:70"
        assert bytes(entry["bytes"]) == tokenizer.names.bytes(70)


def test_an_evaluation_calls_a_token_greedy_if_it_is_the_likeliest(tokenizers):
    """Every id is chosen once beside a better one: no name hides the better one's number."""
    for tokenizer in tokenizers:
        count = tokenizer.vocab_size
        for id_ in range(count):
            better = (id_ * 7 + 1) % count
            for top in ((better, id_), (better,)):
                candidates = tuple(Candidate(o, -0.25 if o == better else -0.5) for o in top)
                token = SampledToken(id_, -0.5, candidates, 2)
                found = LogprobWriter(CALL, tokenizer).completion([token], [id_], [0])
                alternatives = found["top_logprobs"][0]
                assert alternatives[found["tokens"][0]] == found["token_logprobs"][0] == -0.5
                assert max(alternatives.values()) == (-0.5 if better == id_ else -0.25)
                assert len(alternatives) == len({id_, better})
