"""`tpdet serve`: checks the flags, then starts `--tp` ranks under a supervisor.

The flags are those of `python -m tpdet.serve`. Settings are resolved here, once: the ranks get them
as flags, the API key's digest and the run secret in the run directory, and nothing of either in
their environment.
"""

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tpdet.errors import UsageError
from tpdet.launch.faults import read_faults
from tpdet.launch.log_lines import open_log
from tpdet.launch.run_secret import given_secret
from tpdet.launch.supervise import serve
from tpdet.server.setting_sources import forget_settings
from tpdet.server.settings import SETTINGS, load_settings

_log = logging.getLogger("tpdet.server")


def serve_command(arguments: Sequence[str]) -> int:
    """Run a server of `--tp` ranks until it ends; the exit code of docs/server.md.

    Raises UsageError and NotFoundError before anything is started.
    """
    settings = load_settings(arguments, "tpdet serve")
    if settings.world.nodes > 1:
        raise UsageError(
            f"the settings are for {settings.world.nodes} nodes, tpdet serve starts the ranks of "
            "one host: run torchrun -m tpdet.serve with the same settings on each node"
        )
    read_faults(settings.server.allow_faults)
    secret = given_secret(settings.server.run_secret_file)
    forget_settings(SETTINGS)
    open_log("serve")
    for note in settings.notes:
        _log.warning("%s", note)
    return serve(
        settings.world.tp or 1,
        settings.rank_arguments(),
        _run_directory(settings.server.run_dir),
        step_timeout=settings.engine.step_timeout,
        drain_timeout=settings.server.drain_timeout,
        secret=secret,
        key_digest=settings.api_key_digest,
    )


def _run_directory(given: str | None) -> Path:
    """The run directory, a new one under the temporary directory unless one is named."""
    if given is not None:
        return Path(given)
    return Path(tempfile.mkdtemp(prefix=f"tpdet-{os.getuid()}-"))
