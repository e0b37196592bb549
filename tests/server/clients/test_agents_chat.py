"""Clients of agents, unmodified, by chat completions: a call of a tool each, and what follows it.

An engine of fixed tokens calls while the last message is a user's, and speaks behind a result.
LangChain, pydantic-ai, LiteLLM and openai-agents are those of `pip install .[agents]`. The last
three import for 22 s; what they ask is among the recorded requests of `test_recorded_agents.py`.
"""

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel

from tests.lib.server.harness import MODEL
from tests.server.parrot import called
from tests.server.tool_server import tool_server

END, OPENING, CLOSING = map(chr, (0xE002, 0xE003, 0xE004))
CALL = called("weather", city="Köln")
FINE = "It is 18 degrees."
SALT = {"cache_salt": f"turns={CALL}{END}|{FINE}{END}".replace("<tool_call>", OPENING)
        .replace("</tool_call>", CLOSING)}  # fmt: skip
ASKED = "What is the weather in Köln?"


class weather(BaseModel):
    """Tell the weather of a city."""

    city: str


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with tool_server(tmp_path_factory.mktemp("agents"), 4096, parser="hermes") as found:
        yield found


@pytest.fixture
def address(server):
    return {"base_url": server.url + "/v1", "api_key": "none", "max_retries": 0}


def result_of(arguments):
    assert json.loads(arguments) == {"city": "Köln"}
    return "18"


def test_openai_whole_streamed_and_parsed(address):
    tool = openai.pydantic_function_tool(weather)
    assert tool["function"]["strict"]
    fields = {"model": MODEL, "tools": [tool], "seed": 1, "max_tokens": 100, "extra_body": SALT}
    messages = [{"role": "user", "content": ASKED}]
    with openai.OpenAI(**address) as client:
        chats = client.chat.completions
        whole = chats.create(messages=messages, **fields).choices[0]
        parsed = chats.parse(messages=messages, **fields).choices[0]
        with chats.stream(messages=messages, **fields) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.done" in kinds
        for choice in (whole, parsed, streamed):
            assert choice.finish_reason == "tool_calls"
            (call,) = choice.message.tool_calls
            assert call.id == whole.message.tool_calls[0].id
            result = result_of(call.function.arguments)
        for choice in (parsed, streamed):
            assert choice.message.tool_calls[0].function.parsed_arguments == weather(city="Köln")
        # As it came, nulls and all.
        messages += [parsed.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        last = chats.create(messages=messages, **fields).choices[0]
        assert (last.message.content, last.finish_reason) == (FINE, "stop")


def test_langchain(address):
    chat_models = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage

    model = chat_models.ChatOpenAI(model=MODEL, seed=1, max_tokens=100, extra_body=SALT, **address)
    bound = model.bind_tools([weather], strict=True)
    messages = [HumanMessage(ASKED)]
    answer = bound.invoke(messages)
    (call,) = answer.tool_calls
    assert call["args"] == {"city": "Köln"}
    streamed = None
    for chunk in bound.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls == answer.tool_calls
    messages += [answer, ToolMessage("18", tool_call_id=call["id"])]
    assert bound.invoke(messages).content == FINE


@pytest.mark.slow
def test_pydantic_ai(address):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    asked = []

    def weather(city: str) -> str:
        """Tell the weather of a city."""
        asked.append(city)
        return "18"

    async def answers():
        async with openai.AsyncOpenAI(**address) as client:
            model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
            settings = {"seed": 1, "max_tokens": 100, "extra_body": SALT}
            agent = pydantic_ai.Agent(model, tools=[weather], model_settings=settings)
            whole = await agent.run(ASKED)
            async with agent.run_stream(ASKED) as run:
                return whole.output, await run.get_output()

    assert asyncio.run(answers()) == (FINE, FINE) and asked == ["Köln"] * 2


@pytest.mark.slow
def test_litellm(server, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the internet
    litellm = pytest.importorskip("litellm")
    fields = {"model": f"openai/{MODEL}", "api_base": server.url + "/v1", "api_key": "none"}
    fields |= {"tools": [openai.pydantic_function_tool(weather)], "seed": 1, "max_tokens": 100}
    fields |= {"extra_body": SALT, "num_retries": 0}
    messages = [{"role": "user", "content": ASKED}]
    message = litellm.completion(messages=messages, **fields).choices[0].message
    (call,) = message.tool_calls
    chunks = [*litellm.completion(messages=messages, stream=True, **fields)]
    joined = litellm.stream_chunk_builder(chunks, messages=messages).choices[0]
    assert joined.message.tool_calls[0].function == call.function
    assert joined.finish_reason == "tool_calls"
    result = result_of(call.function.arguments)
    assert message.provider_specific_fields is not None  # which goes back with the message
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert litellm.completion(messages=messages, **fields).choices[0].message.content == FINE


@pytest.mark.slow
def test_openai_agents(address):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    asked = []

    @agents.function_tool
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        asked.append(city)
        return "18"

    async def answers():
        async with openai.AsyncOpenAI(**address) as client:
            model = agents.OpenAIChatCompletionsModel(MODEL, client)
            settings = agents.ModelSettings(max_tokens=100, extra_body=SALT | {"seed": 1})
            agent = agents.Agent("a", tools=[weather], model=model, model_settings=settings)
            whole = await agents.Runner.run(agent, ASKED)
            run = agents.Runner.run_streamed(agent, ASKED)
            async for _ in run.stream_events():
                pass
            return whole.final_output, run.final_output

    assert asyncio.run(answers()) == (FINE, FINE) and asked == ["Köln"] * 2
