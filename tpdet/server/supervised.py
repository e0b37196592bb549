"""`tpdet serve`: checks the flags, then starts `--tp` ranks under a supervisor.

The flags are those of `python -m tpdet.serve`, which runs them, and `--tp`.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tpdet.errors import UsageError
from tpdet.launch.faults import read_faults
from tpdet.launch.supervise import serve
from tpdet.server.settings import load_settings, make_parser

MAX_RANKS = 64


def serve_command(arguments: Sequence[str]) -> int:
    """Run a server of `--tp` ranks until it ends; the exit code of SERVER.md.

    Raises UsageError and NotFoundError before anything is started.
    """
    given, rest = split_ranks(arguments)
    settings = load_settings(rest, "tpdet serve")
    ranks = given or settings.world.tp or 1
    if settings.world.nodes > 1:
        raise UsageError(
            f"the settings are for {settings.world.nodes} nodes, tpdet serve starts the ranks of "
            "one host: run torchrun -m tpdet.serve with the same settings on each node"
        )
    read_faults(settings.server.allow_faults)
    return serve(
        ranks,
        rest,
        _run_directory(settings.server.run_dir),
        step_timeout=settings.engine.step_timeout,
        drain_timeout=settings.server.drain_timeout,
    )


def split_ranks(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """The tensor-parallel size, if one is given, and the arguments that are for the ranks."""
    if any(argument in ("-h", "--help") for argument in arguments):
        parser = make_parser("tpdet serve")
        _add_ranks(parser)
        parser.parse_args(["--help"])
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    _add_ranks(parser)
    try:
        options, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise UsageError(f"{error}: see tpdet serve --help") from error
    if options.tp is not None and not 1 <= options.tp <= MAX_RANKS:
        raise UsageError(f"--tp {options.tp} is out of range [1, {MAX_RANKS}]")
    return options.tp, rest


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tensor-parallel-size",
        "-tp",
        "--tp",
        dest="tp",
        type=int,
        default=None,
        help="ranks to start (default: tp of --config, else 1)",
    )


def _run_directory(given: str | None) -> Path:
    """The run directory, a new one under the temporary directory unless one is named."""
    if given is not None:
        return Path(given)
    return Path(tempfile.mkdtemp(prefix=f"tpdet-{os.getuid()}-"))
