"""An answer that was cut off goes on: by its token ids, or by the cursor of its last event."""

import json

import openai
import pytest

from tests.lib.server.harness import MODEL, refused
from tpdet.errors import RequestError
from tpdet.requests.body.cursor import cursor_head, read_cursor
from tpdet.requests.body.problems import ApiError
from tpdet.requests.body.resume import resumed_by_cursor
from tpdet.requests.engine_facts import PROCESSED_LOGPROBS, RAW_LOGPROBS, AnswerOrigin, EngineFacts
from tpdet.requests.request import Request, SamplingParams
from tpdet.scheduler.limits import check_drafts

CONTRACT, WEIGHTS = "c0" * 32, "d1" * 32
STREAMED = {"accept": "text/event-stream"}
ASKED = {"seed": 3, "max_tokens": 12, "n": 2, "stop": ["hoc"], "stream": True}


@pytest.fixture(scope="module")
def ask(server):
    """Sends a body with headers; the answer."""

    def send(fields, **headers):
        body = {"model": MODEL, "prompt": "hello"} | fields
        return server.http.post("/v1/completions", json=body, headers=STREAMED | headers)

    return send


def events_of(found) -> list[tuple[str, dict]]:
    """The cursor and the JSON of each event but the last, which is [DONE]."""
    assert found.status_code == 200, found.text
    *events, last, rest = found.text.split("\n\n")
    assert last.splitlines()[-1] == "data: [DONE]" and rest == ""
    pairs = [event.split("\n") for event in events]
    return [(i.removeprefix("id: "), json.loads(d.removeprefix("data: "))) for i, d in pairs]


def joined(events) -> list[tuple[str, list, str | None]]:
    """Text, ids and finish reason of each choice."""
    texts, ids, ends = ["", ""], [[], []], [None, None]
    for _, event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            ids[choice["index"]] += choice.get("token_ids", [])
            ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
    return list(zip(texts, ids, ends, strict=True))


@pytest.mark.parametrize(
    "more", [{}, {"return_token_ids": True, "logprobs": 1}], ids=["text", "ids"]
)
def test_a_stream_goes_on_behind_the_cursor_of_any_event(ask, more):
    fields = ASKED | more | {"stream_options": {"include_usage": True}}
    whole = events_of(ask(fields))
    expected, last = joined(whole), whole[-1][1]
    assert {end for *_, end in expected} == {"stop", "length"}  # both ways to end are tried
    for place, (cursor, _) in enumerate(whole):
        rest = events_of(ask(fields, **{"last-event-id": cursor}))
        found = joined(whole[: place + 1] + rest)
        assert found == expected
        assert (rest[-1][0], rest[-1][1]["tpdet"]) == (whole[-1][0], last["tpdet"])
        assert rest[-1][1]["usage"] == last["usage"]
    assert read_cursor(whole[-1][0]).counts == (12, 9)


def test_a_stream_has_cursors_where_its_client_reads_event_streams(ask):
    assert ask(ASKED).text.startswith("id: 1.c0c0c0c0c0c0.d1d1d1d1d1d1.3.")
    assert ask(ASKED, accept="*/*").text.startswith("data: ")
    assert ask(ASKED, accept="*/*", **{"last-event-id": ""}).text.startswith("id: ")
    many = {"prompt": ["a", "b"], "n": 65, "max_tokens": 1}
    assert ask(ASKED | many).text.startswith("data: ")  # they would be too long


def test_the_openai_client_reads_streams_with_cursors(ask, server):
    """Its decoder has the cursors; what it gives out is as without them."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

        def read(headers):
            fields = {"model": MODEL, "prompt": "hello", "max_tokens": 5, "seed": 3}
            chunks = client.completions.create(**fields, stream=True, extra_headers=headers)
            return [chunk.choices[0].text for chunk in chunks]

        assert read(STREAMED) == read({}) and len(read({})) == 5
        cursor = events_of(ask({"seed": 3, "max_tokens": 5, "stream": True}))[1][0]
        assert read({"last-event-id": cursor}) == read({})[2:]


def test_a_wrong_cursor_is_refused_by_name(ask):
    cursor = events_of(ask(ASKED))[3][0]
    _, contract, weights, _, checksum, _ = cursor.split(".")

    def refusal(status, cursor, **fields):
        found = ask(ASKED | fields, **{"last-event-id": cursor})
        return refused(found, status, "last-event-id")

    for wrong in (
        "x",
        cursor + "-",
        cursor.replace("1.", "2.", 1),
        cursor.replace(".3.", ".9" * 20),
        cursor.replace(".3.", ".03."),
        cursor.rpartition(".")[0] + ".01-1",
        cursor.replace(contract, contract + "0"),
    ):
        assert "is no cursor of a stream: send the id of" in refusal(400, wrong)["message"]
    other = "0123456789ab"
    for name, text in (
        ("contract", cursor.replace(contract, other)),
        ("weights", cursor.replace(weights, other)),
        ("logprobs_mode", cursor.replace("1.", "1p.", 1)),
    ):
        error = refusal(409, text)
        assert error["code"] == "resume_mismatch" and name in error["message"]
        assert (PROCESSED_LOGPROBS if name == "logprobs_mode" else other) in error["message"]
    for status, said, fields in (
        (400, "the seed of Last-Event-ID is 3, the body's 4", {"seed": 4}),
        (400, "is of 2 choices, the body of 3", {"n": 3}),
        (400, "over max_tokens 1", {"max_tokens": 1}),
        (400, "set stream to true", {"stream": False}),
        (400, "send one of the two", {"tpdet": {"resume": resume([[1]])}}),
        (409, "not those that the stream delivered", {"prompt": "other"}),
    ):
        assert said in refusal(status, cursor, **fields)["message"]
    unsent = f"1.{contract}.{weights}.3.{checksum}.0-0"
    assert f"its checksum of no tokens is {checksum}" in refusal(400, unsent)["message"]
    damaged = cursor.replace(checksum, f"{int(checksum, 16) ^ 1:08x}")
    assert "not those that the stream delivered" in refusal(409, damaged)["message"]


@pytest.mark.parametrize("mode", [RAW_LOGPROBS, PROCESSED_LOGPROBS])
def test_a_cursor_goes_on_where_log_probabilities_are_of_its_mode(mode):
    """One of another mode could have the same bits so far: greedily they are equal in both."""
    cursor = f"{cursor_head(AnswerOrigin(CONTRACT, WEIGHTS, mode), 3).decode()}.0000abcd.2"
    assert read_cursor(cursor).origin == AnswerOrigin(CONTRACT[:12], WEIGHTS[:12], mode)
    requests = (Request(request_id="a", prompt_token_ids=(1,), params=SamplingParams()),)
    for here in (RAW_LOGPROBS, PROCESSED_LOGPROBS):
        facts = EngineFacts("fp", CONTRACT, WEIGHTS, 9, 9, (), 1, "", "float32", logprobs_mode=here)
        if here == mode:
            assert resumed_by_cursor(requests, cursor, facts)[0][0].resumed == (2,)
            continue
        with pytest.raises(ApiError, match=f"resume is {mode}, and here is {here}: ask") as error:
            resumed_by_cursor(requests, cursor, facts)
        assert error.value.status == 409


def resume(choices) -> dict:
    return {"contract": CONTRACT, "weights": WEIGHTS[:12], "seed": 3, "choices": choices}


def test_an_answer_goes_on_behind_its_token_ids(ask):
    fields = ASKED | {"return_token_ids": True}
    whole = events_of(ask(fields))
    origin = {
        "contract": CONTRACT,
        "weights": WEIGHTS,
        "seed": 3,
        "max_tokens": ASKED["max_tokens"],
        "logprobs_mode": RAW_LOGPROBS,
    }
    assert whole[0][1]["tpdet"] == origin and whole[-1][1]["tpdet"].keys() > origin.keys()
    (first, ids, _), (second, others, _) = joined(whole)
    asked = {key: value for key, value in fields.items() if key != "seed"}
    for cut, other_cut in ((1, 0), (5, 2), (len(ids), len(others))):
        given = {"tpdet": {"resume": resume([ids[:cut], others[:other_cut]])}}
        rest = events_of(ask(asked | given))
        found = joined(rest)
        assert [ids[cut:], others[other_cut:]] == [found[0][1], found[1][1]]
        assert first.endswith(found[0][0]) and second.endswith(found[1][0])
        assert [end for *_, end in found] == [end for *_, end in joined(whole)]
        assert rest[-1][1]["tpdet"] == whole[-1][1]["tpdet"]
    hints = {"tpdet": {"drafts": [ids[:3], [1] * 12]}}  # beside a cursor they are only drafts
    rest = events_of(ask(fields | hints, **{"last-event-id": whole[9][0]}))
    assert joined(whole[:10] + rest) == joined(whole)
    large = {"metadata": {"x": "y" * 300_000}}  # another process works on its body
    assert events_of(ask(asked | given | large))[-1][1]["tpdet"] == whole[-1][1]["tpdet"]
    cursor = {"last-event-id": whole[5][0]}
    assert joined(whole[:6] + events_of(ask(fields | large, **cursor))) == joined(whole)
    not_streamed = {"stream": False}
    plain = ask(fields | not_streamed).json()
    again = ask(asked | given | not_streamed).json()
    assert (again["choices"], again["tpdet"]) == (plain["choices"], plain["tpdet"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_token_that_is_not_ours_is_a_mismatch(ask, server, stream):
    fields = ASKED | {"return_token_ids": True}
    (_, ids, _), (_, others, _) = joined(events_of(ask(fields)))
    asked = fields | {"stream": stream}
    for place in (0, 3, len(ids) - 1):
        wrong = [*ids]
        wrong[place] ^= 1
        found = ask(asked | {"tpdet": {"resume": resume([wrong])}})
        error = refused(found, 409, f"tpdet.resume.choices[0][{place}]")
        assert error["code"] == "resume_mismatch"
        said = f"choice 0, position {place}: the resumed token is {wrong[place]}, and"
        assert error["message"].startswith(said) and str(ids[place]) in error["message"]
    longer = ask(asked | {"tpdet": {"resume": resume([[], [*others, 5]])}})
    error = refused(longer, 409, f"tpdet.resume.choices[1][{len(others)}]")
    assert f"ends after {len(others)} tokens" in error["message"]
    assert server.complete().status_code == 200


def test_a_resume_that_cannot_apply_is_refused_by_name(ask):
    for status, said, given, fields in (
        (409, "the contract of the answer", {"contract": "0" * 64}, {}),
        (409, "the weights of the answer", {"weights": "0" * 12}, {}),
        (400, "seed 3 is not the seed of the answer to resume, 4", {"seed": 4}, {}),
        (409, "the logprobs_mode of the answer", {"logprobs_mode": PROCESSED_LOGPROBS}, {}),
        (400, "tpdet.resume.logprobs_mode", {"logprobs_mode": "processed"}, {}),
        (400, "tpdet.resume.contract", {"contract": "C0" * 32}, {}),
        (400, "tpdet.resume.contract", {"contract": CONTRACT[:13]}, {}),
        (400, "tpdet.resume.weights", {"weights": WEIGHTS[:63]}, {}),
        (400, "tpdet.resume.seed", {"seed": -1}, {}),
        (400, "tpdet.resume.words", {"words": 1}, {}),
        (400, "'tpdet.resume.choice': did you mean 'choices'?", {"choice": 1}, {}),
        (400, "'tpdet.draft': did you mean 'drafts'?", {}, {"tpdet": {"draft": [[1]]}}),
        (400, "tpdet: Input should be a valid dictionary, not 'x'", {}, {"tpdet": "x"}),
        (400, "3 resumed choices for 2 choices", {"choices": [[1]] * 3}, {}),
        (400, "token id 512 in tpdet.resume", {"choices": [[512]]}, {}),
        (400, "over max_tokens 12", {"choices": [[1] * 13]}, {}),
        (400, "a prompt that is echoed", {}, {"echo": True}),
        (400, "2 prompts", {}, {"prompt": ["a", "b"]}),
        (400, "leave drafts out", {}, {"tpdet": {"drafts": [[1]], "resume": resume([[1]])}}),
    ):
        fields = ASKED | {"tpdet": {"resume": resume([[1]]) | given}} | fields
        assert said in refused(ask(fields), status)["message"]


def test_the_engine_refuses_to_resume_what_it_cannot_verify():
    params = SamplingParams(seed=3)
    by_cursor = Request(request_id="a", prompt_token_ids=(1,), params=params, resumed=(4,))
    by_ids = Request(
        request_id="a", prompt_token_ids=(1,), params=params, resumed=(1,), drafts=((5,),)
    )
    check_drafts(
        by_cursor, fixed_batch=2, approximate=False
    )  # it is computed again, in plain steps
    for request, fixed_batch, said in (
        (by_ids, 2, "fixed_batch 2"),
        (by_ids, None, "an approximate answer"),
        (by_cursor, None, "an approximate answer"),
    ):
        with pytest.raises(RequestError, match=said) as found:
            check_drafts(request, fixed_batch, approximate=fixed_batch is None)
        assert found.value.param == "tpdet.resume"
