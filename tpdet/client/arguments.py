"""The flags of `tpdet chat` and `complete`, and those that name a server."""

import argparse

from tpdet.arguments.flags import Flag, add_command, add_flags, count, figure, file, flag, later
from tpdet.client import DEFAULT_URL
from tpdet.launch.host.standard_streams import argument_text


def _answer_flags(most: str) -> tuple[Flag, ...]:
    """The flags of an answer; most: its tokens by default."""
    return (
        flag("-q --quick", "the same as the prompt", type=argument_text, metavar="TEXT"),
        count("--max-tokens", f"tokens of the answer (default: {most})"),
        figure("--temperature", "0 for the likeliest tokens (default: the server's, 1)"),
        figure("--top-p", "(default: the server's, 1)"),
        count("--top-k", "(default: the server's, all tokens)"),
        count("--seed", "for the same answer again (default: random)"),
    )


_CHAT = (
    flag("prompt", "a message (standard input if it is piped), or a model's path", nargs="?"),
    flag("message", "after a model's path: a message to it", nargs="?"),
    flag("--system --system-prompt", "what the conversation begins with",
         type=argument_text, metavar="TEXT"),
    *_answer_flags("all that the context has room for"),
)  # fmt: skip
_COMPLETE = (
    flag("prompt", "a text; standard input if it is piped", nargs="?"),
    *_answer_flags("16"),
)
_URL = flag("--url", f"its address (default: TPDET_URL, else {DEFAULT_URL})")
_NAME = flag("--model --model-name", "(default: its first)", metavar="NAME")
_KEY_AND_TIMEOUT = (
    file("--api-key-file",
         "its first key is sent (default: the key in TPDET_API_KEY or VLLM_API_KEY)"),
    figure("--timeout", "without a byte of an answer (default 600)",
           default=600.0, metavar="SECONDS"),
)  # fmt: skip


def add_chat(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet chat`."""
    command = add_command(
        commands,
        "chat",
        later("tpdet.client.commands", "chat_command"),
        _CHAT,
        help="talk to a running server, or to a model",
        usage="tpdet chat [MODEL] [PROMPT] [flags]",
        description="Talk to a running server, or to a model that is loaded here. Without a "
        "prompt, and with a\nkeyboard, it is a conversation: Ctrl-C stops an answer, Ctrl-D "
        "leaves, /help says more.",
        epilog='  tpdet chat "Why is the sky blue?"\n'
        "  tpdet chat --url http://host:8000 < question.txt\n"
        '  tpdet chat models/smollm2 "Why is the sky blue?"',
    )
    add_server(command)


def add_complete(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet complete`."""
    command = add_command(
        commands,
        "complete",
        later("tpdet.client.commands", "complete_command"),
        _COMPLETE,
        help="let a running server continue a text",
        description="Let a running server continue a text, with no chat template.",
        epilog='  tpdet complete "The for statement" --max-tokens 40',
    )
    add_server(command)


def add_server(command: argparse.ArgumentParser, named: bool = True) -> None:
    """Add the flags that name a running server; `named`: and one for the name of its model."""
    group = command.add_argument_group("server")
    add_flags(group, (_URL, *((_NAME,) if named else ()), *_KEY_AND_TIMEOUT))
