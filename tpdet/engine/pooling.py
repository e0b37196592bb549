"""Makes vectors, labels and scores of prompts' rows on rank 0: prompts only, nothing is sampled."""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from pathlib import Path
from typing import NamedTuple

import blake3
import msgspec
import torch

from tpdet.checkpoint.checkpoint import open_part
from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.model_config.pooling import DenseLayer, Pooling, load_for_task
from tpdet.checkpoint.resolve import resolve_model
from tpdet.config import EngineConfig
from tpdet.errors import NumericalError, RequestError
from tpdet.kernels import ops
from tpdet.kernels.exact import pooling as exact
from tpdet.requests.pooling_params import ONLY_POOLED, PoolingParams
from tpdet.requests.request import PooledOutput, Request, TokenOutput
from tpdet.runner.start.kernel_checks import check_chains
from tpdet.scheduler.pending_steps import PendingStep
from tpdet.scheduler.results import Output
from tpdet.scheduler.sequence import Sequence

_NOT_FINITE = "the model gave NaN or infinity for this prompt"


class Dense(NamedTuple):
    """A dense layer's tensors in fp32, and its activation."""

    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None
    activation: str

    def __call__(self, x_K: torch.Tensor) -> torch.Tensor:
        """act(fp32(chain + bias)) [N]: one chain over K, nothing is rounded in between."""
        y_N = ops.column_gemm(x_K[None], self.weight_NK, self.bias_N)[0]
        return exact.activated(y_N, self.activation)


def open_pooler(config: EngineConfig, model: ModelConfig) -> "Pooler | None":
    """How the engine's model pools; None where it generates. Raises as `load_for_task`."""
    if model.head == "tokens" and config.task != "score":
        return None
    directory = resolve_model(config.model, config.revision)
    _, pooling = load_for_task(directory, config.dtype, config.task)
    return None if pooling is None else Pooler(pooling, directory, model.head_dim)


class Pooler:
    """What makes an answer of rows: dense layers, the cut, the length or the activation.

    `digest` (BLAKE3, hex) names the pooling and the tensors of its dense layers.
    """

    def __init__(self, pooling: Pooling, directory: Path, head_dim: int) -> None:
        self.pooling = pooling
        self._digest = blake3.blake3(pooling.identity.encode())
        self._dense = [self._read(directory, layer) for layer in pooling.dense]
        self.digest = self._digest.hexdigest()
        if pooling.dense:
            check_chains([layer.inputs for layer in pooling.dense], head_dim)

    def _read(self, directory: Path, layer: DenseLayer) -> Dense:
        checkpoint = open_part(directory / layer.folder)
        shape = layer.outputs, layer.inputs
        tensors = {
            "linear.weight": checkpoint.piece("linear.weight", shape, 0, 0, shape[0]).float()
        }
        if layer.bias:
            bias = checkpoint.piece("linear.bias", shape[:1], 0, 0, shape[0])
            tensors["linear.bias"] = bias.float()
        checkpoint.check_all_read(tensors)
        for tensor in tensors.values():
            self._digest.update(tensor.contiguous().numpy().tobytes())
        return Dense(tensors["linear.weight"], tensors.get("linear.bias"), layer.activation)

    def of(self, request: Request) -> Request:
        """A request of the same prompt that this model can answer: no text is in its answer."""
        ids = (0, 1) if self.pooling.answers == "tokens" else ()
        params = msgspec.structs.replace(request.params, max_tokens=0)
        return msgspec.structs.replace(request, params=params, pooling=PoolingParams(token_ids=ids))

    def resolved(self, request: Request) -> Request:
        """The request with the row that is pooled. Raises RequestError for what it cannot have."""
        params, pooling = request.pooling, self.pooling
        if params is None:
            raise RequestError(ONLY_POOLED.format(pooling.task), "task")
        if params.dimensions is not None:
            if pooling.answers != "vector":
                raise RequestError("dimensions are of vectors: leave them out", "dimensions")
            if params.dimensions > pooling.width:
                raise RequestError(
                    f"dimensions {params.dimensions} is over the vector's width of "
                    f"{pooling.width}: lower it",
                    "dimensions",
                )
        if (pooling.answers == "tokens") != (len(params.token_ids) == 2):
            raise RequestError("a score by tokens needs two token ids", "token_ids")
        if pooling.row == "mean" and len(request.prompt_token_ids) > exact.MEAN_ROWS:
            raise RequestError(
                f"a mean of {len(request.prompt_token_ids)} tokens is over the limit of "
                f"{exact.MEAN_ROWS}: shorten the prompt",
                "prompt",
            )
        return msgspec.structs.replace(
            request, pooling=msgspec.structs.replace(params, row=pooling.row)
        )

    def answers(self, step: PendingStep) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """By request id, of a step that has run and is not committed: answers, and failures."""
        answers: dict[str, torch.Tensor] = {}
        failures: dict[str, str] = {}
        for sequence, end in zip(step.sequences, step.ends, strict=True):
            if sequence.pooled is None:
                continue
            try:
                rows = _sound(*sequence.pooled)
                if end == sequence.prompt_length:
                    answers[sequence.request_id] = self._answer(sequence, rows)
            except NumericalError as error:
                failures[sequence.request_id] = str(error)
        return answers, failures

    def _answer(self, sequence: Sequence, rows: torch.Tensor) -> torch.Tensor:
        """fp32 [W], on the CPU. Raises NumericalError for a row without an answer."""
        params, pooling = sequence.request.pooling, self.pooling
        assert params is not None
        x = exact.mean_of(rows, sequence.prompt_length) if pooling.row == "mean" else rows
        x = x.cpu()
        if pooling.answers == "tokens":
            yes, no = params.token_ids
            x = (x[yes] - x[no])[None]
        for dense in self._dense:
            x = dense(x)
        if not bool(torch.isfinite(x).all()):
            raise NumericalError(_NOT_FINITE)
        activates = params.use_activation
        if pooling.answers != "vector":
            return x if activates is False else exact.activated(x, pooling.activation)
        x = x[: params.dimensions]
        if not (pooling.normalises if activates is None else activates):
            return x
        if not bool(x.any()):
            raise NumericalError("the model gave zeros for this prompt: they have no direction")
        return exact.normalised(x)


def _sound(rows: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """The rows taken so far. Raises NumericalError for NaN, infinity, and a mean past its limit."""
    size = float(largest)
    if not math.isfinite(size):
        raise NumericalError(_NOT_FINITE)
    if rows.dtype == torch.int64 and not size < exact.MEAN_LIMIT:
        raise NumericalError(
            f"a row of this prompt holds {size:g}: means are of values below {exact.MEAN_LIMIT:g}"
        )
    return rows


def pool_rows(sequence: Sequence, position: int, rows: torch.Tensor) -> None:
    """Take rows fp32 [n, W] of a prompt's `position`, `position + 1`, ... into `Sequence.pooled`.

    A sequence that lost its pages begins again at position 0, or with its last row.
    """
    params, before = sequence.request.pooling, sequence.pooled if position else None
    assert params is not None
    if params.row == "last":
        sequence.pooled = rows[-1].clone(), rows[-1].abs().amax()
        return
    total, largest = exact.mean_terms(rows)
    if before is not None:
        largest = torch.maximum(before[1], largest)
    if params.row == "mean":
        sequence.pooled = total if before is None else before[0] + total, largest
    else:
        sequence.pooled = rows[0].clone() if before is None else before[0], largest


def with_pooled(outputs: Ordered[Output], answers: Mapping[str, torch.Tensor]) -> list[Output]:
    """The outputs of a step, with the answer in the place of each pooled prompt's last output."""
    return [
        PooledOutput(
            output.request_id,
            answers[output.request_id].contiguous().numpy().astype("<f4").tobytes(),
            output.cached_tokens,
            output.weights,
        )
        if isinstance(output, TokenOutput) and output.request_id in answers
        else output
        for output in outputs
    ]
