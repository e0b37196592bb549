"""`EngineArgs`: the settings of `LLM` as one object, also from a script's command line."""

import argparse
import dataclasses
import inspect
from functools import partial
from typing import Any, Self

from tpdet.arguments.vllm_arguments import HABITS
from tpdet.config import EngineConfig
from tpdet.llm import LLM
from tpdet.llm.settings import accept_habits
from tpdet.server.settings.flags import add_field
from tpdet.server.settings.sources import parse_text, plain_type

_SETTINGS = {
    name: None if parameter.default is inspect.Parameter.empty else parameter.default
    for name, parameter in inspect.signature(LLM.__init__).parameters.items()
    if name not in ("self", "of_vllm", "on_slowdown", "max_slowdown")
}
"""What `LLM` takes, with its defaults; a model has none."""


class _EngineArgs:
    """The settings of `LLM`, with its defaults; `LLM(**dataclasses.asdict(engine_args))` uses them.

    Keywords of vLLM's that ask for what holds anyway are accepted. Raises UsageError for others.
    """

    def __init__(self, model: Any = None, **given: Any) -> None:
        of_vllm = {name: value for name, value in given.items() if name not in _SETTINGS}
        accept_habits(of_vllm)
        for name, default in _SETTINGS.items():
            setattr(self, name, given.get(name, default))
        self.model = model

    @classmethod
    def add_cli_args(cls, parser: Any) -> Any:
        """Add a flag for each setting to a parser or a group of one; returns it."""
        for name, default in _SETTINGS.items():
            if name == "tensor_parallel_size":
                flags = ("--tensor-parallel-size", "-tp")
                parser.add_argument(*flags, type=int, default=default, help="ranks")
            else:
                _add(parser, name, default)
        for name, habit in HABITS.items():
            options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            if habit.switch:
                options["action"] = argparse.BooleanOptionalAction
            parser.add_argument(f"--{name}", **options)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The settings among the arguments that were read; all others are left alone."""
        return cls(**{name: vars(args)[name] for name in _SETTINGS if name in args})


def _add(parser: Any, name: str, default: Any) -> None:
    field = EngineConfig.model_fields[name]
    action = add_field(parser, name, field, default)
    if plain_type(field.annotation) is not bool:
        action.type = partial(parse_text, field)


EngineArgs = dataclasses.make_dataclass(
    "EngineArgs",
    [(name, Any, default) for name, default in _SETTINGS.items()],
    bases=(_EngineArgs,),
    init=False,
    namespace={"__doc__": _EngineArgs.__doc__, "__module__": __name__},
)
AsyncEngineArgs = EngineArgs
"""Its settings are those of `LLM` too."""
