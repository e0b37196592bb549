"""Predicts the seconds of a decode step and of a prefill step, part by part."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.kernels.cuda.cost.roofline import smooth_maximum
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.kernels.order import DEFAULT_FOLD_ORDER
from tpdet.layers.partition import Partition, state_shape
from tpdet.layers.products import LayerProduct
from tpdet.models.micro_batches import MICRO_BATCH_ROWS
from tpdet.models.products import head_product, layer_products, one_of_each_kind
from tpdet.tools.measurement.floor import attention_flops
from tpdet.tools.plan.constants import EXPERTS, Constants
from tpdet.tools.plan.exchange_time import (
    Levels,
    between_seconds,
    exchange_seconds,
    levels_of,
    overlapped_seconds,
)
from tpdet.tools.plan.hardware import Hardware, Network
from tpdet.tools.plan.kernel_time import (
    decode_attention_work,
    experts_work,
    layer_bytes,
    linear_decode_work,
    linear_prefill_work,
    product_work,
)
from tpdet.tools.worlds.shapes import cut_for


@dataclass(frozen=True)
class PlanWorld:
    """A model divided over ranks on nodes, with the constants for its steps.

    budget: rows of a step, at most; overlapped: multiprocessors of an exchange that overlaps
    products, None for the runtime's. Raises UsageError naming the sizes or leaves that fit the
    model.
    """

    config: ModelConfig
    ranks: int
    constants: Constants
    hardware: Hardware
    network: Network
    budget: int = 8192
    fold_order: str = DEFAULT_FOLD_ORDER
    leaves: int | None = None
    overlapped: int | None = None

    @cached_property
    def partition(self) -> Partition:
        """The cut of the rank that holds most of the model."""
        cut = self.config, self.ranks, self.fold_order, self.leaves
        parts = [cut_for(*cut, rank=rank) for rank in range(self.ranks)]
        return max(parts, key=lambda part: (len(part.key_heads), len(part.query_heads)))

    @cached_property
    def levels(self) -> Levels:
        """The levels of its fold."""
        cut = self.partition.leaves, self.fold_order, self.config.hidden_size, self.budget
        return levels_of(self.ranks, self.hardware.gpus, *cut)


Parts = dict[str, float]
"""Seconds by name, in a fixed order; `host` runs beside the other parts and is not added."""


def step_seconds(parts: Parts) -> float:
    """The sum of the GPU's parts, or the host's work for the next step if that is longer."""
    return max(sum(parts.values()) - parts["host"], parts["host"])


def limit_of(parts: Parts) -> str:
    """The largest part of a step."""
    if parts["host"] >= step_seconds(parts):
        return "host"
    return max((name for name in parts if name != "host"), key=lambda name: parts[name])


def decode_parts(world: PlanWorld, batch: int, context: int) -> Parts:
    """The parts of a step in which `batch` sequences of `context` tokens get one token each."""
    config, constants, levels = world.config, world.constants, world.levels
    layers = config.num_layers
    work = decode_attention_work(batch, context, len(world.partition.key_heads), config.head_dim)
    exchanges = 2 * layers if world.ranks > 1 else 0
    inside, between = exchange_seconds(constants, levels, batch, world.network)
    return {
        "products": _layers_products(world, batch) + _head(world, batch),
        "attention": config.attention_layers * constants.decode_attention.seconds(work),
        "linear attention": _linear_decode(world, batch),
        "other kernels": _between_products(world, batch),
        "sampling": _sampling(world, batch),
        "exchange in a node": exchanges * inside + _expert_rows(world, batch),
        "exchange between nodes": exchanges * between + _embedding(world, batch),
        "host": constants.host * batch,
    }


def prefill_parts(world: PlanWorld, length: int) -> Parts:
    """The parts of a step of `budget` tokens from prompts of `length` tokens, each sampled once.

    A step of many rows runs as two micro-batches: the exchanges of one overlap the products of the
    other.
    """
    config, rows = world.config, world.budget
    ended = max(1, rows // length)
    overlaps = world.ranks > 1 and world.partition.experts is None
    micro_batches = 2 if overlaps and rows >= MICRO_BATCH_ROWS else 1
    size = -(-rows // micro_batches)
    attends = config.attention_layers
    attention = rows * attention_flops(config, length / 2) / attends / world.ranks
    attention_time = attends * world.constants.prefill_attention.seconds(attention)
    products = micro_batches * _layers_products(world, size)
    linear = micro_batches * _linear_prefill(world, size, length)
    other = micro_batches * _between_products(world, size)
    computed = products + attention_time + linear + other
    inside, between = _prefill_exchanges(world, micro_batches, computed)
    return {
        "products": products + _head(world, ended),
        "attention": attention_time,
        "linear attention": linear,
        "other kernels": other,
        "sampling": _sampling(world, ended),
        "exchange in a node": inside + _expert_rows(world, rows),
        "exchange between nodes": between + _embedding(world, rows),
        "host": 0.0,
    }


def _prefill_exchanges(
    world: PlanWorld, micro_batches: int, computed: float
) -> tuple[float, float]:
    """Seconds that exchanges add to the `computed` seconds: inside a node, and between nodes."""
    if world.ranks == 1:
        return 0.0, 0.0
    levels, constants = world.levels, world.constants
    count = 2 * micro_batches * world.config.num_layers
    size = -(-world.budget // micro_batches)
    inside, between = exchange_seconds(constants, levels, size, world.network)
    if micro_batches == 1 or levels.local == 1:
        return count * inside, count * between
    between *= count
    programs = world.overlapped or levels.overlapped
    every = world.hardware.multiprocessors
    slowed = computed * every / (every - programs)
    inside = count * overlapped_seconds(constants, levels, size, programs)
    whole = smooth_maximum(slowed, inside + between, constants.overlapped.sharpness)
    added = whole - computed
    share = between / (inside + between)
    return added * (1 - share), added * share


def _layers_products(world: PlanWorld, rows: int) -> float:
    """Seconds of a rank's products of all layers, by the kinds of these."""
    return sum(
        count * _layer_products(world, rows, index)
        for index, count in _layers_of_each_kind(world.config)
    )


def _layers_of_each_kind(config: ModelConfig) -> list[tuple[int, int]]:
    """(a layer, how many there are of its kind) of each kind of products."""
    kinds = Counter(config.kind_of(index)[1:] for index in range(config.num_layers))
    return [(index, kinds[config.kind_of(index)[1:]]) for index in one_of_each_kind(config)]


def _linear_decode(world: PlanWorld, batch: int) -> float:
    """Seconds of all linear layers beside their products; 0 where that was not measured."""
    shape, cost = state_shape(world.partition), world.constants.linear
    if shape is None or cost is None:
        return 0.0
    return shape.layers * cost.seconds(linear_decode_work(shape, batch))


def _linear_prefill(world: PlanWorld, rows: int, length: int) -> float:
    """As `_linear_decode`, of `rows` tokens from prompts of `length` tokens."""
    shape, cost = state_shape(world.partition), world.constants.linear
    if shape is None or cost is None:
        return 0.0
    prompts, tokens = max(1, rows // length), min(length, rows)
    work = linear_prefill_work(shape, prompts, tokens, world.hardware.multiprocessors)
    return shape.layers * cost.seconds(work)


def _layer_products(world: PlanWorld, rows: int, index: int) -> float:
    """Seconds of a rank's products of layer `index`."""
    products = layer_products(world.partition, index)
    alone = sum(_product(world, product, rows) for product in products if not product.experts)
    if experts := [product for product in products if product.experts]:
        work = experts_work(experts, world.config.experts, rows)
        alone += world.constants.product(EXPERTS).seconds(work)
    return max(alone - world.constants.layer.saved, 0.0)


def _expert_rows(world: PlanWorld, rows: int) -> float:
    """Seconds of gathering rows between the products of experts that are cut over outputs.

    It has the costs of a one-shot exchange; the totals behind the experts count as the exchange of
    any layer.
    """
    config, mixture, ranks = world.config, world.config.mixture, world.ranks
    if mixture is None or world.partition.experts is None:
        return 0.0
    sent = 2.0 * rows * mixture.routing.chosen * mixture.width * (ranks - 1) / ranks
    gather = world.constants.one_shot.seconds(ranks, sent)
    return sum(map(config.has_experts, range(config.num_layers))) * gather


def _head(world: PlanWorld, rows: int) -> float:
    """Seconds of the output head, in blocks of HEAD_ROWS."""
    head = head_product(world.partition)
    full, rest = divmod(rows, HEAD_ROWS)
    blocks = [HEAD_ROWS] * full + ([rest] if rest else [])
    return sum(_product(world, head, block) for block in blocks)


def _product(world: PlanWorld, product: LayerProduct, rows: int) -> float:
    work = product_work(product.kind, rows, product.n, product.k, world.levels.slots)
    return world.constants.product(product.kind).seconds(work)


def _between_products(world: PlanWorld, rows: int) -> float:
    """Seconds of rotation, stores, activation and gaps of all layers.

    What stands behind the first product of a linear layer is counted by itself, if it is at all.
    """
    cost, apart = world.constants.layer, {"qkvz"} if world.constants.linear else set()
    seconds = 0.0
    for index, count in _layers_of_each_kind(world.config):
        products = layer_products(world.partition, index)
        moved = layer_bytes(rows, [product for product in products if product.name not in apart])
        seconds += count * (cost.seconds + moved / cost.bytes)
    return seconds


def _sampling(world: PlanWorld, rows: int) -> float:
    columns = head_product(world.partition).n
    return world.constants.sampling.seconds(world.ranks, rows, columns)


def _embedding(world: PlanWorld, rows: int) -> float:
    """Seconds of embedded rows from other nodes: bf16, half the bytes of a partial."""
    values = -(-rows * world.config.hidden_size // (2 * world.levels.node_slots))
    return between_seconds(world.constants, world.levels, values, world.network)
