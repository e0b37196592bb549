"""`tpdet check --url`: a server is asked again, and every field of its answer is compared."""

import json
import math
import re
import struct
from types import SimpleNamespace

import msgspec
import pytest

from tests.lib.server.harness import MODEL, Server
from tests.tools.recorded_lines import CHATS, COMPLETIONS, changed, leaves, with_changed
from tpdet import SamplingParams
from tpdet.cli import main
from tpdet.client.connection import Connection
from tpdet.errors import TpdetError
from tpdet.tools.check.answers import read_lines
from tpdet.tools.check.by_server import compare_by_server, server_facts

TALK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
ASKED = {
    "completion": (
        COMPLETIONS,
        {"prompt": ["ab", "c"], "n": 2, "max_tokens": 2, "echo": True, "logprobs": 1, "user": "u"},
    ),
    "greedy": (COMPLETIONS, {"prompt": [97, 98], "max_tokens": 3, "temperature": 0, "stop": "q"}),
    "chat": (CHATS, TALK | {"logprobs": True, "top_logprobs": 1, "seed": 3}),
    "chat of no limit": (CHATS, {"messages": TALK["messages"], "stop": ["a", "e", "i", "o"]}),
}
SLOW = ("completion", "chat", "chat of no limit")
NAMES = {"id", "custom_id", "response.body.created", "request.body.user"}
SILENT = {"offline": {"request_id", "params.output_kind", "seed"}}
"""The fields that a change of may leave unseen, beside NAMES: no function of the request."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("s"))
    yield found
    assert found.stop() == 0


@pytest.fixture(scope="module")
def lines(server, tmp_path_factory):
    """What `run-batch --record` writes, by name; and a line of `generate` with one such answer."""
    folder = tmp_path_factory.mktemp("batch")
    asked = [{"custom_id": n, "url": url, "body": body} for n, (url, body) in ASKED.items()]
    (folder / "in").write_text("".join(json.dumps(line) + "\n" for line in asked))
    flags = ("-i", str(folder / "in"), "-o", str(folder / "out"), "--url", server.url, "--record")
    assert main(["run-batch", *flags]) == 0
    made = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    return dict(zip(ASKED, made, strict=True)) | {"offline": offline(made[1])}


def offline(line):
    """A line of `tpdet generate` with the answer of a batch's."""
    body = line["response"]["body"]
    (choice,) = body["choices"]
    params = SamplingParams(max_tokens=3, temperature=0, stop="q")
    same = ("index", "text", "token_ids", "logprob_bits", "finish_reason", "stop_reason")
    total = math.fsum(value_of(bits) for bits in choice["logprob_bits"])
    output = {name: choice[name] for name in same} | {"cumulative_logprob": total}
    output |= {"logprobs": None, "routed_experts": None}
    return {
        "contract": body["tpdet"]["contract"],
        "weights": body["tpdet"]["weights"],
        "seed": body["tpdet"]["seed"],
        "prompt_token_ids": choice["prompt_token_ids"],
        "params": msgspec.to_builtins(params),
        "outputs": [output],
        "replay_digest": body["tpdet"]["replay_digest"],
        "replay_version": 2,
        "request_digest": body["tpdet"]["request_digest"],
        "request_id": "llm-0-0",
        "prompt": None,
        "prompt_logprobs": None,
        "finished": True,
        "system_fingerprint": body["system_fingerprint"],
        "prompt_routed_experts": None,
    }


def value_of(bits):
    return struct.unpack(">f", bytes.fromhex(bits))[0]


def compare(server, folder, line, **facts):
    """What differs of a line, as text; or why it is refused."""
    file = folder / "line"
    file.write_text(json.dumps(line))
    connection = Connection(server.url)
    try:
        (found,) = compare_by_server(
            connection, read_lines(str(file)), server_facts(connection) | facts
        )
    except TpdetError as error:
        return f"{type(error).__name__}: {error}"
    return "\n".join([*map(str, found.differences), *(other.part for other in found.elsewhere)])


def test_true_answers_are_equal(server, lines, tmp_path, capsys):
    file = tmp_path / "answers"
    file.write_text("".join(json.dumps(line) + "\r\n" for line in lines.values()))
    assert main(["check", str(file), "--url", server.url]) == 0
    assert capsys.readouterr().out.startswith("answers       5, all equal\ntokens ")
    line = with_changed(lines["chat"], "response.body.choices[0].message.content", "no")
    file.write_text(json.dumps(lines["greedy"]) + "\n" + json.dumps(line))
    assert main(["check", str(file), "--url", server.url, "--json"]) == 1
    found, checked = map(json.loads, capsys.readouterr().out.splitlines())
    path = "response.body.choices[0].message.content"
    assert (found["line"], found["difference"]["part"], found["parts"]) == (2, path, [path])
    assert found["difference"]["recorded"] == "no"
    assert (
        found["difference"]["computed"]
        == lines["chat"]["response"]["body"]["choices"][0]["message"]["content"]
    )
    assert (checked["answers"], checked["different"]) == (2, 1)


@pytest.mark.parametrize(
    "name", ["greedy", "offline", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_every_field_that_was_changed_is_reported(server, lines, tmp_path, name):
    line = lines[name]
    assert compare(server, tmp_path, line) == ""
    silent = {
        path
        for path, value in leaves(line)
        if not compare(server, tmp_path, with_changed(line, path, changed(value)))
    }
    open_fields = NAMES | SILENT.get(name, set())
    assert silent == {path for path, _ in leaves(line) if path in open_fields}


def test_a_version_1_digest_is_asked_for_as_such(server, lines, tmp_path):
    line = lines["chat"]
    body = line["request"]["body"]
    asked = server.http.post(CHATS, json=body | {"tpdet": {"replay_version": 1}}).json()["tpdet"]
    assert asked["replay_version"] == 1
    digest = "response.body.tpdet.replay_digest"
    old = with_changed(line, digest, asked["replay_digest"])
    assert compare(server, tmp_path, old).startswith(digest)
    del old["response"]["body"]["tpdet"]["replay_version"]
    assert compare(server, tmp_path, old) == ""
    refused = server.http.post(CHATS, json=body | {"tpdet": {"replay_version": 3}})
    assert refused.status_code == 400 and "replay_version" in refused.text


def test_another_name_of_the_model_is_named_and_no_difference(server, lines, tmp_path):
    line = with_changed(lines["greedy"], "response.body.model", "other")
    assert compare(server, tmp_path, line).startswith('response.body.model: recorded "other"')
    del line["request"]["body"]["model"]  # as records were made before
    assert compare(server, tmp_path, line) == "response.body.model"
    assert lines["greedy"]["request"]["body"]["model"] == MODEL


@pytest.mark.parametrize(
    ("name", "path", "new", "why"),
    [
        ("chat", "request.body.messages[0].content", "Ho", "than were recorded: .* or the record"),
        ("chat", "request.body.n", 2, "has 1 choices, and its request asks for 2: .* the record"),
        ("greedy", "request.body.stream", True, "another stream than is recorded, or the record"),
        ("offline", "prompt", "x", "the tokenizer makes other ids"),
        ("offline", "params.logprobs", 2, "has logprobs 2, which no server shows in that form"),
        ("offline", "params.json_schema", '{"type": "object"}', "not compact JSON"),
        ("chat", "response.body.usage.completion_tokens_details", {"reasoning_tokens": 0},
         "made with a reasoning parser, and the server runs without"),
        ("chat", "response.body.tpdet.weights", "0" * 64, "check it by a server of the same"),
    ],
)  # fmt: skip
def test_what_the_server_cannot_show_again_is_refused(
    server, lines, tmp_path, name, path, new, why
):
    assert re.search(why, compare(server, tmp_path, with_changed(lines[name], path, new)))


@pytest.mark.parametrize(
    "wanted",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"guided_regex": "a|b"},
    ],
)
@pytest.mark.parametrize("mark", [[], [5, 6]])
def test_a_recorded_mark_before_a_form_is_asked_for_again(tmp_path, lines, mark, wanted):
    """Whatever the parser of the server that checks, or without one."""
    line = json.loads(json.dumps(lines["greedy"]))
    line["request"]["body"] |= wanted
    answer = line["response"]["body"]
    answer["tpdet"] |= {"json_schema_after": mark} if mark else {}
    seen = []
    server = SimpleNamespace(post_patiently=lambda path, body: seen.append(body) or answer)
    (tmp_path / "a").write_text(json.dumps(line))
    facts = {"model": "m", **{name: answer["tpdet"][name] for name in ("contract", "weights")}}
    (found,) = compare_by_server(server, read_lines(str(tmp_path / "a")), facts)
    assert found.differences == []
    assert seen[0]["tpdet"]["json_schema_after"] == tuple(mark)
    assert seen[0]["tpdet"]["drafts"] == [tuple(answer["choices"][0]["token_ids"])]
