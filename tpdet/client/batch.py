"""Files of requests in OpenAI's batch format, and their answers by a running server.

What a line is stands in `tpdet/requests/body/batch_lines.py`.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tpdet.client.connection import Connection, HttpError
from tpdet.client.input_file import numbered_lines, read_input
from tpdet.errors import NotFoundError, NotPermittedError, TpdetError, UsageError
from tpdet.requests.body.batch_lines import (
    BatchLineError,
    BatchLines,
    BatchRequest,
    Json,
    answered_line,
    failed_line,
    refused_line,
)
from tpdet.requests.routes import TEMPLATED


def read_requests(path: str) -> list[BatchRequest]:
    """The requests of a file. Raises what `read_input` raises, UsageError for a malformed line."""
    lines, requests = BatchLines(), []
    for number, data in numbered_lines(read_input(path, "give a file of requests")):
        try:
            requests.append(lines.read(number, data))
        except BatchLineError as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
    return requests


def answers_by_server(
    connection: Connection, requests: Sequence[BatchRequest], width: int
) -> Iterator[Json]:
    """The output lines, in the order of the requests, of which at most `width` are in flight.

    Raises NotFoundError and NotPermittedError: no other request would do.
    """
    with ThreadPoolExecutor(width) as pool:
        running: deque[Future[Json]] = deque()
        for index, request in enumerate(requests):
            if len(running) >= 2 * width:
                yield running.popleft().result()
            running.append(pool.submit(_answer, connection, index, request))
        while running:
            yield running.popleft().result()


def _answer(connection: Connection, index: int, request: BatchRequest) -> Json:
    """One line of the output."""
    name, custom_id = f"batch_req_{index}", request.custom_id
    try:
        body = connection.post_patiently(request.url, request.body)
    except (NotFoundError, NotPermittedError):
        raise
    except TpdetError as error:
        if isinstance(error, HttpError) and error.body is not None:
            return refused_line(name, custom_id, error.request_id, error.status, error.body)
        return failed_line(name, custom_id, error.code, str(error))
    return answered_line(name, custom_id, body.get("id"), body)


def recorded_body(url: str, body: dict[str, Any], date: str | None) -> dict[str, Any]:
    """A body whose answer can be checked: it asks for ids, and has the date of a chat template."""
    body = {**body, "return_token_ids": True}
    if date is not None and url in TEMPLATED:
        variables = body.get("chat_template_kwargs") or {}
        body["chat_template_kwargs"] = {"current_date": date, **variables}
    return body
