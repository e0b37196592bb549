"""The flags of `tpdet check`; what runs it is imported then."""

import argparse

from tpdet.client.arguments import add_server
from tpdet.client.engine_settings import add_engine_settings, add_tp


def add_check(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet check`."""
    command = commands.add_parser(
        "check",
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
    command.add_argument("model", nargs="?", help="Hugging Face directory or hub name")
    command.add_argument("answers", metavar="ANSWERS.jsonl", help="recorded answers")
    command.add_argument(
        "--json",
        action="store_true",
        help="JSON lines: each difference with both values, then what was checked",
    )
    add_server(command, named=False)
    add_tp(command)
    add_engine_settings(command, leave_out=("share_draws", "fixed_batch", "approximate"))
    command.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    from tpdet.tools.check.command import check

    return check(options)
