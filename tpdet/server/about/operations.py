"""Summaries and descriptions of the API's operations, for the schema and the page."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from tpdet.requests.routes import PATHS, Route, path_of


class Operation(NamedTuple):
    """A short summary, and the content of an answer."""

    summary: str
    description: str


class _Tables(msgspec.Struct):
    """What `operations.json` has: of routes, other paths, control routes, batches; then remedies
    for paths that other servers have."""

    routes: dict[Route, Operation]
    paths: dict[str, Operation]
    control: dict[str, Operation]
    batches: dict[str, Operation]
    elsewhere: dict[str, str]


_TABLES = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=_Tables)


def _of_path(path: str, route: Route) -> Operation:
    named, first = _TABLES.routes[route], path_of(route)
    return named if path == first else named._replace(description=f"Another name of {first}.")


CALL_OPERATIONS = {path: _of_path(path, route) for path, route in PATHS.items()}
"""Those that ask for a model's text, ids or numbers, by POST."""
OPERATIONS = CALL_OPERATIONS | _TABLES.paths
CONTROL_OPERATIONS = _TABLES.control
"""Of the control routes, which only a server that was started with them has."""
BATCH_OPERATIONS = _TABLES.batches
"""Files and batches are had with --batch-dir alone."""
FILE_ROUTES = ("/v1/files",)
"""Bodies to these are files, which are worked on as they come."""
ELSEWHERE = _TABLES.elsewhere
"""Paths of other servers: what to use here instead."""
LONGEST = 4  # segments of a path here or in ELSEWHERE, at most


def not_found(path: str) -> str:
    """The message of a 404 for a path.

    A wrong base URL leaves the path that was meant at the end: after /v1 twice, two slashes,
    another server's prefix, or with a slash behind it.
    """
    if path.startswith("/v1/responses/"):
        return (
            "responses are not stored, nor compacted or counted: POST /v1/responses with the whole "
            "conversation as input"
        )
    parts = [part for part in path.split("/") if part][-LONGEST:]
    for begin in range(len(parts)):
        meant = "/" + "/".join(parts[begin:])
        if meant in OPERATIONS:
            return f"there is nothing at this path: use {meant}"
        if meant in ELSEWHERE:
            return f"there is nothing at this path: {ELSEWHERE[meant]}"
    return (
        "there is nothing at this path: GET /openapi.json lists what there is, GET /v1/models the "
        "model, and a browser shows both at /docs"
    )
