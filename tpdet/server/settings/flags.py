"""The server's command line, made from the fields of its settings; everyday flags first."""

import argparse
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tpdet.arguments.command_line import Parser
from tpdet.arguments.vllm_arguments import HABITS
from tpdet.server.settings.sources import plain_type

EVERYDAY = (
    "model", "tp", "host", "port", "max_model_len", "served_model_name", "api_key_file", "dtype",
    "device", "config",
)  # fmt: skip
GROUPS = {
    "everyday": EVERYDAY,
    "model and tokenizer": (
        "task", "revision", "load_format", "weights", "tokenizer", "skip_tokenizer_init",
        "chat_template", "chat_template_date", "reasoning_parser", "tool_call_parser",
    ),
    "memory and batches": (
        "gpu_memory_utilization", "kv_pages", "enable_prefix_caching",
        "enable_return_routed_experts", "max_num_seqs",
        "max_num_batched_tokens", "fixed_batch", "drafts", "draft_model", "max_queue",
    ),
    "arithmetic (what may change bits)": (
        "fold_order", "row_layers", "leaves", "kv_cache_dtype", "logprobs_mode", "approximate",
        "on_slowdown",
        "max_slowdown", "seed", "seed_policy",
    ),
    "ranks and kernels": (
        "transport", "experts", "share_draws", "enforce_eager", "compile_ahead", "kernel_cache",
        "start_timeout", "step_timeout", "run_secret_file",
    ),
    "operation": (
        "admin_key_file", "admin_listen", "admin_insecure",
        "run_dir", "http_processes", "drain_timeout", "canary_interval",
        "weights_root", "weights_peers", "weights_timeout",
        "audit_dir", "audit_key", "audit_policy",
        "answer_cache", "answer_cache_bytes", "batch_dir", "batch_dir_bytes",
        "batch_swing_alarm", "disable_log_stats", "disable_uvicorn_access_log", "print_limits",
        "allow_faults",
    ),
}  # fmt: skip
"""Every setting stands in one group; what no group names comes last."""
_WORDS = {
    "model": "DIR_OR_NAME", "tokenizer": "DIR_OR_NAME", "host": "ADDRESS", "port": "PORT",
    "served_model_name": "NAME", "api_key_file": "FILE", "run_secret_file": "FILE",
    "chat_template": "FILE", "chat_template_date": "YYYY-MM-DD",
    "admin_key_file": "FILE", "admin_listen": "HOST:PORT",
    "kernel_cache": "DIR", "draft_model": "DIR", "run_dir": "DIR",
    "max_model_len": "TOKENS",
    "max_num_batched_tokens": "TOKENS", "gpu_memory_utilization": "SHARE", "max_slowdown": "SHARE",
    "batch_swing_alarm": "SHARE", "step_timeout": "SECONDS", "start_timeout": "SECONDS",
    "drain_timeout": "SECONDS", "canary_interval": "SECONDS", "kv_pages": "PAGES",
    "revision": "NAME", "weights_root": "DIR", "weights_peers": "ADDRESSES",
    "weights_timeout": "SECONDS", "audit_dir": "DIR", "audit_key": "FILE|URI",
    "answer_cache": "DIR", "answer_cache_bytes": "BYTES",
    "batch_dir": "DIR", "batch_dir_bytes": "BYTES",
}  # fmt: skip
_KINDS = {int: "N", float: "NUMBER", str: "TEXT"}
_EPILOG = """\
Sizes take a suffix: 2k is 2,000, 2K is 2,048. Flags may be spelled with _ for -.
Each setting may also stand in the environment (--max-model-len as TPDET_MAX_MODEL_LEN; a switch is
true or false; the API key itself as TPDET_API_KEY) and in the file of --config. The command line
wins, then the environment, then the file. docs/server.md has them all.
"""
HABIT = "habit "
"""Before the destination of an argument of vLLM that is no setting here."""


def make_parser(program: str, *models: type[BaseModel], leave_out: Sequence[str] = ()) -> Parser:
    """The command line of the settings in `models`: a flag for each field, absent unless given."""
    fields = {
        name: field
        for model in models
        for name, field in model.model_fields.items()
        if name not in leave_out
    }
    parser = Parser(
        prog=program,
        usage=f"{program} [MODEL] [flags]",
        argument_default=argparse.SUPPRESS,
        description="Serve a model over the OpenAI API, with the same bits for the same request.",
        epilog=_EPILOG,
        add_help=False,
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("-h", "--help", action="help", help="show this and end")
    named = [name for names in GROUPS.values() for name in names]
    groups = GROUPS | {"more": tuple(name for name in fields if name not in named)}
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add(group, name, fields)
    _add_habits(parser, fields)
    return parser


def _add(group: Any, name: str, fields: dict[str, FieldInfo]) -> None:
    """Add one flag, if it is among the fields or not a field at all."""
    if name == "config":
        group.add_argument(
            "--config", metavar="FILE.toml", help="settings; flags and the environment win over it"
        )
    elif name == "print_limits":
        group.add_argument("--print-limits", action="store_true", help="print every limit as JSON")
    elif name in fields:
        add_field(group, name, fields[name], argparse.SUPPRESS)


def add_field(group: Any, name: str, field: FieldInfo, default: Any = None) -> Any:
    """Add the flag of one setting; its action. `default` is what argparse makes of its absence."""
    flag = "--" + name.replace("_", "-")
    flags = ["--tensor-parallel-size", "-tp", "--tp"] if name == "tp" else [flag]
    kind = plain_type(field.annotation)
    text = field.description or ""
    if field.default is not None and not field.is_required() and "default" not in text:
        usual = field.default
        shown = ("on" if usual else "off") if kind is bool else usual
        text += f" (default {shown:g})" if kind is float else f" (default {shown})"
    text = text.replace("%", "%%")
    if kind is bool:
        kind = argparse.BooleanOptionalAction
        return group.add_argument(flag, action=kind, default=default, help=text)
    word = _WORDS.get(name, _KINDS.get(kind, "TEXT"))
    if get_origin(kind) is Literal:
        word = "{" + ",".join(get_args(kind)) + "}"
    return group.add_argument(*flags, dest=name, metavar=word, default=default, help=text)


def _add_habits(parser: argparse.ArgumentParser, fields: dict[str, FieldInfo]) -> None:
    """Arguments of vLLM that are accepted, or refused with a reason; help does not show them."""
    for name, habit in HABITS.items():
        if name.replace("-", "_") in fields:
            continue
        options: dict[str, Any] = {"dest": HABIT + name, "help": argparse.SUPPRESS}
        if habit.switch:
            parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, **options)
        else:
            parser.add_argument(f"--{name}", metavar="VALUE", **options)
