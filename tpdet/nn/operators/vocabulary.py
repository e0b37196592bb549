"""Embedded rows, and log-probabilities of picked ids. Shapes: M rows, V ids, H hidden."""

import torch
from torch import Tensor

from tpdet.kernels import ops
from tpdet.kernels.exact.thresholds import scale_by_temperature
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.nn.operators.declare import operator, wide


@operator(
    lambda ids, table: table.new_empty(ids.shape[0], table.shape[1], dtype=torch.float32),
    lambda ids, table: torch.nn.functional.embedding(ids, wide(table)),
)
def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of table [V, H] for ids int64 [M] -> fp32 [M, H]; bits are copied."""
    return ops.embed(ids, table)


def _picked_reference(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    scores = torch.log_softmax(logits / temperature, -1)
    return scores.gather(1, ids[:, None])[:, 0]


@operator(lambda logits, ids, temperature: logits.new_empty(ids.shape[0]), _picked_reference)
def log_probabilities(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """log p of ids int64 [M] in rows of logits fp32 [M, V] -> fp32 [M]; NaN of unfit rows.

    temperature: logits are divided by it first, as before sampling; 1 for those of the model.
    """
    if temperature != 1.0:
        logits = scale_by_temperature(logits, temperature)
    scored = ops.score_tokens(logits, ids.tolist(), Shard(0, logits.shape[1]))
    return torch.where(scored.fit, scored.logprobs, torch.nan)
