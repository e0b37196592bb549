"""The flags of `tpdet diff`."""

from tpdet.arguments.flags import file, flag, switch
from tpdet.client.command import UNVERIFIED, Command

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
    *UNVERIFIED, "enforce_eager", "enable_prefix_caching", "drafts", "draft_model",
    "max_num_batched_tokens", "max_num_seqs",
)  # fmt: skip

DIFF = Command(
    name="diff",
    run="tpdet.tools.diff.command:diff",
    flags=_FLAGS,
    description="Name the first token or bit in which recorded answers differ, pair by pair, "
    "with both tokens and both\nlog-probabilities, and what differs of their requests "
    "(docs/audit.md). No signature is checked, and without\n--trace nothing is computed. The "
    "exit code is 0 if all tokens and bits are equal and 1 if some differ.",
    epilog="  tpdet diff bundle-1.json bundle-2.json\n"
    "  tpdet diff monday.jsonl tuesday.jsonl --json\n"
    "  tpdet diff bundle-1.json bundle-2.json --trace --model models/smollm2 --tp 1,2",
    without=_TRACES_OWN,
)
