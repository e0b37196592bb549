"""Facts of a running engine that requests are read, named and resumed by."""

from typing import Literal, NamedTuple

import msgspec

from tpdet.checkpoint.model_config.pooling import Pooling

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""Which row the log-probabilities of sampled tokens are of: the model's own logits, or what is
sampled from, after every operation before noise (docs/numerics.md, section 7). vLLM's names."""
RAW_LOGPROBS: LogprobsMode = "raw_logprobs"
PROCESSED_LOGPROBS: LogprobsMode = "processed_logprobs"

SeedPolicy = Literal["random", "request"]
"""Where the seed of a request without one comes from: a stream, or the request itself."""


class AnswerOrigin(NamedTuple):
    """What computes an answer: contract id, model digest, and what its log-probabilities are of.

    Of an answer that is resumed, contract and weights may be cut to their first hex digits.
    """

    contract: str
    weights: str
    logprobs_mode: LogprobsMode = RAW_LOGPROBS


class EngineFacts(msgspec.Struct, frozen=True, tag="start"):
    """Engine to HTTP: facts of the engine; requests may come from now on.

    Sent again after a reload: what is accepted after it is answered by the new weights.
    `contract` and `model_digest` (64 hex digits each) go into replay digests.
    `approximate_fingerprint` is that of answers with a token marked approximate; where all are,
    it is the `system_fingerprint` too. `dtype` is that of weights and activations.
    `weights_number` counts the updates of the weights before these, as in `TokenOutput.weights`;
    `weight_version` is what operators call them.
    `seed_policy`: by which answers have their seeds.
    `experts_shape`: (layers, experts chosen) of a token; zeros where no answer has them.
    `device`: what rank 0 computes on, by its maker's name. `pooling`: how the model pools, None
    where it generates; `pooling_digest` names that with the tensors of its dense layers.
    """

    system_fingerprint: str
    contract: str
    model_digest: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tp: int
    approximate_fingerprint: str
    dtype: str
    weights_number: int = 0
    weight_version: str = "default"
    logprobs_mode: LogprobsMode = RAW_LOGPROBS
    seed_policy: SeedPolicy = "random"
    experts_shape: tuple[int, int] = (0, 0)
    device: str = ""
    pooling: Pooling | None = None
    pooling_digest: str = ""

    @property
    def origin(self) -> AnswerOrigin:
        """What computes an answer that is not approximate."""
        return AnswerOrigin(self.contract, self.model_digest, self.logprobs_mode)
