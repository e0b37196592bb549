"""Text between a person and a server: prompts from the keyboard, answers as they come."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from tpdet.errors import TpdetError, UsageError

Message = dict[str, str]
Ask = Callable[[list[Message]], Iterator[dict[str, Any]]]
"""What answers a conversation: events as the API streams them. A server, or an engine here."""

HELP = """\
/clear   begin a new conversation
/help    this
/exit    leave (so does Ctrl-D)
Ctrl-C stops an answer."""
_LIMIT = "length"


@dataclass
class ShownAnswer:
    """An answer so far: its text, why it ended, and whether Ctrl-C ended it."""

    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stopped: bool = False

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)


def show(events: Iterable[dict[str, Any]]) -> ShownAnswer:
    """Write an answer to standard output as it comes; Ctrl-C ends it. Raises as the events do.

    Reasoning that the server splits off goes to standard error: it is no part of the answer.
    """
    answer, line = ShownAnswer(), "\n"
    try:
        for event in events:
            for choice in event.get("choices") or []:
                delta = choice.get("delta") or {}
                reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
                write(reasoning, sys.stderr)
                line = reasoning or line
                piece = choice.get("text") or delta.get("content") or ""
                if piece and not line.endswith("\n"):
                    write(line := "\n", sys.stderr)
                answer.pieces.append(piece)
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                write(piece)
    except KeyboardInterrupt:
        answer.stopped = True
    finally:
        close = getattr(events, "close", None)
        if close is not None:
            close()
        if answer.pieces and not answer.text.endswith("\n"):
            write("\n")
        if not line.endswith("\n"):
            write("\n", sys.stderr)
    if answer.finish_reason == _LIMIT:
        tell("(cut at the most tokens it may have: raise --max-tokens)")
    return answer


def converse(ask: Ask, system: str | None) -> int:
    """Talk until Ctrl-D or /exit; an error ends its answer, not the conversation. Returns 0."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and a history, by being imported)

    begin = [] if system is None else [{"role": "system", "content": system}]
    messages = list(begin)
    while (text := _next_line()) is not None:
        if text.startswith("/"):
            if text in ("/exit", "/quit"):
                break
            if text == "/clear":
                messages = list(begin)
                tell("(a new conversation)")
            else:
                tell(HELP if text == "/help" else f"no command {text.split()[0]}\n{HELP}")
            continue
        messages.append({"role": "user", "content": text})
        try:
            answer = show(ask(messages))
        except TpdetError as error:
            tell(f"tpdet: {error}")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer.text})
    return 0


def prompt_lines() -> Iterator[str]:
    """Prompts from the keyboard, each on its own, until Ctrl-D or /exit."""
    while (text := _next_line()) is not None and text not in ("/exit", "/quit"):
        yield text


def piped() -> str | None:
    """All of standard input; None if it is a terminal, or empty."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    try:
        return sys.stdin.read().strip("\n") or None
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is no UTF-8: {error.reason}") from None


def write(text: str, stream: TextIO | None = None) -> None:
    """Text to a stream, by default standard output, at once; harmless if that is a terminal."""
    stream = stream or sys.stdout
    if stream.isatty():
        text = "".join(
            c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
        )
    stream.write(text)
    stream.flush()


def tell(text: str) -> None:
    """A remark to standard error, which is no part of an answer."""
    print(text, file=sys.stderr, flush=True)


def _next_line() -> str | None:
    """The next line that is not empty; None at the end of input."""
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            tell("\n(Ctrl-D leaves)")
            continue
        if text:
            return text
