"""The engine's settings of an offline command: from flags, the environment and a TOML file."""

import argparse
import sys
from collections.abc import Collection, Mapping
from typing import Any

from tpdet.config import EngineConfig, validated
from tpdet.errors import UsageError
from tpdet.server.settings.flags import add_field
from tpdet.server.settings.settings import SETTINGS
from tpdet.server.settings.sources import Source, parse_text, read_toml, read_variables

GROUPS = {
    "everyday": ("max_model_len", "dtype", "device"),
    "model and tokenizer": (
        "revision", "load_format", "tokenizer", "skip_tokenizer_init", "chat_template",
        "chat_template_date",
    ),
    "memory and batches": (
        "gpu_memory_utilization", "kv_pages", "enable_prefix_caching", "max_num_seqs",
        "max_num_batched_tokens", "fixed_batch", "drafts", "draft_model",
    ),
    "arithmetic (what may change bits)": ("fold_order", "row_layers", "leaves", "approximate"),
    "ranks and kernels": (
        "transport", "experts", "share_draws", "enforce_eager", "compile_ahead",
        "kernel_cache",
    ),
}  # fmt: skip
"""The engine's settings that are flags of an offline command; the others keep their defaults."""


def add_engine_settings(command: argparse.ArgumentParser, leave_out: Collection[str] = ()) -> None:
    """Add `--config` and a flag for each of the settings, but for those in `leave_out`."""
    command.add_argument("--config", metavar="FILE.toml", help="settings; only the engine's count")
    for title, names in GROUPS.items():
        group = command.add_argument_group(title)
        for name in names:
            if name not in leave_out:
                add_field(group, name, EngineConfig.model_fields[name])


def engine_config(options: argparse.Namespace, environ: Mapping[str, str]) -> EngineConfig:
    """The engine that flags, the environment and the file of --config ask for, in this order.

    Raises UsageError naming the source of a wrong value, NotFoundError without the file.
    """
    fields = EngineConfig.model_fields
    variables = read_variables(environ, {**SETTINGS})
    path = options.config or environ.get("TPDET_CONFIG", "").strip()
    file = read_toml(path) if path else Source()
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for source in (file, variables):
        for name in source.values:
            if name in fields and name != "on_slowdown":
                values[name], spelled[name] = source.values[name], source.spelled[name]
    for names in GROUPS.values():
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
