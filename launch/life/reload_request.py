"""The files in the run directory by which `tpdet reload` asks a server for other weights.

    reload.json        {"id", "model", "patience"}: the request; one at a time
    reload-done.json   {"id", "exit", "code", "message", "system_fingerprint"}: its result

Whoever may write into the run directory (mode 0700) may reload and stop the server. No port or
socket is involved, and hence no API key.
"""

import os
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tpdet.errors import NotFoundError, PeerLostError, ResourceError
from tpdet.launch.host.whole_file import read_json, write_json
from tpdet.launch.life.run_directory import RunDirectory

REQUEST = "reload.json"
ANSWER = "reload-done.json"
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class ReloadRequest:
    """A request for the weights of `model`; if empty, of the present model's directory again.

    `patience`: seconds that running requests get to finish before the reload is given up.
    """

    id: str
    model: str
    patience: float


@dataclass(frozen=True)
class ReloadAnswer:
    """Done if `exit` is 0; else the old weights serve on, and `message` says why."""

    id: str
    exit: int
    code: str
    message: str
    system_fingerprint: str


def pending_reload(run: RunDirectory) -> ReloadRequest | None:
    """The request that is not answered yet; None if there is none, or none that can be read."""
    path = run.path / REQUEST
    try:
        owner = path.lstat().st_uid
    except OSError:
        return None
    content = read_json(path) if owner == os.geteuid() else None
    try:
        request = ReloadRequest(**(content or {}))
        known = isinstance(request.id, str) and isinstance(request.model, str)
        if known and isinstance(request.patience, int | float):
            return request
    except TypeError:
        pass
    with suppress(OSError):
        path.unlink()  # else nobody could ask again
    return None


def answer_reload(run: RunDirectory, answer: ReloadAnswer) -> None:
    """Write the result, and make room for the next request."""
    write_json(run.path / ANSWER, asdict(answer))
    with suppress(OSError):
        (run.path / REQUEST).unlink()


def reload(run_dir: Path, model: str, patience: float) -> ReloadAnswer:
    """Ask the server of a run directory for other weights, and wait for its answer.

    A path is taken from the caller's working directory. Raises NotFoundError if no server runs
    here, ResourceError if a reload is under way, PeerLostError if the server ends meanwhile.
    """
    run = RunDirectory(run_dir.absolute(), session="")
    leader = next((record for record in run.local_records() if record.rank == 0), None)
    if leader is None or not leader.runs:
        raise NotFoundError(f"no server of this host runs in {run_dir}")
    if Path(model).exists() and model:
        model = str(Path(model).absolute())
    request = ReloadRequest(secrets.token_hex(16), model, patience)
    if not write_json(run.path / REQUEST, asdict(request), only_first=True):
        raise ResourceError(f"another reload of {run_dir} is under way: wait for it")
    while True:
        content = read_json(run.path / ANSWER)
        if content is not None and content.get("id") == request.id:
            return ReloadAnswer(**content)
        if not leader.runs:
            raise PeerLostError(f"the server of {run_dir} ended before the reload was done")
        time.sleep(_POLL_SECONDS)
