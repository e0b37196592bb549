"""The least time a case can take: bytes over the GPU's bandwidth, operations over its peak."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tpdet.cache.kv import page_bytes, stored_dtype
from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.model_config.expert_load import touched_experts
from tpdet.checkpoint.model_config.model import LinearAttention
from tpdet.kernels.cuda.hardware import RATES, Rates
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, PAGE_TOKENS, FoldPlan
from tpdet.layers.products import LayerProduct
from tpdet.models.products import layer_products
from tpdet.tools.worlds.shapes import cut_for

_PASSES = 6  # operations of a row and a value of a state: products with k and q, and k u'
_BEFORE = "qkv", "qkvz", "ba"
"""Products of a layer that its keys and values, or its states, are made of."""


@dataclass(frozen=True)
class CaseWork:
    """Operations and bytes that a case needs, over all GPUs."""

    flops: float
    bytes: float

    def over(self, ranks: int) -> "CaseWork":
        """A rank's share."""
        return CaseWork(self.flops / ranks, self.bytes / ranks)

    def seconds(self, rates: Rates) -> float:
        """The least time on one GPU of these rates."""
        return max(self.flops / rates.flops, self.bytes / rates.bytes)


def gpu_rates(gpu: str) -> Rates | None:
    """The rates of a GPU by torch's name for it, None for a CPU and for unknown GPUs."""
    return RATES.get(gpu)


def here() -> Rates | None:
    """The rates of this process's GPU."""
    return gpu_rates(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def print_floor(case: str, work: CaseWork) -> float | None:
    """Say the least microseconds of a case on this GPU, before it is timed; None: not known."""
    rates = here()
    if rates is None:
        print(f"{case}: no floor is known for this GPU", flush=True)
        return None
    floor = 1e6 * work.seconds(rates)
    print(f"{case}: floor {floor:.2f} us", flush=True)
    return floor


def exchange_seconds(rates: Rates, plan: FoldPlan, values: int) -> float:
    """For the bytes that leave a GPU when `values` outputs are folded, one-shot or two-shot.

    Every rank sends its fp32 roots to all others, or to each row's owner, which sends y in bf16.
    """
    return min(sent_bytes(len(plan.roots), plan.slots, values)) / rates.link


def sent_bytes(ranks: int, slots: int, values: int) -> tuple[float, float]:
    """Bytes that leave a GPU when `values` outputs are folded, one-shot and two-shot."""
    one = values * 4 * slots * (ranks - 1)
    two = values * (4 * slots + 2) * (ranks - 1) / ranks
    return one, two


def linear_weights(config: ModelConfig, rows: int) -> float:
    """Values in the weights that `rows` rows read in the layers' products.

    Of experts those that rows touch on average which choose them evenly and each for itself.
    """
    return sum(
        product.n * product.k * _touched(config, product, rows) for product in _products(config)
    )


def multiplied_weights(config: ModelConfig) -> int:
    """Values by which one row is multiplied in the layers' products."""
    return _multiplied(_products(config))


def _products(config: ModelConfig) -> list[LayerProduct]:
    partition = cut_for(config, 1, DEFAULT_FOLD_ORDER)
    layers = range(config.num_layers)
    return [product for index in layers for product in layer_products(partition, index)]


def _touched(config: ModelConfig, product: LayerProduct, rows: int) -> float:
    if not product.experts:
        return 1.0
    return touched_experts(config.experts, product.chosen, rows)


def weight_bytes(config: ModelConfig, rows: int = 1) -> float:
    """Bytes of the weights that a step of `rows` reads: all but the embedding's unread rows."""
    count = linear_weights(config, rows) + config.vocab_size * config.hidden_size
    return count * float(getattr(torch, config.dtype).itemsize)


def decode_work(
    config: ModelConfig, batch: int, context: int, kv_cache_dtype: str = "auto"
) -> CaseWork:
    """A step in which `batch` sequences of `context` tokens gain one each.

    Of linear layers a sequence's boundary states are read, and nothing else of their states.
    kv_cache_dtype: of pages, as the setting.
    """
    linear, stored = config.linear, stored_dtype(kv_cache_dtype, config.dtype)
    sizes = config.attention_layers, config.num_kv_heads, config.head_dim
    cached = batch * context * page_bytes(*sizes, stored) / PAGE_TOKENS
    multiplied = multiplied_weights(config) + config.vocab_size * config.hidden_size
    mixed = attention_flops(config, context)
    if linear is not None:
        values = sum(linear.layers) * _state_values(linear)
        cached, mixed = cached + batch * 4 * values, mixed + _PASSES * values
    return CaseWork(batch * (2 * multiplied + mixed), weight_bytes(config, batch) + cached)


def prefill_work(config: ModelConfig, prompts: int, length: int) -> CaseWork:
    """Prompts of `length` tokens each, one token sampled for each; weights are read once.

    Of a prompt's last layer, only the last token needs more than keys and values.
    """
    head, layers = config.vocab_size * config.hidden_size, config.attention_layers
    all_keys = attention_flops(config, length) / layers  # of one row and layer
    products = 2 * (length * multiplied_weights(config) - (length - 1) * _finishing(config) + head)
    whole = layers if config.is_linear(config.num_layers - 1) else layers - 1
    attended = whole * length * all_keys / 2 + (layers - whole) * all_keys
    if config.linear is not None:
        attended += _PASSES * sum(config.linear.layers) * length * _state_values(config.linear)
    return CaseWork(prompts * (products + attended), weight_bytes(config, prompts * length))


def _state_values(linear: LinearAttention) -> int:
    """Values of one layer's state: a row is multiplied by all for k, for q, and adds to all."""
    return linear.value_heads * linear.key_size * linear.value_size


def _finishing(config: ModelConfig) -> int:
    """Values by which one row is multiplied behind the last layer's keys and values, or states."""
    partition = cut_for(config, 1, DEFAULT_FOLD_ORDER)
    products = layer_products(partition, config.num_layers - 1)
    return _multiplied(product for product in products if product.name not in _BEFORE)


def _multiplied(products: Iterable[LayerProduct]) -> int:
    return sum(product.n * product.k * (product.chosen or 1) for product in products)


def mixed_work(config: ModelConfig, lengths: list[int], generate: int) -> CaseWork:
    """Prompts of these lengths and `generate` tokens each; weights are read once a token."""
    flops = 0.0
    for length in lengths:
        flops += prefill_work(config, 1, length).flops
        flops += (generate - 1) * decode_work(config, 1, length + generate // 2).flops
    return CaseWork(flops, generate * weight_bytes(config, len(lengths)))


def attention_flops(config: ModelConfig, keys: float) -> float:
    """Operations of a token's scores and sums over `keys` keys, in all layers that have keys."""
    return 4 * config.attention_layers * config.num_heads * config.head_dim * keys
