"""How attention's kernels are shared out, and the choice for each shape: none reaches a bit."""

from dataclasses import dataclass

import torch

from tpdet.kernels.cuda.hardware import Gpu

WARP_SPECIALISED_HEAD = 128
WARP_SPECIALISED_TYPES = (torch.bfloat16, torch.float16)
WIDE_ROWS = 64  # of a program: fewer have no wide matrix instruction
_WARP_SPECIALISED_ROWS, _CONSUMER_WARPS = 128, 4
_LEAST_STAGES = 3  # the scores of a tile begin while the stages of two others are in use
STREAMED_HEADS, STREAMED_ROWS = (64, 128), (8, 16)
_STREAMED_STAGES, _FP8_STAGES = 3, 5
_STREAMED_SPLITS = 2048  # of all key heads: seven a program, as lengths may differ
_FUSED_SPLITS = 16  # a sequence, on average: with more splits the merge is spread wider
_LONE_SPLITS = 8  # a step: programs of fewer rows fill more multiprocessors
_FEW_SPLITS = 32  # a step: most multiprocessors idle, and only loads ahead hide the wait
_FEW_PROGRAMS = 256  # a step of single splits: as few


@dataclass(frozen=True)
class AttentionVariant:
    """How a kernel is shared out: rows of a program (a power of two up to 128), warps, stages.

    Of prefill alone: `descriptors`, the tensor memory accelerator copies whole splits (Hopper and
    later); `warp_specialised`, the 128 rows of `prefill_warp_specialised.py` (Hopper).
    Of decode alone: `fused`, the last program of a sequence to finish merges its splits, without
    another launch; `swapped`, keys and lanes stand on the side of 64 of Hopper's wide matrix
    instructions; `streamed`, the programs of `streamed.py`, which stay (Hopper).

    Raises ValueError for rows, warps or stages that a kernel for Hopper alone does not have.
    """

    rows: int
    warps: int
    stages: int
    descriptors: bool = False
    warp_specialised: bool = False
    fused: bool = False
    swapped: bool = False
    streamed: bool = False

    def __post_init__(self) -> None:
        fixed = (self.rows, self.warps) == (_WARP_SPECIALISED_ROWS, _CONSUMER_WARPS)
        if self.warp_specialised and (not fixed or self.stages < _LEAST_STAGES):
            raise ValueError(
                f"{self.rows} rows, {self.warps} warps, {self.stages} stages: warp-specialised "
                f"attention has {_WARP_SPECIALISED_ROWS} rows, {_CONSUMER_WARPS} warps and "
                f"{_LEAST_STAGES} stages or more"
            )
        if self.streamed and (self.rows not in STREAMED_ROWS or self.warps != _CONSUMER_WARPS):
            raise ValueError(
                f"{self.rows} rows, {self.warps} warps: streamed attention has one of "
                f"{STREAMED_ROWS} rows and {_CONSUMER_WARPS} warps"
            )


def prefill_variant(
    dtype: torch.dtype, head: int, gpu: Gpu, plain: bool = True, fp8: bool = False
) -> AttentionVariant:
    """The choice for sequences with many rows; plain: without a soft-cap and sinks; fp8: pages."""
    if dtype == torch.float32:
        return AttentionVariant(16, 4, 1)
    if fp8:
        return AttentionVariant(64, 4 if head <= 128 else 8, 2)
    known = head == WARP_SPECIALISED_HEAD and dtype in WARP_SPECIALISED_TYPES and plain
    if gpu.wgmma and known:
        return AttentionVariant(128, 4, 5, True, warp_specialised=True)
    if head <= 128:
        return AttentionVariant(64, 4, 3 if gpu.descriptors else 2, gpu.descriptors)
    return AttentionVariant(64, 8, 2, gpu.descriptors)


def decode_variant(
    dtype: torch.dtype,
    head: int,
    rows: int,
    splits: int = 1,
    sequences: int = 1,
    key_heads: int = 8,
    streams: bool = False,
    fp8: bool = False,
) -> AttentionVariant:
    """The choice for sequences with few: `rows` is the most rows times query heads of a group.

    `splits` of `sequences` together, pad splits of a captured graph included; `key_heads` of this
    rank, by which a split has programs; streams: whether `streamed.py` has a kernel (`streams_of`);
    fp8: pages.
    """
    fused = splits <= _FUSED_SPLITS * sequences
    enough = 0 if fp8 else _STREAMED_SPLITS  # of codes the other form has more to compute
    if streams and fused and _streams_well(rows, splits, sequences, key_heads, enough):
        least = next(n for n in STREAMED_ROWS if rows <= n)
        stages = _FP8_STAGES if fp8 else _STREAMED_STAGES
        return AttentionVariant(least, 4, stages, swapped=True, streamed=True)
    if dtype == torch.float32:
        return AttentionVariant(16, 4, 1, fused=fused)
    if head > 128 and rows > 16:  # a fused merge of so much spills
        return AttentionVariant(16, 4, 1, swapped=True)
    if fp8:
        return AttentionVariant(16 if rows <= 16 else 32, 4, 1, fused=fused, swapped=True)
    if splits <= _LONE_SPLITS or rows <= 16:
        stages = _decode_stages(head, splits, sequences, key_heads)
        return AttentionVariant(16, 4, stages, fused=fused, swapped=True)
    return AttentionVariant(32, 4, 3, fused=fused, swapped=True)


def streams_of(
    dtype: torch.dtype, head: int, gpu: Gpu, plain: bool = True, fp8: bool = False
) -> bool:
    """Whether decode attention can be streamed; plain: without a window, a soft-cap and sinks.

    fp8: pages; fp16 has too few exponents for the powers of two of their weights.
    """
    types = WARP_SPECIALISED_TYPES[:1] if fp8 else WARP_SPECIALISED_TYPES
    return gpu.wgmma and plain and head in STREAMED_HEADS and dtype in types


def _streams_well(rows: int, splits: int, sequences: int, key_heads: int, least: int) -> bool:
    """Whether the programs that stay win, with `least` splits of all key heads or more."""
    few, many = STREAMED_ROWS
    single = splits == sequences
    real = splits if single else splits // 2  # a captured graph has room for up to twice as many
    return (rows <= few or (rows <= many and not single)) and real * key_heads >= least


def _decode_stages(head: int, splits: int, sequences: int, key_heads: int) -> int:
    if head > 128:
        return 1
    if _FEW_SPLITS < splits <= sequences <= 128:  # each program has a single split of its sequence
        return 3 if splits * key_heads <= _FEW_PROGRAMS else 1  # more share a multiprocessor
    return 3 if splits <= _FEW_SPLITS else 2
