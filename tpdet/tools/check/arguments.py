"""The flags of `tpdet check`."""

from tpdet.arguments.flags import flag, switch
from tpdet.client.command import SERVER, UNVERIFIED, Command

_FLAGS = (
    flag("model", "Hugging Face directory or hub name", nargs="?"),
    flag("answers", "recorded answers", metavar="ANSWERS.jsonl"),
    switch("--json", "JSON lines: each difference with both values, then what was checked"),
)

CHECK = Command(
    name="check",
    run="tpdet.tools.check.command:check",
    flags=_FLAGS,
    usage="tpdet check [MODEL] ANSWERS.jsonl [flags]",
    description="Compute recorded answers again, by a model that is loaded here or, without "
    "MODEL, by a running server, and\nname what differs of each: the first token or bit, and "
    "every other field that a reader believes. The\nrecorded tokens are verified as drafts, "
    "many in one step. The exit code is 0 if all are equal and 1 if\none differs.",
    epilog="ANSWERS.jsonl has lines of tpdet generate --json, or of tpdet run-batch --record; "
    "- is standard input.\n\n"
    "  tpdet check models/smollm2 answers.jsonl\n"
    "  tpdet check answers.jsonl --url http://host:8000 --json",
    server=SERVER,
    ranks=True,
    without=UNVERIFIED,
)
