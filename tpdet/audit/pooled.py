"""The answer to a pooled prompt, and the digest that names it with its request and its bits."""

import struct

import blake3
import rfc8785

from tpdet.requests.request import PooledOutput, Request, RequestFailed

_VERSION = "tpdet-pooled-1"


class PooledAssembler:
    """Takes the one output of a pooled prompt; `finished` once it is there."""

    approximate = False

    def __init__(self, request: Request) -> None:
        self.request = request
        self.output: PooledOutput | None = None
        self.failure: RequestFailed | None = None

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.output is not None or self.failure is not None

    def push(self, output: PooledOutput | RequestFailed) -> None:
        """Take an output of the engine."""
        if isinstance(output, RequestFailed):
            self.failure = output
        else:
            self.output = output


def numbers_of(values: bytes) -> list[float]:
    """An answer's fp32 values, little-endian, as Python's numbers."""
    return list(struct.unpack(f"<{len(values) // 4}f", values))


def bits_digest(values: bytes) -> str:
    """BLAKE3 (hex) over an answer's fp32 values, little-endian, and nothing else."""
    return blake3.blake3(values).hexdigest()


def pooled_digest(
    request: Request, values: bytes, contract: str, model_digest: str, pooling: str
) -> str:
    """BLAKE3 (hex) over what computed an answer, its request and its fp32 values.

    pooling: the digest of how the model pools (`engine/pooling.py`).
    """
    params = request.pooling
    assert params is not None
    head = [
        _VERSION,
        contract,
        model_digest,
        pooling,
        params.dimensions,
        params.use_activation,
        list(params.token_ids),
        len(request.prompt_token_ids),
    ]
    digest = blake3.blake3(rfc8785.dumps(head))
    digest.update(struct.pack(f"<{len(request.prompt_token_ids)}q", *request.prompt_token_ids))
    return digest.update(values).hexdigest()
