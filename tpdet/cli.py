"""The `tpdet` command. Each subcommand imports its code when it runs, so help is instant."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tpdet import __version__
from tpdet.arguments.command_line import Parser
from tpdet.arguments.flags import add_command, add_flags, choice, count, figure, flag
from tpdet.checkpoint.model_config import FAMILY_NAMES, HEAD_SIZES
from tpdet.checkpoint.model_config.known_shapes import SHAPES
from tpdet.errors import UsageError
from tpdet.launch.host.standard_streams import print_utf8, run_command
from tpdet.launch.life.signals import interrupt_at_stop, raising

OVERVIEW = """\
Tensor-parallel, bitwise-deterministic inference: the same request, the same bits.

serve
  tpdet serve MODEL --tp 2              a server of two ranks, with the OpenAI API
  tpdet chat                            talk to it
  tpdet complete "The for statement"    let it continue a text
  tpdet run-batch IN OUT                answer a file of requests
  tpdet stop RUN_DIR                    drain it
  tpdet reload RUN_DIR --model DIR      let it load other weights
  tpdet launch slurm --nodes 2 MODEL    start one on a cluster: slurm, torchrun, mpirun
offline
  tpdet generate MODEL --prompt "Hi"    answer prompts without a server
  tpdet score MODEL FILE                log-probabilities of a text's tokens, bit for bit
  tpdet check MODEL ANSWERS.jsonl       compute recorded answers again, and name what differs
  tpdet diff A B                        where recorded answers begin to differ
  tpdet golden check GOLDEN.json        hold a model or a server to golden answers
  tpdet certify RESULTS                 one hash for all answers of an evaluation
  tpdet audit verify DIR --keys FILE    check signed receipts of answers
  tpdet replay DIR --model M --keys K   compute the answers of signed receipts again
  tpdet tape record -- COMMAND          record an agent's run; check it, or take it another way
  tpdet verify MODEL                    prove that no circumstance changes a bit
  tpdet bench latency MODEL             time the engine, a server, the kernels
  tpdet plan --model qwen3-8b           memory and speed on GPUs that need not be there
  tpdet tune                            measure the GEMM variants of this GPU
  tpdet compile MODEL --gpu h200 --output DIR     a start's kernels, without a GPU
  tpdet make-model DIR --like qwen3     write a small random checkpoint
  tpdet quantise MODEL --format mxfp4 --output DIR     write its weights in fewer bits
  tpdet env                             print what may change bits here

tpdet COMMAND --help says more of each."""

OWN_RANKS = "serve"  # the server itself parses the flags of this command
CLUSTER = "launch"  # the server parses these too, except for the launcher's flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit code is that of the error that ended it."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: _main(arguments))


def _main(arguments: list[str]) -> int:
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if arguments[:1] == [OWN_RANKS]:
        return _serve(arguments[1:])
    if arguments[:1] == [CLUSTER]:
        from tpdet.server.commands.launch import launch_command

        return launch_command(arguments[1:])
    from tpdet.tools.bench.arguments import complete

    options = command_parser().parse_args(complete(arguments))
    if not hasattr(options, "run"):
        print(command_parser().format_help(), end="", file=sys.stderr)
        return UsageError.exit_code
    with raising():
        code: int = options.run(options)
    return code


def command_parser() -> Parser:
    """The parser of `tpdet` and all its commands."""
    parser = Parser(prog="tpdet", usage="tpdet COMMAND ...", description=OVERVIEW)
    parser.add_argument("--version", action="version", version=f"tpdet {__version__}")
    # The overview shows each command with an example; a list would repeat them.
    commands = parser.add_subparsers(metavar="COMMAND", help=argparse.SUPPRESS, prog="tpdet")
    commands.add_parser(OWN_RANKS)
    commands.add_parser(CLUSTER)
    from tpdet.client.arguments import CHAT, COMPLETE
    from tpdet.client.generate import add_generate
    from tpdet.server.commands.stop_and_reload import add_reload, add_stop
    from tpdet.tools.audit.arguments import AUDIT
    from tpdet.tools.bench.arguments import BENCH
    from tpdet.tools.certify.arguments import CERTIFY
    from tpdet.tools.check.arguments import CHECK
    from tpdet.tools.compile.arguments import COMPILE
    from tpdet.tools.diff.arguments import DIFF
    from tpdet.tools.golden.arguments import GOLDEN
    from tpdet.tools.plan.arguments import PLAN
    from tpdet.tools.quantise.arguments import QUANTISE
    from tpdet.tools.replay.arguments import REPLAY
    from tpdet.tools.run_batch.arguments import RUN_BATCH
    from tpdet.tools.score.arguments import SCORE
    from tpdet.tools.tape.arguments import TAPE
    from tpdet.tools.tune.arguments import add_tune
    from tpdet.tools.verify.arguments import add_verify

    commands_in_order = (
        CHAT.add, COMPLETE.add, RUN_BATCH.add, add_generate, add_stop, add_reload, SCORE.add,
        CHECK.add, DIFF.add, GOLDEN.add, CERTIFY.add, AUDIT.add, REPLAY.add, TAPE.add, add_verify,
        BENCH.add, PLAN.add, add_tune, COMPILE.add, _add_make_model, QUANTISE.add, _add_env,
    )  # fmt: skip
    for add in commands_in_order:
        add(commands)
    return parser


def _serve(arguments: list[str]) -> int:
    interrupt_at_stop()  # before the imports, because a stop signal is no failure
    try:
        from tpdet.server.commands.supervised import main as serve
    except KeyboardInterrupt:
        print("tpdet: the start was stopped", file=sys.stderr)
        return 0
    return serve(arguments)


_SIZES = {
    "hidden": (512, "width of the residual stream"),
    "layers": (4, "decoder layers"),
    "heads": (8, "attention heads"),
    "kv-heads": (None, "key heads, which divide the heads (default: half of them)"),
    "head-dim": (
        64, f"width of a head: {', '.join(map(str, HEAD_SIZES))}, or on a CPU any even one",
    ),
    "intermediate": (None, "a multiple of 128 (default: near 3 times --hidden)"),
    "vocab": (2048, "tokens, at least 1024"),
    "context": (4096, "positions"),
    "seed": (0, "of the weights"),
    "shards": (1, "files that the weights are in"),
}  # fmt: skip
"""Flags of `tpdet make-model`: the default and the text of each."""
_WEIGHTS = (
    choice("--dtype", "of weights", "float32", "bfloat16", "float16"),
    figure("--router-skew", "of a mixture: the odds of expert i fall about as (1 + i) ** -S",
           default=0.0, metavar="S"),
    flag("--tie", "output head and embedding are one (default: for qwen2)",
         action=argparse.BooleanOptionalAction, default=None),
)  # fmt: skip


def _add_make_model(commands: argparse._SubParsersAction) -> None:
    command = add_command(
        commands,
        "make-model",
        _make_model,
        [flag("directory", "a new or empty folder", type=Path)],
        help="write a small checkpoint of random weights, with a tokenizer",
        epilog="  tpdet make-model models/small --like qwen3 --layers 2",
    )
    family = command.add_mutually_exclusive_group(required=True)
    family.add_argument("--like", type=_family_name, choices=FAMILY_NAMES, help="its family")
    family.add_argument(
        "--like-config",
        metavar="NAME",
        help=f"only the config.json of one of {', '.join(sorted(SHAPES))}, for --load-format dummy "
        "and token ids; other options do not apply",
    )
    sizes = (count(f"--{name}", text, default=size) for name, (size, text) in _SIZES.items())
    add_flags(command, (*sizes, *_WEIGHTS))


def _family_name(text: str) -> str:
    """A family's name, whose words a hyphen or a dot may join: gpt-oss, qwen3.5.

    The text part of a family that also reads images may be named as the whole.
    """
    name = text.replace("-", "_").replace(".", "_")
    return f"{name}_text" if f"{name}_text" in FAMILY_NAMES else name


def _make_model(options: argparse.Namespace) -> int:
    if options.like_config is not None:
        from tpdet.checkpoint.model_config.known_shapes import write_shape

        print(write_shape(options.directory, options.like_config))
        return 0
    from tpdet.tools.synthetic.make_model import make_model

    given = {
        name: value
        for name, value in vars(options).items()
        if name not in ("run", "directory", "like_config") and value is not None
    }
    try:
        make_model(options.directory, **given)
    except UsageError as error:
        name, _, rest = str(error).partition(" ")
        if name not in given:
            raise
        raise UsageError(f"--{name.replace('_', '-')} {rest}") from None
    print(options.directory)
    return 0


def _add_env(commands: argparse._SubParsersAction) -> None:
    device = choice("--device", "whose facts", "auto", "cpu", "cuda")
    description = "Print what may change bits here, as JSON."
    add_command(commands, "env", _env, [device], description=description)


def _env(options: argparse.Namespace) -> int:
    from tpdet.comm.agreement import collect_facts
    from tpdet.comm.device import resolve_device
    from tpdet.models.fingerprint import architecture

    device = resolve_device(options.device)
    facts = {"tpdet": __version__, "architecture": architecture(device)}
    facts |= collect_facts({}, device)
    print_utf8([json.dumps(facts, indent=1, ensure_ascii=False)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
