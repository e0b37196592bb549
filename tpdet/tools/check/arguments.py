"""The flags of `tpdet check`."""

import argparse

from tpdet.arguments.flags import add_command, flag, later, switch
from tpdet.client.arguments import add_server
from tpdet.client.engine_settings import add_engine_settings, add_tp

_FLAGS = (
    flag("model", "Hugging Face directory or hub name", nargs="?"),
    flag("answers", "recorded answers", metavar="ANSWERS.jsonl"),
    switch("--json", "JSON lines: each difference with both values, then what was checked"),
)


def add_check(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet check`."""
    command = add_command(
        commands,
        "check",
        later("tpdet.tools.check.command", "check"),
        _FLAGS,
        usage="tpdet check [MODEL] ANSWERS.jsonl [flags]",
        description="Compute recorded answers again, by a model that is loaded here or, without "
        "MODEL, by a running server, and\nname what differs of each: the first token or bit, and "
        "every other field that a reader believes. The\nrecorded tokens are verified as drafts, "
        "many in one step. The exit code is 0 if all are equal and 1 if\none differs.",
        epilog="ANSWERS.jsonl has lines of tpdet generate --json, or of tpdet run-batch --record; "
        "- is standard input.\n\n"
        "  tpdet check models/smollm2 answers.jsonl\n"
        "  tpdet check answers.jsonl --url http://host:8000 --json",
    )
    add_server(command, named=False)
    add_tp(command)
    add_engine_settings(command, leave_out=("share_draws", "fixed_batch", "approximate"))
