"""Clients of agents, unmodified, at tasks: `python -m tests.server.clients.agents.clients NAME`.

Address and key come by variables of the environment, as from `tpdet tape record`.
"""

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, create_model

from tests.server.clients.agents.tasks import INSTRUCTIONS, TASKS, Json, Task

MODEL = "demo"
LIMIT = 1000  # tokens of an answer
TOOL_CHOICES = ("auto", "auto", "required")


def main(name: str) -> None:
    """Do all tasks with one client; a task's number varies how it is asked."""
    for number, task in enumerate(TASKS):
        CLIENTS[name](task, number)


def openai_chat(task: Task, number: int) -> None:
    import openai

    client = openai.OpenAI(max_retries=0)
    fields: Json = {"model": MODEL, "tools": chat_tools(task), "max_completion_tokens": LIMIT}
    fields |= ({}, {"temperature": 0}, {"n": 2}, {"logprobs": True, "top_logprobs": 2})[number % 4]
    messages: list[Any] = [{"role": "developer", "content": INSTRUCTIONS}]

    def ask(first: bool) -> Any:
        more = {"tool_choice": TOOL_CHOICES[number % 3]} if first else {}
        if number % 2:
            with client.chat.completions.stream(messages=messages, **fields, **more) as stream:
                return stream.get_final_completion().choices[0].message
        return (
            client.chat.completions.create(messages=messages, **fields, **more).choices[0].message
        )

    chat_loop(task, messages, ask)


def litellm_chat(task: Task, number: int, model: str = f"openai/{MODEL}") -> None:
    import litellm

    fields: Json = {"model": model, "tools": chat_tools(task), "max_tokens": LIMIT}
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]

    def ask(first: bool) -> Any:
        more = {"tool_choice": TOOL_CHOICES[number % 3]} if first else {}
        if number % 2:
            chunks = [*litellm.completion(messages=messages, stream=True, **fields, **more)]
            return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
        return litellm.completion(messages=messages, **fields, **more).choices[0].message

    chat_loop(task, messages, ask)


def litellm_messages(task: Task, number: int) -> None:
    litellm_chat(task, number, f"anthropic/{MODEL}")


def chat_loop(task: Task, messages: list[Any], ask: Callable[[bool], Any]) -> None:
    """Ask in turn, and run what is called, until the model has answered."""
    for asked in task.asked:
        messages.append({"role": "user", "content": asked})
        message = ask(asked == task.asked[0])
        while message.tool_calls:
            messages.append(message)
            for call in message.tool_calls:
                result = ran(task, call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            message = ask(False)
        messages.append({"role": "assistant", "content": message.content})


def openai_responses(task: Task, number: int) -> None:
    import openai

    client = openai.OpenAI(max_retries=0)

    def ask(fields: Json) -> Any:
        if number % 2:
            with client.responses.stream(**fields) as stream:
                return stream.get_final_response()
        return client.responses.create(**fields)

    responses_loop(task, number, ask, MODEL)


def litellm_responses(task: Task, number: int) -> None:
    import litellm

    responses_loop(task, number, lambda fields: litellm.responses(**fields), f"openai/{MODEL}")


def responses_loop(task: Task, number: int, ask: Callable[[Json], Any], model: str) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in chat_tools(task)]
    fields: Json = {"model": model, "tools": tools, "max_output_tokens": LIMIT, "store": False}
    fields |= {"instructions": INSTRUCTIONS, "include": ["reasoning.encrypted_content"]}
    fields |= ({}, {"temperature": 0}, {"parallel_tool_calls": False})[number % 3]
    items: list[Any] = []
    for asked in task.asked:
        items.append({"role": "user", "content": asked})
        while True:
            items += (output := ask(fields | {"input": items}).output)
            calls = [item for item in output if item.type == "function_call"]
            for call in calls:
                result = {"output": ran(task, call.name, call.arguments)}
                result |= {"type": "function_call_output", "call_id": call.call_id}
                items.append(result)
            if not calls:
                break


def anthropic_messages(task: Task, number: int) -> None:
    import anthropic

    client = anthropic.Anthropic(max_retries=0)
    tools = [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
        for f in (tool["function"] for tool in chat_tools(task))
    ]
    system = [{"type": "text", "text": INSTRUCTIONS, "cache_control": {"type": "ephemeral"}}]
    fields: Json = {"model": MODEL, "max_tokens": LIMIT, "system": system, "tools": tools}
    choice = ({"type": "auto", "disable_parallel_tool_use": True}, None, {"type": "any"})[
        number % 3
    ]
    messages: list[Any] = []
    for asked in task.asked:
        messages.append({"role": "user", "content": asked})
        while True:
            more = {} if choice is None or len(messages) > 1 else {"tool_choice": choice}
            if number % 2:
                with client.messages.stream(messages=messages, **fields, **more) as stream:
                    answer = stream.get_final_message()
            else:
                answer = client.messages.create(messages=messages, **fields, **more)
            messages.append({"role": "assistant", "content": answer.to_param()["content"]})
            results = []
            for block in answer.content:
                if block.type == "tool_use":
                    text = ran(task, block.name, json.dumps(block.input))
                    wrong = {"is_error": True} if text.startswith("Error") else {}
                    content = [{"type": "text", "text": text}] if number % 2 else text
                    result = {"type": "tool_result", "tool_use_id": block.id, "content": content}
                    results.append(result | wrong)
            if not results:
                break
            messages.append({"role": "user", "content": results})


def anthropic_runner(task: Task, number: int) -> None:
    import anthropic

    client = anthropic.Anthropic(max_retries=0)
    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=LIMIT,
        system=INSTRUCTIONS,
        tools=[anthropic.beta_tool(tool) for tool in task.tools],
        messages=[{"role": "user", "content": task.asked[0]}],
        stream=number % 2 == 1,
    )
    for message in runner:
        if number % 2:
            for _ in message:
                pass


def openai_agents(task: Task, number: int, make_model: Callable[[], Any]) -> None:
    import agents

    agents.set_tracing_disabled(True)
    choice = TOOL_CHOICES[number % 3]
    settings = agents.ModelSettings(
        max_tokens=LIMIT,
        tool_choice=None if choice == "auto" else choice,
        parallel_tool_calls=(None, False)[number % 2],
    )
    tools = [agents.function_tool(tool) for tool in task.tools]
    agent = agents.Agent(
        "clerk", instructions=INSTRUCTIONS, tools=tools, model=make_model(), model_settings=settings
    )

    async def work() -> None:
        said: list[Any] = []
        for asked in task.asked:
            said.append({"role": "user", "content": asked})
            if number % 2:
                run: Any = agents.Runner.run_streamed(agent, said)
                async for _ in run.stream_events():
                    pass
            else:
                run = await agents.Runner.run(agent, said)
            said = run.to_input_list()

    asyncio.run(work())


def agents_chat(task: Task, number: int) -> None:
    import agents
    import openai

    model = agents.OpenAIChatCompletionsModel
    openai_agents(task, number, lambda: model(MODEL, openai.AsyncOpenAI(max_retries=0)))


def agents_responses(task: Task, number: int) -> None:
    import agents
    import openai

    model = agents.OpenAIResponsesModel
    openai_agents(task, number, lambda: model(MODEL, openai.AsyncOpenAI(max_retries=0)))


def agents_messages(task: Task, number: int) -> None:
    from agents.extensions.models.litellm_model import LitellmModel

    openai_agents(task, number, lambda: LitellmModel(f"anthropic/{MODEL}", api_key="none"))


def pydantic_ai(task: Task, number: int, model: Any) -> None:
    from pydantic_ai import Agent

    settings: Any = {"max_tokens": LIMIT, "parallel_tool_calls": number % 2 == 0}
    agent = Agent(model, tools=[*task.tools], instructions=INSTRUCTIONS, model_settings=settings)

    async def work() -> None:
        history = None
        for asked in task.asked:
            if number % 2:
                async with agent.run_stream(asked, message_history=history) as run:
                    await run.get_output()
                history = run.all_messages()
            else:
                history = (await agent.run(asked, message_history=history)).all_messages()

    asyncio.run(work())


def pydantic_chat(task: Task, number: int) -> None:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    pydantic_ai(task, number, OpenAIChatModel(MODEL, provider=OpenAIProvider()))


def pydantic_responses(task: Task, number: int) -> None:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    pydantic_ai(task, number, OpenAIResponsesModel(MODEL, provider=OpenAIProvider()))


def pydantic_messages(task: Task, number: int) -> None:
    import anthropic
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    provider = AnthropicProvider(anthropic_client=anthropic.AsyncAnthropic(max_retries=0))
    pydantic_ai(task, number, AnthropicModel(MODEL, provider=provider))


def langchain(task: Task, number: int, responses: bool) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=MODEL,
        max_retries=0,
        max_tokens=LIMIT,
        use_responses_api=responses,
        **({"temperature": 0} if number % 3 else {}),
    )
    bound = model.bind_tools([*task.tools], strict=number % 2 == 0 or None)
    messages: list[Any] = [SystemMessage(INSTRUCTIONS)]
    for asked in task.asked:
        messages.append(HumanMessage(asked))
        while True:
            if number % 2:
                answer: Any = None
                for chunk in bound.stream(messages):
                    answer = chunk if answer is None else answer + chunk
            else:
                answer = bound.invoke(messages)
            messages.append(answer)
            for call in answer.tool_calls:
                result = ran(task, call["name"], json.dumps(call["args"]))
                messages.append(ToolMessage(result, tool_call_id=call["id"]))
            if not answer.tool_calls:
                break


def langchain_chat(task: Task, number: int) -> None:
    langchain(task, number, False)


def langchain_responses(task: Task, number: int) -> None:
    langchain(task, number, True)


CLIENTS: dict[str, Callable[[Task, int], None]] = {
    one.__name__: one
    for one in (
        openai_chat,
        agents_chat,
        pydantic_chat,
        langchain_chat,
        litellm_chat,
        openai_responses,
        agents_responses,
        pydantic_responses,
        langchain_responses,
        litellm_responses,
        anthropic_messages,
        anthropic_runner,
        agents_messages,
        pydantic_messages,
        litellm_messages,
    )
}


def chat_tools(task: Task) -> list[Any]:
    """The tools as chats declare them, strict."""
    import openai

    return [openai.pydantic_function_tool(_model_of(tool)) for tool in task.tools]


def ran(task: Task, name: str, arguments: str) -> str:
    """What a tool gives."""
    tool = next(one for one in task.tools if one.__name__ == name)
    given = _model_of(tool).model_validate_json(arguments)
    return tool(**{name: getattr(given, name) for name in type(given).model_fields})


def _model_of(tool: Callable[..., str]) -> type[BaseModel]:
    parameters = inspect.signature(tool).parameters.values()
    fields: Json = {one.name: (one.annotation, ...) for one in parameters}
    return create_model(tool.__name__, __doc__=tool.__doc__, **fields)


if __name__ == "__main__":
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet
    main(sys.argv[1])
