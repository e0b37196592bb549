"""The one table of a model's products: what its layers declare, in the order of a step."""

from tpdet.kernels.inputs.product import Product
from tpdet.layers.attention import Attention
from tpdet.layers.mlp import GatedMlp
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct
from tpdet.layers.vocabulary import VocabularyTable

BLOCKS = (Attention, GatedMlp)
"""Of one decoder layer."""


def layer_products(partition: Partition) -> tuple[LayerProduct, ...]:
    """One decoder layer's products on this rank."""
    return tuple(product for block in BLOCKS for product in block.products(partition))


def head_product(partition: Partition) -> LayerProduct:
    """The output head's."""
    return VocabularyTable.product(partition)


def model_products(partition: Partition) -> tuple[LayerProduct, ...]:
    """One decoder layer's products, then the head's."""
    return (*layer_products(partition), head_product(partition))


def rank_products(partition: Partition) -> tuple[Product, ...]:
    """A rank's distinct products in total order, alike on every rank of a world but for roots."""
    return tuple(sorted({each.product for each in model_products(partition)}))
