"""Reads recorded answers: lines of `tpdet generate --json` and of `tpdet run-batch --record`."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tpdet.errors import CheckpointError, NotFoundError, UsageError
from tpdet.launch.ranks.environment import read_environment
from tpdet.llm.recorded import RecordedAnswer, RecordedChoice
from tpdet.server.body.prepare import Preparer
from tpdet.server.body.work import Route, prepare_call
from tpdet.server.wire.problems import ApiError

STDIN = "-"
ROUTES: dict[str, Route] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}


class Asked(msgspec.Struct, frozen=True):
    """A request of a batch: the path and the body that was sent."""

    url: str
    body: dict[str, Any]


class Origin(msgspec.Struct, frozen=True):
    """What computed an answer over HTTP, the seed that was used, and the ids before its schema."""

    contract: str
    weights: str
    seed: int
    json_schema_after: tuple[int, ...] = ()


class ChoiceOverHttp(RecordedChoice, frozen=True):
    """A choice with the ids of its prompt."""

    prompt_token_ids: tuple[int, ...] = ()


class BodyOverHttp(msgspec.Struct, frozen=True):
    """An answer with `return_token_ids`."""

    tpdet: Origin
    choices: tuple[ChoiceOverHttp, ...]


class Response(msgspec.Struct, frozen=True):
    """What a server answered."""

    status_code: int
    body: BodyOverHttp


class BatchLine(msgspec.Struct, frozen=True):
    """A line of `tpdet run-batch --record`."""

    request: Asked
    response: Response


class Line(NamedTuple):
    """A line of a file: its number, and the answer in the form in which it was recorded."""

    number: int
    answer: RecordedAnswer | BatchLine

    @property
    def origin(self) -> RecordedAnswer | Origin:
        """What computed it."""
        found = self.answer
        return found if isinstance(found, RecordedAnswer) else found.response.body.tpdet

    @property
    def choices(self) -> tuple[RecordedChoice, ...]:
        """The recorded choices of all its prompts, in their order."""
        found = self.answer
        if isinstance(found, RecordedAnswer):
            return found.outputs
        return tuple(
            RecordedChoice(choice.token_ids, choice.logprob_bits)
            for choice in found.response.body.choices
        )


def read_lines(path: str) -> list[Line]:
    """The answers of a file.

    Raises NotFoundError, UsageError for a file that cannot be read, CheckpointError naming the
    line that is no recorded answer.
    """
    found = []
    for number, data in enumerate(_read(path).splitlines(), 1):
        if data.strip():
            found.append(Line(number, _decoded(data, f"{path}, line {number}")))
    if not found:
        raise CheckpointError(f"{path} has no answers: record some with tpdet generate --json")
    return found


def requests_of(line: Line, preparer: Preparer) -> Iterator[RecordedAnswer]:
    """The prompts of a line with their answers, as the model reads them.

    Raises CheckpointError for a body that the server would refuse, or whose prompt has other ids.
    """
    if isinstance(line.answer, RecordedAnswer):
        yield line.answer
        return
    asked, found = line.answer.request, line.answer.response.body
    body = {key: value for key, value in asked.body.items() if key not in ("model", "tpdet")}
    try:
        call = prepare_call(ROUTES[asked.url], preparer, body, str(line.number))
    except ApiError as error:
        raise CheckpointError(f"line {line.number}: its request is refused: {error}") from None
    check_same_choices(line, len(call.requests) * call.choices)
    for place, request in enumerate(call.requests):
        choices = found.choices[place * call.choices : (place + 1) * call.choices]
        params = request.params
        if params.form is not None:
            after = found.tpdet.json_schema_after
            params = msgspec.structs.replace(params, json_schema_after=after)
        for choice in choices:
            check_same_prompt(line, choice.prompt_token_ids, request.prompt_token_ids)
        yield RecordedAnswer(
            contract=found.tpdet.contract,
            weights=found.tpdet.weights,
            seed=found.tpdet.seed,
            prompt_token_ids=request.prompt_token_ids,
            params=params,
            outputs=tuple(RecordedChoice(c.token_ids, c.logprob_bits) for c in choices),
        )


def check_same_choices(line: Line, asked: int) -> None:
    """Refuse (CheckpointError) a line with more or fewer choices than its request asks for."""
    if len(line.choices) != asked:
        raise CheckpointError(
            f"line {line.number} has {len(line.choices)} choices, and its request asks for "
            f"{asked}: record it again"
        )


def check_same_prompt(line: Line, recorded: Sequence[int], read: Sequence[int]) -> None:
    """Refuse (CheckpointError) a line whose request has other ids than were recorded."""
    if recorded != read:
        raise CheckpointError(
            f"line {line.number}: the tokenizer makes other ids of the prompt than were recorded: "
            "check it with the tokenizer, the chat template and the --chat-template-date that "
            "made it"
        )


def _decoded(data: bytes, place: str) -> RecordedAnswer | BatchLine:
    try:
        fields = msgspec.json.decode(data)
        if isinstance(fields, dict) and "response" in fields:
            if fields.get("error") is not None:
                raise ValueError("its request failed: leave the line out")
            found = msgspec.json.decode(data, type=BatchLine)
            if found.request.url not in ROUTES:
                raise ValueError(f"url {found.request.url!r} is none of {', '.join(ROUTES)}")
            return found
        return msgspec.json.decode(data, type=RecordedAnswer)
    except (msgspec.DecodeError, ValueError) as error:
        raise CheckpointError(
            f"{place} is no recorded answer ({error}): take lines of tpdet generate --json, or of "
            "tpdet run-batch --record"
        ) from None


def _read(path: str) -> bytes:
    try:
        if path != STDIN:
            return Path(path).read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"{path} does not exist: give a file of recorded answers") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    ranks = read_environment().size
    if ranks > 1:
        raise UsageError(f"- reaches one process only, not all {ranks} ranks: give a file")
    return sys.stdin.buffer.read()
