"""Flags of a command as rows of data, in the order in which its help shows them.

A command is imported when it runs, so help is instant.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tpdet.arguments.command_line import number, whole_number

Run = Callable[[argparse.Namespace], int]
"""What a command does; its exit code."""


@dataclass(frozen=True)
class Flag:
    """One flag, or a positional argument: its names and what argparse's `add_argument` takes."""

    names: tuple[str, ...]
    options: dict[str, Any]


def flag(names: str, text: str, **options: Any) -> Flag:
    """A flag of these names ("-q --quick"), with its text in the help."""
    return Flag(tuple(names.split()), {"help": text, **options})


count = partial(flag, type=whole_number)
figure = partial(flag, type=number)
switch = partial(flag, action="store_true")
file = partial(flag, type=Path, metavar="FILE")


def choice(names: str, text: str, *values: str, **options: Any) -> Flag:
    """A flag with one of these values, the first by default."""
    return flag(names, text, default=values[0], choices=[*values], **options)


def add_flags(command: Any, flags: Iterable[Flag]) -> None:
    """Add flags to a command, or to a group of its arguments."""
    for row in flags:
        command.add_argument(*row.names, **row.options)


def add_command(
    commands: argparse._SubParsersAction, name: str, run: Run, flags: Iterable[Flag], **options: Any
) -> argparse.ArgumentParser:
    """Add a command with its flags; options: of `add_parser`."""
    command = add_parser(commands, name, **options)
    add_flags(command, flags)
    command.set_defaults(run=run)
    return command


def add_parser(
    commands: argparse._SubParsersAction, name: str, **options: Any
) -> argparse.ArgumentParser:
    """Add a command, or a group of them, whose description is a sentence of its help if unset."""
    if text := options.get("help"):
        options.setdefault("description", f"{text[:1].upper()}{text[1:]}.")
    return commands.add_parser(name, **options)


def later(module: str, function: str) -> Run:
    """A function of a module that is imported when it is called."""

    def run(options: argparse.Namespace) -> int:
        return getattr(import_module(module), function)(options)

    return run
