"""A command of `tpdet` as data: what runs it, its flags, its help; and groups of commands."""

import argparse
from dataclasses import dataclass

from tpdet.arguments.flags import Flag, add_flags, add_parser, figure, file, flag, later
from tpdet.client import DEFAULT_URL
from tpdet.client.engine_settings import add_engine_settings, add_tp

_TEXTS = ("help", "usage", "description", "epilog")
Commands = argparse._SubParsersAction
UNVERIFIED = ("share_draws", "fixed_batch", "approximate")
"""Settings under which no answer is verified, which commands that verify do not take."""

_URL = flag("--url", f"its address (default: TPDET_URL, else {DEFAULT_URL})")
_NAME = flag("--model --model-name", "(default: its first)", metavar="NAME")
_KEY_AND_TIMEOUT = (
    file("--api-key-file",
         "its first key is sent (default: the key in TPDET_API_KEY or VLLM_API_KEY)"),
    figure("--timeout", "without a byte of an answer (default 600)",
           default=600.0, metavar="SECONDS"),
)  # fmt: skip
SERVER = (_URL, *_KEY_AND_TIMEOUT)
"""Flags that name a running server."""
SERVER_AND_MODEL = (_URL, _NAME, *_KEY_AND_TIMEOUT)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that `run`, "module:function", does; the module is imported when it runs.

    Its texts are those of argparse's `add_parser`. server: the flags that name one. ranks: whether
    it has `--tp`. without: the engine's settings that are no flags of it; None: none is.
    """

    name: str
    run: str
    flags: tuple[Flag, ...]
    help: str | None = None
    usage: str | None = None
    description: str | None = None
    epilog: str | None = None
    server: tuple[Flag, ...] = ()
    ranks: bool = False
    without: tuple[str, ...] | None = None

    def add(self, commands: Commands) -> None:
        """Add it to the commands of `tpdet`, or of a group."""
        command = add_parser(commands, self.name, **_texts(self))
        command.set_defaults(run=later(*self.run.split(":")))
        add_flags(command, self.flags)
        if self.server:
            add_flags(command.add_argument_group("server"), self.server)
        if self.ranks:
            add_tp(command)
        if self.without is not None:
            add_engine_settings(command, self.without)


@dataclass(frozen=True, kw_only=True)
class CommandGroup:
    """A command that has commands; metavar: what help calls them."""

    name: str
    metavar: str
    commands: tuple[Command, ...]
    help: str | None = None
    description: str | None = None
    epilog: str | None = None

    def add(self, commands: Commands) -> None:
        """Add it to the commands of `tpdet`."""
        group = add_parser(commands, self.name, **_texts(self))
        names = group.add_subparsers(required=True, metavar=self.metavar)
        for command in self.commands:
            command.add(names)


def _texts(one: Command | CommandGroup) -> dict[str, str]:
    """Those that it has: an empty help would list a command that has none."""
    texts = {name: getattr(one, name, None) for name in _TEXTS}
    return {name: text for name, text in texts.items() if text is not None}
