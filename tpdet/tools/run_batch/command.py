"""`tpdet run-batch`: the answers to a file of requests, by a server or by a model loaded here."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, NamedTuple

from tpdet.arguments.command_line import check_counts
from tpdet.client.batch import answers_by_server, read_requests, recorded_body
from tpdet.client.commands import connect, refuse_server
from tpdet.client.input_file import STDIN
from tpdet.errors import NotFoundError, UsageError
from tpdet.requests.answer.messages import problem_body
from tpdet.requests.body.batch_lines import (
    BatchRequest,
    Json,
    answered_line,
    line_digest,
    output_digest,
    refused_line,
)
from tpdet.requests.body.problems import ApiError
from tpdet.requests.routes import TEMPLATED

_BY_SERVER, _BY_MODEL = 64, 1024


class Paths(NamedTuple):
    """What the command line names; model: None where a server answers."""

    model: str | None
    source: str
    target: str


def run_batch(options: argparse.Namespace) -> int:
    """Answer the file; 1 when some request failed. Raises UsageError for a malformed line."""
    check_counts(options, "concurrency")
    paths = _paths(options)
    begin, digests, failed = time.monotonic(), [], 0
    with ExitStack() as stack:
        requests = read_requests(paths.source)
        _refuse_same_file(paths)
        answers = _by_server if paths.model is None else _by_model
        output: IO[str] | None = None
        for request, answer in answers(stack, options, paths, requests):
            # Only now: what is refused as a whole leaves the file as it was.
            output = output or _open(stack, paths.target)
            if options.record:
                answer["request"] = {"url": request.url, "body": request.body}
            output.write(json.dumps(answer, ensure_ascii=False) + "\n")
            output.flush()
            digests.append(line_digest(answer))
            failed += answer["error"] is not None
            if sys.stderr.isatty():
                print(f"\r{len(digests)} of {len(requests)}", end="", file=sys.stderr, flush=True)
        if output is None:
            _open(stack, paths.target)
    start, seconds = "\n" if sys.stderr.isatty() else "", time.monotonic() - begin
    print(
        f"{start}{len(digests)} requests, {failed} failed, {seconds:.1f} s\n"
        f"output digest {output_digest(digests)}",
        file=sys.stderr,
    )
    return 1 if failed else 0


Answers = Iterator[tuple[BatchRequest, Json]]


def _by_server(
    stack: ExitStack, options: argparse.Namespace, paths: Paths, requests: list[BatchRequest]
) -> Answers:
    """Each request as it was sent, and its line, in their order."""
    if options.tp is not None:
        raise UsageError("--tp is for a model that is loaded here: leave it out beside a server")
    connection = connect(options)
    model = options.model or connection.model()
    date = None
    if options.record and any(request.url in TEMPLATED for request in requests):
        date = connection.get("/tokenizer_info").get("chat_template_date")
    sent = [_complete(request, model, options.record, date) for request in requests]
    width = options.concurrency or _BY_SERVER
    return zip(sent, answers_by_server(connection, sent, width), strict=True)


def _by_model(
    stack: ExitStack, options: argparse.Namespace, paths: Paths, requests: list[BatchRequest]
) -> Answers:
    """As `_by_server`. Raises what `LLM` raises, and UsageError under a launcher."""
    from tpdet.tools.check.answers import Question
    from tpdet.tools.check.by_model import ModelCheck, open_model, refuse_launcher

    assert paths.model is not None
    refuse_server(options, paths.model)
    refuse_launcher("a batch is answered")
    name = options.model or Path(paths.model).resolve().name
    options.model = paths.model
    llm = stack.enter_context(open_model(options))
    check = ModelCheck(llm, name)
    date = None if llm.tokenizer is None else llm.tokenizer.info()["chat_template_date"]
    sent = [_complete(request, name, options.record, date) for request in requests]
    together = options.concurrency or _BY_MODEL
    for start in range(0, len(sent), together):
        group = sent[start : start + together]
        bodies = check.answer_all([Question(*request) for request in group], use_tqdm=False)
        for index, (request, body) in enumerate(zip(group, bodies, strict=True), start):
            yield request, _line(f"batch_req_{index}", request, body)


def _line(name: str, request: BatchRequest, body: Json | ApiError) -> Json:
    custom_id = request.custom_id
    if isinstance(body, ApiError):
        refused = json.loads(problem_body(body, request.url, custom_id))
        return refused_line(name, custom_id, None, body.status, refused)
    return answered_line(name, custom_id, body["id"], body)


def _complete(request: BatchRequest, model: str, record: bool, date: str | None) -> BatchRequest:
    """The request with a model and a seed, and with all that a check of its answer needs.

    date: what the chat template prints; it is noted in the request, and so kept.
    """
    body = {"model": model, **request.seeded_body}
    return request._replace(body=recorded_body(request.url, body, date) if record else body)


def _paths(options: argparse.Namespace) -> Paths:
    """The model and the files. Raises UsageError where they are too few or too many."""
    named: Sequence[str] = options.paths
    files = [one for one in (options.input_file, options.output_file) if one is not None]
    if len(files) == 0 and len(named) in (2, 3):
        model, (source, target) = (named[0] if len(named) == 3 else None), named[-2:]
        return Paths(model, source, target)
    if len(files) == 2 and len(named) < 2:
        return Paths(named[0] if named else None, *files)
    raise UsageError(
        "name the requests and the answers once: tpdet run-batch [MODEL] IN.jsonl OUT.jsonl, or "
        "tpdet run-batch [MODEL] -i IN.jsonl -o OUT.jsonl"
    )


def _refuse_same_file(paths: Paths) -> None:
    """Refuse (UsageError) to write over the requests."""
    source, target = paths.source, paths.target
    if STDIN not in (source, target) and Path(target).exists() and Path(target).samefile(source):
        raise UsageError(f"{target} holds the requests: name another file for the answers")


def _open(stack: ExitStack, path: str) -> IO[str]:
    """Where answers are written."""
    if path == STDIN:
        return sys.stdout
    try:
        return stack.enter_context(open(path, "w", encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: there is no such directory: make it first") from error
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}): name another file for the answers"
        ) from error
