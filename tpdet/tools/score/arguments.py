"""The flags of `tpdet score`; what runs it is imported then."""

import argparse

from tpdet.arguments.command_line import whole_number
from tpdet.client.engine_settings import add_engine_settings, add_tp
from tpdet.requests.field_ranges import ALTERNATIVES

_TOP = ALTERNATIVES.high


def add_score(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet score`."""
    command = commands.add_parser(
        "score",
        usage="tpdet score MODEL (FILE | --prompt TEXT | --tokens FILE) [flags]",
        description="Print the tokens of a text and the log-probability of each, given all before "
        "it: the same fp32\nbits at every tensor-parallel size and --max-num-batched-tokens. The "
        "first token has none.",
        epilog="Settings may also stand in TPDET_ variables (TPDET_MAX_MODEL_LEN) and in the file "
        "of --config,\nas for tpdet serve.\n\n"
        '  tpdet score models/smollm2 --prompt "The for statement"\n'
        "  tpdet score models/smollm2 README.md --top 3 --json | head",
    )
    command.add_argument("model", nargs="?", help="Hugging Face directory or hub name")
    command.add_argument(
        "file", nargs="?", metavar="FILE", help="UTF-8 text, read byte for byte; - for stdin"
    )
    command.add_argument("--prompt", action="append", metavar="TEXT", help="the text itself")
    command.add_argument(
        "--tokens",
        action="append",
        metavar="FILE",
        help="a JSON list of token ids, scored as they are; - for stdin",
    )
    command.add_argument(
        "--add-special-tokens",
        action=argparse.BooleanOptionalAction,
        help="begin a text as the tokenizer does (a BOS token, if it has one), as /v1/completions "
        "does (default: on)",
    )
    command.add_argument(
        "--top",
        type=whole_number,
        default=0,
        help=f"also the N likeliest tokens of each position, at most {_TOP} (default 0)",
    )
    command.add_argument(
        "--json",
        action="store_true",
        help="JSON lines: what was computed, each token with its fp32 bits, the totals",
    )
    add_tp(command)
    add_engine_settings(command, leave_out=("chat_template", "chat_template_date", "share_draws"))
    command.set_defaults(run=_score)


def _score(options: argparse.Namespace) -> int:
    from tpdet.tools.score.command import score

    return score(options)
