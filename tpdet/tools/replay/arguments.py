"""The flags of `tpdet replay`."""

from tpdet.arguments.flags import count, file, flag, switch
from tpdet.client.command import UNVERIFIED, Command

_FLAGS = (
    file("path", "a bundle, or what --audit-dir named", metavar="BUNDLE|DIR"),
    flag("--model", "Hugging Face directory or hub name, with the weights of the receipts",
         required=True),
    file("--keys", "the keys to trust, and no others", metavar="KEYS.json", required=True),
    count("--sample", "replay so many receipts of a directory, drawn at random (default: all)",
          metavar="N"),
    switch("--json", "a line of JSON for each receipt that is not equal, then one for all"),
)  # fmt: skip

REPLAY = Command(
    name="replay",
    run="tpdet.tools.replay.command:replay",
    flags=_FLAGS,
    usage="tpdet replay BUNDLE|DIR --model MODEL --keys KEYS.json [flags]",
    description="Verify receipts, as tpdet audit verify does, and compute their answers again "
    "(docs/audit.md). The\nrecorded tokens are verified as drafts, many in one step. An answer "
    "that differs is computed again\nin other layouts, which tell whether the receipt or this "
    "machine is wrong. The exit code is 0 if\nall are equal, 1 if an answer differs, 65 for a "
    "wrong signature, receipt or log, 66 where all\ncontent was erased, 70 for a failure here, "
    "and 78 for other weights or another contract.",
    epilog="  tpdet replay bundle.json --model models/smollm2 --keys keys.json\n"
    "  tpdet replay AUDIT_DIR --model models/smollm2 --keys keys.json --sample 100 --tp 2",
    ranks=True,
    without=UNVERIFIED,
)
