"""The flags of `tpdet chat`, `complete` and `run-batch`; what runs them is imported then."""

import argparse
from pathlib import Path

from tpdet.arguments.command_line import number, whole_number
from tpdet.client import DEFAULT_URL
from tpdet.launch.host.standard_streams import argument_text


def add_chat(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet chat`."""
    command = commands.add_parser(
        "chat",
        help="talk to a running server, or to a model",
        usage="tpdet chat [MODEL] [PROMPT] [flags]",
        description="Talk to a running server, or to a model that is loaded here. Without a "
        "prompt, and with a\nkeyboard, it is a conversation: Ctrl-C stops an answer, Ctrl-D "
        "leaves, /help says more.",
        epilog='  tpdet chat "Why is the sky blue?"\n'
        "  tpdet chat --url http://host:8000 < question.txt\n"
        '  tpdet chat models/smollm2 "Why is the sky blue?"',
    )
    command.add_argument(
        "prompt", nargs="?", help="a message (standard input if it is piped), or a model's path"
    )
    command.add_argument("message", nargs="?", help="after a model's path: a message to it")
    command.add_argument(
        "--system",
        "--system-prompt",
        type=argument_text,
        metavar="TEXT",
        help="what the conversation begins with",
    )
    _add_common(command, "all that the context has room for")
    command.set_defaults(run=_chat)


def add_complete(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet complete`."""
    command = commands.add_parser(
        "complete",
        help="let a running server continue a text",
        description="Let a running server continue a text, with no chat template.",
        epilog='  tpdet complete "The for statement" --max-tokens 40',
    )
    command.add_argument("prompt", nargs="?", help="a text; standard input if it is piped")
    _add_common(command, "16")
    command.set_defaults(run=_complete)


def add_run_batch(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet run-batch`."""
    command = commands.add_parser(
        "run-batch",
        help="answer a file of requests in OpenAI's batch format",
        description="Answer a file of requests in OpenAI's batch format (JSONL) by a running "
        "server; answers come in the\norder of the requests. A line: "
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions",\n"body": {"prompt": "The", '
        '"max_tokens": 8}}; a body without a model gets the server\'s.',
    )
    command.add_argument("-i", "--input-file", required=True, metavar="FILE", help="- for stdin")
    command.add_argument("-o", "--output-file", required=True, metavar="FILE", help="- for stdout")
    command.add_argument(
        "--concurrency", type=whole_number, default=64, help="requests in flight, at most"
    )
    command.add_argument(
        "--record",
        action="store_true",
        help="keep each request beside its answer, with token ids and bits, for tpdet check",
    )
    add_server(command)
    command.set_defaults(run=_run_batch)


def _add_common(command: argparse.ArgumentParser, most: str) -> None:
    command.add_argument(
        "-q", "--quick", type=argument_text, metavar="TEXT", help="the same as the prompt"
    )
    command.add_argument(
        "--max-tokens", type=whole_number, help=f"tokens of the answer (default: {most})"
    )
    command.add_argument(
        "--temperature", type=number, help="0 for the likeliest tokens (default: the server's, 1)"
    )
    command.add_argument("--top-p", type=number, help="(default: the server's, 1)")
    command.add_argument("--top-k", type=whole_number, help="(default: the server's, all tokens)")
    command.add_argument(
        "--seed", type=whole_number, help="for the same answer again (default: random)"
    )
    add_server(command)


def add_server(command: argparse.ArgumentParser, named: bool = True) -> None:
    """Add the flags that name a running server; `named`: and one for the name of its model."""
    group = command.add_argument_group("server")
    group.add_argument("--url", help=f"its address (default: TPDET_URL, else {DEFAULT_URL})")
    if named:
        group.add_argument("--model", "--model-name", metavar="NAME", help="(default: its first)")
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="its first key is sent (default: the key in TPDET_API_KEY or VLLM_API_KEY)",
    )
    group.add_argument(
        "--timeout",
        type=number,
        default=600.0,
        metavar="SECONDS",
        help="without a byte of an answer (default 600)",
    )


def _chat(options: argparse.Namespace) -> int:
    from tpdet.client.commands import chat_command

    return chat_command(options)


def _complete(options: argparse.Namespace) -> int:
    from tpdet.client.commands import complete_command

    return complete_command(options)


def _run_batch(options: argparse.Namespace) -> int:
    from tpdet.client.batch import batch_command

    return batch_command(options)
