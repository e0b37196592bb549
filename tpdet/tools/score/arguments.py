"""The flags of `tpdet score`."""

import argparse

from tpdet.arguments.flags import count, flag, switch
from tpdet.client.command import Command
from tpdet.requests.field_ranges import ALTERNATIVES

_TOP = ALTERNATIVES.high
_FLAGS = (
    flag("model", "Hugging Face directory or hub name", nargs="?"),
    flag("file", "UTF-8 text, read byte for byte; - for stdin", nargs="?", metavar="FILE"),
    flag("--prompt", "the text itself", action="append", type=str, metavar="TEXT"),
    flag("--tokens", "a JSON list of token ids, scored as they are; - for stdin",
         action="append", metavar="FILE"),
    flag("--add-special-tokens",
         "begin a text as the tokenizer does (a BOS token, if it has one), as /v1/completions "
         "does (default: on)", action=argparse.BooleanOptionalAction),
    count("--top", f"also the N likeliest tokens of each position, at most {_TOP} (default 0)",
          default=0),
    switch("--json", "JSON lines: what was computed, each token with its fp32 bits, the totals"),
)  # fmt: skip

SCORE = Command(
    name="score",
    run="tpdet.tools.score.command:score",
    flags=_FLAGS,
    usage="tpdet score MODEL (FILE | --prompt TEXT | --tokens FILE) [flags]",
    description="Print the tokens of a text and the log-probability of each, given all before "
    "it: the same fp32\nbits at every tensor-parallel size and --max-num-batched-tokens. The "
    "first token has none.",
    epilog="Settings may also stand in TPDET_ variables (TPDET_MAX_MODEL_LEN) and in the file "
    "of --config,\nas for tpdet serve.\n\n"
    '  tpdet score models/smollm2 --prompt "The for statement"\n'
    "  tpdet score models/smollm2 README.md --top 3 --json | head",
    ranks=True,
    without=("chat_template", "chat_template_date", "share_draws", "logprobs_mode"),
)
