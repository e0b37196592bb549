"""The poison check: memory that no sequence owns may hold NaN, and no logit changes.

A short prompt and one more token are computed twice: with zeros, and with NaN, in free pages, in
the unwritten part of its own pages, and in every tensor that an operation makes before it writes
it. The logits must have the same bits: padding is inert (docs/numerics.md).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tpdet.cache.kv import KeyValuePages
from tpdet.comm.world.world import World
from tpdet.errors import CheckpointError, TpdetError
from tpdet.kernels.inputs.paged_batch import PagedSequence
from tpdet.kernels.order import CHUNK_TOKENS, PAGE_TOKENS
from tpdet.models.decoder import Decoder
from tpdet.models.micro_batches import micro_batches

PROMPT_TOKENS = 21
_PAGES = 3  # the sequence's page is the middle one, unless the cache has fewer

_MAKERS = (torch.empty, torch.empty_like, torch.Tensor.new_empty)


class Workspaces(TorchFunctionMode):
    """While it is entered, tensors of this thread that nobody has written hold `value`."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value
        self.filled = 0

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Fill what an allocating function returns."""
        made = func(*args, **(kwargs or {}))
        if func in _MAKERS and made.is_floating_point():
            made.fill_(self._value)
            self.filled += 1
        return made


def poison_check(
    model: Decoder, pages: KeyValuePages, vocab_size: int, max_model_len: int, world: World
) -> None:
    """Compare the two computations; collective, and the pages hold NaN afterwards.

    No page may be in use. Fills all pages of a GPU, where that takes milliseconds, and the first
    few on the CPU, where the others have no memory yet. Raises TpdetError, on every rank, naming
    a rank whose bits differ, and CheckpointError where the logits are not finite.
    """
    clean = _logits(model, pages, vocab_size, max_model_len, 0.0)
    poisoned = _logits(model, pages, vocab_size, max_model_len, float("nan"))
    sound = bool(torch.isfinite(clean).all())
    if b"\0" in world.gather_bytes(b"\1" if sound else b"\0"):
        raise CheckpointError(
            "the model's weights give NaN or infinity for a short prompt: finite weights can be "
            "too large to compute with; check the checkpoint, or choose another --dtype"
        )
    same = torch.equal(clean.view(torch.int32), poisoned.view(torch.int32))
    for rank, answer in enumerate(world.gather_bytes(b"\1" if same else b"\0")):
        if answer != b"\1":
            raise TpdetError(
                f"poison check: NaN in free pages and workspaces changes the logits of rank {rank}"
                ": an operation reads what it does not own, no answer can be trusted"
            )


def _logits(
    model: Decoder, pages: KeyValuePages, vocab_size: int, max_model_len: int, value: float
) -> torch.Tensor:
    """This rank's logits [2, V'] of the prompt's last token and of one that follows it."""
    first = pages.attention[0].keys
    count = first.shape[0] if first.device.type == "cuda" else min(_PAGES, first.shape[0])
    pages.fill(count, value)
    if pages.states is not None:
        pages.states.fill(value)
        pages.states.clear(0)
    own = min(_PAGES, count) // 2
    length = max(1, min(PROMPT_TOKENS, max_model_len - 1, PAGE_TOKENS - 1))
    blocks = []
    with Workspaces(value):
        for start, size in ((0, length), (length, 1)):
            if start + size > max_model_len:
                continue
            ids = torch.tensor([(7 * p + 3) % vocab_size for p in range(start, start + size)])
            standing = max(0, start - 1) // CHUNK_TOKENS
            sequence = PagedSequence(0, size, start, (own,), 0, standing)
            batches = micro_batches((sequence,), first.device, model.overlaps_exchanges)
            x_MH = model.hidden(ids.to(first.device), pages, *batches)
            blocks.append(model.local_logits(x_MH[-1:]))
    return torch.cat(blocks)
