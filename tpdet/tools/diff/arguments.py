"""The flags of `tpdet diff`."""

import argparse

from tpdet.arguments.flags import add_command, file, flag, later, switch
from tpdet.client.engine_settings import add_engine_settings

_FORMS = "a bundle, or lines of tpdet generate --json or of tpdet run-batch --record"
_FLAGS = (
    file("first", _FORMS, metavar="A"),
    file("second", "the same, with as many answers", metavar="B"),
    switch("--json", "a line of JSON for each pair of answers that differs, and one for a trace"),
    switch("--trace", "compute the token of the first difference at two sizes, and name the first "
           "operation whose bits differ"),
    flag("--model", "for --trace: Hugging Face directory or hub name"),
    flag("--tp", "for --trace: two tensor-parallel sizes, which may be one twice", default="1,2",
         metavar="N,M"),
)  # fmt: skip
_TRACES_OWN = (
    "share_draws", "fixed_batch", "approximate", "enforce_eager", "enable_prefix_caching",
    "drafts", "draft_model", "max_num_batched_tokens", "max_num_seqs",
)  # fmt: skip


def add_diff(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet diff`."""
    command = add_command(
        commands,
        "diff",
        later("tpdet.tools.diff.command", "diff"),
        _FLAGS,
        description="Name the first token or bit in which recorded answers differ, pair by pair, "
        "with both tokens and both\nlog-probabilities, and what differs of their requests "
        "(docs/audit.md). No signature is checked, and without\n--trace nothing is computed. The "
        "exit code is 0 if all tokens and bits are equal and 1 if some differ.",
        epilog="  tpdet diff bundle-1.json bundle-2.json\n"
        "  tpdet diff monday.jsonl tuesday.jsonl --json\n"
        "  tpdet diff bundle-1.json bundle-2.json --trace --model models/smollm2 --tp 1,2",
    )
    add_engine_settings(command, leave_out=_TRACES_OWN)
