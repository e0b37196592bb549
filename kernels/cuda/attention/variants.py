"""How attention's kernels are shared out, and the choice for each shape: none reaches a bit."""

from dataclasses import dataclass

import torch
import triton

from tpdet.kernels.cuda.hardware import Gpu

GROUPS_HEAD = 128
GROUPS_TYPES = (torch.bfloat16, torch.float16)
_GROUPS_ROWS, _GROUPS_WARPS = 128, 4
_GROUPS_PLACES = 3  # a tile is asked for while two others are in use
_FUSED_SPLITS = 16  # above so many splits a sequence on average the merge is spread wider
_FEW_SPLITS = 32  # of a step: most multiprocessors idle, and only loads ahead hide the wait


@dataclass(frozen=True)
class Variant:
    """How a kernel is shared out: rows of a program (a power of two up to 128), warps, stages.

    Of prefill alone: `descriptors`, whole splits are fetched by the tensor memory accelerator
    (Hopper and later); `groups`, the 128 rows of `prefill_warp_specialised.py` (Hopper).
    Of splits alone: `fused`, the last of a sequence to finish merges them, without a launch of its
    own; `swapped`, keys and lanes stand on the side of 64 of Hopper's wide matrix instructions.

    Raises ValueError for groups of other rows, warps or places (stages) than they have.
    """

    rows: int
    warps: int
    stages: int
    descriptors: bool = False
    groups: bool = False
    fused: bool = False
    swapped: bool = False

    def __post_init__(self) -> None:
        fixed = (self.rows, self.warps) == (_GROUPS_ROWS, _GROUPS_WARPS)
        if self.groups and (not fixed or self.stages < _GROUPS_PLACES):
            raise ValueError(
                f"groups of {self.rows} rows, {self.warps} warps, {self.stages} places: they have "
                f"{_GROUPS_ROWS} rows, {_GROUPS_WARPS} warps, {_GROUPS_PLACES} places or more"
            )


def prefill_variant(dtype: torch.dtype, head: int, gpu: Gpu) -> Variant:
    """The choice for sequences with many rows."""
    if dtype == torch.float32:
        return Variant(16, 4, 1)
    if gpu.wgmma and head == GROUPS_HEAD and dtype in GROUPS_TYPES:
        return Variant(128, 4, 5, True, groups=True)
    if head <= 128:
        return Variant(64, 4, 3 if gpu.descriptors else 2, gpu.descriptors)
    return Variant(64, 8, 2, gpu.descriptors)


def decode_variant(
    dtype: torch.dtype, head: int, rows: int, splits: int = 1, sequences: int = 1
) -> Variant:
    """The choice for sequences with few: `rows` is the most rows times query heads of a group.

    `splits` of `sequences` together, pad splits of a captured graph included.
    """
    fused = splits <= _FUSED_SPLITS * sequences
    if dtype == torch.float32:
        return Variant(16, 4, 1, fused=fused)
    if head > 128 and rows > 16:  # a fused merge of so much spills
        return Variant(16, 4, 1, swapped=True)
    rows = min(max(16, triton.next_power_of_2(rows)), 64)
    return Variant(rows, 4, _decode_stages(head, splits, sequences), fused=fused, swapped=True)


def _decode_stages(head: int, splits: int, sequences: int) -> int:
    if head > 128 or _FEW_SPLITS < splits <= sequences <= 128:
        return 1  # more programs on a multiprocessor, each with a single split of its sequence
    return 3 if splits <= _FEW_SPLITS else 2
