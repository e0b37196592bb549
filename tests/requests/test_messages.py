"""Bodies of Anthropic's Messages API as chats, and the types of its errors."""

import json

import pytest

from tests.lib.server.harness import TEMPLATE, write_tokenizer
from tpdet.requests.answer.messages import error_of, is_of_messages
from tpdet.requests.body.messages_body import MessagesBody, MessagesChat
from tpdet.requests.body.parse import parse_body
from tpdet.requests.body.problems import ApiError, bad_request, from_code
from tpdet.requests.body.prompts import BodyPrompts
from tpdet.requests.body.schema import ChatBody
from tpdet.text.tokenizer import Tokenizer

HELLO = {"role": "user", "content": "Hello"}


def chat_of(messages, **more):
    body = {"max_tokens": 9, "messages": messages} | more
    return MessagesChat(parse_body(MessagesBody, body))


def text(words):
    return {"type": "text", "text": words}


def use(name, **arguments):
    return {"type": "tool_use", "id": name, "name": "f", "input": arguments}


def test_turns_of_one_role_are_one_turn():
    messages = [
        HELLO,
        {"role": "user", "content": [text("there")]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": ""}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "?"}, use("x")]},
        {"role": "assistant", "content": [text("b"), use("y", k=1), text("c")]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}, text("d")]},
    ]
    fields = chat_of(messages).fields
    first, answer, result, last = fields["messages"]
    assert first == {"role": "user", "content": [text("Hello"), text("there")]}
    calls = [one["function"]["arguments"] for one in answer.pop("tool_calls")]
    assert answer == {"role": "assistant", "content": "bc", "reasoning_content": "a"}
    assert calls == [{}, {"k": 1}]
    assert result == {"role": "tool", "tool_call_id": "x", "content": ""}
    assert last == {"role": "user", "content": "d"} and "continue_final_message" not in fields


def test_what_is_billed_is_no_prompt_and_results_name_their_tools():
    system = [text("x-anthropic-billing-header: a=b"), text("Be brief.")]
    references = [{"type": "tool_reference", "tool_name": name} for name in ("f", "g")]
    messages = [
        HELLO,
        {"role": "assistant", "content": [use("x")]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "x", "content": references}],
        },
        {"role": "system", "content": "Now."},
        {"role": "assistant", "content": []},
    ]
    fields = chat_of(messages, system=system).fields
    roles = [one["role"] for one in fields["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "system", "assistant"]
    assert fields["messages"][0]["content"] == "Be brief."
    assert fields["messages"][2]["content"] is None and fields["messages"][5]["content"] == ""
    assert fields["messages"][3]["content"] == [text("f"), text("g")]
    assert fields["continue_final_message"] and fields["add_generation_prompt"] is False
    bare = chat_of([HELLO], system=system[:1]).fields["messages"]
    assert bare == [HELLO]


def test_a_later_system_message_stands_where_the_template_shows_it(tmp_path):
    messages = [
        HELLO,
        {"role": "system", "content": "Now."},
        {"role": "assistant", "content": "Yes."},
        HELLO,
    ]
    body = parse_body(ChatBody, chat_of(messages, system="Be brief.").fields)

    def prompt(folder, template):
        write_tokenizer(folder)
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"chat_template": template}))
        tokenizer = Tokenizer.load(folder)
        ids = BodyPrompts(tokenizer, 4096).chat_tokens(body)
        return tokenizer.decode(ids, skip_special_tokens=False)

    said = prompt(tmp_path / "a", TEMPLATE)
    turns = [turn.partition("<|im_end|>")[0] for turn in said.split("<|im_start|>")[1:]]
    first, now = "system\nBe brief.", "system\nNow."
    rest = ["assistant\nYes.", "user\nHello", "assistant\n"]
    assert turns == [first, "user\nHello", now, *rest]
    refusing = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    refusing += "{{ raise_exception('System message must be at the beginning.') }}"
    said = prompt(tmp_path / "b", refusing + "{% endif %}{% endfor %}" + TEMPLATE)
    turns = [turn.partition("<|im_end|>")[0] for turn in said.split("<|im_start|>")[1:]]
    assert turns == [first + "\n\nNow.", "user\nHello", *rest]


def test_a_refusal_names_the_clients_places():
    tools = [{"type": "web_search", "name": "w"}, {"name": "f", "input_schema": {}}]
    chat = chat_of(
        [
            HELLO,
            {"role": "user", "content": [text("a"), text("b")]},
            {"role": "assistant", "content": [use("x")]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "y", "content": "c"}],
            },
        ],
        tools=tools,
    )
    cases = {
        "messages[2].tool_call_id": "messages[3].content[0].tool_use_id",
        "messages[1].tool_calls[0].function.arguments": "messages[2].arguments",
        "messages[0].content": "messages[0]",
        "messages[9].content": "messages[9].content",
        "tools[0].function.parameters": "tools[1].input_schema",
        "stop": "stop_sequences",
    }
    for ours, theirs in cases.items():
        refused = chat.refused(bad_request(f"{ours} is wrong", ours))
        assert (refused.message, refused.param) == (f"{theirs} is wrong", theirs)
    assert chat.form.headers == [(b"tpdet-dropped-tools", b"w")]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (bad_request("x"), "invalid_request_error"),
        (ApiError(405, "x", code="method_not_allowed"), "invalid_request_error"),
        (ApiError(401, "x", code="invalid_api_key"), "authentication_error"),
        (ApiError(403, "x", code="foreign_origin"), "permission_error"),
        (ApiError(404, "x", code="not_found"), "not_found_error"),
        (ApiError(413, "x"), "request_too_large"),
        (from_code("engine_overloaded", "x"), "overloaded_error"),
        (from_code("internal_error", "x"), "api_error"),
    ],
)
def test_errors_have_anthropics_types(error, kind):
    expected = {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": "r"}
    assert error_of(error, "r") == expected


def test_only_paths_below_messages_have_its_errors():
    assert is_of_messages("/v1/messages") and is_of_messages("/v1/messages/batches")
    assert not is_of_messages("/v1/messages2") and not is_of_messages("/v1/models")
