"""The flags of `tpdet certify`."""

from tpdet.arguments.flags import flag, switch
from tpdet.client.command import Command

_FLAGS = (
    flag("results", "files of one evaluation", nargs="+", metavar="RESULTS"),
    flag("--task", "a task's version, where no file has it; may be repeated", action="append",
         default=[], metavar="NAME=VERSION"),
    flag("--expect", "the certificate that it must be; any other is exit code 1",
         metavar="CERTIFICATE"),
    switch("--json", "one JSON line"),
)  # fmt: skip

CERTIFY = Command(
    name="certify",
    run="tpdet.tools.certify.command:certify",
    flags=_FLAGS,
    description="Print one hash over the replay digests of all answers of an evaluation and "
    "its tasks' versions: the\nsame for any order, batch size, concurrency, tensor-parallel "
    "size and restart.",
    epilog="RESULTS are lines of tpdet generate --json or tpdet run-batch, or results of "
    "lm-eval, inspect-ai or\npromptfoo (docs/golden.md has the recipes). An answer without a "
    "digest is refused by name.\n\n"
    "  tpdet certify answers.jsonl\n"
    "  tpdet certify results_*.json samples_*.jsonl answers.jsonl --json",
)
