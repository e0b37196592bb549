"""Makes vectors, labels and scores of prompts' rows on rank 0: prompts only, nothing is sampled."""

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from pathlib import Path
from typing import NamedTuple

import blake3
import msgspec
import torch

from tpdet.checkpoint.checkpoint import open_part
from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.model_config.pooling import DenseLayer, Pooling, load_for_task
from tpdet.checkpoint.pieces import part_of
from tpdet.checkpoint.resolve import resolve_model
from tpdet.config import EngineConfig
from tpdet.errors import NumericalError, RequestError
from tpdet.kernels import ops
from tpdet.kernels.exact import pooling as exact
from tpdet.requests.pooling_params import ONLY_POOLED, PoolingParams
from tpdet.requests.request import PooledOutput, Request, TokenOutput
from tpdet.runner.start.kernel_checks import check_chains
from tpdet.sampling.sampler import to_device, to_host
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
        shapes = {"linear.weight": shape} | ({"linear.bias": shape[:1]} if layer.bias else {})
        tensors = {
            name: checkpoint.piece(part_of(name, of, 0, 0, of[0])).float()
            for name, of in shapes.items()
        }
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

    def answers(
        self, pending: Ordered["PendingPooled"]
    ) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """By request id, of a step that has run: answers fp32 [W] on the CPU, and failures."""
        answers: dict[str, torch.Tensor] = {}
        failures: dict[str, str] = {}
        for part in pending:
            for sequence, rows, largest in part.finish():
                try:
                    _check_size(largest, pooling=self.pooling)
                    answers[sequence.request_id] = self._answer(sequence, rows)
                except NumericalError as error:
                    failures[sequence.request_id] = str(error)
        return answers, failures

    def _answer(self, sequence: Sequence, rows: torch.Tensor) -> torch.Tensor:
        """fp32 [W], of what was pooled of its prompt. Raises NumericalError for no answer."""
        params, pooling = sequence.request.pooling, self.pooling
        assert params is not None
        x = exact.mean_of(rows, sequence.prompt_length) if pooling.row == "mean" else rows
        if pooling.answers == "tokens":
            x = x[:1] - x[1:]
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


def _check_size(largest: float, pooling: Pooling) -> None:
    """Raises NumericalError for NaN, infinity, and a row that is past the limit of means."""
    if not math.isfinite(largest):
        raise NumericalError(_NOT_FINITE)
    if pooling.row == "mean" and not largest < exact.MEAN_LIMIT:
        raise NumericalError(
            f"a row of this prompt holds {largest:g}: means are of values below "
            f"{exact.MEAN_LIMIT:g}"
        )


class PromptRows(NamedTuple):
    """Rows fp32 [n, W] of a prompt's `position`, `position + 1`, ..., on their device."""

    sequence: Sequence
    position: int
    rows: torch.Tensor


class PendingPooled(NamedTuple):
    """What was pooled of prompts that a step ends, on its way to the host.

    Of each prompt its row fp32 [W], the sum int64 [W] of a mean, or the logits fp32 [2] of two
    tokens; and the largest size of a value in what was pooled.
    """

    sequences: list[Sequence]
    pooled: torch.Tensor
    largest: torch.Tensor
    copied: torch.cuda.Event | None

    def finish(self) -> Iterable[tuple[Sequence, torch.Tensor, float]]:
        """Wait for the copies: each prompt with its part."""
        if self.copied is not None:
            self.copied.synchronize()
        return zip(self.sequences, self.pooled, self.largest.tolist(), strict=True)


def pool(prompts: Ordered[PromptRows]) -> PendingPooled | None:
    """Pool the rows of a block of a step's; None where no prompt ends. Nothing is waited for.

    What prompts need of earlier rows is in `Sequence.pooled`. One that lost its pages begins again
    at position 0, or with its last row.
    """
    last = [prompt for prompt in prompts if _params(prompt).row == "last"]
    ended = last or [prompt for prompt in prompts if _add(prompt)]
    if not ended:
        return None
    sequences = [prompt.sequence for prompt in ended]
    if last:
        rows_BW = torch.stack([prompt.rows[-1] for prompt in last])
        largest = rows_BW.abs().amax(1)
        ids = [_params(prompt).token_ids for prompt in last]
        pooled = rows_BW.gather(1, to_device(ids, rows_BW.device)) if ids[0] else rows_BW
    else:
        pooled, largest = (
            torch.stack(parts) for parts in zip(*(each.pooled for each in sequences), strict=True)
        )
    host, _ = to_host(pooled)
    sizes, copied = to_host(largest)  # of one stream: the last copy ends last
    return PendingPooled(sequences, host, sizes, copied)


def _params(prompt: PromptRows) -> PoolingParams:
    params = prompt.sequence.request.pooling
    assert params is not None
    return params


def _add(prompt: PromptRows) -> bool:
    """Add rows to what a mean or a first row has so far; whether they are its prompt's last."""
    sequence, position, rows = prompt
    before = sequence.pooled if position else None
    total, largest = exact.mean_terms(rows)
    if before is not None:
        largest = torch.maximum(before[1], largest)
    if _params(prompt).row == "mean":
        sequence.pooled = total if before is None else before[0] + total, largest
    else:
        sequence.pooled = rows[0].clone() if before is None else before[0], largest
    return position + len(rows) == sequence.prompt_length


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
