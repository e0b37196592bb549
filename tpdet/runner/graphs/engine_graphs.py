"""The CUDA graphs of an engine: of decode steps, with drafts or without, and of prompt steps."""

import logging
from dataclasses import dataclass

import torch

from tpdet.cache.kv import KeyValuePages
from tpdet.comm.device import ranks_per_gpu
from tpdet.config import EngineConfig
from tpdet.control.plan import PlanRows
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.kernels.inputs.short_rows import SHORT_TOKENS
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.models.decoder import Decoder
from tpdet.runner.graphs.captured_steps import GraphSource
from tpdet.runner.graphs.decode_graphs import DecodeGraphs, decode_shapes
from tpdet.runner.graphs.draft_graphs import DraftGraphs, largest_shape, usual_shapes
from tpdet.runner.graphs.draft_moves import DraftMoves
from tpdet.runner.graphs.graph_room import GraphRoom
from tpdet.runner.graphs.packed_step import StepShape
from tpdet.runner.graphs.step_graphs import StepGraphs, step_shapes

_GRAPH_BYTES = 8 << 20  # that a GPU keeps for a graph of decode steps, at most
_log = logging.getLogger("tpdet.engine")


@dataclass(frozen=True)
class Graphs:
    """`steps`: None where prompts' steps cannot be captured; `drafts`: None without drafts."""

    decode: DecodeGraphs
    steps: StepGraphs | None
    fixed_batch: bool
    drafts: DraftGraphs | None = None

    def logits(self, rows: PlanRows, moves: DraftMoves | None = None) -> torch.Tensor | None:
        """A replayed decode step, with drafts or without: this rank's logits fp32 [n, V'].

        Valid until the next call; None if no graph fits. moves: of rows behind unverified drafts.
        """
        if self.decode.takes(rows):
            return self.decode.run(rows, moves)
        return None if self.drafts is None else self.drafts.run(rows, moves)

    def buffer_of(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Where `logits` returned these: fp32 [more rows, V'], at the same place for every step."""
        buffer = self.decode.buffer_of(logits)
        if buffer is None and self.drafts is not None:
            buffer = self.drafts.buffer_of(logits)
        return buffer

    def hidden(self, rows: PlanRows) -> torch.Tensor | None:
        """A replayed step's normed rows whose logits are wanted [R, H]; None if no graph fits.

        In a fixed batch, not of one token a row: such a step has rows added to it.
        """
        padded = self.fixed_batch and bool((rows.count == 1).all())
        return None if self.steps is None or padded else self.steps.run(rows)


def captures_graphs(config: EngineConfig, device: torch.device) -> bool:
    """Whether steps become graphs; host staging (ranks that share a GPU) is no graph."""
    if device.type == "cpu" or config.enforce_eager or config.transport == "mpi":
        return False
    return ranks_per_gpu() == 1


def bytes_for_drafts(config: EngineConfig, context: int, vocabulary: int) -> int:
    """Bytes of the GPU that graphs of steps with drafts, captured at start, take for good.

    What their layers compute with is in the memory of larger graphs. context: positions of a
    sequence; vocabulary: ids of which this rank has logits.
    """
    usual = len(_usual_with_drafts(config, -(-context // PAGE_TOKENS)))
    return usual * _GRAPH_BYTES + (HEAD_ROWS * vocabulary * 4 if usual else 0)


def _usual_with_drafts(config: EngineConfig, width: int, linear: bool = False) -> list[StepShape]:
    """Shapes of steps with a draft model's drafts, if there is one; tables have `width` pages."""
    if config.draft_model is None or not config.drafters or config.fixed_batch is not None:
        return []
    return usual_shapes(config.max_running, width, SHORT_TOKENS, linear)


def make_graphs(
    model: Decoder,
    pages: KeyValuePages,
    sampled: torch.Tensor,
    config: EngineConfig,
    most: int,
    context: int,
    capture: bool = True,
) -> Graphs:
    """The graphs of steps of up to `most` tokens and sequences of up to `context`. Collective.

    Without `capture` every step is launched once and nothing is captured: what graphs need
    compiled; `model` may then be shallow. sampled: ids of the step before, as for `DecodeGraphs`.
    """
    width, linear = -(-context // PAGE_TOKENS), pages.states is not None
    decode = decode_shapes(config.max_running, width, config.fixed_batch or 0, linear)
    steps = []
    if model.attends_in_fixed_shapes:
        steps = step_shapes(most, config.max_running, width, model.overlaps_exchanges, linear)
    room, first = None, model
    with_drafts = model.attends_in_fixed_shapes and config.fixed_batch is None
    usual = _usual_with_drafts(config, width, linear) if with_drafts else []
    if capture:
        others = len(steps) + len(usual)
        _log.info("capturing CUDA graphs: %d of decode steps, %d others", len(decode), others)
        drafts = [largest_shape(config.max_running, width, linear)] if with_drafts else []
        words = max(shape.words for shape in (*decode, *steps, *drafts))
        room, first = GraphRoom(sampled.device, words), model.shallow()
    source = GraphSource(model, first, pages, sampled, room)
    # The larger first: the others fit into their memory.
    step_graphs = StepGraphs(source, steps, decode) if steps else None
    decode_graphs = DecodeGraphs(source, decode)
    draft_graphs = DraftGraphs(source, config.max_running, width) if with_drafts else None
    if draft_graphs is not None and capture:
        draft_graphs.capture(usual)
    return Graphs(decode_graphs, step_graphs, config.fixed_batch is not None, draft_graphs)
