"""Notes the bits of every operation of a request's steps, on one rank.

The whole output is hashed, for ranks of one size. Of its last row, which is the request's last
token at any size, the values are kept in sorted order: the parts that ranks have of it are then
comparable with the whole, however they are cut.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import blake3
import msgspec
import numpy as np
import torch

from tpdet.engine import Engine
from tpdet.kernels import ops
from tpdet.kernels.partial_sums import PartialSums
from tpdet.models.decoder import Decoder
from tpdet.requests.request import Request, SamplingParams

STEP_TOKENS = 128
"""Tokens of a step at most: of 256 rows or more, each rank would fold a slice."""


class TracedOperation(msgspec.Struct, frozen=True):
    """One output of one operation: which it is, its digest, and its last row's values, sorted.

    stage: "inputs", "embedding", "layer 0" and so on, or "head"; call: which of its name in the
    stage. width: bytes of a value.
    """

    step: int
    stage: str
    name: str
    call: int
    shape: tuple[int, ...]
    digest: str
    width: int
    last_row: bytes

    @property
    def key(self) -> tuple[int, str, str, int]:
        """What names the same operation on every rank, at any size."""
        return self.step, self.stage, self.name, self.call

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.stage}, {self.name} (call {self.call} in it, {shape})"


class OperationLog:
    """The operations of one model on one rank, in order; noted by the thread that is inside."""

    def __init__(self, model: Decoder) -> None:
        self.operations: list[TracedOperation] = []
        self._model = model
        self._step, self._stage = -1, "inputs"
        self._calls: Counter[tuple[int, str, str]] = Counter()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what this thread computes while inside."""
        model = self._model
        hooks: list[tuple[object, str, str]] = [
            (model.embedding, "embed", "embedding"),
            (model, "local_logits", "head"),
        ]
        hooks += [(layer, "project", f"layer {layer.index}") for layer in model.layers]
        for owner, method, stage in hooks:
            setattr(owner, method, partial(self._enter, stage, getattr(owner, method)))
        names = [name for name, one in vars(ops).items() if hasattr(one, "__wrapped__")]
        table = {name: partial(self.run, name, getattr(ops, name)) for name in names}
        try:
            with ops.recorded(table):
                yield
        finally:
            for owner, method, _ in hooks:
                delattr(owner, method)

    def _enter(self, stage: str, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        self._step += stage == "embedding"
        self._stage = stage
        return method(*args, **named)

    def run(self, name: str, operation: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Run an operation of `kernels/ops`, and note its outputs under this name."""
        with ops.recorded():
            result = operation(*args, **named)
        for output in result if isinstance(result, tuple) else (result,):
            self._note(name, output)
        return result

    def _note(self, name: str, output: Any) -> None:
        by_columns = name == "fold_roots" or isinstance(output, PartialSums)  # [C, M, N]
        values = output.values if isinstance(output, PartialSums) else output
        if not isinstance(values, torch.Tensor) or not values.numel():
            return
        values = values.detach().cpu().contiguous()
        last = values[:, -1] if by_columns else values[-1:]
        width = values.element_size()
        row = np.sort(np.frombuffer(_bytes(last.contiguous()), f"u{width}")).tobytes()
        where = self._step, self._stage, name
        digest = blake3.blake3(_bytes(values)).hexdigest()
        what = *where, self._calls[where], tuple(values.shape)
        self.operations.append(TracedOperation(*what, digest, width, row))
        self._calls[where] += 1


def noted(engine: Engine, prompt_token_ids: tuple[int, ...]) -> list[TracedOperation]:
    """The operations that compute the logits behind a prompt, on this rank; collective."""
    log = OperationLog(engine.runner.model)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with log.noting():
        if engine.world.rank > 0:
            engine.worker_loop()
            return log.operations
        request = Request(request_id="traced", prompt_token_ids=prompt_token_ids, params=params)
        engine.submit(request)
        while engine.has_work:
            engine.step()
    engine.stop_workers()
    return log.operations


def _bytes(values: torch.Tensor) -> bytes:
    """A contiguous tensor's bytes."""
    return values.reshape(-1).view(torch.uint8).numpy().tobytes()
