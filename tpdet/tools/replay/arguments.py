"""The flags of `tpdet replay`."""

import argparse

from tpdet.arguments.flags import add_command, count, file, flag, later, switch
from tpdet.client.engine_settings import add_engine_settings, add_tp

_FLAGS = (
    file("path", "a bundle, or what --audit-dir named", metavar="BUNDLE|DIR"),
    flag("--model", "Hugging Face directory or hub name, with the weights of the receipts",
         required=True),
    file("--keys", "the keys to trust, and no others", metavar="KEYS.json", required=True),
    count("--sample", "replay so many receipts of a directory, drawn at random (default: all)",
          metavar="N"),
    switch("--json", "a line of JSON for each receipt that is not equal, then one for all"),
)  # fmt: skip


def add_replay(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet replay`."""
    command = add_command(
        commands,
        "replay",
        later("tpdet.tools.replay.command", "replay"),
        _FLAGS,
        usage="tpdet replay BUNDLE|DIR --model MODEL --keys KEYS.json [flags]",
        description="Verify receipts, as tpdet audit verify does, and compute their answers again "
        "(docs/audit.md). The\nrecorded tokens are verified as drafts, many in one step. An answer "
        "that differs is computed again\nin other layouts, which tell whether the receipt or this "
        "machine is wrong. The exit code is 0 if\nall are equal, 1 if an answer differs, 65 for a "
        "wrong signature, receipt or log, 66 where all\ncontent was erased, 70 for a failure here, "
        "and 78 for other weights or another contract.",
        epilog="  tpdet replay bundle.json --model models/smollm2 --keys keys.json\n"
        "  tpdet replay AUDIT_DIR --model models/smollm2 --keys keys.json --sample 100 --tp 2",
    )
    add_tp(command)
    add_engine_settings(command, leave_out=("share_draws", "fixed_batch", "approximate"))
