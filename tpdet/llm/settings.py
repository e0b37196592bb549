"""Keyword arguments of `LLM` and `AsyncLLM` as the engine's configuration."""

import logging
from collections.abc import Mapping
from operator import index
from os import PathLike, fspath
from typing import Any

from tpdet.arguments.suggestions import did_you_mean
from tpdet.arguments.vllm_arguments import accept_habit
from tpdet.config import EngineConfig
from tpdet.errors import UsageError
from tpdet.launch.ranks.environment import RankEnvironment, read_environment

_log = logging.getLogger("tpdet.llm")
_LOGS_NOTHING = ("disable_log_stats",)


def read_settings(given: Mapping[str, Any], of_vllm: Mapping[str, Any]) -> tuple[EngineConfig, int]:
    """The configuration of the keyword arguments `given`; `of_vllm` are all other keywords.

    Also the number of ranks that this process has to start, itself among them; 1 for none. Raises
    UsageError for the first unknown name or unusable value, and for a tensor-parallel size that is
    not the number of ranks that a launcher started.
    """
    accept_habits(of_vllm)
    settings = {name: _default(name) if value is None else value for name, value in given.items()}
    ranks = _ranks_to_start(settings.pop("tensor_parallel_size", None), read_environment())
    for name in ("model", "draft_model"):
        if isinstance(settings[name], PathLike):
            settings[name] = fspath(settings[name])
    if type(settings["dtype"]).__module__ == "torch":
        settings["dtype"] = str(settings["dtype"]).removeprefix("torch.")
    if settings["on_slowdown"] is not None:
        raise UsageError("on_slowdown is a server's setting: leave it out, or set approximate")
    return EngineConfig.from_values(**settings), ranks


def accept_habits(of_vllm: Mapping[str, Any]) -> None:
    """Return if every keyword is vLLM's and asks for what holds anyway, which the log says.

    Raises UsageError for others, with the nearest name or the remedy.
    """
    known = [*EngineConfig.model_fields, "tensor_parallel_size"]
    for name, value in of_vllm.items():
        note = None if name in _LOGS_NOTHING else accept_habit(name, value)
        if note is None and name not in _LOGS_NOTHING:
            hint = did_you_mean(name, known) or ": see help(LLM.__init__) for those there are"
            raise UsageError(f"unknown setting {name!r}{hint}")
        if note is not None and value is not None:
            _log.warning("%s", note)


def _default(name: str) -> Any:
    """What None stands for: the setting's default; None itself where there is no other."""
    field = EngineConfig.model_fields.get(name)
    return None if field is None or field.is_required() else field.default


def _ranks_to_start(asked: Any, environment: RankEnvironment) -> int:
    """How many ranks this process starts, itself among them; `asked` None takes those there are.

    Raises UsageError where a launcher started another number than `asked`.
    """
    if asked is None:
        return 1
    try:
        size = index(asked)
    except TypeError:
        size = 0
    if size < 1 or isinstance(asked, bool):
        raise UsageError(f"tensor_parallel_size must be a number of ranks, not {asked!r}")
    if size == environment.size:
        return 1
    if environment.size == 1 and environment.launcher != "torchrun":
        return size
    raise UsageError(
        f"tensor_parallel_size {size} needs {size} ranks, and {environment.launcher} started "
        f"{environment.size}: start the script with `torchrun --nproc-per-node {size} SCRIPT`, or "
        "without a launcher, and it starts the other ranks itself"
    )
