"""What is signed of an answer: an in-toto Statement that holds salted hashes, and no content.

`sha256(salt || digest)` stands for each digest of the content, with 32 random bytes of salt that
lie beside the content alone. Without them nobody can try out whether a prompt they guess was asked.
So texts of the request (stop strings, schemas) and the seed, which may be made from the prompt, are
left out too: the request digest covers them.
"""

import datetime
import secrets
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal, NamedTuple

import msgspec

from tpdet.audit.recorded import RecordedAnswer, RecordedChoice, tokens_of
from tpdet.audit.replay import AnswerDigests, DigestOrigin, answer_digests, request_digest
from tpdet.control.row_messages import SampledToken
from tpdet.errors import AuditError, UsageError
from tpdet.requests.engine_facts import EngineFacts, LogprobsMode
from tpdet.requests.request import Request, SamplingParams
from tpdet.text.outputs import all_logprob_bits

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:tpdet:answer:v1"
SALT_BYTES = 32
MOST_LISTED = 256
"""Choices, prompts and spans that a statement lists; of more it has the sums, and the hashes."""

Outcome = Literal["completed", "aborted", "client_gone", "failed"]
"""How an answer ended; `aborted`: by the operator, and it was sent as far as it was."""

PARAMETERS = (
    "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip
"""Parameters in the statement: numbers, which say nothing of what was asked."""

_OWNER = b"tpdet-receipt-owner-1\n"


class SignedSpan(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a choice, and the weights that computed them.

    choice: counted over all prompts; old_keys: over keys and values of other weights.
    """

    choice: int
    start: int
    end: int
    weights: str
    version: str
    old_keys: bool = False


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is for all of its answers: SHA-256 of tokenizer.json and of the chat template,
    and the versions of packages.
    """

    tokenizer: str | None
    template: str | None
    versions: dict[str, str]
    node: str


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that change no bit; times in RFC 3339. cached: it came from the cache of answers."""

    tp: int
    device: str
    node: str
    route: str
    began: str
    ended: str
    cached: bool = False


class Predicate(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: what computed it, its numbers, and salted hashes of its ids and bits."""

    id: str
    owner: str
    outcome: Outcome
    reason: str | None
    contract: str
    weights: str
    weight_version: str
    tokenizer: str | None
    template: str | None
    versions: dict[str, str]
    replay_version: int
    logprobs_mode: LogprobsMode
    approximate: bool
    parameters: dict[str, int | float | bool | None]
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    finish_reasons: tuple[str | None, ...]
    spans: tuple[SignedSpan, ...]
    ids: str
    bits: str
    facts: Circumstances


class Subject(msgspec.Struct, frozen=True):
    """What the statement is about: `request`, or `answer`, and its salted digest."""

    name: str
    digest: dict[str, str]


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """An in-toto Statement of version 1."""

    type: str = msgspec.field(name="_type")
    subject: tuple[Subject, ...]
    predicate_type: str = msgspec.field(name="predicateType")
    predicate: Predicate

    def digest_of(self, name: str) -> str | None:
        """The salted digest of a subject; None where there is none of this name."""
        for subject in self.subject:
            if subject.name == name:
                return subject.digest.get("sha256")
        return None


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept apart, and erased: the salt, the plain digests, and each prompt's record.

    replay_digest: of the whole call; None where the answer has none. eos_token_ids: the model's.
    """

    salt: str
    request_digest: str
    replay_digest: str | None
    replay_version: int
    eos_token_ids: tuple[int, ...]
    answers: tuple[RecordedAnswer, ...]

    def __post_init__(self) -> None:
        if len(bytes.fromhex(self.salt)) != SALT_BYTES or not self.answers:
            raise ValueError("its salt is no 32 bytes, or it has no answers")

    def encode(self) -> bytes:
        """Its JSON."""
        return msgspec.json.encode(self)

    @property
    def requests(self) -> list[Request]:
        """The requests, as the digests take them."""
        return [
            Request(
                request_id="recorded",
                prompt_token_ids=answer.prompt_token_ids,
                params=answer.params,
                eos_token_ids=self.eos_token_ids,
            )
            for answer in self.answers
        ]


class EndedChoice(NamedTuple):
    """A choice as far as its reader got it."""

    tokens: Sequence[SampledToken]
    finish_reason: str | None


@dataclass(frozen=True, kw_only=True)
class EndedAnswer:
    """One call that has ended, well or not: what its receipt is made of.

    facts: the engine's, under the weights of the first tokens. choices: of each prompt in order.
    replay_digest: of an answer that has one. owner: BLAKE3 of the key it was asked with, or "".
    began, ended: Unix times in seconds. cached: it came from the cache of answers.
    """

    id: str
    owner: str
    outcome: Outcome
    reason: str | None
    route: str
    facts: EngineFacts
    seed: int
    requests: tuple[Request, ...]
    choices: tuple[tuple[EndedChoice, ...], ...]
    spans: tuple[SignedSpan, ...]
    approximate: bool
    replay_version: int
    replay_digest: str | None
    began: float
    ended: float
    cached: bool = False


def content_of(answer: EndedAnswer) -> Content:
    """What is kept of an answer beside its receipt, with a salt of its own."""
    facts, alone = answer.facts, len(answer.requests) == 1
    origin = DigestOrigin(
        answer.seed, facts.contract, facts.model_digest, logprobs_mode=facts.logprobs_mode
    )
    records = tuple(
        RecordedAnswer(
            contract=facts.contract,
            weights=facts.model_digest,
            seed=answer.seed if request.params.seed is None else request.params.seed,
            prompt_token_ids=request.prompt_token_ids,
            params=request.params,
            outputs=tuple(_recorded(choice.tokens) for choice in choices),
            replay_digest=answer.replay_digest if alone else None,
            replay_version=answer.replay_version,
            logprobs_mode=facts.logprobs_mode,
        )
        for request, choices in zip(answer.requests, answer.choices, strict=True)
    )
    return Content(
        salt=secrets.token_hex(SALT_BYTES),
        request_digest=request_digest(answer.requests, origin),
        replay_digest=answer.replay_digest,
        replay_version=answer.replay_version,
        eos_token_ids=answer.requests[0].eos_token_ids,
        answers=records,
    )


def statement_of(answer: EndedAnswer, content: Content, server: ServerFacts) -> bytes:
    """The statement's bytes: compact JSON, its keys sorted."""
    facts, salt = answer.facts, bytes.fromhex(content.salt)
    choices = [choice for choices in answer.choices for choice in choices]
    prompts = [len(request.prompt_token_ids) for request in answer.requests]
    tokens = [len(choice.tokens) for choice in choices]
    reasons = tuple(choice.finish_reason for choice in choices)
    digests = {"request": content.request_digest}
    if content.replay_digest is not None:
        digests["answer"] = content.replay_digest
    ids, bits = _hashes(content.answers)
    params = answer.requests[0].params
    predicate = Predicate(
        id=answer.id,
        owner=owner_mark(answer.id, answer.owner),
        outcome=answer.outcome,
        reason=answer.reason,
        contract=facts.contract,
        weights=facts.model_digest,
        weight_version=facts.weight_version,
        tokenizer=server.tokenizer,
        template=server.template,
        versions=server.versions,
        replay_version=answer.replay_version,
        logprobs_mode=facts.logprobs_mode,
        approximate=answer.approximate,
        parameters=_parameters(params),
        prompt_tokens=summed(prompts),
        tokens=summed(tokens),
        finish_reasons=reasons if len(reasons) <= MOST_LISTED else (),
        spans=answer.spans[:MOST_LISTED],
        ids=salted(salt, ids),
        bits=salted(salt, bits),
        facts=Circumstances(
            tp=facts.tp,
            device=facts.device,
            node=server.node,
            route=answer.route,
            began=_moment(answer.began),
            ended=_moment(answer.ended),
            cached=answer.cached,
        ),
    )
    statement = Statement(
        type=STATEMENT_TYPE,
        subject=tuple(Subject(name, {"sha256": salted(salt, d)}) for name, d in digests.items()),
        predicate_type=PREDICATE_TYPE,
        predicate=predicate,
    )
    return msgspec.json.encode(statement, order="sorted")


def summed(counts: Sequence[int]) -> tuple[int, ...]:
    """Counts of tokens as a statement has them: of more than MOST_LISTED, their sum."""
    return tuple(counts) if len(counts) <= MOST_LISTED else (sum(counts),)


def read_statement(payload: bytes, where: str) -> Statement:
    """The statement in an envelope. Raises AuditError for another form; `where` names the leaf."""
    try:
        statement = msgspec.json.decode(payload, type=Statement)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AuditError(f"{where} holds no statement of an answer ({error})") from None
    if (statement.type, statement.predicate_type) != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise AuditError(
            f"{where} is a {statement.predicate_type!r}, not {PREDICATE_TYPE}: check it with a "
            "newer tpdet"
        )
    return statement


def read_content(data: bytes, where: str) -> Content:
    """The content beside a receipt. Raises AuditError for another form."""
    try:
        return msgspec.json.decode(data, type=Content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AuditError(f"the content of {where} has another form ({error})") from None


def check_content(statement: Statement, content: Content, where: str) -> None:
    """Refuse (AuditError) content that is not what the statement was made of, by what differs."""
    predicate, salt = statement.predicate, bytes.fromhex(content.salt)
    first = content.answers[0]
    origin = first.contract, first.weights, first.logprobs_mode
    if any((one.contract, one.weights, one.logprobs_mode) != origin for one in content.answers):
        raise AuditError(f"the content of {where} is of several contracts or weights")
    try:
        digests = _digests(content)
        ids, bits = _hashes(content.answers)
    except (ValueError, UsageError, struct.error, OverflowError) as error:
        raise AuditError(f"the content of {where} has no digest ({error})") from None
    answered = content.replay_digest is not None
    named = (content.replay_digest if len(content.answers) == 1 else None, content.replay_version)
    records = {(answer.replay_digest, answer.replay_version) for answer in content.answers}
    parts = (
        ("contract", predicate.contract, first.contract),
        ("weights", predicate.weights, first.weights),
        ("parameters", predicate.parameters, _parameters(first.params)),
        ("request", statement.digest_of("request"), salted(salt, digests.request)),
        ("ids", predicate.ids, salted(salt, ids)),
        ("bits", predicate.bits, salted(salt, bits)),
        ("request_digest", content.request_digest, digests.request),
        ("replay_digest", records, {named}),
        ("replay_version", content.replay_version, predicate.replay_version),
        ("replay_digest", content.replay_digest, digests.replay if answered else None),
        ("answer", statement.digest_of("answer"),
         salted(salt, digests.replay) if answered else None),
    )  # fmt: skip
    for name, signed, computed in parts:
        if signed != computed:
            raise AuditError(
                f"the content of {where} is not what was signed: its {name} differs, so one of "
                "the two was changed"
            )


def _digests(content: Content) -> AnswerDigests:
    first = content.answers[0]
    choices = [map(tokens_of, answer.outputs) for answer in content.answers]
    names = first.seed, first.contract, first.weights, content.replay_version, first.logprobs_mode
    return answer_digests(content.requests, choices, DigestOrigin(*names))


def salted(salt: bytes, digest: str) -> str:
    """SHA-256 (hex) over a salt and a digest (hex)."""
    return sha256(salt + bytes.fromhex(digest)).hexdigest()


def owner_mark(receipt_id: str, owner: str) -> str:
    """What a statement has in place of its owner: nobody sees that two receipts have one."""
    return sha256(_OWNER + receipt_id.encode() + owner.encode()).hexdigest()


def _hashes(answers: Iterable[RecordedAnswer]) -> tuple[str, str]:
    """SHA-256 over all choices' ids, and bits: each count, then they, as little-endian uint32."""
    ids, bits = sha256(), sha256()
    for answer in answers:
        for choice in answer.outputs:
            count = len(choice.token_ids)
            ids.update(struct.pack(f"<I{count}I", count, *choice.token_ids))
            bits.update(struct.pack("<I", count))
            words = struct.unpack(f">{count}I", bytes.fromhex("".join(choice.logprob_bits)))
            bits.update(struct.pack(f"<{count}I", *words))
    return ids.hexdigest(), bits.hexdigest()


def _recorded(tokens: Sequence[SampledToken]) -> RecordedChoice:
    ids = tuple([token.token_id for token in tokens])
    return RecordedChoice(ids, all_logprob_bits([token.logprob for token in tokens]))


def _parameters(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in PARAMETERS}


def _moment(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
