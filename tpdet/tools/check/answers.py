"""Reads recorded answers: lines of `tpdet generate --json` and of `tpdet run-batch --record`."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from tpdet.checkpoint.model_config.json_file import parse_json_object
from tpdet.client.input_file import numbered_lines, read_by_each_rank, text_of
from tpdet.errors import CheckpointError, RequestError
from tpdet.llm.recorded import RecordedAnswer, RecordedChoice, check_version
from tpdet.requests.body.work import Route

ROUTES: dict[str, Route] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
CHANGED = "or the record was changed"
_FORMS = "take lines of tpdet generate --json, or of tpdet run-batch --record"
_BODY = "response.body"


class BatchRequest(msgspec.Struct, frozen=True):
    """A request of a batch: the path and the body that was sent."""

    url: str
    body: dict[str, Any]


class Origin(msgspec.Struct, frozen=True):
    """What computed an answer over HTTP, the seed and the limit that were used, and so on.

    json_schema_after: the ids before its schema.
    """

    contract: str
    weights: str
    seed: int
    json_schema_after: tuple[int, ...] = ()
    max_tokens: int | None = None
    replay_version: int = 1


class ChoiceOverHttp(RecordedChoice, frozen=True):
    """A choice with the ids of its prompt."""

    prompt_token_ids: tuple[int, ...] = ()


class BodyOverHttp(msgspec.Struct, frozen=True):
    """An answer with `return_token_ids`."""

    tpdet: Origin
    choices: tuple[ChoiceOverHttp, ...]


class Response(msgspec.Struct, frozen=True):
    """What a server answered."""

    body: BodyOverHttp


class BatchLine(msgspec.Struct, frozen=True):
    """A line of `tpdet run-batch --record`."""

    request: BatchRequest
    response: Response


class Line(NamedTuple):
    """A line of a file: its number, its JSON, and the answer in the form of its record."""

    number: int
    fields: dict[str, Any]
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

    @property
    def tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def is_bare(self) -> bool:
        """Whether it is what `LLM.record` makes alone: no text, no reason, no fingerprint."""
        return "system_fingerprint" not in self.fields and isinstance(self.answer, RecordedAnswer)

    @property
    def shown_choices(self) -> list[dict[str, Any]]:
        """The choices as they are shown."""
        offline = isinstance(self.answer, RecordedAnswer)
        found: list[dict[str, Any]] = self.fields["outputs"] if offline else self.body["choices"]
        return found

    @property
    def body(self) -> dict[str, Any]:
        """The body that a server answered."""
        found: dict[str, Any] = self.fields["response"]["body"]
        return found

    @property
    def is_split(self) -> bool:
        """Whether a server split reasoning off from the content, or would have."""
        if isinstance(self.answer, RecordedAnswer):
            return False
        usage = self.body.get("usage")
        details = usage.get("completion_tokens_details") if isinstance(usage, dict) else None
        return isinstance(details, dict) and "reasoning_tokens" in details

    def path(self, choice: int) -> str:
        """Where a choice stands in the line."""
        offline = isinstance(self.answer, RecordedAnswer)
        return f"outputs[{choice}]" if offline else f"{_BODY}.choices[{choice}]"


def read_lines(path: str) -> list[Line]:
    """The answers of a file.

    Raises NotFoundError, NotPermittedError, CheckpointError naming the line that is no recorded
    answer, and UsageError for standard input under a launcher.
    """
    data = read_by_each_rank(path, "give a file of recorded answers")
    found = [Line(number, *_read(line, path, number)) for number, line in numbered_lines(data)]
    if not found:
        raise CheckpointError(f"{path} has no answers: record some with tpdet generate --json")
    return found


def check_same_choices(line: Line, asked: int) -> None:
    """Refuse (CheckpointError) a line with more or fewer choices than its request asks for."""
    if len(line.choices) != asked:
        raise CheckpointError(
            f"line {line.number} has {len(line.choices)} choices, and its request asks for "
            f"{asked}: record it again, {CHANGED}"
        )


def check_same_prompt(line: Line, recorded: Sequence[int], read: Sequence[int]) -> None:
    """Refuse (CheckpointError) a line whose request has other ids than were recorded."""
    if tuple(recorded) != tuple(read):
        raise CheckpointError(
            f"line {line.number}: the tokenizer makes other ids of the prompt than were recorded: "
            "check it with the tokenizer, the chat template and the --chat-template-date that "
            f"made it, {CHANGED}"
        )


def asked_body(line: Line, answer: BatchLine) -> dict[str, Any]:
    """What was asked, as it is asked again: with the seed that was used.

    What the server chose by its own context is what the answer says.
    """
    left_out = ("model", "stream", "stream_options")
    body = {key: value for key, value in answer.request.body.items() if key not in left_out}
    body["seed"] = answer.response.body.tpdet.seed
    limits = (body.get("max_tokens"), body.get("max_completion_tokens"))
    chosen = answer.response.body.tpdet.max_tokens
    if limits == (None, None) and chosen is not None:
        body["max_tokens"] = chosen
    return body


def _read(data: bytes, path: str, number: int) -> tuple[dict[str, Any], RecordedAnswer | BatchLine]:
    place = f"{path}, line {number}"
    try:
        fields = parse_json_object(text_of(data, place, _FORMS), place, _FORMS)
        answer = _decoded(fields)
        version = answer.replay_version if isinstance(answer, RecordedAnswer) else 1
        if isinstance(answer, BatchLine):
            version = answer.response.body.tpdet.replay_version
        check_version(version, place)
    except RequestError as error:
        raise CheckpointError(str(error)) from None
    except CheckpointError:
        raise
    except (msgspec.DecodeError, ValueError) as error:
        raise CheckpointError(f"{place} is no recorded answer ({error}): {_FORMS}") from None
    return fields, answer


def _decoded(fields: dict[str, Any]) -> RecordedAnswer | BatchLine:
    """Raises ValueError with what is wrong."""
    if "response" not in fields:
        answer = msgspec.convert(fields, RecordedAnswer, str_keys=True)
        if answer.params.max_tokens is None:
            raise ValueError(f"params.max_tokens is null, {CHANGED}")
        return answer
    if fields.get("error") is not None:
        raise ValueError("its request failed: leave the line out")
    found = msgspec.convert(fields, BatchLine)
    if found.request.url not in ROUTES:
        raise ValueError(f"url {found.request.url!r} is none of {', '.join(ROUTES)}")
    wrong = [name for name, wanted in _as_recorded(found) if not wanted]
    if wrong:
        raise ValueError(f"its request has another {wrong[0]} than is recorded, {CHANGED}")
    return found


def _as_recorded(found: BatchLine) -> Iterator[tuple[str, bool]]:
    """What the body of a recorded request says, and whether it does."""
    body = found.request.body
    yield "return_token_ids", body.get("return_token_ids") is True
    yield "stream", body.get("stream") in (None, False)
