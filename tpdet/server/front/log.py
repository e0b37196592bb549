"""The log of the HTTP process: a line for each answered request, and errors of its event loop.

Neither holds a query, a prompt or a key.
"""

import logging
from typing import Any

from starlette.types import Scope

from tpdet.launch.life.log_lines import Log
from tpdet.launch.life.log_lines import open_log as open_process_log

MAX_PATH_CHARACTERS = 128
CLIENT_GONE = 499
"""The status in the log of a request whose client went away before an answer began."""

_access = logging.getLogger("tpdet.access")


def open_log(access: bool, index: int = 0) -> Log:
    """Send this process's log to standard error; without `access`, not each request.

    index: of several HTTP processes, this one's number.

    To be called once, before anything else logs.
    """
    log = open_process_log(f"http {index}" if index else "http")
    _access.setLevel(logging.INFO if access else logging.CRITICAL)
    # One line for each client that sends garbage would let it write our log.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    return log


def log_access(
    scope: Scope,
    request_id: str,
    status: int,
    milliseconds: float,
    tokens: tuple[int, int] | None = None,
) -> None:
    """One request's line, at the end of its answer; `tokens` are the prompt's and those generated.

    The query is left out: a client may have put a key into it.
    """
    if not _access.isEnabledFor(logging.INFO):
        return
    host, port = scope.get("client") or ("-", 0)
    path = ascii(scope["path"][:MAX_PATH_CHARACTERS])[1:-1]
    counted = ""
    if tokens is not None:
        counted = f" prompt_tokens={tokens[0]} completion_tokens={tokens[1]}"
    _access.info(
        "%s %s status=%d%s latency_ms=%.1f request=%s client=%s:%d",
        *(scope["method"], path, status, counted, milliseconds, request_id, host, port),
    )


def log_loop_problem(loop: Any, context: dict[str, Any]) -> None:
    """An event loop's exception handler that shows no exception's message."""
    logging.getLogger("tpdet.server").error(
        "%s", context["message"], exc_info=context.get("exception")
    )
