"""Reads recorded answers: lines of `tpdet generate --json` and of `tpdet run-batch --record`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tpdet.audit.recorded import RecordedAnswer, RecordedChoice, check_version
from tpdet.checkpoint.model_config.json_file import parse_json_object
from tpdet.client.input_file import numbered_lines, read_by_each_rank, text_of
from tpdet.errors import CheckpointError, RequestError
from tpdet.requests.body.batch_lines import answered_line, with_seed
from tpdet.requests.engine_facts import RAW_LOGPROBS, LogprobsMode
from tpdet.requests.routes import MESSAGES, RECORDED, RESPONSES

CHANGED = "or the record was changed"
_FORMS = "take lines of tpdet generate --json, or of tpdet run-batch --record"
_BODY = "response.body"
_THOUGHTS = frozenset({"reasoning_tokens", "thinking_tokens"})
_CUT = {MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
"""The limits that a server cuts to its context, by the route."""


class SentRequest(msgspec.Struct, frozen=True):
    """A request of a batch: the path and the body that was sent."""

    url: str
    body: dict[str, Any]


class Origin(msgspec.Struct, frozen=True):
    """What computed an answer over HTTP, the seeds and the limit that were used, and so on.

    seed: of all prompts; where they had others, seeds has each one's. json_schema_after: the ids
    before its schema.
    """

    contract: str
    weights: str
    seed: int | None
    seeds: tuple[int, ...] = ()
    json_schema_after: tuple[int, ...] = ()
    max_tokens: int | None = None
    replay_version: int = 1
    logprobs_mode: LogprobsMode = RAW_LOGPROBS

    def __post_init__(self) -> None:
        if (self.seed is None) is not (len(self.seeds) > 1):
            raise ValueError("one seed is for all prompts, or seeds are for each: not both")

    def seeds_of(self, prompts: int, where: str) -> tuple[int, ...]:
        """The seed of each prompt. Raises CheckpointError for another number of prompts."""
        seeds = self.seeds if self.seed is None else (self.seed,) * prompts
        if len(seeds) != prompts:
            raise CheckpointError(
                f"{where} has {len(seeds)} seeds for {prompts} prompts: record it again, {CHANGED}"
            )
        return seeds


class ChoiceOverHttp(RecordedChoice, frozen=True):
    """A choice with the ids of its prompt."""

    prompt_token_ids: tuple[int, ...] = ()


def bare_choice(choice: ChoiceOverHttp) -> RecordedChoice:
    """The ids of a choice and their bits alone."""
    return RecordedChoice(choice.token_ids, choice.logprob_bits)


class BodyOverHttp(msgspec.Struct, frozen=True):
    """An answer with `return_token_ids`."""

    tpdet: Origin
    choices: tuple[ChoiceOverHttp, ...]


def is_one_choice(body: Any) -> bool:
    """Whether a body is a message or a response, which is the one choice of its answer."""
    is_object = isinstance(body, dict)
    return is_object and (body.get("type") == "message" or body.get("object") == "response")


def body_over_http(body: Any) -> BodyOverHttp:
    """What a body says of its choices. Raises msgspec.ValidationError."""
    return msgspec.convert(_with_choices(body), BodyOverHttp)


def _with_choices(body: Any) -> Any:
    return {"tpdet": body.get("tpdet"), "choices": [body]} if is_one_choice(body) else body


class Response(msgspec.Struct, frozen=True):
    """What a server answered."""

    body: BodyOverHttp


class BatchLine(msgspec.Struct, frozen=True):
    """A line of `tpdet run-batch --record`."""

    request: SentRequest
    response: Response


class Line(NamedTuple):
    """A line: its number, JSON and recorded answer; name: what messages call it, if not line N."""

    number: int
    fields: dict[str, Any]
    answer: RecordedAnswer | BatchLine
    name: str = ""

    @property
    def where(self) -> str:
        """What messages call it."""
        return self.name or f"line {self.number}"

    @property
    def origin(self) -> RecordedAnswer | Origin:
        """What computed it."""
        answer = self.answer
        return answer if isinstance(answer, RecordedAnswer) else answer.response.body.tpdet

    @property
    def choices(self) -> tuple[RecordedChoice, ...]:
        """The recorded choices of all its prompts, in their order."""
        answer = self.answer
        if isinstance(answer, RecordedAnswer):
            return answer.outputs
        return tuple(map(bare_choice, answer.response.body.choices))

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
        if not offline and is_one_choice(self.body):
            return [self.body]
        return self.fields["outputs"] if offline else self.body["choices"]

    @property
    def body(self) -> dict[str, Any]:
        """The body that a server answered."""
        return self.fields["response"]["body"]

    @property
    def is_split(self) -> bool:
        """Whether a server split reasoning off from the content, or would have."""
        if isinstance(self.answer, RecordedAnswer):
            return False
        usage = self.body.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        details = usage.get("completion_tokens_details"), usage.get("output_tokens_details")
        if self.body.get("object") == "response":  # has the count always
            return bool(details[1] and details[1].get("reasoning_tokens"))
        return any(isinstance(one, dict) and _THOUGHTS & one.keys() for one in details)

    def path(self, choice: int) -> str:
        """Where a choice stands in the line."""
        if isinstance(self.answer, RecordedAnswer):
            return f"outputs[{choice}]"
        return _BODY if self.answer.request.url in _CUT else f"{_BODY}.choices[{choice}]"


class Question(NamedTuple):
    """A request over HTTP that is to be answered and recorded: a path, a body and a name.

    seed: used where the body has none; split: whether reasoning is split off.
    """

    name: str
    url: str
    body: dict[str, Any]
    seed: int = 0
    split: bool = False

    @property
    def seeded_body(self) -> dict[str, Any]:
        """The body with a seed."""
        return with_seed(self.body, self.seed)

    def line(self, body: dict[str, Any]) -> dict[str, Any]:
        """A line of `run-batch --record` with an answer's body."""
        line = answered_line("batch_req_0", self.name, body["id"], body)
        return line | {"request": {"url": self.url, "body": self.body}}


def read_lines(path: str) -> list[Line]:
    """The answers of a file.

    Raises NotFoundError, NotPermittedError, CheckpointError naming the line that is no recorded
    answer, and UsageError for standard input under a launcher.
    """
    data = read_by_each_rank(path, "give a file of recorded answers")
    lines = [_read(line, path, number) for number, line in numbered_lines(data)]
    if not lines:
        raise CheckpointError(f"{path} has no answers: record some with tpdet generate --json")
    return lines


def check_same_choices(line: Line, asked: int) -> None:
    """Refuse (CheckpointError) a line with more or fewer choices than its request asks for."""
    if len(line.choices) != asked:
        raise CheckpointError(
            f"{line.where} has {len(line.choices)} choices, and its request asks for "
            f"{asked}: record it again, {CHANGED}"
        )


def check_same_prompt(line: Line, recorded: Sequence[int], read: Sequence[int]) -> None:
    """Refuse (CheckpointError) a line whose request has other ids than were recorded."""
    if tuple(recorded) != tuple(read):
        raise CheckpointError(
            f"{line.where}: the tokenizer makes other ids of the prompt than were recorded: "
            "check it with the tokenizer, the chat template and the --chat-template-date that "
            f"made it, {CHANGED}"
        )


def asked_body(line: Line, answer: BatchLine) -> dict[str, Any]:
    """What was asked, as it is asked again: with the seeds that were used.

    What the server chose by its own context is what the answer says.
    """
    left_out = ("model", "stream", "stream_options")
    body = {key: value for key, value in answer.request.body.items() if key not in left_out}
    origin = answer.response.body.tpdet
    body["seed"] = origin.seed
    limits = (body.get("max_tokens"), body.get("max_completion_tokens"))
    chosen, is_cut = origin.max_tokens, answer.request.url in _CUT
    if (is_cut or limits == (None, None)) and chosen is not None:
        body[_CUT.get(answer.request.url, "max_tokens")] = chosen
    return body


def line_of(fields: dict[str, Any], where: str, number: int = 1, name: str = "") -> Line:
    """A recorded answer of its JSON. Raises CheckpointError, in which `where` names it."""
    try:
        line = Line(number, fields, _decoded(fields), name)
        check_version(line.origin.replay_version, where)
    except RequestError as error:
        raise CheckpointError(str(error)) from None
    except (msgspec.DecodeError, ValueError) as error:
        raise CheckpointError(f"{where} is no recorded answer ({error}): {_FORMS}") from None
    return line


def _read(data: bytes, path: str, number: int) -> Line:
    where = f"{path}, line {number}"
    fields = parse_json_object(text_of(data, where, _FORMS), where, _FORMS)
    return line_of(fields, where, number)


def _decoded(fields: dict[str, Any]) -> RecordedAnswer | BatchLine:
    """Raises ValueError with what is wrong."""
    if "response" not in fields:
        answer = msgspec.convert(fields, RecordedAnswer, str_keys=True)
        if answer.params.max_tokens is None:
            raise ValueError(f"params.max_tokens is null, {CHANGED}")
        return answer
    if fields.get("error") is not None:
        raise ValueError("its request failed: leave the line out")
    response = fields["response"]
    if isinstance(response, dict) and "body" in response:
        body = _with_choices(response["body"])
        fields = {**fields, "response": {**response, "body": body}}
    line = msgspec.convert(fields, BatchLine)
    if line.request.url not in RECORDED:
        known = ", ".join(RECORDED)
        raise ValueError(f"url {line.request.url!r} is none of {known}")
    body = line.request.body
    as_recorded = {
        "return_token_ids": body.get("return_token_ids") is True,
        "stream": body.get("stream") in (None, False),
    }
    if wrong := [name for name, same in as_recorded.items() if not same]:
        raise ValueError(f"its request has another {wrong[0]} than is recorded, {CHANGED}")
    return line
