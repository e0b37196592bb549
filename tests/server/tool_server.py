"""A server whose chats call tools and think by marks, as the tests of several APIs want it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lib.server.harness import Server
from tests.lib.text.made_conversations import CHATML

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


@contextmanager
def tool_server(folder: Path, room: int, *flags: str, parser: str = "auto") -> Iterator[Server]:
    """Sequences of `room` tokens; parser: of the calls. It must end well."""
    template = folder / "template.jinja"
    template.write_text(CHATML)
    told = ("--chat-template", str(template), "--reasoning-parser", "auto")
    told += ("--tool-call-parser", parser, "--max-model-len", str(room))
    server = Server(folder, *told, *flags, marks=MARKS)
    yield server
    assert server.stop() == 0, server.log.read_text()
