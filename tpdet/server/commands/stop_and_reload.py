"""`tpdet stop` and `tpdet reload`: commands to a running server through its run directory."""

import argparse
import sys
from pathlib import Path

from tpdet.arguments.flags import add_command, flag
from tpdet.errors import UsageError

LONGEST_PATIENCE = 86400.0


_RUN_DIR = flag("run_dir", "", type=Path, metavar="RUN_DIR")
_STOP = (_RUN_DIR, flag("--timeout", "seconds to wait", type=float, default=60.0))
_RELOAD = (
    _RUN_DIR,
    flag("--model", "checkpoint of the same shapes (default: the server's --model)", default="",
         metavar="DIR_OR_NAME"),
    flag("--patience",
         "seconds that running requests get to finish; new ones are refused meanwhile",
         type=float, default=600.0),
)  # fmt: skip


def add_stop(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet stop RUN_DIR`."""
    add_command(commands, "stop", _stop, _STOP, help="drain a running server")


def add_reload(commands: argparse._SubParsersAction) -> None:
    """Add `tpdet reload RUN_DIR`."""
    text = "let a running server load other weights"
    add_command(commands, "reload", _reload, _RELOAD, help=text)


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
