"""`tpdet stop` and `tpdet reload`: commands to a running server through its run directory."""

import argparse
import sys
from pathlib import Path

from tpdet.errors import UsageError

LONGEST_PATIENCE = 86400.0


def add_stop(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet stop RUN_DIR`."""
    command = commands.add_parser("stop", help="drain a running server", allow_abbrev=False)
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    command.add_argument("--timeout", type=float, default=60.0, help="seconds to wait")
    command.set_defaults(run=_stop)


def add_reload(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet reload RUN_DIR`."""
    command = commands.add_parser(
        "reload", help="let a running server load other weights", allow_abbrev=False
    )
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    command.add_argument(
        "--model",
        default="",
        metavar="DIR_OR_NAME",
        help="checkpoint of the same shapes (default: the server's --model)",
    )
    command.add_argument(
        "--patience",
        type=float,
        default=600.0,
        help="seconds that running requests get to finish; new ones are refused meanwhile",
    )
    command.set_defaults(run=_reload)


def _stop(options: argparse.Namespace) -> int:
    from tpdet.launch.life.stop import stop

    _check_run_dir(options.run_dir)
    return stop(options.run_dir, options.timeout, print)


def _reload(options: argparse.Namespace) -> int:
    from tpdet.launch.life.reload_request import reload

    _check_run_dir(options.run_dir)
    if not 0.0 <= options.patience <= LONGEST_PATIENCE:
        raise UsageError(
            f"--patience {options.patience:g} is out of range [0, {LONGEST_PATIENCE:g}]"
        )
    answer = reload(options.run_dir, options.model, options.patience)
    if answer.exit:
        print(f"tpdet: {answer.message}", file=sys.stderr)
    else:
        print(f"{answer.message}: {answer.system_fingerprint}")
    return answer.exit


def _check_run_dir(path: Path) -> None:
    if not path.is_dir():
        raise UsageError(f"{path} is not a run directory: see --run-dir of tpdet serve")
