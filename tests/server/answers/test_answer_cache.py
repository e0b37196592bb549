"""Cached answers: equal in bytes to computed ones but for their names, and whose they are."""

import base64
import hashlib
import json
import re

import pytest

from tests.lib.server.harness import Server, eventually
from tpdet.server.answers.routes import SALT_HEADER

KEYS = {"one": "sk-one", "two": "sk-two"}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TALK = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("s") / "kept" / "answers"


@pytest.fixture(scope="module")
def server(tmp_path_factory, folder):
    """A server with two keys that keeps answers; `ask` sends a body with one of them."""
    place = tmp_path_factory.mktemp("s")
    keys = place / "keys"
    keys.write_text("\n".join(KEYS.values()))
    keys.chmod(0o600)
    server = Server(place, "--api-key-file", str(keys), "--answer-cache", str(folder))
    yield server
    assert server.stop() == 0, server.log.read_text()


def ask(server, path=COMPLETIONS, who="one", headers=(), **fields):
    """The answer's Cache-Status and content, without what names this answer alone."""
    start = {COMPLETIONS: {"prompt": "hello", "max_tokens": 9}, CHATS: TALK | {"max_tokens": 9}}
    body = start.get(path, {}) | fields
    answer = server.http.post(
        path, json=body, headers={"authorization": f"Bearer {KEYS[who]}", **dict(headers)}
    )
    assert answer.status_code == 200, answer.text
    text = re.sub(r'"(id|request_id)":"[^"]*"', r'"\1":"-"', answer.text)
    return answer.headers["cache-status"], re.sub(r'"created":\d+', '"created":0', text)


def receipt(text):
    return json.loads(text)["tpdet"]


CALLS = {
    "sampled": (COMPLETIONS, {"seed": 1}),
    "greedy": (COMPLETIONS, {"temperature": 0, "seed": 1}),
    "choices": (COMPLETIONS, {"seed": 2, "n": 3, "return_token_ids": True}),
    "prompts": (COMPLETIONS, {"seed": 3, "prompt": ["ab", "cd", "ab"], "n": 2, "echo": True}),
    "a seed each": (COMPLETIONS, {"tpdet": {"seeds": [4, 5]}, "prompt": ["ab", "ab"]}),
    "stop strings": (COMPLETIONS, {"seed": 4, "stop": list("aeiou"), "max_tokens": 60, "n": 2}),
    "stop strings shown": (
        COMPLETIONS,
        {"seed": 5, "stop": ["a", "e"], "max_tokens": 60, "include_stop_str_in_output": True},
    ),
    "stop ids": (
        COMPLETIONS,
        {"seed": 6, "stop_token_ids": [*range(97, 110)], "min_tokens": 3, "max_tokens": 60},
    ),
    "end of text": (COMPLETIONS, {"seed": 7, "logit_bias": {"258": 100}}),
    "nothing generated": (COMPLETIONS, {"max_tokens": 0, "seed": 1}),
    "log-probabilities": (COMPLETIONS, {"seed": 8, "logprobs": 0}),
    "pieces of characters": (COMPLETIONS, {"seed": 9, "logit_bias": {"195": 100}, "logprobs": 0}),
    "weight versions": (COMPLETIONS, {"seed": 10, "return_weight_versions": True}),
    "chat": (CHATS, {"seed": 11, "n": 2, "return_token_ids": True}),
    "chat, scored": (CHATS, {"seed": 12, "logprobs": True, "top_logprobs": 0}),
    "token ids": (
        "/inference/v1/generate",
        {"token_ids": [5, 6], "sampling_params": {"seed": 13, "max_tokens": 5}},
    ),
    "SGLang": (
        "/generate",
        {"text": "hey", "sampling_params": {"sampling_seed": 14, "max_new_tokens": 5}},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_cached_answer_is_the_computed_one(server, name):
    path, fields = CALLS[name]
    fresh, computed = ask(server, path, **fields)
    stored, cached = ask(server, path, **fields)
    assert (fresh, stored) == ("tpdet; fwd=miss", "tpdet; hit")
    assert cached == computed
    other, _ = ask(server, path, who="two", **fields)
    assert other == "tpdet; fwd=miss"  # the answers of a key are its own


@pytest.mark.parametrize("name", [name for name in CALLS if name != "SGLang"])
def test_a_cached_stream_is_the_computed_one(server, name):
    """SGLang's events hold all so far, and how many there are depends on the reader's speed."""
    path, fields = CALLS[name]
    fields = fields | {"stream": True, "cache_salt": "stream"}
    if path in (COMPLETIONS, CHATS):
        usage = {"include_usage": True, "continuous_usage_stats": True}
        fields |= {"stream_options": usage}
    headers = {"accept": "text/event-stream"}
    fresh, computed = ask(server, path, headers=headers, **fields)
    stored, cached = ask(server, path, headers=headers, **fields)
    assert (fresh, stored) == ("tpdet; fwd=miss", "tpdet; hit")
    assert cached == computed and cached.endswith("data: [DONE]\n\n")
    whole, _ = ask(server, path, **fields | {"stream": False, "stream_options": None})
    assert whole == "tpdet; hit"  # what was streamed is answered whole


def test_what_only_shows_an_answer_finds_it_and_what_shows_more_computes_it(server):
    fields = {"seed": 21, "prompt": "shown"}
    assert ask(server, **fields)[0] == "tpdet; fwd=miss"
    for same in ({"logprobs": 0}, {"return_token_ids": True}, {"echo": True}, {"user": "u"}):
        assert ask(server, **fields, **same)[0] == "tpdet; hit"
    for more in ({"logprobs": 1}, {"prompt_logprobs": 0}, {"logprob_token_ids": [5]}):
        assert ask(server, **fields, **more)[0] == "tpdet; fwd=miss"
        assert ask(server, **fields, **more)[0] == "tpdet; fwd=miss"
    ranks = {"token_ids": [5], "sampling_params": {"seed": 1, "max_tokens": 2, "logprobs": 0}}
    for _ in range(2):
        assert ask(server, "/inference/v1/generate", **ranks)[0] == "tpdet; fwd=miss"
    for other in ({"seed": 22}, {"max_tokens": 8}, {"n": 2}, {"cache_salt": "s"}, {"stop": "~"}):
        assert ask(server, **fields | other)[0] == "tpdet; fwd=miss"


def test_a_sampled_request_without_a_seed_is_computed_each_time(server):
    drawn = [ask(server, prompt="drawn") for _ in range(3)]
    assert [status for status, _ in drawn] == ["tpdet; fwd=bypass"] * 3
    seeds = [receipt(text)["seed"] for _, text in drawn]
    assert len({*seeds}) == 3
    status, text = ask(server, prompt="drawn", seed=seeds[1])  # but is there under the one it had
    assert status == "tpdet; hit" and text == drawn[1][1]
    greedy = [ask(server, prompt="drawn", temperature=0) for _ in range(2)]
    assert [status for status, _ in greedy] == ["tpdet; fwd=miss", "tpdet; hit"]
    one, other = (json.loads(text) for _, text in greedy)
    assert one["tpdet"].pop("seed") != other["tpdet"].pop("seed") == 0  # it changes nothing
    assert one == other
    assert receipt(ask(server, prompt="drawn", temperature=0, seed=5)[1])["seed"] == 5


def test_clients_and_checks_may_ask_for_a_computed_answer(server):
    fields = {"seed": 31, "prompt": "again", "return_token_ids": True}
    _, text = ask(server, **fields)
    for directive in ("no-cache", "No-Store", "max-age=0, no-cache"):
        status, again = ask(server, headers={"cache-control": directive}, **fields)
        assert (status, again) == ("tpdet; fwd=bypass", text)
    # Drafts come from those who check an answer: it must be computed to be worth anything.
    (choice,) = json.loads(text)["choices"]
    drafts = {"drafts": [choice["token_ids"]]}
    assert ask(server, **fields, tpdet=drafts)[0] == "tpdet; fwd=bypass"
    unkept = fields | {"seed": 32}
    assert ask(server, headers={"cache-control": "no-store"}, **unkept)[0] == "tpdet; fwd=bypass"
    assert ask(server, **unkept)[0] == "tpdet; fwd=miss"


def test_a_stream_that_was_cut_off_goes_on_from_a_cached_answer(server):
    body = {"seed": 33, "prompt": "cut", "stream": True}
    events = {"accept": "text/event-stream"}
    _, text = ask(server, headers=events, **body)
    parts = text.split("\n\n")
    cursor = parts[3].split("\n")[0].removeprefix("id: ")
    status, rest = ask(server, headers=events | {"last-event-id": cursor}, **body)
    assert status == "tpdet; hit" and rest.split("\n\n") == parts[4:]


def get(server, digest, salt=None, who="one", **headers):
    headers["authorization"] = f"Bearer {KEYS[who]}"
    if salt is not None:
        headers[SALT_HEADER] = salt.encode()
    return server.http.get(f"/v1/answers/{digest}", headers=headers)


def test_an_answer_is_had_again_by_its_digest_key_and_salt(server):
    _, text = ask(
        server, seed=41, cache_salt="sält", prompt=["a", "b"], logit_bias={"97": 1, "98": 2}
    )
    shown = receipt(text)
    answer = get(server, shown["request_digest"], "sält")
    assert answer.status_code == 200
    stored = answer.json()
    assert stored["request_digest"] == shown["request_digest"]
    assert [one["prompt_token_ids"] for one in stored["answers"]] == [[97], [98]]
    tag = f'"{shown["replay_digest"]}"'
    assert answer.headers["etag"] == tag
    assert answer.headers["cache-control"] == "private, immutable"
    digest = base64.b64encode(hashlib.sha256(answer.content).digest()).decode()
    assert answer.headers["repr-digest"] == f"sha-256=:{digest}:"
    for condition in (tag, f'"x", W/{tag}', "*"):
        unchanged = get(server, shown["request_digest"], "sält", **{"if-none-match": condition})
        assert (unchanged.status_code, unchanged.content) == (304, b"")
        assert unchanged.headers["etag"] == tag and "cache-control" in unchanged.headers
    assert get(server, shown["request_digest"], "sält", **{"if-none-match": '"x"'}).content
    absent = [
        get(server, shown["request_digest"]),
        get(server, shown["request_digest"], "salt"),
        get(server, shown["request_digest"], "sält", "two"),
        get(server, shown["replay_digest"], "sält"),
        get(server, shown["request_digest"].upper(), "sält"),
        get(server, "..%2f..%2fkeys", "sält"),
        get(server, "0" * 64, "sält"),
    ]
    assert {one.status_code for one in absent} == {404}
    assert len({one.content for one in absent[:3]}) == 1  # nothing says which of them it was
    assert server.http.get(f"/v1/answers/{shown['request_digest']}").status_code == 401


def test_an_answers_bytes_are_a_function_of_its_request(server):
    """Whoever made it, and whatever it was shown with."""
    fields = {"prompt": "same", "temperature": 0, "stop_token_ids": [300, 299]}
    texts = [
        ask(server, **fields, seed=1, logprobs=3, user="u"),
        ask(
            server, **fields | {"stop_token_ids": [299, 300, 299]}, who="two", top_k=0, stream=True
        ),
    ]
    assert [status for status, _ in texts] == ["tpdet; fwd=miss"] * 2
    digest = receipt(texts[0][1])["request_digest"]
    one, two = get(server, digest), get(server, digest, who="two")
    assert one.content == two.content and one.headers["etag"] == two.headers["etag"]


def test_a_damaged_answer_is_removed_and_computed_again(server, folder):
    fields = {"seed": 51, "prompt": "damaged"}
    _, text = ask(server, **fields)
    (file,) = folder.glob(f"*/{receipt(text)['request_digest']}-*")
    sound = file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    place = sound.index(b'"token_ids"') + 16
    flipped = sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :]
    for damaged in (sound[:-1], b"", sound[:40], flipped, sound + b" ", b"x" + sound):
        file.write_bytes(damaged)
        assert get(server, receipt(text)["request_digest"]).status_code == 404
        assert not file.exists()
        file.write_bytes(damaged)
        assert ask(server, **fields) == ("tpdet; fwd=miss", text)
        assert file.read_bytes() == sound
    assert ask(server, **fields) == ("tpdet; hit", text)


def test_metrics_count_what_the_cache_was_asked(server):
    def counts():
        text = server.http.get("/metrics").text
        found = re.findall(r'^tpdet_answer_cache_total{result="(\w+)"} ([\d.]+)', text, re.M)
        return {name: float(count) for name, count in found}

    ask(server, seed=61)
    before, tokens = counts(), server.metric("tpdet_prompt_tokens_total")
    ask(server, seed=61)
    ask(server)
    after = counts()
    assert {name: after[name] - before[name] for name in after} == {
        "hit": 1,
        "miss": 0,
        "bypass": 1,
    }
    assert server.metric("tpdet_prompt_tokens_total") == tokens + 5  # of the one that was computed
    assert server.metric("tpdet_answer_cache_bytes") > 0


def test_answers_that_cannot_be_replayed_are_not_kept(server, folder):
    """Aborted, failed, by two weights, or approximate from some token on: this comes last."""
    before = {*folder.glob("*/*")}
    with server.http.stream(
        "POST",
        COMPLETIONS,
        json={
            "prompt": "gone",
            "seed": 1,
            "max_tokens": 200,
            "cache_salt": "slow=0.05",
            "stream": True,
        },
        headers={"authorization": "Bearer sk-one"},
    ) as stream:
        next(stream.iter_raw())
    eventually(lambda: not server_runs(server))
    failed = server.http.post(
        COMPLETIONS,
        json={"prompt": "x", "seed": 1, "max_tokens": 9, "cache_salt": "nan=3"},
        headers={"authorization": "Bearer sk-one"},
    )
    assert failed.status_code == 500
    status, text = ask(server, seed=1, cache_salt="update=3")
    assert status == "tpdet; fwd=miss" and receipt(text)["mixed_weights"] is True
    assert {*folder.glob("*/*")} == before
    # Answers of the weights before are not those of these.
    assert ask(server, **CALLS["sampled"][1])[0] == "tpdet; fwd=miss"
    _, exact = ask(server, seed=71)
    before = {*folder.glob("*/*")}
    status, text = ask(server, seed=1, cache_salt="approximate=3")
    assert status == "tpdet; fwd=miss" and receipt(text)["approximate"] is True
    assert {*folder.glob("*/*")} == before
    # By now the server is approximate. What it answered before is exact, and says so.
    assert ask(server, seed=71) == ("tpdet; hit", exact)


def server_runs(server):
    return server.metric("tpdet_requests_running")
