"""Seconds of a decode step and of a prefill step, by what they go to."""

from dataclasses import dataclass

from tpdet.bench.report.floor import attention_flops
from tpdet.bench.report.shapes import cut_for
from tpdet.kernels.order import DEFAULT_FOLD_ORDER
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct
from tpdet.model_config import ModelConfig
from tpdet.models.micro_batches import MICRO_BATCH_ROWS
from tpdet.models.products import head_product, layer_products
from tpdet.planner.constants import Constants
from tpdet.planner.exchange_time import (
    Levels,
    aside_seconds,
    between_seconds,
    exchange_seconds,
    levels_of,
)
from tpdet.planner.hardware import Hardware, Network
from tpdet.planner.kernel_time import (
    decode_attention_seconds,
    decode_attention_work,
    layer_bytes,
    prefill_attention_seconds,
    product_seconds,
    product_work,
    sampling_seconds,
    smooth_maximum,
)

HEAD_ROWS = 256
"""Rows of the output head computed at once, at most (runner.LOGIT_ROWS)."""


@dataclass(frozen=True)
class World:
    """A model cut over ranks on nodes, and what its steps are timed with. budget: rows of a step.

    `aside` overrides the runtime's multiprocessors of an exchange under products.
    """

    partition: Partition
    levels: Levels
    constants: Constants
    hardware: Hardware
    network: Network
    budget: int
    aside: int | None = None

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return self.partition.config

    @property
    def ranks(self) -> int:
        """Of the world."""
        return self.partition.world.size


def make_world(
    config: ModelConfig,
    ranks: int,
    constants: Constants,
    hardware: Hardware,
    network: Network,
    *,
    budget: int = 8192,
    fold_order: str = DEFAULT_FOLD_ORDER,
    leaves: int | None = None,
    aside: int | None = None,
) -> World:
    """Raises UsageError naming the sizes that fit the model, or its leaves."""
    partition = cut_for(config, ranks, fold_order, leaves)
    cut = partition.leaves, fold_order, config.hidden_size, budget
    return World(
        partition,
        levels_of(ranks, hardware.gpus, *cut),
        constants,
        hardware,
        network,
        budget,
        aside,
    )


Parts = dict[str, float]
"""Seconds by what they go to, in a fixed order; `host` is not added, it runs beside the rest."""


def step_seconds(parts: Parts) -> float:
    """The GPU's parts in turn, or the host's work for the next step if that is longer."""
    return max(sum(parts.values()) - parts["host"], parts["host"])


def limit_of(parts: Parts) -> str:
    """What a step's time goes to first."""
    if parts["host"] >= step_seconds(parts):
        return "host"
    return max((name for name in parts if name != "host"), key=lambda name: parts[name])


def decode_parts(world: World, batch: int, context: int) -> Parts:
    """A step in which `batch` sequences of `context` tokens gain one each."""
    config, constants, levels = world.config, world.constants, world.levels
    layers = config.num_layers
    work = decode_attention_work(batch, context, len(world.partition.key_heads), config.head_dim)
    exchanges = 2 * layers if world.ranks > 1 else 0
    inside, between = exchange_seconds(constants, levels, batch, world.network)
    return {
        "products": layers * _layer_products(world, batch) + _head(world, batch),
        "attention": layers * decode_attention_seconds(constants.decode_attention, work),
        "other kernels": layers * _between_products(world, batch),
        "sampling": _sampling(world, batch),
        "exchange in a node": exchanges * inside,
        "exchange between nodes": exchanges * between + _embedding(world, batch),
        "host": constants.host * batch,
    }


def prefill_parts(world: World, length: int) -> Parts:
    """A step of `budget` tokens of prompts of `length` tokens each, one token drawn a prompt.

    Steps of many rows run in halves, with one's exchange under the other's products.
    """
    config, rows = world.config, world.budget
    layers, ended = config.num_layers, max(1, rows // length)
    halves = 2 if world.ranks > 1 and rows >= MICRO_BATCH_ROWS else 1
    size = -(-rows // halves)
    attention = rows * attention_flops(config, length / 2) / layers / world.ranks
    cost = world.constants.prefill_attention
    attention_time = layers * prefill_attention_seconds(cost, attention)
    products = layers * halves * _layer_products(world, size)
    other = layers * halves * _between_products(world, size)
    inside, between = _prefill_exchanges(world, halves, products + attention_time + other)
    return {
        "products": products + _head(world, ended),
        "attention": attention_time,
        "other kernels": other,
        "sampling": _sampling(world, ended),
        "exchange in a node": inside,
        "exchange between nodes": between + _embedding(world, rows),
        "host": 0.0,
    }


def _prefill_exchanges(world: World, halves: int, computed: float) -> tuple[float, float]:
    """Seconds that exchanges add to `computed` ones of all layers: in a node, and between nodes."""
    if world.ranks == 1:
        return 0.0, 0.0
    levels, constants = world.levels, world.constants
    count = 2 * halves * world.config.num_layers
    size = -(-world.budget // halves)
    inside, between = exchange_seconds(constants, levels, size, world.network)
    if halves == 1 or levels.local == 1:
        return count * inside, count * between
    between *= count
    programs = world.aside or levels.aside
    mine = world.hardware.multiprocessors
    slowed = computed * mine / (mine - programs)
    inside = count * aside_seconds(constants, levels, size, programs)
    whole = smooth_maximum(slowed, inside + between, constants.aside.sharpness)
    added = whole - computed
    share = between / (inside + between)
    return added * (1 - share), added * share


def _layer_products(world: World, rows: int) -> float:
    """A rank's four products of one layer, in a step."""
    alone = sum(_product(world, each, rows) for each in layer_products(world.partition))
    return max(alone - world.constants.layer.saved, 0.0)


def _head(world: World, rows: int) -> float:
    """The output head, in blocks."""
    head = head_product(world.partition)
    full, rest = divmod(rows, HEAD_ROWS)
    blocks = [HEAD_ROWS] * full + ([rest] if rest else [])
    return sum(_product(world, head, block) for block in blocks)


def _product(world: World, each: LayerProduct, rows: int) -> float:
    work = product_work(each.kind, rows, each.n, each.k, world.levels.slots)
    return product_seconds(world.constants.products[each.kind], work)


def _between_products(world: World, rows: int) -> float:
    """Rotation, stores, SiLU and gaps of one layer."""
    partition, cost = world.partition, world.constants.layer
    query = partition.query_heads * world.config.head_dim
    key = len(partition.key_heads) * world.config.head_dim
    inner = world.config.intermediate_size // world.ranks
    return cost.seconds + layer_bytes(rows, query, key, inner) / cost.bytes


def _sampling(world: World, rows: int) -> float:
    columns = head_product(world.partition).n
    return sampling_seconds(world.constants.sampling, world.ranks, rows, columns)


def _embedding(world: World, rows: int) -> float:
    """Embedded rows that come from other nodes: bf16 values, half the bytes of a partial."""
    values = -(-rows * world.config.hidden_size // (2 * world.levels.node_slots))
    return between_seconds(world.constants, world.levels, values, world.network)
