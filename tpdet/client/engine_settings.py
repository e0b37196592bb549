"""The engine's settings of an offline command: from flags, the environment and a TOML file."""

import argparse
import sys
from collections.abc import Collection, Mapping
from typing import Any

from tpdet.arguments.flags import add_flags, count
from tpdet.config import EngineConfig, validated
from tpdet.errors import UsageError
from tpdet.launch.ranks.environment import read_environment
from tpdet.server.settings.flags import GROUPS, add_field
from tpdet.server.settings.settings import SETTINGS
from tpdet.server.settings.sources import SettingsSource, parse_text, read_toml, read_variables

_SERVERS_ALONE = (
    "model", "enable_return_routed_experts", "max_queue", "on_slowdown", "max_slowdown", "seed",
    "seed_policy", "start_timeout", "step_timeout",
)  # fmt: skip
OFFLINE_GROUPS = {
    title: [n for n in names if n in EngineConfig.model_fields and n not in _SERVERS_ALONE]
    for title, names in GROUPS.items()
    if title != "operation"
}
"""The engine's settings that are flags of an offline command; the others keep their defaults."""


def add_engine_settings(command: argparse.ArgumentParser, leave_out: Collection[str] = ()) -> None:
    """Add `--config` and a flag for each of the settings, but for those in `leave_out`."""
    command.add_argument("--config", metavar="FILE.toml", help="settings; only the engine's count")
    for title, names in OFFLINE_GROUPS.items():
        group = command.add_argument_group(title)
        for name in names:
            if name not in leave_out:
                add_field(group, name, EngineConfig.model_fields[name])


def add_tp(command: argparse.ArgumentParser) -> None:
    """Add `--tp` with serve's other names."""
    ranks = count(
        "--tp -tp --tensor-parallel-size",
        "ranks that share the model, which the command starts itself on this machine "
        "(default 1; under a launcher those that it started)",
        metavar="N",
    )
    add_flags(command, [ranks])


def ranks_asked(options: argparse.Namespace) -> int | None:
    """The `tensor_parallel_size` that `--tp` asks for; None for the ranks there are.

    Raises UsageError for no number of ranks, and for another than a launcher started.
    """
    asked: int | None = options.tp
    if asked is None:
        return None
    if asked < 1:
        raise UsageError(f"--tp {asked}: give a number of ranks, 1 or more")
    rank = read_environment()
    if rank.size != asked and (rank.size > 1 or rank.launcher == "torchrun"):
        raise UsageError(
            f"--tp {asked} and {rank.launcher}, which started {rank.size}: leave --tp out, or "
            "run the command without a launcher"
        )
    return asked


def engine_config(options: argparse.Namespace, environ: Mapping[str, str]) -> EngineConfig:
    """The engine that flags, the environment and the file of --config ask for, in this order.

    Raises UsageError naming the source of a wrong value, NotFoundError without the file.
    """
    fields = EngineConfig.model_fields
    variables = read_variables(environ, {**SETTINGS})
    path = options.config or environ.get("TPDET_CONFIG", "").strip()
    file = read_toml(path) if path else SettingsSource()
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for source in (file, variables):
        for name in source.values:
            if name in fields and name != "on_slowdown":
                values[name], spelled[name] = source.values[name], source.spelled[name]
    for names in OFFLINE_GROUPS.values():
        for name in names:
            value = getattr(options, name, None)
            if value is not None:
                values[name] = parse_text(fields[name], value) if isinstance(value, str) else value
                spelled[name] = "--" + name.replace("_", "-")
    if options.model is not None:
        values["model"] = options.model
    if "model" not in values:
        raise UsageError("no model is given: name a Hugging Face directory")
    for note in variables.notes:
        print(f"tpdet: {note}", file=sys.stderr)
    return validated(
        EngineConfig, values, lambda name: spelled.get(name, "--" + name.replace("_", "-"))
    )
