"""A conversation with a model in this process, in the form in which a server answers one."""

import argparse
import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

from tpdet.client.engine_settings import engine_config
from tpdet.client.terminal import Ask, Message
from tpdet.errors import RequestError, UsageError


def talk_offline(model: str, sampling: Mapping[str, Any], converse: Callable[[Ask], int]) -> int:
    """Load a model, converse with it, and close it; the conversation's exit code.

    sampling: of every answer. Settings of the engine may stand in TPDET_ variables. Raises as
    `AsyncLLM`, and UsageError for wrong sampling parameters or ranks of a launcher.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("chat with a model runs in one process: start a server for more ranks")
    config = engine_config(argparse.Namespace(model=model, config=None), os.environ)
    from tpdet import AsyncLLM, SamplingParams

    try:
        params = SamplingParams(**{"max_tokens": None, **sampling})
    except RequestError as error:
        raise UsageError(f"--{str(error).replace('_', '-', 1)}") from None
    llm = AsyncLLM(**config.model_dump(include=config.model_fields_set))

    def ask(messages: list[Message]) -> Iterator[dict[str, Any]]:
        talk = llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True)
        ids = talk["input_ids"]
        return _events(runner, llm.generate({"prompt_token_ids": ids}, params))

    with asyncio.Runner() as runner:
        try:
            return converse(ask)
        finally:
            runner.run(llm.close())


def _events(runner: asyncio.Runner, outputs: AsyncGenerator[Any, None]) -> Iterator[dict[str, Any]]:
    """The text that each output adds. Ctrl-C ends the answer by KeyboardInterrupt."""
    shown = 0
    try:
        while (output := runner.run(_next(outputs))) is not None:
            choice = output.outputs[0]
            yield {
                "choices": [{"text": choice.text[shown:], "finish_reason": choice.finish_reason}]
            }
            shown = len(choice.text)
    finally:
        runner.run(outputs.aclose())


async def _next(outputs: AsyncGenerator[Any, None]) -> Any:
    return await anext(outputs, None)
