"""The `tpdet` command. Each subcommand imports what it needs when it runs, so help is instant."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tpdet import __version__
from tpdet.errors import TpdetError
from tpdet.kernels.order import DEFAULT_FOLD_ORDER

OWN_RANKS = "serve"  # this command's flags are parsed by the server itself
CLUSTER = "launch"  # so are this command's, but for the launcher's own


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit code is that of the error that ended it."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == [OWN_RANKS]:
            return _serve(arguments[1:])
        if arguments[:1] == [CLUSTER]:
            return _launch(arguments[1:])
        options = _parser().parse_args(_complete(arguments))
        return options.run(options)
    except TpdetError as error:
        print(f"tpdet: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tpdet",
        description="Tensor-parallel, bitwise-deterministic inference.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tpdet {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("serve", help="start a server of N ranks (see tpdet serve --help)")
    commands.add_parser("launch", help="start on a cluster (see tpdet launch --help)")
    from tpdet.server.commands import add_reload, add_stop

    for add in (
        _add_generate,
        _add_verify,
        _add_bench,
        _add_tune,
        _add_plan,
        _add_make_model,
        _add_env,
        add_stop,
        add_reload,
    ):
        add(commands)
    return parser


def _complete(arguments: list[str]) -> list[str]:
    from tpdet.bench.arguments import complete

    return complete(arguments)


def _serve(arguments: list[str]) -> int:
    from tpdet.server.supervised import serve_command

    return serve_command(arguments)


def _launch(arguments: list[str]) -> int:
    from tpdet.server.launch_command import launch_command

    return launch_command(arguments)


def _add_generate(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("generate", help="answer prompts offline", allow_abbrev=False)
    command.add_argument("model", help="Hugging Face directory or hub name")
    command.add_argument("--prompt", action="append", required=True, help="may be given again")
    command.add_argument("--max-tokens", type=int, default=64)
    command.add_argument("--temperature", type=float, default=0.0)
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument("--top-k", type=int, default=-1)
    command.add_argument("--seed", type=int, default=None)
    command.add_argument("-n", type=int, default=1, help="choices of each prompt")
    command.add_argument("--dtype", default="auto")
    command.add_argument("--fold-order", default=DEFAULT_FOLD_ORDER)
    command.add_argument("--row-layers", default="fold", choices=["fold", "gather"])
    command.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    command.add_argument("--json", action="store_true", help="one JSON object a prompt")
    command.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> int:
    import msgspec

    from tpdet.llm import LLM
    from tpdet.request import SamplingParams

    params = SamplingParams(
        n=options.n,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
    )
    llm = LLM(
        options.model,
        dtype=options.dtype,
        fold_order=options.fold_order,
        row_layers=options.row_layers,
        device=options.device,
    )
    for output in llm.generate(options.prompt, params):
        if options.json:
            print(msgspec.json.encode(output).decode())
        else:
            print("\n".join(choice.text for choice in output.outputs))
    llm.close()
    return 0


def _add_verify(commands: argparse._SubParsersAction) -> None:
    from tpdet.verify.arguments import add_verify

    add_verify(commands)


def _add_bench(commands: argparse._SubParsersAction) -> None:
    from tpdet.bench.arguments import add_bench

    add_bench(commands)


def _add_tune(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "tune", help="measure GEMM variants and write the shape table of this GPU",
        allow_abbrev=False,
    )  # fmt: skip
    command.add_argument(
        "--model-shape", default="qwen3-8b,llama-3-70b", help="names of well-known models"
    )
    command.add_argument("--tp", default="1,2,4", help="tensor-parallel sizes")
    command.add_argument(
        "--row-layers",
        default="fold",
        help="gather: only what it takes in addition; or both: fold,gather",
    )
    command.add_argument("--max-rows", type=int, default=8192, help="rows in a step, at most")
    command.add_argument("--repeats", type=int, default=10, help="replays of each finalist")
    command.add_argument("--output", type=Path, help="table to write; the package's own if none")
    command.set_defaults(run=_tune)


def _tune(options: argparse.Namespace) -> int:
    from tpdet.tune.run import tune_command

    return tune_command(options)


def _add_plan(commands: argparse._SubParsersAction) -> None:
    from tpdet.planner.arguments import add_plan

    add_plan(commands)


def _add_make_model(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "make-model", help="write a small random checkpoint", allow_abbrev=False
    )
    command.add_argument("directory", type=Path)
    kind = command.add_mutually_exclusive_group(required=True)
    kind.add_argument("--like", choices=["llama", "mistral", "qwen2", "qwen3"])
    kind.add_argument(
        "--like-config",
        metavar="NAME",
        help="only the config.json of qwen3-8b or llama-3-8b, for --load-format dummy and token "
        "ids; other options do not apply",
    )
    for name, default in (
        ("hidden", 512), ("layers", 4), ("heads", 8), ("kv-heads", None), ("head-dim", 64),
        ("intermediate", None), ("vocab", 2048), ("context", 4096), ("seed", 0), ("shards", 1),
    ):  # fmt: skip
        command.add_argument(f"--{name}", type=int, default=default)
    command.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    command.add_argument("--tie", action=argparse.BooleanOptionalAction, default=None)
    command.set_defaults(run=_make_model)


def _make_model(options: argparse.Namespace) -> int:
    if options.like_config is not None:
        from tpdet.model_shapes import write_shape

        print(write_shape(options.directory, options.like_config))
        return 0
    from tpdet.make_model import make_model

    given = {
        name: value
        for name, value in vars(options).items()
        if name not in ("run", "directory", "like_config") and value is not None
    }
    make_model(options.directory, **given)
    print(options.directory)
    return 0


def _add_env(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("env", help="print what may change bits on this machine")
    command.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    command.set_defaults(run=_env)


def _env(options: argparse.Namespace) -> int:
    from tpdet.comm.agreement import collect_facts
    from tpdet.comm.device import resolve_device
    from tpdet.receipt import architecture

    device = resolve_device(options.device)
    facts = {"tpdet": __version__, "architecture": architecture(device)}
    facts |= collect_facts({}, device)
    print(json.dumps(facts, indent=1, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
