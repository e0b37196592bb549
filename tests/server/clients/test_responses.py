"""`/v1/responses`: chats by other names, whole and streamed, for unmodified clients."""

import json
import random
from itertools import pairwise

import openai
import pydantic
import pytest

from tests.lib.server.harness import MODEL, refused
from tests.lib.some_slow import some_slow
from tests.server.clients.agents.codex_request import SHELL, TOOLS, first_turn, next_turn, said
from tests.server.tool_server import tool_server

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
END, OPENING, CLOSING, THINK, THOUGHT = map(chr, range(0xE002, 0xE007))
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "A patch as text."}
DIALECT = {**CUSTOM, "name": "patch", "format": {"type": "grammar", "syntax": "lark"}}


def call(name="shell", arguments='{"command": "ls"}'):
    return f'{OPENING}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSING}'


SPOKEN = f"{THINK}why not{THOUGHT}I look.\n\n{call()}{END}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with tool_server(tmp_path_factory.mktemp("responses"), 65536) as found:
        yield found


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(server, says=f"Fine.{END}", **fields):
    body = {"model": MODEL, "input": "Hi", "seed": 3, "max_output_tokens": 400}
    return server.http.post(PATH, json=body | {"cache_salt": f"text={says}"} | fields)


def response_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(answer):
    assert answer.status_code == 200, answer.text
    *events, last, rest = answer.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    parsed = []
    for event in events:
        name, data = event.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    return parsed


def assembled(events):
    """The output that the deltas of a stream make; what is done says the same as they did."""
    numbers = [event["sequence_number"] for event in events]
    assert numbers == [*range(len(events))]
    names = [event["type"] for event in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    items, texts = [], {}
    for event in events[2:-1]:
        kind, index = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert index == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
        elif kind == "content_part.added":
            assert not items[index]["content"]
            items[index]["content"].append(event["part"])
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[index]["id"]
            texts[index] = texts.get(index, "") + event["delta"]
        elif kind == "content_part.done":
            items[index]["content"][0]["text"] = texts.get(index, "")
            assert event["part"] == items[index]["content"][0]
        elif kind == "output_item.done":
            whole = event["item"]
            for name in ("status", "encrypted_content"):
                if name in whole:
                    items[index][name] = whole[name]
            for name in ("arguments", "input"):
                if name in whole:
                    items[index][name] = texts[index]
            assert items[index] == whole
        else:
            assert kind.endswith(".done")
            said = {event[n] for n in ("text", "arguments", "input") if n in event}
            assert said == {texts.get(index, "")}
    last = events[-1]["response"]
    assert last["output"] == items
    assert events[-1]["type"] == f"response.{last['status']}"
    return last


def without_times(response):
    return response | {"created_at": 0, "completed_at": 0}


TEXTS = (
    SPOKEN,
    f"Fine.{END}",
    END,
    f"{THINK}only thought",
    f"{call()}{call('agents__spawn', '{}')}{END}",
    f"a {call('apply_patch', json.dumps({'input': 'é “x”'}))} b{call()}c{END}",
    f"{THINK}a{THOUGHT}b{call('nobody')}{END}",
)


@pytest.mark.parametrize("text", some_slow(TEXTS[:1] + TEXTS[5:6], TEXTS))
def test_a_stream_makes_the_whole_answer_and_both_repeat(server, text):
    fields = {"tools": [*TOOLS, CUSTOM], "max_output_tokens": 300}
    fields["include"] = ["reasoning.encrypted_content"]
    whole = response_of(ask(server, text, **fields))
    assert whole["status"] == ("completed" if END in text else "incomplete")
    assert (whole["incomplete_details"] is None) == (END in text)
    streamed = assembled(events_of(ask(server, text, stream=True, **fields)))
    again = response_of(ask(server, text, **fields))
    assert without_times(streamed) == without_times(whole) == without_times(again)
    identities = [item["id"] for item in whole["output"]] + [whole["id"]]
    assert len({*identities}) == len(identities)
    other = response_of(ask(server, text, **fields, seed=4))
    assert not {*identities} & {other["id"], *(item["id"] for item in other["output"])}


@pytest.mark.parametrize("seeds", some_slow([range(4)], [range(4), range(4, 60)]), ids=str)
def test_random_requests_are_the_same_whole_and_streamed(server, seeds):
    random_source = random.Random(5 + seeds.start)
    marks = (THINK, THOUGHT, OPENING, CLOSING, call(), call("agents__wait", '{"agent": "x"}'))
    for seed in seeds:
        words = [random_source.choice((*marks, "word ", "é\n", "<tool_call>")) for _ in range(5)]
        text = "".join(words) + random_source.choice((END, ""))
        fields = {
            "seed": seed,
            "temperature": random_source.choice((0.0, 0.7)),
            "tools": random_source.choice((TOOLS, [], [CUSTOM])),
            "parallel_tool_calls": random_source.choice((True, None)),
            "max_output_tokens": random_source.choice((random_source.randint(9, 90), 250)),
        }
        whole = response_of(ask(server, text, **fields))
        streamed = assembled(events_of(ask(server, text, stream=True, **fields)))
        assert without_times(streamed) == without_times(whole)


def test_items_are_what_the_model_said_in_its_order(server):
    answer = ask(server, SPOKEN, tools=TOOLS)
    found = response_of(answer)
    thought, message, called = found["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "why not"}]
    assert message["content"][0]["text"] == "I look." and message["role"] == "assistant"
    assert (called["name"], called["arguments"]) == ("shell", '{"command": "ls"}')
    assert answer.headers["tpdet-dropped-tools"] == "web_search"
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] == 7
    assert found["usage"]["total_tokens"] == sum(
        found["usage"][f"{kind}_tokens"] for kind in ("input", "output")
    )
    names = f"{call('agents__spawn', '{}')}{call('apply_patch', json.dumps({'input': 'p'}))}{END}"
    answer = ask(server, names, tools=[*TOOLS, CUSTOM, DIALECT])
    spawned, patched = response_of(answer)["output"]
    assert (spawned["namespace"], spawned["name"]) == ("agents", "spawn")
    assert (patched["type"], patched["input"]) == ("custom_tool_call", "p")
    assert answer.headers["tpdet-dropped-tools"] == "web_search, custom-grammar"


@pytest.mark.parametrize("apart", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_call_in_which_the_limit_cut_is_an_incomplete_item(server, apart):
    """Limits `apart` tokens; `text/parsing/test_cut_calls` has every cut of a text."""
    patch = f"{call('apply_patch', json.dumps({'input': 'a patch'}))}{END}"
    texts = {"custom_tool_call": (patch, "input", "a patch")}
    texts["function_call"] = (f"{call()}{END}", "arguments", '{"command": "ls"}')
    for kind, (text, field, whole) in texts.items():
        found = set()
        for most in range(20, 76, apart):
            fields = {"max_output_tokens": most, "tools": [*TOOLS, CUSTOM]}
            answer = response_of(ask(server, text, **fields))
            streamed = assembled(events_of(ask(server, text, stream=True, **fields)))
            assert without_times(streamed) == without_times(answer)
            for item in answer["output"]:
                if item["type"] == kind:
                    found.add((item["status"], item[field]))
                    assert item["status"] == "incomplete" or item[field] == whole
        assert {status for status, _ in found} == {"incomplete", "completed"}, found
        assert ("completed", whole) in found
        assert all(whole.startswith(said) for _, said in found)


def test_it_is_the_chat_that_its_fields_name(server):
    """The digests are those of a chat: no other path makes the answer."""
    functions = [
        {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}}
        for tool in (SHELL, {**TOOLS[2]["tools"][0], "name": "agents__spawn"})
    ]
    chosen = {"type": "function", "function": {"name": "agents__spawn"}}
    shared = {"seed": 9, "temperature": 0.5, "cache_salt": f"text={call()}{END}"}
    body = {
        "model": MODEL,
        "instructions": "Be brief.",
        "input": [
            said("user", "Hi"),
            {"type": "reasoning", "summary": [], "content": [], "encrypted_content": "other"},
            {"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "a.txt"},
            said("assistant", "Yes."),
            said("user", "And", "now?"),
        ],
        "tools": [SHELL, {**TOOLS[2], "tools": TOOLS[2]["tools"][:1]}],
        "tool_choice": {"type": "function", "name": "spawn", "namespace": "agents"},
        "max_output_tokens": 40,
    }
    called = {"id": "c", "type": "function", "function": {"name": "shell", "arguments": "{}"}}
    chat = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "c", "content": "a.txt"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("And", "now?")]},
        ],
        "tools": functions,
        "tool_choice": chosen,
        "max_tokens": 40,
    }
    ours = server.http.post(PATH, json=body | shared).json()
    theirs = server.http.post(CHAT, json=chat | shared).json()
    assert ours["tpdet"] == theirs["tpdet"]
    (item,), message = ours["output"], theirs["choices"][0]["message"]
    text = item["content"][0]["text"] if item["type"] == "message" else None
    assert text == message["content"]
    for field, value in (("input", "Ho"), ("seed", 8), ("tool_choice", "required")):
        other = server.http.post(PATH, json=body | shared | {field: value}).json()
        assert other["tpdet"]["request_digest"] != ours["tpdet"]["request_digest"]
    for field in ("metadata", "client_metadata"):
        other = server.http.post(PATH, json=body | shared | {field: {"a": "b"}}).json()
        assert other["tpdet"] == ours["tpdet"] and other["id"] == ours["id"]


def test_what_the_model_lacks_is_done_without(server):
    beyond = response_of(ask(server, "a" * 9 + END, max_output_tokens=1 << 20))
    room = 65536 - beyond["usage"]["input_tokens"]
    assert beyond["max_output_tokens"] == room
    same = response_of(ask(server, "a" * 9 + END, max_output_tokens=room))
    assert same["tpdet"] == beyond["tpdet"]
    asked = {"reasoning": {"effort": "high"}, "text": {"format": {"type": "text"}}}
    effort = response_of(ask(server, **asked))
    assert effort["tpdet"] == response_of(ask(server))["tpdet"]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "seed": 3}
    chat |= {"max_tokens": 1 << 20, "reasoning_effort": "high"}
    refused(server.http.post(CHAT, json=chat), 400, "reasoning_effort")
    fitted = chat | {"tpdet": {"fitted": True}, "cache_salt": f"text={'a' * 9}{END}"}
    assert server.http.post(CHAT, json=fitted).json()["tpdet"] == beyond["tpdet"]


def test_codex_asks_and_goes_on(server):
    body = first_turn() | {"seed": 1}
    spoken = body | {"cache_salt": f"text={SPOKEN}"}
    answer = server.http.post(PATH, json=spoken)
    found = assembled(events_of(answer))
    assert answer.headers["tpdet-dropped-tools"] == "web_search"
    assert found["usage"]["input_tokens"] > 40_000
    assert [item["type"] for item in found["output"]] == ["reasoning", "message", "function_call"]
    following = next_turn(body, found["output"], "hello\n") | {"cache_salt": f"text=Done.{END}"}
    last = assembled(events_of(server.http.post(PATH, json=following)))
    assert last["output"][0]["content"][0]["text"] == "Done."
    # Reasoning that comes back sealed is that of the text itself.
    written = json.loads(json.dumps(following))
    (thought,) = [item for item in written["input"] if item["type"] == "reasoning"]
    del thought["encrypted_content"]
    bare = assembled(events_of(server.http.post(PATH, json=written)))
    assert bare["usage"]["input_tokens"] < last["usage"]["input_tokens"]
    thought["content"] = [{"type": "reasoning_text", "text": "why not"}]
    text = assembled(events_of(server.http.post(PATH, json=written)))
    assert text["tpdet"] == last["tpdet"]


class Weather(pydantic.BaseModel):
    city: str
    days: int


def test_the_openai_client_works_unmodified(server, client):
    fields = {"model": MODEL, "input": "Hi", "extra_body": {"cache_salt": f"text={SPOKEN}"}}
    fields |= {"tools": [SHELL], "max_output_tokens": 300}
    whole = client.responses.create(**fields)
    kinds = ["reasoning", "message", "function_call"]
    assert [item.type for item in whole.output] == kinds and whole.output_text == "I look."
    with client.responses.create(**fields, stream=True) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(pieces) == "I look."
    with client.responses.stream(**fields) as stream:
        names = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.function_call_arguments.done" in names
    assert [item.type for item in final.output] == kinds
    assert final.output[2].arguments == '{"command": "ls"}'
    # The next turn has the items of this one, as they are.
    called = whole.output[2]
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "a.txt"}
    fields["input"] = [{"role": "user", "content": "Hi"}, *whole.output, result]
    fields["extra_body"] = {"cache_salt": f"text=There.{END}"}
    assert client.responses.create(**fields).output_text == "There."
    fields["extra_body"] = {"cache_salt": 'text={"city": "Ulm", "days": 2}' + END}
    parsed = client.responses.parse(**fields | {"tools": []}, text_format=Weather)
    assert parsed.output_parsed == Weather(city="Ulm", days=2)
    assert parsed.text.format.type == "json_schema"


@pytest.mark.slow
def test_openai_agents_call_a_tool_and_go_on(server):
    agents = pytest.importorskip("agents")
    places = []

    @agents.function_tool
    def shell(command: str) -> str:
        """Runs a command."""
        places.append(command)
        return "a.txt"

    client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    model = agents.OpenAIResponsesModel(MODEL, client)
    agents.set_tracing_disabled(True)

    def agent(text, **settings):
        salt = {"cache_salt": f"text={text}"}
        return agents.Agent(
            name="clerk",
            instructions="Be brief.",
            model=model,
            tools=[shell],
            model_settings=agents.ModelSettings(max_tokens=300, extra_body=salt, **settings),
            tool_use_behavior="stop_on_first_tool",
        )

    caller = agent(SPOKEN, tool_choice="required")
    called = agents.Runner.run_sync(caller, "What is here?")
    assert places == ["ls"] and called.final_output == "a.txt"
    ended = agents.Runner.run_sync(agent(f"One file.{END}"), called.to_input_list())
    assert ended.final_output == "One file."


TURNS = {"cache_salt": f"turns={SPOKEN}|Done.{END}"}


@pytest.mark.slow
def test_langchain_calls_a_tool_and_goes_on(server):
    chat_models = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage

    address = {"base_url": server.url + "/v1", "api_key": "none", "max_retries": 0}
    settings = {"model": MODEL, "max_tokens": 300, "extra_body": TURNS, "use_responses_api": True}
    model = chat_models.ChatOpenAI(**settings, **address).bind_tools([shell])
    messages = [HumanMessage("What is here?")]
    answer = model.invoke(messages)
    (called,) = answer.tool_calls
    assert called["args"] == {"command": "ls"} and answer.text == "I look."
    messages += [answer, ToolMessage("a.txt", tool_call_id=called["id"])]
    assert model.invoke(messages).text == "Done."
    assert "".join(chunk.text for chunk in model.stream(messages)) == "Done."


@pytest.mark.slow
def test_pydantic_ai_calls_a_tool_and_goes_on(server):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(openai_client=client))
    # Its streams end at the first text, so the turn that calls has none.
    salt = {"cache_salt": f"turns={THINK}why{THOUGHT}{call()}{END}|Done.{END}"}
    settings = {"max_tokens": 300, "extra_body": salt}
    agent = pydantic_ai.Agent(model, tools=[shell], model_settings=settings)
    assert agent.run_sync("What is here?").output == "Done."
    assert agent.run_stream_sync("What is here?").get_output() == "Done."


def shell(command: str) -> str:
    """Runs a command."""
    assert command == "ls"
    return "a.txt"


USER = [{"role": "user", "content": "Hi"}]
CALLED = {"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "x"}
IMAGE = {"type": "input_image", "image_url": "data:"}
SAID = {"type": "message", "role": "user"}
UNUSABLE = {"type": "json_schema", "name": "x", "schema": {"$ref": "#/nobody"}}
BAD = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
    ({"conversation": "conv_1"}, "conversation", "send the whole conversation"),
    ({"background": True}, "background", "leave it out"),
    ({"prompt": {"id": "p"}}, "prompt", "no stored prompts"),
    ({"include": ["message.output_text.logprobs"]}, "include", "logprobs"),
    ({"text": {"format": {"type": "regex"}}}, "text.format", "text.format.type 'regex'"),
    ({"text": {"format": UNUSABLE}, "tools": []}, "text.format", "the schema cannot be used"),
    ({"max_output_tokens": -1}, "max_output_tokens", "max_output_tokens"),
    ({"temperature": 3}, "temperature", "temperature"),
    ({"n": 2}, "n", "it is a field of /v1/completions"),
    ({"tpdet": {"resume": {}}}, "tpdet", "tpdet.resume"),
    ({"input": []}, "input", "a list of one item or more"),
    ({"input": 3}, "input", "input must be text"),
    ({"input": "x" * (1 << 17)}, "input", "over the model's context of 65536"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "send the item itself"),
    ({"input": [{"type": "web_search_call"}]}, "input[0]", "'web_search_call' is not supported"),
    ({"input": [*USER, {"role": "tool", "content": ""}]}, "input[1].role", "'tool'"),
    ({"input": [{**SAID, "content": [IMAGE]}]}, "input[0].content[0]", "'input_image'"),
    ({"input": [{**SAID, "content": "a", "x": 1}]}, "input[0]", "unknown field 'x'"),
    ({"input": [*USER, RESULT]}, "input[1].tool_call_id", "input[1] is the result of call 'c'"),
    ({"input": [*USER, CALLED]}, "input[1].tool_calls", "input[1]: the tool call 'c' has no"),
    ({"input": [*USER, CALLED, *USER]}, "input[1].tool_calls", "has no result"),
    (
        {"input": [*USER, {"role": "assistant", "content": "a"}, {**CALLED, "arguments": "{"}]},
        "input[2].arguments",
        "input[2].arguments are not JSON",
    ),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "input has no text"),
    ({"input": [*USER, {**CALLED, "call_id": 3}]}, "input[1].call_id", "must be text"),
    ({"input": [*USER, {**CALLED, "namespace": {}}]}, "input[1].namespace", "must be text"),
    ({"input": [{"role": ["user"], "content": "a"}]}, "input[0].role", "['user']"),
    ({"tools": [SHELL, SHELL]}, "tools", "both called 'shell'"),
    ({"tools": [{**SHELL, "name": ""}]}, "tools", "tools[0].name is ''"),
    ({"tools": [{**TOOLS[2], "tools": [{"type": "function"}]}]}, "tools", "tools[0].tools[0].name"),
    ({"tools": [{**SHELL, "x": 1}]}, "tools", "unknown field 'x'"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools", "a list of tools"),
    ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice", "'nobody'"),
    ({"tool_choice": {"type": "function", "name": []}}, "tool_choice", "the tool []"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search'"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice", ""),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=str)
def test_bad_requests_are_refused_by_name(server, fields, param, message):
    error = refused(ask(server, **{"tools": TOOLS} | fields), 400)
    assert message in error["message"], error
    assert param is None or error["param"] == param


def test_an_error_behind_the_first_byte_ends_the_response(server, client):
    answer = ask(server, cache_salt="nan=3", stream=True)
    *events, rest = answer.text.split("\n\n")
    assert rest == "" and "[DONE]" not in answer.text
    *_, error, last = [json.loads(event.partition("data: ")[2]) for event in events]
    assert (error["type"], error["code"], last["type"]) == (
        "error",
        "numerical_error",
        "response.failed",
    )
    assert last["response"]["status"] == "failed" and last["response"]["usage"] is None
    assert last["response"]["error"]["message"] == error["message"]
    (item,) = last["response"]["output"]
    assert item["status"] == "incomplete" and len(item["content"][0]["text"]) == 3
    fields = {"model": MODEL, "input": "Hi", "extra_body": {"cache_salt": "nan=3"}}
    with (
        pytest.raises(openai.APIError, match="NaN"),
        client.responses.create(**fields, stream=True) as stream,
    ):
        list(stream)
    with pytest.raises(openai.InternalServerError):
        client.responses.create(**fields)


def test_a_body_that_another_process_works_on_is_answered_alike(server):
    small = ask(server, SPOKEN, tools=[*TOOLS, CUSTOM])
    large = ask(server, SPOKEN, tools=[*TOOLS, CUSTOM], client_metadata={"x": "a" * 300_000})
    assert without_times(response_of(large)) == without_times(response_of(small))
    assert large.headers["tpdet-dropped-tools"] == "web_search"
    assert f"request {large.headers['x-request-id']}: left out web_search" in server.log.read_text()


def test_nothing_is_stored(server):
    for method in ("GET", "DELETE"):
        error = refused(server.http.request(method, f"{PATH}/resp_1"), 404)
        assert "POST /v1/responses with the whole conversation" in error["message"]
    assert response_of(ask(server, store=True))["store"] is False
    gone = server.http.post(
        PATH, json={"input": "a", "stream": True}, headers={"last-event-id": "x"}
    )
    refused(gone, 400)


def test_surrogates_and_marks_in_a_history_are_text(server):
    lone = server.http.post(
        PATH, content=rb'{"input": "\ud800"}', headers={"content-type": "application/json"}
    )
    refused(lone, 400)
    plain = "<|im_end|> <|im_start|>"
    before = response_of(ask(server, input="x" * len(plain)))["usage"]["input_tokens"]
    assert response_of(ask(server, input=plain))["usage"]["input_tokens"] == before


def test_tool_choices_are_those_of_chats(server):
    """Each form has a grammar or none, and a digest of its own."""
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "shell"}],
    }
    forms = ("auto", "none", "required", {"type": "function", "name": "shell"}, allowed)
    digests = [
        response_of(ask(server, tools=TOOLS, tool_choice=form))["tpdet"]["request_digest"]
        for form in forms
    ]
    assert all(one != other for one, other in pairwise(sorted(digests)))
    inner = {"type": "function", "name": "spawn"}  # alone of its name, so its namespace is known
    named = ask(server, tools=TOOLS, tool_choice=inner)
    assert response_of(named)["tool_choice"] == inner


def test_an_answer_of_several_weights_names_none(server):
    """The end of a stream tells of the whole answer, in either form."""
    message = {"messages": USER, "max_tokens": 5}
    for path, fields in (
        (PATH, {"input": "Hi", "max_output_tokens": 5}),
        ("/v1/messages", message),
    ):
        body = {"model": MODEL, "cache_salt": "update=2", "seed": 3} | fields
        whole = server.http.post(path, json=body).json()
        assert whole["tpdet"]["mixed_weights"]
        lines = server.http.post(path, json=body | {"stream": True}).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        for answer in (whole, events[-1].get("response") or events[-2]):
            assert {**answer, **answer["tpdet"]}["system_fingerprint"] is None
            assert answer["tpdet"]["mixed_weights"]
