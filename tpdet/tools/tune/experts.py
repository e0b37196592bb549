"""Tune a layer of experts: at each number of tokens, the tiles of both products and their blocks.

Every tile is timed alone, on cold weights, with routes that differ from call to call. The best few
of each form of blocks are then timed in pairs, from the router's logits to the sums of the lanes,
beside the static choice. A tile counts if its rows have the bytes of dense products.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.experts.admission import differs
from tpdet.kernels.cuda.experts.candidates import block_forms, tiles_of
from tpdet.kernels.cuda.experts.gather import rows_in_blocks
from tpdet.kernels.cuda.experts.products import grouped_product
from tpdet.kernels.cuda.experts.router import route
from tpdet.kernels.cuda.experts.sorted_tokens import SortedTokens, sort_tokens
from tpdet.kernels.cuda.experts.sums import expert_sums
from tpdet.kernels.cuda.experts.tiles import programs, static_tiles, weights_of
from tpdet.kernels.cuda.gemm.choice.expert_entries import TOKENS, LayerTiles
from tpdet.kernels.cuda.gemm.choice.tile_text import format_tile
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.hardware import MEASURED, RATES
from tpdet.kernels.inputs.experts import Lanes, Routing
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.order import PAGE_TOKENS, fold_tree
from tpdet.tools.measurement.graph_times import COLD_BYTES
from tpdet.tools.tune.measure import first_in_class, full_us, quick_us
from tpdet.tools.tune.shapes import Expert

_BEST = 2  # tiles of a product and form of blocks that are timed in pairs
_FORMS = 2  # forms of blocks of which pairs are timed
_STEPS = {16: 8, 256: 4, 1 << 30: 2}  # steps with different routes, by the most tokens
_GAIN = 0.99  # what another choice must take of the static one's time
_RATES = RATES[MEASURED.name]  # of the floor
_FLOPS = 0.65e15  # operations a second of its large products


class TuneStep(NamedTuple):
    """x [M, H], its router's logits [M, E] fp32, and the weights of a layer."""

    x: torch.Tensor
    logits: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class GroupedRows(NamedTuple):
    """What a product reads [P, K], the tokens sorted for it, the weights [E, N, K]."""

    rows: torch.Tensor
    sorted_tokens: SortedTokens
    weight: torch.Tensor


@dataclass(frozen=True)
class LayerRow:
    """What a number of tokens got: tiles, microseconds of them, of the static choice and least."""

    tiles: LayerTiles
    us: float
    static_us: float
    floor_us: float


@dataclass
class TunedLayer:
    """Rows by tokens of a step; tiles that were refused for other bits."""

    expert: Expert
    rows: dict[int, LayerRow] = field(default_factory=dict)
    refused: dict[str, None] = field(default_factory=dict)


class LayerTuner:
    """Weights of one layer, more of them than the L2 cache holds."""

    def __init__(self, expert: Expert, repeats: int, device: torch.device) -> None:
        """Draw the weights."""
        self.expert, self._repeats, self._device = expert, repeats, device
        layer = expert.layer
        size = 6 * layer.held * layer.width * layer.hidden
        copies = max(1, -(-int(2 * COLD_BYTES) // size))
        up, below = (layer.held, 2 * layer.width), (layer.held, layer.hidden)
        self._weights = [
            (self._draw(*up, layer.hidden, seed=i), self._draw(*below, layer.width, seed=i))
            for i in range(copies)
        ]
        self._biases: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        if expert.biased:
            self._biases = self._draw(*up, seed=1), self._draw(*below, seed=2)
        self._lanes = Lanes(range(layer.held), layer.total, 1, (fold_tree("tree", 1),))
        self._differ: dict[tuple[Tile, bool, bool], bool] = {}

    def _draw(self, *shape: int, seed: int) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed(seed)
        drawn = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return drawn.normal_(0.0, 0.02, generator=generator)

    def tune(self, tokens: Iterable[int]) -> TunedLayer:
        """Every number of tokens in turn."""
        tuned = TunedLayer(self.expert)
        for count in tokens:
            tuned.rows[count] = self._tune_step(count, tuned.refused)
        return tuned

    def launches(self, tokens: Iterable[int]) -> Iterator[Callable[[], object]]:
        """Calls that launch each kernel of `tune` once."""
        for count in tokens:
            steps = self._steps(count)[:1]
            for block_rows, by_token in block_forms(self.expert.layer, count):
                for gated in (True, False):
                    [rows] = self._grouped(steps, block_rows, by_token, gated)
                    for tile in self._tiles(block_rows, gated):
                        yield partial(self._run(tile, gated), rows)
                        yield partial(self._leaves_the_class, tile, by_token, gated)
            yield partial(self._whole(count, self._static(count)), steps[0])
        self._differ.clear()

    def _steps(self, tokens: int) -> list[TuneStep]:
        """Other rows, routes and weights from step to step."""
        layer = self.expert.layer
        count = next(steps for most, steps in _STEPS.items() if tokens <= most)
        generator = torch.Generator(self._device).manual_seed(tokens)
        steps = []
        for i in range(max(count, len(self._weights))):
            x = torch.randn(tokens, layer.hidden, generator=generator, device=self._device)
            logits = torch.randn(tokens, layer.total, generator=generator, device=self._device)
            steps.append(TuneStep(x.bfloat16(), logits, *self._weights[i % len(self._weights)]))
        return steps

    def _tune_step(self, tokens: int, refused: dict[str, None]) -> LayerRow:
        steps, static = self._steps(tokens), self._static(tokens)
        forms = sorted(
            (self._form(steps, form, refused) for form in block_forms(self.expert.layer, tokens)),
            key=lambda form: form[0],
        )
        tried = [pair for us, pairs in forms[:_FORMS] if us < math.inf for pair in pairs]
        tried = list(dict.fromkeys([static, *tried]))
        times = full_us([self._whole(tokens, tiles) for tiles in tried], steps, self._repeats)
        best = min(range(len(tried)), key=times.__getitem__)
        if times[best] > _GAIN * times[0]:
            best = 0
        return LayerRow(tried[best], times[best], times[0], self._floor(tokens, steps))

    def _form(
        self, steps: Sequence[TuneStep], form: tuple[int, bool], refused: dict[str, None]
    ) -> tuple[float, list[LayerTiles]]:
        """Microseconds of both products by the best tiles of blocks of a form, and its pairs."""
        block_rows, by_token = form
        best, total = [], 0.0
        for gated in (True, False):
            rows = self._grouped(steps, block_rows, by_token, gated)
            runs = {tile: self._run(tile, gated) for tile in self._tiles(block_rows, gated)}
            times = quick_us(runs, rows)

            def problem(tile: Tile, gated: bool = gated) -> str | None:
                name = f"{format_tile(tile)} of {'gates' if gated else 'down'}"
                return name if self._leaves_the_class(tile, by_token, gated) else None

            tiles, wrong = first_in_class(times, _BEST, problem)
            refused |= dict.fromkeys(wrong.values())
            best.append(tiles)
            total += times[tiles[0]] if tiles else math.inf
        ups, downs = best
        return total, [LayerTiles(up, down, by_token) for up in ups for down in downs]

    def _grouped(
        self, steps: Sequence[TuneStep], block_rows: int, by_token: bool, gated: bool
    ) -> list[GroupedRows]:
        """What one of both products reads in each step."""
        layer, grouped = self.expert.layer, []
        for step in steps:
            ids = step.logits.topk(layer.chosen).indices.sort().values.int()
            tokens = sort_tokens(ids, self._lanes.experts, block_rows, by_token)
            if gated:
                rows = step.x if by_token else rows_in_blocks(step.x, tokens)
            else:
                rows = self._draw(tokens.rows, layer.width, seed=3)
            grouped.append(GroupedRows(rows, tokens, step.gate_up if gated else step.down))
        return grouped

    def _tiles(self, block_rows: int, gated: bool) -> list[Tile]:
        gate_up, down = weights_of(self.expert.layer, 2)
        return tiles_of(block_rows, gate_up if gated else down, hardware.gpu_of(self._device))

    def _run(self, tile: Tile, gated: bool) -> Callable[[GroupedRows], object]:
        name = self.expert.activation if gated else ""
        bias, sms = self._biases[0 if gated else 1], programs(self._device)

        def run(grouped: GroupedRows) -> object:
            rows, tokens, weight = grouped
            shared = gated and tokens.by_token
            return grouped_product(rows, weight, bias, tokens, tile, sms, name, shared)

        return run

    def _whole(self, tokens: int, tiles: LayerTiles) -> Callable[[TuneStep], object]:
        """From the router's logits to the sums of lanes."""
        pages = tuple(range(-(-tokens // PAGE_TOKENS)))
        spans = make_batch((PagedSequence(0, tokens, 0, pages),), self._device).rows
        layer, name = self.expert.layer, self.expert.activation
        routing = Routing(layer.total, layer.chosen)

        def run(step: TuneStep) -> object:
            routes = route(step.logits, None, spans, routing, self._lanes.experts)
            return expert_sums(
                step.x,
                routes.ids,
                routes.weights,
                step.gate_up,
                step.down,
                self._biases,
                self._lanes,
                activation=name,
                tiles=tiles,
                sorted_tokens=routes.sorted_tokens,
            )

        return run

    def _static(self, tokens: int) -> LayerTiles:
        return static_tiles(self.expert.layer, tokens, 2, hardware.gpu_of(self._device))

    def _leaves_the_class(self, tile: Tile, by_token: bool, gated: bool) -> bool:
        case = tile, by_token, gated
        if case not in self._differ:
            weight = weights_of(self.expert.layer, 2)[0 if gated else 1]
            self._differ[case] = differs(weight, tile, by_token, self._device, torch.bfloat16)
        return self._differ[case]

    def _floor(self, tokens: int, steps: Sequence[TuneStep]) -> float:
        """Least microseconds: the touched weights at `_RATES`, or `_FLOPS`."""
        layer = self.expert.layer
        weights, touched, chosen = 3 * layer.width * layer.hidden, 0, 0
        for step in steps:
            ids = step.logits.topk(layer.chosen).indices
            own = ids[ids < layer.held]
            touched, chosen = touched + own.unique().numel(), chosen + own.numel()
        least = max(2 * touched * weights / _RATES.bytes, 2 * chosen * weights / _FLOPS)
        return 1e6 * least / len(steps)


def step_sizes(most: int) -> tuple[int, ...]:
    """Tokens at which a layer is tuned, for steps of up to `most`."""
    return tuple(tokens for tokens in TOKENS if tokens <= most) or TOKENS[:1]
