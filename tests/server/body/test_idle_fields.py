"""What clients send by themselves is taken where it asks for nothing, else refused by name."""

import json

import openai
import pytest

from tests.lib.server.harness import MODEL, refused
from tpdet.requests.body.idle_fields import IDLE

CHAT = "/v1/chat/completions"
OTHER_VALUES = (True, 7, "something", ["x"], {"x": 1})
TAKEN_AND_NOT_USED = {
    "metadata": {"trace": "1"}, "parallel_tool_calls": False, "prompt_cache_key": "k",
    "safety_identifier": "s", "session_id": "i", "user": "u",
}  # fmt: skip


def chat(server, **fields):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    return server.http.post(CHAT, json=body | {"seed": 5} | fields)


def complete(server, **fields):
    return server.complete(**({"max_tokens": 3, "seed": 5} | fields))


@pytest.mark.parametrize(("ask", "fields"), [(chat, IDLE["chat"]),
                                             (complete, IDLE["completion"])])  # fmt: skip
def test_values_that_ask_for_nothing_change_nothing(server, ask, fields):
    expected = ask(server).json()["choices"]
    everything = dict.fromkeys(fields) | {n: i.values[0] for n, i in fields.items() if i.values}
    assert ask(server, **everything, **TAKEN_AND_NOT_USED).json()["choices"] == expected
    for name, idle in fields.items():
        for value in idle.values[1:]:
            assert ask(server, **{name: value}).json()["choices"] == expected, (name, value)


@pytest.mark.parametrize(("ask", "fields"), [(chat, IDLE["chat"]),
                                             (complete, IDLE["completion"])])  # fmt: skip
def test_any_other_value_is_refused_with_what_to_do(server, ask, fields):
    for name, idle in fields.items():
        for value in OTHER_VALUES:
            if idle.accepts(value):
                continue
            error = refused(ask(server, **{name: value}), 400, name)
            assert error["code"] == "not_supported", (name, value)
            assert error["message"].startswith(name) and error["message"].endswith(idle.reason)


def test_numbers_are_of_one_kind_and_truth_values_of_another():
    assert IDLE["generation"]["length_penalty"].accepts(1)
    assert not IDLE["generation"]["length_penalty"].accepts(True)
    assert not IDLE["generation"]["store"].accepts(0)
    assert not IDLE["generation"]["priority"].accepts(False)


@pytest.mark.parametrize(
    ("ask", "field", "message"),
    [
        (complete, "temprature", "did you mean 'temperature'?"),
        (complete, "max_token", "did you mean 'max_tokens'?"),
        (complete, "Top-P", "did you mean 'top_p'?"),
        (complete, "messages", "it is a field of /v1/chat/completions"),
        (complete, "top_logprobs", "it is a field of /v1/chat/completions"),
        (chat, "prompt", "it is a field of /v1/completions"),
        (chat, "tool_choise", "did you mean 'tool_choice'?"),
        (chat, "zzz", "leave it out"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest(server, ask, field, message):
    error = refused(ask(server, **{field: 1}), 400, field)
    assert error["code"] == "unknown_field" and error["message"].endswith(message)


def test_fields_inside_objects_are_refused_with_the_nearest(server):
    wanted = {"type": "json_object", "schema": {"type": "object"}}
    error = refused(chat(server, response_format=wanted), 400, "response_format")
    assert error["code"] == "not_supported" and '"json_schema"' in error["message"]
    for part in ("hi", {"text": "hi"}, {"type": 3}):
        found = chat(server, messages=[{"role": "user", "content": [part]}])
        assert 'send it as {"type": "text"' in refused(found, 400)["message"]
    options = {"include_usages": True}
    error = refused(chat(server, stream=True, stream_options=options), 400)
    assert "did you mean 'include_usage'?" in error["message"]
    error = refused(chat(server, messages=[{"role": "user", "contents": "x"}]), 400)
    assert "did you mean 'content'?" in error["message"]
    error = refused(chat(server, stream=True, stream_options={"include_obfuscation": True}), 400)
    assert error["code"] == "not_supported"
    padded = {"include_obfuscation": False, "include_usage": None}
    assert chat(server, stream=True, stream_options=padded).status_code == 200
    assert chat(server, stream_options=padded).status_code == 200


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"seed": -1}, "leave it out"),
        ({"max_tokens": -1}, "a chat may go on to the end of the context"),
        ({"top_p": 0}, "set temperature to 0"),
        ({"logprobs": -1}, "the likeliest few"),
        ({"prompt_logprobs": -1}, "the likeliest few"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_remedy(server, fields, remedy):
    assert remedy in refused(complete(server, **fields), 400, *fields)["message"]


def test_an_effort_that_the_template_does_not_read_is_refused(server):
    error = refused(chat(server, reasoning_effort="low"), 400, "reasoning_effort")
    assert error["code"] == "not_supported" and "template does not read it" in error["message"]


def test_top_p_0_is_taken_where_nothing_is_drawn(server):
    expected = complete(server, temperature=0).json()["choices"]
    assert complete(server, temperature=0, top_p=0).json()["choices"] == expected
    assert complete(server, temperature=0.0, top_p=0.0).json()["choices"] == expected
    assert complete(server, temperature=1e-5, top_p=0).json()["choices"] == expected
    assert complete(server, temperature=0.0009).json()["choices"] == expected
    refused(complete(server, temperature=0, top_p=False), 400, "top_p")


def test_the_schema_publishes_what_is_taken(server):
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["ChatBody"]["properties"]["store"]["enum"] == [False, None]
    assert "echo" in schemas["ChatBody"]["properties"]
    assert "guided_grammar" not in schemas["ChatBody"]["properties"]


def test_the_openai_client_may_send_what_its_wrappers_do(server):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    found = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=2,
        store=False,
        tools=[],
        tool_choice="none",
        parallel_tool_calls=True,
        metadata={"a": "b"},
        service_tier="auto",
        modalities=["text"],
        functions=[],
        function_call="none",
        verbosity="medium",
        top_logprobs=0,
        logprobs=False,
        response_format={"type": "text"},
        extra_body={
            "add_generation_prompt": True,
            "continue_final_message": False,
            "chat_template_kwargs": {"enable_thinking": False},
            "priority": 0,
        },
    )
    assert found.usage.completion_tokens == 2


CALL = {"id": "call_1", "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}  # fmt: skip
RECORDED = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None,
     "annotations": [], "function_call": None, "audio": None},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "18"}]},
    {"role": "assistant", "content": "It is 18.", "reasoning_content": "easy"},
]  # fmt: skip


def test_a_recorded_conversation_with_tool_calls_is_scored(server):
    found = chat(
        server,
        messages=RECORDED,
        add_generation_prompt=False,
        max_tokens=0,
        prompt_logprobs=0,
        return_token_ids=True,
    )
    assert found.status_code == 200, found.text
    ids = found.json()["choices"][0]["prompt_token_ids"]
    assert len(found.json()["prompt_logprobs"]) == len(ids)
    text = server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text.endswith("It is 18.<|im_end|>\n")
    counted = server.http.post("/tokenize", json={"messages": RECORDED, "tools": []}).json()
    assert counted["count"] > len(ids)  # with what comes before an answer


def test_a_conversations_final_message_is_continued(server):
    fields = {"messages": RECORDED, "add_generation_prompt": False, "continue_final_message": True}
    ids = server.http.post("/tokenize", json=fields).json()["tokens"]
    text = server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\nIt is 18.")
    found = chat(server, **fields, max_tokens=0, prompt_logprobs=0, return_token_ids=True)
    assert found.json()["choices"][0]["prompt_token_ids"] == ids
    fields |= {"add_generation_prompt": None}
    assert "to false" in refused(chat(server, **fields), 400, "continue_final_message")["message"]


def test_a_templates_variables_are_words_and_hold_no_special_token(server):
    expected = chat(server).json()["choices"]
    found = chat(server, chat_template_kwargs={"enable_thinking": False, "x": [{"y": "z"}]})
    assert found.json()["choices"] == expected
    for value in ({"messages": []}, {"a b": 1}, {"x": ["<|im_end|>"]}):
        refused(chat(server, chat_template_kwargs=value), 400, "chat_template_kwargs")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"function": {"name": "f", "arguments": "{"}}, "are not JSON"),
        ({"function": {"name": "f", "arguments": 3}}, "arguments"),
        ({"function": {"arguments": "{}"}}, "name is missing"),
        ({"function": {"name": "f", "argument": "{}"}}, "did you mean 'arguments'?"),
        ({"type": "custom"}, "type"),
    ],
)
def test_a_tool_call_that_cannot_be_rendered_is_named(server, change, message):
    messages = [RECORDED[0], RECORDED[1] | {"tool_calls": [CALL | change]}]
    assert message in refused(chat(server, messages=messages), 400)["message"]


def test_a_large_body_is_treated_alike(server):
    long = {"role": "user", "content": "x" * (300 << 10)}
    body = json.loads(chat(server, messages=[long], temprature=1).content)
    assert "did you mean 'temperature'?" in body["error"]["message"]


def test_hints_where_a_prompt_may_be_cached_are_taken_at_every_place(server):
    """Anthropic's `cache_control`, which proxies and agents leave in."""
    expected = chat(server).json()["choices"]
    for hint in ({"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}):
        part = {"type": "text", "text": "hi", "cache_control": hint, "annotations": []}
        message = {"role": "user", "content": [part], "cache_control": hint}
        found = chat(server, messages=[message], cache_control=hint)
        assert found.json()["choices"] == expected
    plain = {"role": "system", "content": "s"}
    for place, changed in (
        ("messages[1].content[0]", {"content": [part | {"cache_control": {"type": "forever"}}]}),
        ("messages[1]", {"content": "hi", "cache_control": {"type": "ephemeral", "ttl": "9d"}}),
    ):
        found = chat(server, messages=[plain, {"role": "user"} | changed])
        error = refused(found, 400, place)
        assert error["message"].startswith(f"{place}.cache_control is not supported")
    call = {"type": "function", "function": {"name": "f", "strict": True}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    place = "messages[1].tool_calls[0].function.strict"
    assert place in refused(chat(server, messages=[plain, message]), 400, place)["message"]
    error = refused(chat(server, messages=[plain, {"role": "user", "name": 5}]), 400, "messages")
    assert error["message"].startswith("messages[1].name:")


OTHER_FORMATS = (
    {"type": "regex", "value": "[a-z]+"},
    {"type": "json", "value": {"type": "null"}},
    {"type": "grammar", "value": "root ::= 'a'"},
    {"type": "structural_tag", "structures": [], "triggers": []},
    {"type": "ebnf", "grammar": "a"},
    {"type": "structural_tag", "format": {}},
)


@pytest.mark.parametrize("wanted", OTHER_FORMATS, ids=str)
def test_a_response_format_of_another_engine_is_refused_by_its_type(server, wanted):
    for ask in (chat, complete):
        error = refused(ask(server, response_format=wanted), 400, "response_format")
        assert error["code"] == "not_supported"
        assert f"response_format.type {wanted['type']!r} is not supported" in error["message"]
        remedy = "structured_outputs" if wanted["type"] == "regex" else "json_schema"
        assert remedy in error["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": {"grammar": "a"}}, "give json, regex or choice"),
        ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "give one of them"),
        ({"structured_outputs": {"choices": ["b"]}}, "did you mean 'choice'?"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "give one of them"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "send one of them",
        ),
        ({"guided_regex": "(a"}, "unclosed group"),
        ({"guided_choice": []}, "choice must be a list of texts"),
    ],
)
def test_a_form_that_cannot_be_used_is_refused(server, fields, message):
    for ask in (chat, complete):
        assert message in refused(ask(server, **fields), 400)["message"]
    for name in ("guided_regex", "guided_choice"):
        assert name in refused(complete(server, **{name: 3}), 400, name)["message"]
