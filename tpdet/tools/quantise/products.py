"""Which tensors of a checkpoint are weights of products, by their names and shapes."""

import re
from typing import NamedTuple

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.stored import Tensors
from tpdet.errors import UsageError
from tpdet.tools.quantise.encodings import WeightFormat

_WEIGHT, _EMBEDDING = ".weight", "embed_tokens"
_CONVOLUTION = ".linear_attn.conv1d"
_GATES = (".linear_attn.in_proj_a", ".linear_attn.in_proj_b", ".linear_attn.in_proj_ba")
"""Small products of linear layers whose outputs are exponents."""
_OF_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Sorted(NamedTuple):
    """products: the names of weights to quantise; ignored: modules with matrices that stay."""

    products: frozenset[str]
    ignored: list[str]


def sort_tensors(tensors: Tensors, config: ModelConfig, encoding: WeightFormat) -> Sorted:
    """Tell the weights of the layers' products from routers, heads, embeddings and vectors.

    Raises UsageError for experts that lie in one tensor, and for inputs that are no groups.
    """
    products, ignored = [], []
    for name in sorted(tensors):
        shape, stem = tensors[name].open().get_shape(), name.removesuffix(_WEIGHT)
        if stem.endswith(_CONVOLUTION):
            ignored.append(stem)
            continue
        if len(shape) > 2:
            raise UsageError(
                f"tensor {name} has all experts of a layer: only experts that lie apart can be "
                "quantised"
            )
        if len(shape) < 2 or stem == name or stem.endswith(_EMBEDDING):
            continue
        if not _is_product(stem, config):
            ignored.append(stem)
            continue
        if shape[1] % encoding.unit:
            raise UsageError(
                f"tensor {name} has {shape[1]} inputs, which are no groups of {encoding.unit}: use "
                "--format fp8-block"
            )
        products.append(name)
    return Sorted(frozenset(products), ignored)


def _is_product(stem: str, config: ModelConfig) -> bool:
    layer = _OF_LAYER.search(stem)
    if layer is None or int(layer[1]) >= config.num_layers:
        return False
    mixture, kept = config.mixture, list(_GATES)
    if mixture is not None:
        kept.append(f".{mixture.block}.{mixture.router}")
        kept += [f".{mixture.block}.{mixture.shared_gate}"] * bool(mixture.shared_gate)
    return not stem.endswith(tuple(kept))
