"""`tpdet run-batch`: a file of requests in OpenAI's batch format, answered by a running server.

A line of the input is {"custom_id", "method": "POST", "url": "/v1/chat/completions" or
"/v1/completions", "body"}, a line of the output {"id", "custom_id", "response": {"status_code",
"request_id", "body"}, "error"}, in the order of the input; what the server refuses has its status
and body, and where the server was lost, "response" is null. With --record it also has the "request"
that was sent, and its answer the ids and bits that `tpdet check` reads.
"""

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from tpdet.arguments.command_line import check_counts
from tpdet.client.commands import connect
from tpdet.client.connection import Connection, HttpError
from tpdet.client.input_file import STDIN, numbered_lines, read_input, text_of
from tpdet.errors import NotFoundError, NotPermittedError, TpdetError, UsageError

CHATS = "/v1/chat/completions"
ROUTES = (CHATS, "/v1/completions")
_KEYS = {"custom_id", "method", "url", "body"}


def batch_command(options: argparse.Namespace) -> int:
    """Answer the file; 1 when some request failed. Raises UsageError for a malformed line."""
    check_counts(options, "concurrency")
    connection = connect(options)
    model = options.model or connection.model()
    begin, done, failed = time.monotonic(), 0, 0
    with ExitStack() as stack:
        requests = _requests(options.input_file)
        _refuse_same_file(options.input_file, options.output_file)
        output = _open(stack, options.output_file)
        pool = stack.enter_context(ThreadPoolExecutor(options.concurrency))
        if options.record:
            chats = any(request["url"] == CHATS for request in requests)
            date = connection.get("/tokenizer_info").get("chat_template_date") if chats else None
            requests = [_recorded(request, model, date) for request in requests]
        for answer in _in_order(pool, options.concurrency, connection, model, requests):
            if options.record:
                asked = requests[done]
                answer["request"] = {"url": asked["url"], "body": asked["body"]}
            output.write(json.dumps(answer, ensure_ascii=False) + "\n")
            output.flush()
            done += 1
            failed += answer["error"] is not None
            if sys.stderr.isatty():
                print(f"\r{done} of {len(requests)}", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - begin
    start = "\n" if sys.stderr.isatty() else ""
    print(f"{start}{done} requests, {failed} failed, {seconds:.1f} s", file=sys.stderr)
    return 1 if failed else 0


def _in_order(
    pool: ThreadPoolExecutor,
    width: int,
    connection: Connection,
    model: str,
    requests: list[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """The answers, in the order of the requests, with a few ahead under way."""
    running: deque[Future[dict[str, Any]]] = deque()
    for index, request in enumerate(requests):
        if len(running) >= 2 * width:
            yield running.popleft().result()
        running.append(pool.submit(_answer, connection, model, index, request))
    while running:
        yield running.popleft().result()


def _answer(
    connection: Connection, model: str, index: int, request: dict[str, Any]
) -> dict[str, Any]:
    """One line of the output. Raises NotFoundError and NotPermittedError: no other would do."""
    found: dict[str, Any] = {"id": f"batch_req_{index}", "custom_id": request["custom_id"]}
    try:
        body = connection.post_patiently(request["url"], {"model": model, **request["body"]})
    except (NotFoundError, NotPermittedError):
        raise
    except TpdetError as error:
        said: dict[str, Any] | None = None  # where the server was lost it sent no status
        if isinstance(error, HttpError):
            sent = {"status_code": error.status, "request_id": error.request_id}
            said = {**sent, "body": error.body}
        return found | {"response": said, "error": {"code": error.code, "message": str(error)}}
    said = {"status_code": 200, "request_id": body.get("id"), "body": body}
    return found | {"response": said, "error": None}


def _recorded(request: dict[str, Any], model: str, date: str | None) -> dict[str, Any]:
    """The request whose answer can be checked: one with token ids and bits, and with its model.

    date: what the server's chat template prints; it is noted in the request, and so kept.
    """
    body = {"model": model, **request["body"], "return_token_ids": True}
    if date is not None and request["url"] == CHATS:
        given = body.get("chat_template_kwargs") or {}
        body["chat_template_kwargs"] = {"current_date": date, **given}
    return {**request, "body": body}


def _requests(path: str) -> list[dict[str, Any]]:
    """The requests of a file. Raises what `read_input` and `_request` raise."""
    remedy = "give a file of requests"
    data = read_input(path, remedy)
    return [
        _request(text_of(line, f"{path}, line {number}", remedy), number, path)
        for number, line in numbered_lines(data)
    ]


def _request(line: str, number: int, name: str) -> dict[str, Any]:
    """A line of the input, checked. Raises UsageError naming file and line."""
    where = f"{name}, line {number}"
    try:
        found = json.loads(line)
    except RecursionError:
        raise UsageError(f"{where} is nested too deeply: no request is") from None
    except ValueError as error:
        raise UsageError(f"{where} is no JSON: {error}") from None
    if (
        not isinstance(found, dict)
        or not found.keys() <= _KEYS
        or not _KEYS - {"method"} <= (found.keys())
    ):
        raise UsageError(f"{where} does not have the keys custom_id, method, url and body")
    if found.get("method", "POST") != "POST" or found["url"] not in ROUTES:
        raise UsageError(f"{where}: use method POST and url {' or '.join(ROUTES)}")
    if not isinstance(found["custom_id"], str) or not isinstance(found["body"], dict):
        raise UsageError(f"{where}: custom_id is text and body an object")
    if found["body"].get("stream"):
        raise UsageError(f"{where}: a batch has no streams: leave stream out")
    return found


def _refuse_same_file(source: str, target: str) -> None:
    """Refuse (UsageError) to write over the requests."""
    if "-" not in (source, target) and Path(target).exists() and Path(target).samefile(source):
        raise UsageError(f"{target} holds the requests: name another file by --output-file")


def _open(stack: ExitStack, path: str) -> IO[str]:
    """Where answers are written."""
    if path == STDIN:
        return sys.stdout
    try:
        return stack.enter_context(open(path, "w", encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: there is no such directory: make it first") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be used: {error.strerror}") from error
