"""The tensors of the KV cache: for each layer, pages of 256 tokens of keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from tpdet.cache.states import StatePool
from tpdet.errors import ResourceError
from tpdet.kernels.exact.fp8_rows import fp8_page_bytes
from tpdet.kernels.inputs.linear_state import LinearState
from tpdet.kernels.order import PAGE_TOKENS


@dataclass(frozen=True)
class LayerPages:
    """One layer's keys and values, each [P, Hkv, 256, D] in the model's dtype.

    In fp8 each is uint8 [P, Hkv, 256 * (D + 1)], as `kernels.exact.fp8_rows` says.
    """

    keys: torch.Tensor
    values: torch.Tensor


LayerCache: TypeAlias = LayerPages | LinearState
"""What one layer keeps of sequences: pages, or states of a linear layer."""


@dataclass(frozen=True)
class KeyValuePages:
    """The pages of every layer. The content of a page is undefined until it is written.

    layers: linear ones have states in place of pages; states: all of these, None if there are none.
    """

    layers: tuple[LayerCache, ...]
    states: StatePool | None = None

    @property
    def attention(self) -> tuple[LayerPages, ...]:
        """The pages of the layers that have some."""
        return tuple(layer for layer in self.layers if isinstance(layer, LayerPages))

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.attention[0].keys.device

    def fill(self, count: int, value: float) -> None:
        """Write `value` all over the first `count` pages; in fp8, rows of zeros or of NaN."""
        for layer in self.attention:
            for pages in (layer.keys, layer.values):
                pages[:count].fill_(value if pages.is_floating_point() else 255 * (value != value))

    def beside(self, states: StatePool, linear: Sequence[bool]) -> "KeyValuePages":
        """The pages of these layers and the states of linear ones; linear: which are, in order."""
        pages, own = iter(self.layers), iter(states.layers)
        layers = tuple(next(own) if is_linear else next(pages) for is_linear in linear)
        return KeyValuePages(layers, states)


def allocate_pages(
    layers: int,
    pages: int,
    key_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> KeyValuePages:
    """Uninitialised pages. Raises ResourceError with the size in GiB when memory is short.

    dtype: as `stored_dtype` has it.
    """
    shape: tuple[int, ...] = (pages, key_heads, PAGE_TOKENS, head_dim)
    if dtype == torch.uint8:
        shape = (pages, key_heads, fp8_page_bytes(head_dim))
    try:
        return KeyValuePages(
            tuple(
                LayerPages(*(torch.empty(shape, dtype=dtype, device=device) for _ in range(2)))
                for _ in range(layers)
            )
        )
    except (RuntimeError, MemoryError) as error:
        size = pages * page_bytes(layers, key_heads, head_dim, dtype)
        also = "" if str(device) == "cpu" else ", --gpu-memory-utilization or --max-model-len"
        raise ResourceError(
            f"no memory for {pages} KV pages ({size / 2**30:.1f} GiB) on {device}: lower --kv-pages"
            f"{also}"
        ) from error


def stored_dtype(kv_cache_dtype: str, dtype: str) -> torch.dtype:
    """The dtype of pages by the setting and the model's dtype: uint8 stands for fp8."""
    return torch.uint8 if kv_cache_dtype == "fp8" else getattr(torch, dtype)


def page_bytes(layers: int, key_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers, keys and values; dtype: as `stored_dtype` has it."""
    if dtype == torch.uint8:
        return 2 * layers * key_heads * fp8_page_bytes(head_dim)
    return 2 * layers * key_heads * PAGE_TOKENS * head_dim * dtype.itemsize
