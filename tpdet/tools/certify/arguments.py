"""The flags of `tpdet certify`."""

import argparse

from tpdet.arguments.flags import add_command, flag, later, switch

_FLAGS = (
    flag("results", "files of one evaluation", nargs="+", metavar="RESULTS"),
    flag("--task", "a task's version, where no file has it; may be repeated", action="append",
         default=[], metavar="NAME=VERSION"),
    flag("--expect", "the certificate that it must be; any other is exit code 1",
         metavar="CERTIFICATE"),
    switch("--json", "one JSON line"),
)  # fmt: skip


def add_certify(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet certify`."""
    add_command(
        commands,
        "certify",
        later("tpdet.tools.certify.command", "certify"),
        _FLAGS,
        description="Print one hash over the replay digests of all answers of an evaluation and "
        "its tasks' versions: the\nsame for any order, batch size, concurrency, tensor-parallel "
        "size and restart.",
        epilog="RESULTS are lines of tpdet generate --json or tpdet run-batch, or results of "
        "lm-eval, inspect-ai or\npromptfoo (docs/golden.md has the recipes). An answer without a "
        "digest is refused by name.\n\n"
        "  tpdet certify answers.jsonl\n"
        "  tpdet certify results_*.json samples_*.jsonl answers.jsonl --json",
    )
