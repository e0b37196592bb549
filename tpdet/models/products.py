"""What the layers of a model's family declare of its weights: products, norms, shapes of tensors.

This is the one table of a model's products. The shape table, the tuner, the planner, the
benchmarks and the start-up checks read it.
"""

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.kernels.inputs.experts import ExpertLayer
from tpdet.kernels.inputs.product import Product
from tpdet.layers.experts import held_experts
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct
from tpdet.layers.vocabulary import VocabularyTable
from tpdet.models.layer import DecoderLayer


def layer_products(partition: Partition, index: int = -1) -> tuple[LayerProduct, ...]:
    """The products of the last decoder layer, like most, on this rank, in the order of a step."""
    config = partition.config
    return DecoderLayer.products(partition, index % config.num_layers)


def head_product(partition: Partition) -> LayerProduct:
    """The output head's."""
    return VocabularyTable.product(partition)


def model_products(partition: Partition) -> tuple[LayerProduct, ...]:
    """One decoder layer's products, then the head's."""
    return (*layer_products(partition), head_product(partition))


def rank_products(partition: Partition) -> tuple[Product, ...]:
    """A rank's distinct products in total order, without those of single experts.

    They are alike on every rank of a world but for roots and, with unequal leaves, for sizes.
    """
    return tuple(sorted({each.product for each in _rank_products(partition)}))


def table_products(partition: Partition) -> tuple[Product, ...]:
    """Those of `rank_products` that a shape table names: a layer multiplies them by themselves."""
    return tuple(sorted({each.product for each in _rank_products(partition) if not each.joined}))


def _rank_products(partition: Partition) -> list[LayerProduct]:
    """All but those of single experts."""
    every = _all_layer_products(partition)
    if partition.config.head == "tokens":  # a head of labels is small, and tuned by no table
        every.append(head_product(partition))
    return [product for product in every if not product.experts]


def expert_products(partition: Partition) -> tuple[Product, ...]:
    """The distinct products of single experts on a rank, in total order."""
    every = _all_layer_products(partition)
    return tuple(sorted({each.product for each in every if each.experts}))


def expert_layer(partition: Partition) -> ExpertLayer | None:
    """A rank's whole experts; None for a dense model and where experts are cut over outputs."""
    mixture, config = partition.config.mixture, partition.config
    if mixture is None or partition.experts is not None:
        return None
    held, routing = len(held_experts(partition)), mixture.routing
    return ExpertLayer(config.hidden_size, mixture.width, held, routing.experts, routing.chosen)


def _all_layer_products(partition: Partition) -> list[LayerProduct]:
    """Those of one layer of each kind."""
    layers = one_of_each_kind(partition.config)
    return [product for index in layers for product in layer_products(partition, index)]


def one_of_each_kind(config: ModelConfig) -> list[int]:
    """The last layer of each kind of products: with experts or without, linear or not."""
    kinds = {config.kind_of(index)[1:]: index for index in range(config.num_layers)}
    return [*kinds.values()]


def norm_values(config: ModelConfig) -> int:
    """Values of all norms of a model, each of which every rank holds."""
    layers = sum(DecoderLayer.norm_values(config, i) for i in range(config.num_layers))
    return layers + config.norm_values


def sized_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of tensors of the checkpoint in which every size of the configuration occurs.

    Those of the last layer show the number of layers too.
    """
    shapes = VocabularyTable.sized_tensors(config, "model.embed_tokens")
    linear = [i for i in one_of_each_kind(config) if config.is_linear(i)]
    for index in {*linear, config.num_layers - 1}:
        shapes |= DecoderLayer.sized_tensors(config, index)
    return shapes
