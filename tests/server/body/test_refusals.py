"""Bad input gets a clear error, in a fixed order, and costs nobody else anything."""

import json

import pytest

from tests.lib.server.harness import MODEL, refused
from tpdet.requests.body.limits import MAX_BODY_BYTES

PATH = "/v1/completions"
pytestmark = pytest.mark.usefixtures("unharmed")
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}
WRONG_FORMATS = (
    {}, {"name": "x"}, {"schema": {}}, {"name": "", "schema": {}}, {"name": "x", "schema": True},
    {"name": "x", "schema": "{}"}, {"name": "x", "schema": {"type": "robot"}},
    {"name": "x", "schema": {"not": {}}}, {"name": "x", "schema": {}, "strict": 1},
    {"name": "x", "schema": {"description": "d" * (64 << 10)}},
    {"name": "x", "schema": {"$ref": "file:///etc/passwd"}},
)  # fmt: skip


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("n", [1, 128], [0, 129, -1, 10**30, 1.0, "1", True]),
        ("logprobs", [0, 100], [-1, 101, "1", True]),
        ("temperature", [0, 0.0009, 0.001, 2, 1.5], [-0.001, 2.001, "1", True, 10**400]),
        ("top_p", [0.0001, 1], [0, 1.0001, -1, "1"]),
        ("top_k", [-1, 0, 2**31 - 1], [-2, 2**31, 1.5]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("seed", [0, 2**63 - 1], [-1, 2**63, 0.5, "7"]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.1, 5], [0, -1]),
        ("max_tokens", [0, 251], [252, -1, 2**31, "4", 4.0]),
        ("min_tokens", [0, 4], [5, -1]),
        ("stop", ["a", ["b"] * 16, "x" * 256, []], ["", ["b"] * 17, "x" * 257, [1], {}, 3, [""]]),
        ("stop_token_ids", [[0, 511], []], [[512], [-1], ["1"], [1.0], 3]),
        ("user", ["u" * 256, ""], ["u" * 257, "é" * 129, 3]),
        ("cache_salt", ["c" * 256], ["c" * 257, 3]),
        (
            "logit_bias",
            [{"0": -100, "511": 100}, {}],
            [
                {"512": 1},
                {"1": 100.5},
                {"01": 1},
                {"-1": 1},
                {"x": 1},
                {"1": "2"},
                {"+1": 1},
                [],
                {"١": 1},
                {str(i): 1 for i in range(1025)},
            ],
        ),
        ("truncate_prompt_tokens", [-1, 1, 300], [0, -2, "1"]),
        ("stream", [False], ["true", 1, 0]),
        ("echo", [True], ["yes", 1]),
        (
            "response_format",
            [{"type": "text"}, {"type": "json_object"}, FORMAT],
            [
                "text",
                {},
                {"type": "json_schema"},
                FORMAT | {"type": "json_object"},
                FORMAT | {"type": "text"},
                {"type": "grammar"},
                *({"type": "json_schema", "json_schema": wrong} for wrong in WRONG_FORMATS),
            ],
        ),
        (
            "prompt",
            ["x", [1, 2], ["x"] * 1024, [[1]] * 1024, "y" * 252],
            [
                "",
                [],
                [[]],
                ["x"] * 1025,
                [1, "x"],
                ["x", 1],
                [[1], "x"],
                3,
                {},
                [512],
                [-1],
                [1.0],
                [True],
                [[1, "a"]],
                "y" * 257,
                [5] * 300,
                [[5] * 300],
                [None],
            ],
        ),
    ],
)
def test_each_field_at_its_limits_and_past_them(server, field, inside, outside):
    for value in inside:
        found = server.complete(**{field: value})
        assert found.status_code == 200, (value, found.text)
    for value in outside:
        param = {"min_tokens": None, "max_tokens": None}.get(field, field)
        refused(server.complete(**{field: value}), 400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": "x", "unknown": 1}]},
        {"messages": "x"},
        {"top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 101},
        {"logprobs": 2},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "assistant", "tool_calls": []}]},
        {"echo": True},
        {"max_tokens": 3, "max_completion_tokens": 4},
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        {"stream": True, "stream_options": {"other": 1}},
        {"stream": True, "prompt_logprobs": 1},
        {"frequency": 1},
        {"response_format": {"type": "json_object", "schema": {}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    ],
)
def test_chat_refuses_what_it_does_not_know(server, fields):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    error = refused(server.http.post("/v1/chat/completions", json=body | fields), 400)
    assert error["type"] == "invalid_request_error" and error["param"]


PARTS = (
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    {"type": "input_image", "image_url": "https://example.com/a.png"},
    {"type": "image", "image": "a.png"},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "audio_url", "audio_url": {"url": "a.wav"}},
    {"type": "video_url", "video_url": {"url": "a.mp4"}},
    {"type": "file", "file": {"file_id": "f"}},
)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part["type"])
def test_a_part_that_is_no_text_is_refused_by_its_type(server, part):
    content = [{"type": "text", "text": "x"}, part]
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": content}]
    for route in ("/v1/chat/completions", "/tokenize"):
        found = server.http.post(route, json={"model": MODEL, "messages": messages})
        error = refused(found, 400, "messages[1].content[1]")
        assert f"of type '{part['type']}': only the text part of a model is" in error["message"]


def test_a_message_a_client_sends_back_may_hold_nulls(server):
    answer = {"role": "assistant", "content": "y", "refusal": None, "tool_calls": None}
    messages = [{"role": "user", "content": "x"}, answer, {"role": "user", "content": "z"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 2}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200


def test_known_and_unknown_fields_are_told_apart(server):
    assert refused(server.complete(tools=[1]), 400, "tools")["code"] == "not_supported"
    assert refused(server.complete(toolz=[1]), 400, "toolz")["code"] == "unknown_field"
    assert refused(server.complete(toolz=None), 400, "toolz")["code"] == "unknown_field"


def test_another_models_name_is_404(server):
    assert refused(server.complete(model="gpt"), 404, "model")["code"] == "model_not_found"
    assert refused(server.http.get("/v1/models/gpt"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"3", b"null", b'"x"', b"{'a': 1}", b"\xff\xfe{}", b"{}\x00",
        b'{"prompt": NaN}', b'{"prompt": Infinity}', b'{"temperature": 1e999, "prompt": "x"}',
        b'{"prompt": "\\ud800"}', b'{"prompt": "x", "\\udc00": 1}', b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "x", "prompt": "x"}', b'{"prompt": "x", "logit_bias": {"1": 1, "1": 2}}',
        b'{"prompt": ' + b"[" * 40 + b"]" * 40 + b"}", b'{"prompt": ' + b"[" * 200_000,
        b'{"a":' * 50_000, b'{"seed": ' + b"9" * 10_000 + b"}", b'{"prompt": "x"} {}',
        '{"prompt": "x"}'.encode("utf-16"), b"\xef\xbb\xbf{}",
        json.dumps({f"k{i}": 0 for i in range(100_000)}).encode(),
    ],
)  # fmt: skip
def test_malformed_json_is_400(server, body):
    found = server.http.post(PATH, content=body, headers={"content-type": "application/json"})
    refused(found, 400)


def test_json_of_depth_32_is_read_and_33_refused(server):
    def nested(depth: int) -> bytes:
        return b'{"user":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    headers = {"content-type": "application/json"}
    allowed = server.http.post(PATH, content=nested(32), headers=headers)
    assert "nested" not in refused(allowed, 400)["message"]
    assert (
        "nested"
        in refused(server.http.post(PATH, content=nested(33), headers=headers), 400)["message"]
    )


def test_a_surrogate_pair_and_an_escaped_backslash_are_text(server):
    body = b'{"prompt": "\\ud83d\\ude00 \\\\ud800", "max_tokens": 1}'
    found = server.http.post(PATH, content=body, headers={"content-type": "application/json"})
    assert found.status_code == 200, found.text


def test_a_body_at_the_limit_is_read_and_one_past_it_is_413(server):
    head, tail = b'{"model":"demo","prompt":"x","max_tokens":1}', b" "
    headers = {"content-type": "application/json"}
    for extra, status in ((0, 200), (1, 413), (MAX_BODY_BYTES, 413)):
        content = head + tail * (MAX_BODY_BYTES - len(head) + extra)
        found = server.http.post(PATH, content=content, headers=headers)
        assert found.status_code == status, found.text[:200]
        assert found.headers["x-request-id"]


def test_an_oversized_chunked_body_is_413_too(server):
    chunks = (b" " * 65536 for _ in range(200))
    found = server.http.post(PATH, content=chunks, headers={"content-type": "application/json"})
    refused(found, 413)


def test_a_long_name_in_an_error_stays_under_4_kib(server):
    found = server.complete(**{"ü€" * 3000: 1})
    refused(found, 400)
    refused(server.complete(model="\x00" * 1024), 404)
