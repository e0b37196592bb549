"""The argument parser of all commands, made from argparse.

`_` and `-` are one in flags, unknown names get a suggestion, mistakes are UsageErrors, and help
shows each flag's type, choices and default.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tpdet.arguments.suggestions import did_you_mean, nearest
from tpdet.arguments.vllm_arguments import DTYPES, parse_size
from tpdet.errors import UsageError


def whole_number(text: str) -> int:
    """An argument's type: a whole number; 2k is 2,000, 2K is 2,048."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def number(text: str) -> float:
    """An argument's type: a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def results_file(text: str) -> Path:
    """An argument's type: a file to append results to, whose folder is made before they are."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{text!r} cannot be written ({error.strerror})"
        raise argparse.ArgumentTypeError(reason) from None
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r} is a device or a pipe: name a file to write")
    return path


def html_file(text: str) -> Path:
    """An argument's type: a file for a report, in a folder that is there."""
    path = Path(text)
    if (path.exists() and not path.is_file()) or not path.parent.is_dir():
        reason = "is in a folder that does not exist"
        if path.exists():
            reason = "is a folder" if path.is_dir() else "is a device or a pipe"
        raise argparse.ArgumentTypeError(f"{text!r} {reason}: name a file to write")
    return path


def dtype(text: str) -> str:
    """An argument's type: a dtype, whose short names (half, bf16, ...) stand for the long ones."""
    return DTYPES.get(text, text)


def check_counts(options: object, *names: str) -> None:
    """Raise UsageError for the first of these fields below 1; None, a flag not given, passes."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: use 1 or more")


_WORDS = {whole_number: "N", int: "N", number: "NUMBER", float: "NUMBER", Path: "PATH",
          results_file: "PATH", html_file: "PATH"}  # fmt: skip


class Help(argparse.RawDescriptionHelpFormatter):
    """Descriptions as they are written; a word for each type; defaults behind each flag's text."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return _WORDS.get(action.type, "TEXT")

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        hidden = any(action.default is value for value in (None, False, True, argparse.SUPPRESS))
        if not hidden and action.option_strings and "default" not in text:
            text += f" (default {action.default})".replace("%", "%%")
        return text.strip()


class Parser(argparse.ArgumentParser):
    """A command, or a group of them."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", Help)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """What argparse calls for every mistake. Raises UsageError."""
        message = message.removeprefix("argument ")
        see = " See" if message.endswith("?") else ": see"
        raise UsageError(f"{message}{see} {self.prog} --help")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does; raises UsageError for what is unknown."""
        args = None if args is None else _hyphenated_flags(args)
        options, rest = super().parse_known_args(args, namespace)
        if rest:
            self._refuse(rest)
        return options, rest

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """As argparse does; a flag's name of a file, server or model is not empty."""
        named = action.option_strings and action.type in (None, Path)
        if named and not arg_string.strip() and arg_string is not action.default:
            message = f"{arg_string!r} names nothing: give a value, or leave the flag out"
            raise argparse.ArgumentError(action, message)
        return super()._get_value(action, arg_string)

    def _refuse(self, rest: Sequence[str]) -> NoReturn:
        """Raise UsageError for the first unknown flag, without its value, which may be secret."""
        flags = [argument.partition("=")[0] for argument in rest if argument.startswith("-")]
        if not flags:
            self.error(f"unexpected argument {rest[0]!r}")
        known = [
            name
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for name in action.option_strings
        ]
        found = nearest(flags[0], known) if flags[0].startswith("--") else None
        self.error(f"unknown flag {flags[0]}" + (f": did you mean {found}?" if found else ""))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        nearby = did_you_mean(str(value), choices)
        if isinstance(action, argparse._SubParsersAction):
            noun = (action.metavar or "command").lower()  # type: ignore[union-attr]
            self.error(f"no {noun} {value!r}: use one of {', '.join(choices)}{nearby}")
        raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(choices)}{nearby}")


def _hyphenated_flags(arguments: Sequence[str]) -> list[str]:
    """Arguments with hyphens in the flags' names; what stands behind `--` is no flag of ours."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*map(hyphenated, arguments[:end]), *arguments[end:]]


def hyphenated(argument: str) -> str:
    """`--max_model_len=2k` as `--max-model-len=2k`."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value
