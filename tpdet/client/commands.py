"""What `tpdet chat` and `tpdet complete` do with a running server, or `chat` with a model."""

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

from tpdet.checkpoint.resolve import is_model
from tpdet.client import DEFAULT_URL
from tpdet.client.connection import Connection, client_key
from tpdet.client.offline_chat import talk_offline
from tpdet.client.terminal import Ask, Message, converse, piped, prompt_lines, show, tell
from tpdet.errors import TpdetError, UsageError
from tpdet.launch.host.standard_streams import argument_text
from tpdet.requests.routes import CHATS, COMPLETIONS

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")


def chat_command(options: argparse.Namespace) -> int:
    """One message, or a conversation at the keyboard. Raises as `Connection`, `talk_offline`."""
    if options.prompt is not None and is_model(options.prompt):
        if options.model is not None:
            raise UsageError(f"--model names a server's model: talk to {options.prompt} without it")
        refuse_server(options, options.prompt)
        directory, options.prompt, options.message = options.prompt, options.message, None
        prompt = _prompt(options)
        tell(f"loading {directory}")
        return talk_offline(directory, _sampling(options), lambda ask: _talk(options, ask, prompt))
    if options.message is not None:
        raise UsageError(
            f"{options.prompt!r} is no model directory and no GGUF file: give one before the "
            "message, or the message alone to ask a server"
        )
    prompt = _prompt(options)
    connection = connect(options)
    model = options.model or connection.model()
    fields = _sampling(options)

    def ask(messages: list[Message]) -> Iterator[dict[str, Any]]:
        return connection.stream(CHATS, {"model": model, "messages": messages, **fields})

    if prompt is None:
        tell(f"{model} at {connection.url}")
    return _talk(options, ask, prompt)


def _talk(options: argparse.Namespace, ask: Ask, prompt: str | None) -> int:
    """The answer to one message, or a conversation at the keyboard; the exit code."""
    if prompt is None:
        tell("/help for help, Ctrl-D leaves")
        return converse(ask, options.system)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return 130 if show(ask([*system, {"role": "user", "content": prompt}])).stopped else 0


def complete_command(options: argparse.Namespace) -> int:
    """The continuation of one prompt, or of each that is typed. Raises as `Connection` does."""
    prompt = _prompt(options)
    connection = connect(options)
    model = options.model or connection.model()
    fields = _sampling(options)

    def ask(text: str) -> Iterator[dict[str, Any]]:
        return connection.stream(COMPLETIONS, {"model": model, "prompt": text, **fields})

    if prompt is not None:
        return 130 if show(ask(prompt)).stopped else 0
    tell(f"{model} at {connection.url}; each line is continued, Ctrl-D leaves")
    for text in prompt_lines():
        try:
            show(ask(text))
        except TpdetError as error:
            tell(f"tpdet: {error}")
    return 0


def connect(options: argparse.Namespace) -> Connection:
    """The server that the flags name, else the environment."""
    url = options.url or os.environ.get("TPDET_URL") or DEFAULT_URL
    return Connection(url, client_key(options.api_key_file), options.timeout)


def refuse_server(options: argparse.Namespace, model: str) -> None:
    """Refuse (UsageError) a server's address beside a model that is loaded here."""
    if options.url is not None:
        raise UsageError(f"--url names a server, and {model} is loaded here: leave one out")


def _prompt(options: argparse.Namespace) -> str | None:
    """The prompt on the command line or from a pipe; None for a conversation at the keyboard."""
    if options.prompt is not None and options.quick is not None:
        raise UsageError("two prompts are given, one with --quick: give one")
    prompt: str | None = options.prompt if options.prompt is not None else options.quick
    if prompt is None:
        prompt = piped()
        if prompt is None and not sys.stdin.isatty():
            raise UsageError("standard input is empty: give a prompt as an argument")
    elif is_model(prompt):
        raise UsageError(
            f"{prompt} is a model: start a server with tpdet serve {prompt}, then talk to it"
        )
    return None if prompt is None else argument_text(prompt)


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The fields that were given; the others are the server's own defaults."""
    values = {name: getattr(options, name) for name in _SAMPLING}
    return {name: value for name, value in values.items() if value is not None}
