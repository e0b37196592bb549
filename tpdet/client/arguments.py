"""The flags of `tpdet chat` and `complete`."""

from tpdet.arguments.flags import Flag, count, figure, flag
from tpdet.client.command import SERVER_AND_MODEL, Command
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

CHAT = Command(
    name="chat",
    run="tpdet.client.commands:chat_command",
    flags=_CHAT,
    help="talk to a running server, or to a model",
    usage="tpdet chat [MODEL] [PROMPT] [flags]",
    description="Talk to a running server, or to a model that is loaded here. Without a "
    "prompt, and with a\nkeyboard, it is a conversation: Ctrl-C stops an answer, Ctrl-D "
    "leaves, /help says more.",
    epilog='  tpdet chat "Why is the sky blue?"\n'
    "  tpdet chat --url http://host:8000 < question.txt\n"
    '  tpdet chat models/smollm2 "Why is the sky blue?"',
    server=SERVER_AND_MODEL,
)
COMPLETE = Command(
    name="complete",
    run="tpdet.client.commands:complete_command",
    flags=_COMPLETE,
    help="let a running server continue a text",
    description="Let a running server continue a text, with no chat template.",
    epilog='  tpdet complete "The for statement" --max-tokens 40',
    server=SERVER_AND_MODEL,
)
