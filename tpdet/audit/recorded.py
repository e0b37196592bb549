"""Recorded answers: request, ids, bits, and the first difference of two. Needs no torch."""

import json
import struct
from base64 import b64encode
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from tpdet.audit.replay import VERSIONS, DigestOrigin, replay_digest
from tpdet.control.row_messages import SampledToken
from tpdet.errors import DisagreementError, RequestError
from tpdet.requests.engine_facts import RAW_LOGPROBS, LogprobsMode
from tpdet.requests.request import Request, SamplingParams

_BEFORE, _BEHIND = 24, 40
"""Characters shown of a text around the place where it differs."""


class RecordedChoice(msgspec.Struct, frozen=True):
    """A choice's token ids, and the bits of their log-probabilities as 8 hex digits each."""

    token_ids: tuple[int, ...]
    logprob_bits: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprob_bits):
            raise ValueError(
                f"{len(self.token_ids)} token_ids and {len(self.logprob_bits)} logprob_bits"
            )


class RecordedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, how it was sampled, and its answer; `outputs` has a choice for each of `n`.

    contract, weights: contract id and model digest, 64 hex digits each. replay_digest: of the
    answer, in the version that it names. logprobs_mode: what the bits are of. Its JSON is part of
    a line of `tpdet generate --json`.
    """

    contract: str
    weights: str
    seed: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    outputs: tuple[RecordedChoice, ...]
    replay_digest: str | None = None
    replay_version: int = VERSIONS[0]
    logprobs_mode: LogprobsMode = RAW_LOGPROBS

    @property
    def tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.outputs)

    def line(self, output: Any) -> bytes:
        """A line of `tpdet generate --json`: an answer's fields beside those of its record."""
        return msgspec.json.encode({**builtins_of(self), **builtins_of(output)})


class Scored(msgspec.Struct, frozen=True):
    """A token id and the bits of its log-probability."""

    id: int
    bits: str

    @property
    def logprob(self) -> float:
        """The number that the bits are. Raises ValueError or struct.error for bits of no fp32."""
        return struct.unpack(">f", bytes.fromhex(self.bits))[0]


class Difference(msgspec.Struct, frozen=True):
    """The first place of an answer where recorded and computed differ.

    position: in the choice's output, from 0. None stands for an answer that has ended before it.
    """

    choice: int
    position: int
    recorded: Scored | None
    computed: Scored | None

    def __str__(self) -> str:
        place = f"choice {self.choice}, position {self.position}"
        return f"{place}: recorded {_shown(self.recorded)}, computed {_shown(self.computed)}"


class ChangedPart(msgspec.Struct, frozen=True):
    """A field of an answer that is not what was computed.

    part: its path, such as `outputs[0].text`. A value is None too where one of the two lacks it.
    """

    part: str
    recorded: Any
    computed: Any
    is_recorded: bool = True
    is_computed: bool = True

    @property
    def equal(self) -> bool:
        """Whether both are there and one JSON value; 1 and 1.0 are one number, 1 and true not."""
        there = self.is_recorded and self.is_computed
        same_kind = isinstance(self.recorded, bool) is isinstance(self.computed, bool)
        return there and same_kind and bool(self.recorded == self.computed)

    def __str__(self) -> str:
        begin = _first_place(self.recorded, self.computed)
        theirs = _shown_value(self.recorded, begin) if self.is_recorded else "nothing"
        ours = _shown_value(self.computed, begin) if self.is_computed else "nothing"
        return f"{self.part}: recorded {theirs}, computed {ours}"


def builtins_of(value: Any) -> dict[str, Any]:
    """The fields of a result; arrays (`routed_experts`) are base64 of their bytes, as over HTTP."""

    def encode(array: Any) -> str:
        return b64encode(array.tobytes()).decode()

    return msgspec.to_builtins(value, enc_hook=encode)


def digest_of(answer: RecordedAnswer, eos_token_ids: tuple[int, ...]) -> str:
    """The replay digest of a recorded answer, in its own version, with the ids that end a text."""
    request = Request(
        request_id="recorded",
        prompt_token_ids=answer.prompt_token_ids,
        params=answer.params,
        eos_token_ids=eos_token_ids,
    )
    version, mode = answer.replay_version, answer.logprobs_mode
    origin = DigestOrigin(answer.seed, answer.contract, answer.weights, version, mode)
    return replay_digest([request], [map(tokens_of, answer.outputs)], origin)


def tokens_of(choice: RecordedChoice) -> list[SampledToken]:
    """The ids and log-probabilities of a choice whose bits were computed here."""
    bits = bytes.fromhex("".join(choice.logprob_bits))
    values = struct.unpack(f">{len(choice.logprob_bits)}f", bits)
    return [SampledToken(*pair) for pair in zip(choice.token_ids, values, strict=True)]


def first_difference(
    recorded: Sequence[RecordedChoice], computed: Sequence[RecordedChoice]
) -> Difference | None:
    """The first difference by choice, then position; None where all ids and bits are equal."""
    for choice, (theirs, ours) in enumerate(zip(recorded, computed, strict=True)):
        if theirs == ours:
            continue
        pairs = zip_longest(_scored(theirs), _scored(ours))
        for position, (one, other) in enumerate(pairs):
            if one != other:
                return Difference(choice, position, one, other)
    return None


def check_recorded(
    answer: RecordedAnswer,
    place: str,
    contract: str,
    weights: str,
    vocab_size: int,
    mode: LogprobsMode = RAW_LOGPROBS,
) -> None:
    """Refuse an answer of another contract or other weights (DisagreementError), or of no form.

    Also one whose log-probabilities are not of this mode.
    """
    for name, theirs, ours in (
        ("contract", answer.contract, contract),
        ("model digest", answer.weights, weights),
    ):
        if theirs != ours:
            raise DisagreementError(
                f"{place} was computed with {name} {theirs}, and this model has {ours}: check it "
                "with the model and the settings that made it"
            )
    check_mode(answer.logprobs_mode, mode, place)
    check_version(answer.replay_version, place)
    if len(answer.outputs) != answer.params.n:
        raise RequestError(
            f"{place} has {len(answer.outputs)} choices, and its parameters n {answer.params.n}"
        )
    for choice in answer.outputs:
        for token in choice.token_ids:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{place} has token id {token}, outside the vocabulary [0, {vocab_size})"
                )


def check_mode(recorded: LogprobsMode, here: LogprobsMode, where: str) -> None:
    """Refuse (DisagreementError) an answer whose log-probabilities are of another mode."""
    if recorded != here:
        raise DisagreementError(
            f"{where} has {recorded}, and those computed here are {here}: check it with "
            f"logprobs_mode {recorded} (--logprobs-mode)"
        )


def check_version(version: object, place: str) -> None:
    """Refuse (RequestError) a digest of another version than can be computed."""
    if version not in VERSIONS or isinstance(version, bool):
        raise RequestError(
            f"{place} has replay_version {version!r}, none of {', '.join(map(str, VERSIONS))}: "
            "check it with a newer tpdet, or the record was changed"
        )


def checked_params(answer: RecordedAnswer) -> SamplingParams:
    """How a recorded answer is computed again: with its seed, and no more text than it needs."""
    return msgspec.structs.replace(
        answer.params,
        seed=answer.seed,
        logprobs=None,
        prompt_logprobs=None,
        detokenize=bool(answer.params.stop),
    )


def _scored(choice: RecordedChoice) -> list[Scored]:
    return [Scored(*pair) for pair in zip(choice.token_ids, choice.logprob_bits, strict=True)]


def _shown(token: Scored | None) -> str:
    return "the end" if token is None else f"token {token.id} (bits {token.bits})"


def _first_place(one: object, other: object) -> int:
    """Where two texts begin to differ; 0 for other values."""
    if not isinstance(one, str) or not isinstance(other, str):
        return 0
    pairs = zip_longest(one, other)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), 0)


def _shown_value(value: object, place: int) -> str:
    """A value as short JSON; of a long text the part around the place where it differs."""
    if isinstance(value, str):
        begin = max(0, place - _BEFORE)
        cut = value[begin : place + _BEHIND]
        text = json.dumps(cut, ensure_ascii=False)
        return ("..." if begin else "") + text + ("..." if len(value) > place + _BEHIND else "")
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _BEFORE + _BEHIND else text[: _BEFORE + _BEHIND] + "..."
