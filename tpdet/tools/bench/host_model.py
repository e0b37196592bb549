"""Decode steps of an engine on the CPU without their model: plans are packed, tokens are fixed.

What stands in is the device alone: the graphs are empty, and what they would sample is a table.
"""

import torch

from tpdet.control.plan import StepPlan
from tpdet.engine import Engine
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.runner.graphs.captured_steps import GraphSource
from tpdet.runner.graphs.decode_graphs import DecodeGraphs, decode_shapes
from tpdet.runner.graphs.engine_graphs import Graphs
from tpdet.runner.graphs.graph_room import Graph, GraphRoom
from tpdet.runner.step.shared_rows import RowSharing, SampleTogether
from tpdet.sampling.sampler import PendingSample

_LOGPROB = -1.5


def plan_only(engine: Engine) -> None:
    """Let `engine` run ahead, and replace graphs and sampling by what runs no model."""
    engine.run_ahead = True
    runner, config = engine.runner, engine.config
    assert runner.pages is not None
    shapes = decode_shapes(config.max_running, -(-runner.max_model_len // PAGE_TOKENS))
    room = _EmptyRoom(runner.device, max(shape.words for shape in shapes))
    source = GraphSource(runner.model, runner.model, runner.pages, runner.sampled, room)
    decode = _EmptyGraphs(source, shapes)
    runner.graphs = Graphs(decode, None, fixed_batch=False)
    runner.sharing = _FixedTokens(engine.model_config.vocab_size)


class _NoLaunch:
    def replay(self) -> None:
        """Launch nothing."""


class _EmptyRoom(GraphRoom):
    def capture(self, step: object, first: object) -> Graph:
        """A graph that launches nothing."""
        return _NoLaunch()


class _EmptyGraphs(DecodeGraphs):
    def run(self, rows: object) -> torch.Tensor:
        """Pack the rows; the logits are zeros."""
        if not self._kept:
            self._kept = (torch.zeros(self._buckets[-1][0].rows, 1),)
        return super().run(rows)  # type: ignore[arg-type]

    def _step(self, *_: object, **more: object) -> None:
        """Run no model."""


class _FixedTokens(RowSharing):
    """Ranks that sample together, and whose tokens are known beforehand."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self.several = self.open = True
        self._most = HEAD_ROWS

    def follow(self, plan: StepPlan) -> SampleTogether | None:
        """How the step's tokens are found: each is a number of its row and step."""

        def sample(first: int, logits: torch.Tensor) -> PendingSample:
            count = len(logits)
            tokens = (torch.arange(first, first + count) * 7 + plan.step) % self._vocabulary
            packed = torch.empty(count, 3, dtype=torch.float64)
            packed[:, 0], packed[:, 1], packed[:, 2] = 1.0, tokens, _LOGPROB
            return PendingSample(
                tokens, packed, (None,) * count, (0,) * count, packed.view(-1), None
            )

        return sample
