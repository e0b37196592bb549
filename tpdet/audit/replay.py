"""The replay digest, one name for a request and the bits of its answer, and the request digest,
the name of the request alone: docs/replay.md.

They hold what can change the answer and nothing else: no id, time, stream flag, batch, cache or
tensor-parallel size. Needs no torch.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import blake3
import rfc8785

from tpdet.control.row_messages import SampledToken
from tpdet.errors import UsageError
from tpdet.requests.engine_facts import RAW_LOGPROBS, LogprobsMode
from tpdet.requests.request import Request, SamplingParams

VERSION = 2
"""The version of new digests; an answer names it as `replay_version`."""

VERSIONS = (1, VERSION)
"""The versions that can be computed. A record that names none is of the first."""

COVERED = (
    "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop",
    "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias",
)  # fmt: skip
"""Parameters in the canonical request by their own names; `seed` and `ignore_eos` are in it as the
seed that was used and the ids that end the text."""

LEFT_OUT = (
    "logprobs",
    "prompt_logprobs",
    "prompt_logprobs_last_n",
    "logprob_token_ids",
    "detokenize",
    "output_kind",
)
"""Parameters that choose what is shown of an answer, never what it is."""

WHERE_SET = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name not in (*COVERED, *LEFT_OUT, "seed", "ignore_eos")
)
"""All others: in the canonical request only where they are neither empty nor their default."""

SHAPING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", *WHERE_SET,
)  # fmt: skip
"""Parameters that shape the distribution which tokens are drawn from: `request_seed` has them."""

_REQUEST_1, _SEED_1 = "tpdet-request-1", b"tpdet-seed-1\n"
_IDS = 4096  # of a prompt that are written together


def _canonical_pieces(requests: Sequence[Request], mode: LogprobsMode) -> Iterator[bytes]:
    """The canonical JSON of the prompts of one call and of the parameters they share, in pieces.

    `prompts`, which may hold millions of ids, comes last but for `seeds`. The mode is named where
    it is not raw.
    """
    first = requests[0]
    ends = () if first.params.ignore_eos else first.eos_token_ids
    rest: dict[str, Any] = {
        "eos_token_ids": sorted({*ends}),
        "params": _canonical_params(first.params),
    }
    if mode != RAW_LOGPROBS:
        rest["logprobs_mode"] = mode
    yield rfc8785.dumps(rest)[:-1] + b',"prompts":['
    for place, request in enumerate(requests):
        yield b"," if place else b""
        yield from _array(request.prompt_token_ids)
    seeds = seeds_that_differ(requests) if draws_noise(first.params) else ()
    # As text: RFC 8785 has no whole numbers from 2**53 on.
    yield b"]" + (b',"seeds":' + rfc8785.dumps([*map(str, seeds)]) if seeds else b"") + b"}"


def _array(ids: Sequence[int]) -> Iterator[bytes]:
    """The canonical JSON of token ids, in pieces."""
    yield b"["
    for begin in range(0, len(ids), _IDS):
        # RFC 8785 writes a whole number below 2**53 as its digits.
        yield (b"," if begin else b"") + ",".join(map(str, ids[begin : begin + _IDS])).encode()
    yield b"]"


class AnswerDigests(NamedTuple):
    """The request digest and the replay digest of an answer: BLAKE3, 64 hex digits each."""

    request: str
    replay: str


class DigestOrigin(NamedTuple):
    """What a digest covers beside a call and its answer.

    seed: the first prompt's, also where its request left it open: the call's, unless its prompts
    bring others. `contract` and `model_digest` are 64 hex digits each. version: of the replay
    digest. `logprobs_mode`: what the log-probabilities are of.
    """

    seed: int
    contract: str
    model_digest: str
    version: int = VERSION
    logprobs_mode: LogprobsMode = RAW_LOGPROBS


class NamedCall(NamedTuple):
    """A call of some origin: its canonical request, and its digest."""

    origin: DigestOrigin
    canonical: bytes
    digest: str


def request_digest(requests: Sequence[Request], origin: DigestOrigin) -> str:
    """BLAKE3 (hex) over a call, known before its answer is: arguments as of `answer_digests`."""
    return named_call(requests, origin).digest


def named_call(requests: Sequence[Request], origin: DigestOrigin) -> NamedCall:
    """A call and its request digest: arguments as of `answer_digests`."""
    *_, named = named_call_steps(requests, origin)
    assert named is not None
    return named


def answer_digests(
    requests: Sequence[Request],
    answers: Iterable[Iterable[Sequence[SampledToken]]],
    origin: DigestOrigin,
    named: NamedCall | None = None,
) -> AnswerDigests:
    """The digests of a call, and of it with its answer; named: the call, if it was named before.

    requests: one a prompt, with the same parameters but for the seed; answers: each prompt's
    choices, each choice's tokens, in order. Raises UsageError for an unknown version.
    """
    *_, digests = answer_digest_steps(requests, answers, origin, named)
    assert digests is not None
    return digests


def replay_digest(
    requests: Sequence[Request],
    answers: Iterable[Iterable[Sequence[SampledToken]]],
    origin: DigestOrigin,
) -> str:
    """The replay digest alone of `answer_digests`."""
    return answer_digests(requests, answers, origin).replay


def named_call_steps(
    requests: Sequence[Request], origin: DigestOrigin
) -> Iterator[NamedCall | None]:
    """A call and its request digest, in steps as of `answer_digest_steps`."""
    pieces: list[bytes] = []
    for piece in _canonical_pieces(requests, origin.logprobs_mode):
        pieces.append(piece)
        yield None
    request = b"".join(pieces)
    seed = origin.seed if draws_noise(requests[0].params) else 0
    yield NamedCall(origin, request, _begun(_REQUEST_1, origin, seed, request).hexdigest())


def answer_digest_steps(
    requests: Sequence[Request],
    answers: Iterable[Iterable[Sequence[SampledToken]]],
    origin: DigestOrigin,
    named: NamedCall | None = None,
) -> Iterator[AnswerDigests | None]:
    """`answer_digests` in steps of a few milliseconds: None until the last, which has them.

    named: the call, where it was named before.
    """
    version = origin.version
    if version not in VERSIONS:
        raise UsageError(
            f"replay_version {version} is none of {', '.join(map(str, VERSIONS))}: a newer tpdet "
            "computes it"
        )
    if named is None or named.origin != origin:
        for step in named_call_steps(requests, origin):
            named = step
            yield None
    assert named is not None
    noise = draws_noise(requests[0].params) or version == 1
    seed = origin.seed if noise else 0
    digest = _begun(f"tpdet-replay-{version}", origin, seed, named.canonical)
    for choices in answers:
        for tokens in choices:
            ids = [token.token_id for token in tokens]
            logprobs = [token.logprob for token in tokens]
            count = len(tokens)
            digest.update(struct.pack(f"<I{count}I{count}f", count, *ids, *logprobs))
            yield None
    yield AnswerDigests(named.digest, digest.hexdigest())


def _begun(domain: str, origin: DigestOrigin, seed: int, request: bytes) -> blake3.blake3:
    """The hash with all that stands before the answer; request: canonical, seed: as it counts."""
    digest = blake3.blake3(f"{domain}\n".encode())
    digest.update(bytes.fromhex(origin.contract) + bytes.fromhex(origin.model_digest))
    digest.update(struct.pack("<QQ", seed, len(request)) + request)
    return digest


def draws_noise(params: SamplingParams) -> bool:
    """Whether the seed can change an answer: a token is sampled, and not just the likeliest."""
    return params.temperature > 0 and params.max_tokens != 0


def seeds_that_differ(requests: Sequence[Request]) -> tuple[int | None, ...]:
    """The seeds of prompts that bring more than one; empty where one seed is all prompts'."""
    seeds = tuple(request.params.seed for request in requests)
    return seeds if len({*seeds}) > 1 else ()


def request_seed(request: Request) -> int:
    """The seed, of 63 bits, that a prompt itself gives: a function of what its tokens depend on.

    That is its ids and the parameters in SHAPING. Neither the other prompts of a call count, nor
    how many tokens and choices are asked for, what ends them and what is shown.
    """
    params = _canonical_params(request.params)
    shaping = {name: value for name, value in params.items() if name in SHAPING}
    digest = blake3.blake3(_SEED_1 + b'{"params":' + rfc8785.dumps(shaping) + b',"prompt":')
    for piece in _array(request.prompt_token_ids):
        digest.update(piece)
    digest.update(b"}")
    return int.from_bytes(digest.digest(8), "little") >> 1


_DEFAULTS = SamplingParams()


def _canonical_params(params: SamplingParams) -> dict[str, Any]:
    canonical: dict[str, Any] = {name: getattr(params, name) for name in COVERED}
    canonical["top_k"] = max(params.top_k, 0)  # -1 and 0 are both off
    canonical["repetition_penalty"] = float(params.repetition_penalty)  # has no upper limit
    canonical["stop"] = [_text(stop) for stop in params.stop]
    canonical["stop_token_ids"] = sorted({*params.stop_token_ids})
    canonical["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    for name in WHERE_SET:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name) and value != ():
            canonical[name] = value
    return canonical


def _text(stop: str) -> str:
    """Half a surrogate pair, which no output can hold, as the replacement character."""
    return stop.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
