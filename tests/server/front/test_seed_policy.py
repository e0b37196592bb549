"""`--seed-policy request`: a server's answers are functions of their bodies."""

import json

import pytest

from tests.lib.server.harness import MODEL, Server

SEEDLESS = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("s"), "--seed-policy", "request")
    yield server
    assert server.stop() == 0, server.log.read_text()


def answer(server, **fields):
    found = server.complete(**SEEDLESS | fields)
    assert found.status_code == 200, found.text
    return found.json()


def ids(body):
    return [choice["token_ids"] for choice in body["choices"]]


def test_a_prompt_has_one_seed_alone_in_a_list_longer_or_with_more_choices(server):
    alone, again = answer(server), answer(server)
    assert alone["tpdet"] == again["tpdet"] and ids(alone) == ids(again)
    longer = answer(server, max_tokens=20, n=3, stop_token_ids=[300], logprobs=2, min_tokens=3)
    assert longer["tpdet"]["seed"] == alone["tpdet"]["seed"]
    assert ids(longer)[0][:12] == ids(alone)[0] and len({*map(tuple, ids(longer))}) == 3
    other = answer(server, temperature=0.5)
    assert other["tpdet"]["seed"] != alone["tpdet"]["seed"] and ids(other) != ids(alone)
    given = answer(server, seed=alone["tpdet"]["seed"])
    assert given["tpdet"] == alone["tpdet"] and ids(given) == ids(alone)
    assert answer(server, seed=5)["tpdet"]["seed"] == 5


def test_a_call_with_several_prompts_answers_a_seed_for_each(server):
    pair = answer(server, prompt=["hello", "you"], n=2)
    first, second = answer(server, n=2), answer(server, prompt="you", n=2)
    assert ids(pair) == ids(first) + ids(second)
    own = [one["tpdet"]["seed"] for one in (first, second)]
    assert pair["tpdet"]["seed"] is None and pair["tpdet"]["seeds"] == own
    replayed = answer(server, prompt=["hello", "you"], n=2, tpdet={"seeds": own})
    assert replayed["tpdet"] == pair["tpdet"] and ids(replayed) == ids(pair)
    other = answer(server, prompt=["hello", "you"], n=2, tpdet={"seeds": own[::-1]})
    assert other["tpdet"]["request_digest"] != pair["tpdet"]["request_digest"]
    one = answer(server, prompt=["hello", "you"], n=2, seed=own[0])  # the call's, as ever
    assert one["tpdet"]["seed"] == own[0] and ids(one)[:2] == ids(first) != ids(one)[2:]

    clones = answer(server, prompt=["hello", "hello"])
    assert clones["tpdet"]["seed"] == own[0] and ids(clones)[0] == ids(clones)[1]
    assert "seeds" not in clones["tpdet"]


def test_a_stream_of_several_prompts_names_its_seeds_and_goes_on_behind_a_cursor(server):
    body = {"model": MODEL, "prompt": ["hello", "you"], **SEEDLESS}
    whole = server.http.post("/v1/completions", json=body).json()
    events = stream(server, body)
    names = {name: whole["tpdet"][name] for name in ("seed", "seeds")}
    assert all(chunk["tpdet"].items() >= names.items() for _, chunk in events)
    assert events[-1][1]["tpdet"] == whole["tpdet"]
    cursor, _ = events[7]
    rest = stream(server, body, cursor)
    assert [chunk["choices"] for _, chunk in rest] == [chunk["choices"] for _, chunk in events[8:]]
    assert rest[-1][1]["tpdet"] == whole["tpdet"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": 1, "tpdet": {"seeds": [1]}}, "seed and tpdet.seeds are given"),
        ({"tpdet": {"seeds": [1, 2]}}, "has 2 seeds for 1 prompts: send one for each"),
        ({"tpdet": {"seeds": []}}, "has 0 seeds for 1 prompts"),
        ({"tpdet": {"seeds": [-1]}}, "seeds"),
        ({"tpdet": {"seeds": [2**63]}}, "seeds"),
        ({"tpdet": {"seeds": [True]}}, "seeds"),
    ],
)
def test_seeds_that_do_not_fit_are_refused(server, fields, message):
    refused = server.complete(**fields)
    assert refused.status_code == 400 and message in refused.json()["error"]["message"]


def stream(server, body, cursor=None):
    """The cursor and the chunk of each event."""
    headers = {"accept": "text/event-stream"} | ({"last-event-id": cursor} if cursor else {})
    text = server.http.post("/v1/completions", json=body | {"stream": True}, headers=headers).text
    *events, done = [event for event in text.split("\n\n") if event]
    assert done.endswith("[DONE]"), text
    pairs = [event.split("\n") for event in events]
    return [(line[4:], json.loads(data[6:])) for line, data in pairs]
