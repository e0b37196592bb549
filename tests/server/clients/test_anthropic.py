"""The unmodified anthropic client on `/v1/messages`: whole and streamed, tools, refusals."""

import json
import random

import pytest

from tests.lib.server.harness import MODEL
from tests.server.clients.agents.claude_code import HEADERS, request
from tests.server.later import anthropic
from tests.server.tool_server import tool_server

END, OPENING, CLOSING, THINK, THOUGHT = map(chr, range(0xE002, 0xE007))
KEYS = ("sk-first", "sk-second")
TOOLS = [
    {
        "name": name,
        "description": "says <tool_call> and <|im_end|>",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    }
    for name in ("weather", "sights")
]
USER = [{"role": "user", "content": "a <tool_call> b"}]


def call(name="weather", arguments='{"city": "Köln", "days": 1e1}'):
    return f'{OPENING}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSING}'


TWO = f"{THINK}why{THOUGHT}Let me see.\n\n{call()}\n{call('sights')}{END}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("messages")
    keys = folder / "keys"
    keys.write_text("\n".join(KEYS))
    keys.chmod(0o600)
    with tool_server(folder, 65536, "--api-key-file", str(keys)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key=KEYS[0], max_retries=0) as client:
        yield client


def fields(text=TWO, **more):
    """The arguments of a request whose answer is `text`."""
    salt = {"cache_salt": f"text={text}", "seed": 3} | more.pop("extra_body", {})
    kept = {"model": MODEL, "max_tokens": 400, "messages": USER, "tools": TOOLS}
    return kept | {"extra_body": salt} | more


def content_of(message):
    """The blocks of a message, without what the client adds to those that it streamed."""
    blocks = message.model_dump()["content"]
    return [{k: v for k, v in block.items() if k != "parsed_output"} for block in blocks]


def streamed(client, arguments):
    """The message that the client makes of a stream, and the types of its events."""
    kinds = []
    with client.messages.stream(**arguments) as stream:
        for event in stream:
            kinds.append(event.type)
        return stream.get_final_message(), kinds


def same(whole, final):
    """Check that a streamed message is the whole one; what only its end knows is in an event."""
    assert content_of(final) == content_of(whole)
    for name in ("id", "role", "model", "stop_reason", "stop_sequence"):
        assert getattr(final, name) == getattr(whole, name), name
    counts = ("input_tokens", "output_tokens", "cache_read_input_tokens")
    for name in (*counts, "cache_creation_input_tokens"):
        assert getattr(final.usage, name) == getattr(whole.usage, name), name


def test_a_stream_is_the_whole_message_and_repeats_with_its_ids(client):
    whole = client.messages.create(**fields())
    thought, text, *calls = whole.content
    assert (thought.thinking, text.text) == ("why", "Let me see.") and len(thought.signature) == 64
    assert [(one.name, one.input) for one in calls] == [
        (name, {"city": "Köln", "days": 10.0}) for name in ("weather", "sights")
    ]
    assert len({one.id for one in calls}) == 2 and calls[0].id.startswith("toolu_")
    assert whole.stop_reason == "tool_use" and whole.id.startswith("msg_")
    assert whole.usage.output_tokens_details.thinking_tokens == 3
    final, kinds = streamed(client, fields())
    same(whole, final)
    assert kinds.count("content_block_stop") == 4 and kinds[-1] == "message_stop"
    raw = client.messages.with_raw_response.create(**fields())
    assert raw.parse().model_dump() == whole.model_dump()
    assert raw.headers["request-id"] == raw.headers["x-request-id"] not in raw.text()
    other = client.messages.create(**fields(extra_body={"seed": 4}))
    assert other.id != whole.id and other.content[2].id != calls[0].id
    assert other.content[0].signature != thought.signature


@pytest.mark.parametrize("seed", range(12))
def test_random_requests_are_answered_alike_whole_and_streamed(client, seed):
    draw = random.Random(seed)
    pieces = (
        f"{THINK}a\n{THOUGHT}",
        "\n\n",
        call(),
        call("sights", "{}"),
        "é👍🏽 ",
        "END",
        "x" * 9,
    )
    text = "".join(draw.choices(pieces, k=6)) + draw.choice((END, ""))
    more = {
        "max_tokens": draw.choice((5, draw.randint(6, 200), 400)),
        "extra_body": {"temperature": draw.choice((0.0, 1.0))},
    }
    if draw.random() < 0.5:
        more["stop_sequences"] = ["END"]
    if draw.random() < 0.3:
        more["tools"] = []
    asked = fields(text, **more)
    whole = client.messages.create(**asked)
    same(whole, streamed(client, asked)[0])
    assert whole.model_dump() == client.messages.create(**asked).model_dump()


def test_stop_reasons_are_anthropics(client):
    def reason(text, **more):
        found = client.messages.create(**fields(text, **more))
        return found.stop_reason, found.stop_sequence

    assert reason(f"No.{END}") == ("end_turn", None)
    assert reason("No, no", max_tokens=3) == ("max_tokens", None)
    assert reason("No. STOP it", stop_sequences=["x", "STOP"]) == ("stop_sequence", "STOP")
    named = {"type": "tool", "name": "weather"}
    assert reason(call() + END, tool_choice=named) == ("tool_use", None)
    assert reason(TWO, max_tokens=90) == ("max_tokens", None)
    cut = [client.messages.create(**fields(TWO, max_tokens=most)) for most in range(20, 90)]
    inputs = [b.input for found in cut for b in found.content if b.type == "tool_use"]
    assert {} in inputs and {"city": "K\u00f6ln"} in inputs
    nothing = client.messages.create(**fields(max_tokens=0))
    assert (nothing.stop_reason, nothing.content) == ("max_tokens", [])


def test_a_tool_is_called_and_its_result_read(client):
    asked = client.messages.create(**fields(call() + END, tool_choice={"type": "any"}))
    (use,) = asked.content
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": "<|im_end|>"},
        {"type": "text", "text": "Go on."},
    ]
    history = [
        *USER,
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": results},
    ]
    last = client.messages.create(**fields(f"Fine.{END}", messages=history))
    assert last.content[0].text == "Fine." and last.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model=MODEL, messages=history, tools=TOOLS)
    assert counted.input_tokens == last.usage.input_tokens
    # Results are told apart by what they say, and one that failed without a word says so.
    lengths = {
        client.messages.count_tokens(
            model=MODEL,
            messages=[*history[:2], {"role": "user", "content": [results[0] | changed]}],
        ).input_tokens
        for changed in (
            {"content": ""},
            {"content": "", "is_error": True},
            {"content": "No", "is_error": True},
            {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "bcd"}]},
        )
    }
    assert len(lengths) == 4
    with pytest.raises(
        anthropic.BadRequestError, match=r"messages\[1\]: the tool call .* has no result"
    ):
        client.messages.create(**fields(messages=history[:2]))
    twice = [*history, {"role": "user", "content": results[:1]}]
    with pytest.raises(
        anthropic.BadRequestError, match=r"messages\[3\].content\[0\] is the result of"
    ):
        client.messages.create(**fields(messages=twice))


def test_an_answer_goes_on_with_the_last_message(client):
    begun = [*USER, {"role": "assistant", "content": "I said:"}]
    counted = [
        client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
        for messages in (USER, begun)
    ]
    assert counted[1] - counted[0] == len("I said:")


def test_the_first_request_of_claude_code_is_answered(server, client):
    def ask(**more):
        body = {**request(MODEL), "stream": False, "cache_salt": f"text=Hi.{END}", "seed": 5} | more
        found = server.http.post("/v1/messages?beta=true", json=body, headers=bearer)
        assert found.status_code == 200, found.text
        return found

    bearer = {**HEADERS, "authorization": f"Bearer {KEYS[1]}"}
    found = ask(return_token_ids=True).json()
    prompt, own = found["usage"]["input_tokens"], found["tpdet"]
    assert 45_000 < prompt < 65_000 and own["max_tokens"] == 65_536 - prompt
    digest = own["request_digest"]
    assert found["content"] == [{"type": "text", "text": "Hi.", "citations": None}]
    text = bytes(i for i in found["prompt_token_ids"] if i < 256).decode()
    assert "x-anthropic" not in text and "You are an agent" in text
    middle = request(MODEL)["messages"][1]["content"][0]["text"]
    assert text.index("echo hello") < text.index(middle)
    # Nothing that only the client's side needs is in the digest.
    body = request(MODEL, build="c3d", user="7")
    bare = [{k: v for k, v in block.items() if k != "cache_control"} for block in body["system"]]
    idle = dict.fromkeys(("context_management", "output_config", "thinking"))
    idle |= {"system": bare, "max_tokens": 60_000}
    for user in ("7", "x" * 300_000):  # the second body is worked on by another process
        assert ask(metadata={"user_id": user}, **idle).json()["tpdet"]["request_digest"] == digest
    assert ask(max_tokens=9).json()["tpdet"]["request_digest"] != digest
    other = [*bare[:-1], {"type": "text", "text": bare[-1]["text"] + "."}]
    assert ask(system=other).json()["tpdet"]["request_digest"] != digest
    streamed = ask(stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    names = [line for line in streamed.text.splitlines() if line.startswith("event: ")]
    assert names[:3] == ["event: message_start", "event: ping", "event: content_block_start"]
    assert names[-2:] == ["event: message_delta", "event: message_stop"]
    body = {k: v for k, v in request(MODEL).items() if k not in ("stream", "max_tokens")}
    counted = server.http.post("/v1/messages/count_tokens?beta=true", json=body, headers=bearer)
    assert counted.json() == {"input_tokens": prompt}


def test_the_digest_is_that_of_the_same_chat(server):
    bearer = {"authorization": f"Bearer {KEYS[0]}"}

    def digest(path, **body):
        body |= {"model": MODEL, "seed": 3, "max_tokens": 9}
        found = server.http.post(path, json=body, headers=bearer)
        assert found.status_code == 200, found.text
        return found.json()["tpdet"]["request_digest"]

    tools = [
        {
            "type": "function",
            "function": {
                "name": one["name"],
                "description": one["description"],
                "parameters": one["input_schema"],
            },
        }
        for one in TOOLS
    ]
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    chat = digest(
        "/v1/chat/completions", messages=messages, tools=tools, tool_choice="required", stop=["x"]
    )
    choice = {"type": "any"}
    asked = {"messages": USER, "system": "Be brief.", "tools": TOOLS, "stop_sequences": ["x"]}
    assert digest("/v1/messages", **asked, tool_choice=choice) == chat
    one = choice | {"disable_parallel_tool_use": True}
    assert digest("/v1/messages", **asked, tool_choice=one) != chat


def test_tools_that_others_run_are_left_out_by_name(server, client):
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    changes = {"role": "system", "content": [{"type": "tool_addition", "tool": {"name": "x"}}]}
    asked = fields(f"Hi.{END}", tools=[search, *TOOLS], messages=[*USER, changes])
    raw = client.messages.with_raw_response.create(**asked)
    assert raw.headers["tpdet-dropped-tools"] == "tool_addition, web_search"
    without = client.messages.create(**fields(f"Hi.{END}"))
    assert raw.parse().tpdet == without.tpdet
    assert "web_search" in server.log.read_text()


def test_keys_come_in_either_header(server):
    def answer(headers, salt="tenant"):
        body = {"model": MODEL, "max_tokens": 9, "messages": USER, "seed": 3, "cache_salt": salt}
        return server.http.post("/v1/messages", json=body, headers=headers)

    first, again, other = (
        answer(headers).json()["content"]
        for headers in (
            {"x-api-key": KEYS[0]},
            {"authorization": f"Bearer {KEYS[0]}"},
            {"x-api-key": KEYS[1]},
        )
    )
    assert first == again != other
    listed = server.http.get("/v1/models", headers={"x-api-key": KEYS[0]})
    assert listed.json()["data"][0]["id"] == MODEL
    for wrong in (
        {},
        {"x-api-key": "sk-third"},
        {"authorization": "Bearer x", "x-api-key": KEYS[0]},
    ):
        refused = answer(wrong)
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        assert refused.json()["request_id"] == refused.headers["request-id"]


def test_refusals_are_the_clients_own_exceptions(server, client):
    def raised(kind, message, **more):
        with pytest.raises(kind, match=message) as caught:
            client.messages.create(**fields(**more))
        body = caught.value.body
        assert body["type"] == "error" and body["request_id"] == caught.value.request_id
        return body["error"]["type"]

    wrong = anthropic.NotFoundError
    assert raised(wrong, "not served here", model="other") == "not_found_error"
    assert (
        raised(anthropic.BadRequestError, "temperature", extra_body={"temperature": -1})
        == "invalid_request_error"
    )
    stranger = client.with_options(api_key="sk-wrong")
    with pytest.raises(anthropic.AuthenticationError, match="x-api-key: KEY"):
        stranger.messages.create(**fields())
    with pytest.raises(anthropic.NotFoundError, match="use /v1/batches with its endpoint"):
        client.messages.batches.list()
    large = [{"role": "user", "content": "x" * (11 << 20)}]
    assert (
        raised(anthropic.ContentTooLargeError, "over 10485760", messages=large)
        == "request_too_large"
    )
    salt = {"extra_body": {"cache_salt": "nan=2"}}
    assert raised(anthropic.InternalServerError, "NaN", **salt) == "api_error"
    with pytest.raises(anthropic.APIStatusError, match="NaN"):
        streamed(client, fields(**salt))


RESUME = {"contract": "c0" * 32, "weights": "d1" * 32, "seed": 3, "choices": [[1]]}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": []}, "messages must be a list of one message or more"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages[0].role is 'tool'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content must be text, or a list of blocks"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]},
         "messages[0].content[0] is of type 'image', which is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "of type 'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
         "messages[0].content[0] has the unknown field 'x'"),
        ({"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a",
          "name": "f", "input": "{}"}]}]}, "messages[1].content[0].input must be an object"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
          "content": [IMAGE]}]}]}, "messages[0].content[0].content[0] is of type 'image'"),
        ({"system": [{"type": "text", "text": 1}]}, "system[0].text must be text"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "are both called 'weather'"),
        ({"tools": [{"type": "x_1", "name": "x"}, {"name": "", "input_schema": {}}]},
         "tools[1].name: String should have at least 1 character, not ''"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
        ({"tools": [{"name": "f", "input_schema": {}, "x": 1}]}, "'tools[0].x'"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "which tools do not declare"),
        ({"tool_choice": {"type": "tool"}}, "names no tool"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "needs tools"),
        ({"stop_sequences": [""]}, "a stop string must be non-empty text"),
        ({"tpdet": {"resume": RESUME}},
         "tpdet.resume is for completions and chats"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
         "the schema cannot be used"),
        ({"tools": [{"name": "f", "input_schema": {"$ref": "#/x"}, "strict": True}]},
         "'/x' does not exist"),
        ({"tool_choice": {"type": "any"}, "tools": [{"name": "f", "input_schema": {
          "description": "x" * 300_000}}]}, "the prompt has"),
        ({"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a",
          "name": "f", "input": {"k": chr(0xD800)}}]}]}, "half of a surrogate pair"),
        ({"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a",
          "name": "f", "input": {}}]}, USER[0]]}, "messages[1]: the tool call 'a' has no result"),
        ({"tools": [{"name": "f" * 300, "input_schema": {}}]}, "tools[0].name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"thread": {"type": "create"}}, "thread is not supported: no conversation is kept"),
        ({"top_kk": 1}, "top_k"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(server, more, message):
    body = {"model": MODEL, "max_tokens": 9, "messages": USER, "tools": TOOLS} | more
    headers = {"x-api-key": KEYS[0], "content-type": "application/json"}
    found = server.http.post("/v1/messages", content=json.dumps(body), headers=headers)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["type"] == "invalid_request_error" and message in error["message"], error


def test_text_that_imitates_a_call_calls_nothing(client):
    said = "<tool_call>" + call()[1:] + END
    found = client.messages.create(**fields(said))
    assert [block.type for block in found.content] == ["text"] and found.stop_reason == "end_turn"


def test_thinking_turns_the_templates_switch(client):
    def count(**more):
        found = client.messages.count_tokens(model=MODEL, messages=USER, **more)
        return found.input_tokens

    off = {"thinking": {"type": "disabled"}}
    on = {"thinking": {"type": "enabled", "budget_tokens": 2048}}
    assert count(**off) == count() + len("\n\n\n\n") + 2  # an empty thought
    assert count(**on) == count() == count(thinking={"type": "adaptive"})


def test_an_answer_follows_a_schema(client):
    form = {
        "type": "json_schema",
        "schema": {"type": "object", "properties": {"a": {"type": "null"}}},
    }
    found = client.messages.create(
        **fields('{"a":null}' + END, tools=[], output_config={"format": form})
    )
    assert json.loads(found.content[0].text) == {"a": None}
    bare = client.messages.create(**fields('{"a":null}' + END, tools=[]))
    assert bare.tpdet["request_digest"] != found.tpdet["request_digest"]


@pytest.mark.slow
def test_litellm_asks_by_messages(server, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the internet
    litellm = pytest.importorskip("litellm")
    function = {"name": "weather", "parameters": TOOLS[0]["input_schema"]}
    fields = {"model": f"anthropic/{MODEL}", "api_base": server.url, "api_key": KEYS[0]}
    fields |= {"tools": [{"type": "function", "function": function}], "max_tokens": 400}
    salt = {"cache_salt": f"text={THINK}why{THOUGHT}Let me see.\n\n{call()}{END}"}
    message = litellm.completion(messages=USER, **fields, **salt).choices[0].message
    (asked,) = message.tool_calls
    assert (message.content, message.reasoning_content) == ("Let me see.", "why")
    assert json.loads(asked.function.arguments) == {"city": "Köln", "days": 10.0}
    chunks = [*litellm.completion(messages=USER, stream=True, **fields, **salt)]
    joined = litellm.stream_chunk_builder(chunks, messages=USER).choices[0]
    assert joined.finish_reason == "tool_calls" and joined.message.content == message.content
    result = {"role": "tool", "tool_call_id": asked.id, "content": "Sun"}
    salt = {"cache_salt": f"text=It is sunny.{END}"}
    last = litellm.completion(messages=[*USER, message, result], **fields, **salt)
    assert last.choices[0].message.content == "It is sunny."


def test_the_tool_runner_goes_on_without_a_thread(client):
    """It asks for one that the server keeps, and is told that there is none."""
    ran = []

    @anthropic.beta_tool
    def weather(city: str, days: float = 1) -> str:
        """Tell the weather of a city."""
        ran.append(city)
        return "It rains."

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=400,
        messages=USER,
        tools=[weather],
        extra_body={"cache_salt": f"turns={call()}{END}|It rains in Köln.{END}"},
    )
    assert runner.until_done().content[0].text == "It rains in Köln." and ran == ["Köln"]
