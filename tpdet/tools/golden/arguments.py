"""The flags of `tpdet golden`."""

import argparse
from pathlib import Path

from tpdet.arguments.flags import Flag, add_command, flag, later
from tpdet.client.arguments import add_server
from tpdet.client.engine_settings import add_engine_settings, add_tp

_GOLDEN = flag("golden", "a golden file, also one of pytest's", type=Path, metavar="GOLDEN.json")
_MODEL = flag("--model", "Hugging Face directory or hub name; without it a server answers")
_REQUESTS = flag(
    "-i --input-file",
    "requests as tpdet run-batch reads them; their custom_id names the goldens",
    required=True,
    metavar="REQUESTS.jsonl",
)
_COMMANDS: dict[str, tuple[str, tuple[Flag, ...]]] = {
    "record": ("answer requests and keep the answers as golden ones", (_GOLDEN, _REQUESTS, _MODEL)),
    "check": ("verify golden answers as drafts, at prefill speed", (_GOLDEN, _MODEL)),
}
_LEFT_OUT = ("share_draws", "fixed_batch", "approximate")


def add_golden(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet golden record` and `tpdet golden check`."""
    golden = commands.add_parser(
        "golden",
        description="Golden answers: recorded ones that a model or a server is held to, bit for "
        "bit. pytest has the\nfixture `golden` for them.",
        epilog="  tpdet golden record golden.json -i requests.jsonl --model models/smollm2\n"
        "  tpdet golden check golden.json --url http://host:8000",
    )
    group = golden.add_subparsers(required=True, metavar="record|check")
    for name, (text, flags) in _COMMANDS.items():
        command = add_command(
            group,
            name,
            later("tpdet.tools.golden.command", name),
            flags,
            help=text,
            description=f"{text[:1].upper()}{text[1:]}.",
        )
        add_server(command, named=False)
        add_tp(command)
        add_engine_settings(command, leave_out=_LEFT_OUT)
