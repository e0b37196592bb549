"""The replay digest: one name for a request and the bits of its answer, as docs/replay.md says.

It holds what can change the answer and nothing else: no id, time, stream flag, batch, cache or
tensor-parallel size. Needs no torch.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import blake3
import rfc8785

from tpdet.control.row_messages import SampledToken
from tpdet.errors import UsageError
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

LEFT_OUT = ("logprobs", "prompt_logprobs", "detokenize", "output_kind")
"""Parameters that choose what is shown of an answer, never what it is."""

WHERE_SET = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name not in (*COVERED, *LEFT_OUT, "seed", "ignore_eos")
)
"""All others: in the canonical request only where they are neither empty nor their default."""

_IDS = 4096  # of a prompt that are written together


def _canonical_pieces(requests: Sequence[Request]) -> Iterator[bytes]:
    """The canonical JSON of the prompts of one call and of the parameters they share, in pieces.

    `prompts`, which may hold millions of ids, comes last.
    """
    first = requests[0]
    ends = () if first.params.ignore_eos else first.eos_token_ids
    rest: dict[str, Any] = {
        "eos_token_ids": sorted({*ends}),
        "params": _canonical_params(first.params),
    }
    yield rfc8785.dumps(rest)[:-1] + b',"prompts":['
    for place, request in enumerate(requests):
        yield b",[" if place else b"["
        ids = request.prompt_token_ids
        for begin in range(0, len(ids), _IDS):
            # RFC 8785 writes a whole number below 2**53 as its digits.
            yield (b"," if begin else b"") + ",".join(map(str, ids[begin : begin + _IDS])).encode()
        yield b"]"
    yield b"]}"


def replay_digest(
    requests: Sequence[Request],
    answers: Iterable[Iterable[Sequence[SampledToken]]],
    seed: int,
    contract: str,
    model_digest: str,
    version: int = VERSION,
) -> str:
    """BLAKE3 (hex) over a call and its answer.

    requests: one a prompt, with the same parameters; answers: each prompt's choices, each choice's
    tokens, in order; seed: the one that was used, also where a request left it open. `contract`
    and `model_digest` are 64 hex digits each. Raises UsageError for an unknown version.
    """
    *_, digest = replay_digest_steps(requests, answers, seed, contract, model_digest, version)
    assert digest is not None
    return digest


def replay_digest_steps(
    requests: Sequence[Request],
    answers: Iterable[Iterable[Sequence[SampledToken]]],
    seed: int,
    contract: str,
    model_digest: str,
    version: int = VERSION,
) -> Iterator[str | None]:
    """`replay_digest` in steps, each of a few milliseconds: None until the last, the digest."""
    if version not in VERSIONS:
        raise UsageError(
            f"replay_version {version} is none of {', '.join(map(str, VERSIONS))}: a newer tpdet "
            "computes it"
        )
    counted = seed if version == 1 or draws_noise(requests[0].params) else 0
    pieces: list[bytes] = []
    for piece in _canonical_pieces(requests):
        pieces.append(piece)
        yield None
    request = b"".join(pieces)
    digest = blake3.blake3(f"tpdet-replay-{version}\n".encode())
    digest.update(bytes.fromhex(contract) + bytes.fromhex(model_digest))
    digest.update(struct.pack("<QQ", counted, len(request)) + request)
    for choices in answers:
        for tokens in choices:
            ids = [token.token_id for token in tokens]
            logprobs = [token.logprob for token in tokens]
            count = len(tokens)
            digest.update(struct.pack(f"<I{count}I{count}f", count, *ids, *logprobs))
            yield None
    yield digest.hexdigest()


def draws_noise(params: SamplingParams) -> bool:
    """Whether the seed can change an answer: a token is sampled, and not just the likeliest."""
    return params.temperature > 0 and params.max_tokens != 0


_DEFAULTS = SamplingParams()


def _canonical_params(params: SamplingParams) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(params, name) for name in COVERED}
    found["top_k"] = max(params.top_k, 0)  # -1 and 0 are both off
    found["repetition_penalty"] = float(params.repetition_penalty)  # has no upper limit
    found["stop"] = [_text(stop) for stop in params.stop]
    found["stop_token_ids"] = sorted({*params.stop_token_ids})
    found["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    for name in WHERE_SET:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name) and value != ():
            found[name] = value
    return found


def _text(stop: str) -> str:
    """Half a surrogate pair, which no output can hold, as the replacement character."""
    return stop.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
