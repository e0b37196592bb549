"""Tokens stand where `text_offset` says, and make the text by `bytes`: streamed and whole alike."""

import json
from itertools import product

import pytest

from tests.lib.server.harness import MODEL, SPECIAL, Server

PROMPTS = (
    "hello",
    "Köln, 日本語 🎉 e\u0301",
    f"a{SPECIAL[1]}b",
    f"{SPECIAL[0]}twice",
    [256, *"Köl".encode(), 257, *b"n"],
    [195, 104, 240, 159, 105, 258],  # bytes that are no characters
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("s"), bos=True)
    yield found
    assert found.stop() == 0, found.log.read_text()


def check(text: str, logprobs: dict) -> None:
    """Offsets ascend, and each token's text stands where its offset says, special ones apart."""
    offsets, tokens = logprobs["text_offset"], logprobs["tokens"]
    assert len(offsets) == len(tokens) == len(logprobs["token_logprobs"])
    assert offsets == sorted(offsets) and all(0 <= offset <= len(text) for offset in offsets)
    for offset, token, following in zip(offsets, tokens, [*offsets, len(text)][1:], strict=True):
        if not token.startswith("bytes:") and (token not in SPECIAL or offset < following):
            assert text[offset:following] == token


def streamed(server, **fields) -> tuple[str, dict]:
    events = server.complete(stream=True, **fields).text.split("\n\n")
    choices = [json.loads(event[6:])["choices"][0] for event in events[:-2]]
    joined: dict = {}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(values)
    return "".join(choice["text"] for choice in choices), joined


@pytest.mark.parametrize(
    ("prompt", "echo", "special"), list(product(PROMPTS, (False, True), (False, True)))
)
def test_each_offset_is_where_its_token_begins(server, prompt, echo, special):
    fields = {
        "prompt": prompt, "echo": echo, "logprobs": 1, "max_tokens": 6, "seed": 3,
        "ignore_eos": True, "skip_special_tokens": not special,
    }  # fmt: skip
    for more in (
        {},
        {"logit_bias": {"258": 100}},
        {"logit_bias": {"195": 100}},
        {"max_tokens": 0},
        {"add_special_tokens": False},
    ):
        whole = server.complete(**fields | more).json()["choices"][0]
        check(whole["text"], whole["logprobs"])
        assert streamed(server, **fields | more) == (whole["text"], whole["logprobs"])


def test_an_added_bos_has_no_width(server):
    found = server.complete(echo=True, logprobs=0, max_tokens=1).json()["choices"][0]
    assert found["logprobs"]["tokens"][0] == SPECIAL[0]
    assert found["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 4, 5]
    assert found["text"].startswith("hello")


def test_what_a_stop_string_cut_off_is_at_the_end_or_past_it(server):
    fields = {"max_tokens": 40, "seed": 11, "ignore_eos": True, "logprobs": 0}
    text = server.complete(**fields).json()["choices"][0]["text"]
    fields["stop"] = [text[7:10]]
    whole = server.complete(**fields).json()["choices"][0]
    assert whole["logprobs"]["text_offset"] == list(range(len(whole["text"]) + 3))
    assert streamed(server, **fields) == (whole["text"], whole["logprobs"])


def chat(server, **fields):
    messages = [{"role": "user", "content": "x"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 8, "seed": 5, "logprobs": True}
    return server.http.post("/v1/chat/completions", json=body | {"top_logprobs": 3} | fields)


@pytest.mark.parametrize("bias", [{}, {"195": 100}, {"240": 40, "159": 40, "152": 40}])
def test_a_chat_has_the_same_names_and_bytes_whole_and_streamed(server, bias):
    whole = chat(server, logit_bias=bias).json()["choices"][0]
    entries = whole["logprobs"]["content"]
    joined = b"".join(bytes(e["bytes"]) for e in entries if not e["token"].startswith("<|"))
    assert joined.decode(errors="replace") == whole["message"]["content"]
    assert all(len({other["token"] for other in e["top_logprobs"]}) == 3 for e in entries)
    if bias:
        assert any(e["token"].startswith("bytes:\\x") for e in entries)
    events = chat(server, logit_bias=bias, stream=True).text.split("\n\n")[:-2]
    pieces = [json.loads(event[6:])["choices"][0]["logprobs"]["content"] for event in events]
    assert [entry for piece in pieces for entry in piece] == entries
