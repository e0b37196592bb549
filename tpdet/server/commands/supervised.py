"""`tpdet serve`: checks the flags, then starts `--tp` ranks under a supervisor.

The flags are those of `python -m tpdet.serve`. Settings are resolved here, once: the ranks get them
as flags, the API key's digest and the run secret in the run directory, and nothing of either in
their environment.
"""

import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tpdet.errors import TpdetError, UsageError
from tpdet.launch.host.resources import resource_error
from tpdet.launch.life.faults import read_faults
from tpdet.launch.life.lifecycle import print_fatal
from tpdet.launch.life.log_lines import open_log
from tpdet.launch.life.run_secret import given_secret
from tpdet.launch.life.signals import interrupt_at_stop
from tpdet.launch.start.supervise import serve
from tpdet.server.commands.preflight import check_start
from tpdet.server.settings.settings import load_settings
from tpdet.server.settings.sources import forget_settings

_log = logging.getLogger("tpdet.server")


def main(arguments: Sequence[str]) -> int:
    """Run `serve_command` and print its error as one last line; an exit code of docs/server.md.

    A stop signal before the ranks start ends it with 0.
    """
    interrupt_at_stop()
    try:
        return serve_command(arguments)
    except KeyboardInterrupt:
        print("tpdet: the start was stopped", file=sys.stderr)
        return 0
    except Exception as error:
        found = resource_error(error) or error
        if not isinstance(found, TpdetError):
            raise
        print_fatal(found.code, found.exit_code, message=str(found))
        return found.exit_code


def serve_command(arguments: Sequence[str]) -> int:
    """Check the settings, start; the server's exit code. Raises TpdetError before the start."""
    settings = load_settings(arguments, "tpdet serve")
    ranks = settings.world.tp or 1
    if settings.world.nodes > 1:
        raise UsageError(
            f"the settings are for {settings.world.nodes} nodes, tpdet serve starts the ranks of "
            "one host: run torchrun -m tpdet.serve with the same settings on each node"
        )
    read_faults(settings.server.allow_faults)
    secret = given_secret(settings.server.run_secret_file)
    forget_settings()
    open_log("serve")
    for note in settings.notes:
        _log.warning("%s", note)
    check_start(settings, ranks)
    with run_directory(settings.server.run_dir) as run_dir:
        return serve(
            ranks,
            settings.rank_arguments(),
            run_dir,
            step_timeout=settings.engine.step_timeout,
            drain_timeout=settings.server.drain_timeout,
            secret=secret,
            key_digest=settings.api_key_digest,
        )


@contextmanager
def run_directory(given: str | None) -> Iterator[Path]:
    """The run directory, unless one is named a new temporary one, which goes with the server."""
    if given is not None:
        yield Path(given)
        return
    prefix = f"tpdet-{os.getuid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        yield Path(name)
