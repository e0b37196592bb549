"""Warp-specialised prefill attention, without a GPU: the bits of the first form.

Its warps run in `emulated_warps.py`, beside `prefill.py` in Triton's interpreter; fp16.
"""

from types import SimpleNamespace

import torch

from tests.kernels.interpreted.emulated.warps import Pointer, run_program
from tests.kernels.interpreted.paged_inputs import (
    LONG,
    PAGES,
    attend,
    pages_of,
    sequence_of,
)
from tests.lib.bits import assert_same_bits, same_bits
from tpdet.kernels.cuda.attention import items as attention_items
from tpdet.kernels.cuda.attention import prefill_warp_specialised as attention_prefill_warps
from tpdet.kernels.cuda.attention import split as attention_split
from tpdet.kernels.cuda.attention import whole_split as attention_whole_split
from tpdet.kernels.cuda.attention.operands import attention_call
from tpdet.kernels.cuda.attention.variants import WARP_SPECIALISED_HEAD, AttentionVariant
from tpdet.kernels.cuda.launch import warp_pipeline
from tpdet.kernels.inputs.paged_batch import BLOCK_TOKENS, PagedSequence, make_batch
from tpdet.kernels.order import TILE_TOKENS

REFERENCE = AttentionVariant(64, 4, 1)
PROGRAMS = 2  # that the items of a launch are dealt out to
# (keys, first row): whole tiles and splits, one more, one less, a chunk across a split's end
CUTS = ((530, 490), (760, 746), (256, 200), (257, 230), (320, 300), (65, 0), (64, 30), (1, 0))
WINDOWED = ((530, 460), (300, 240))
STAGES = (3, 4, 4, 3, 3, 4, 3, 4, 3, 4, 4)  # of each cut, the windowed, and groups of three heads
KERNEL = attention_prefill_warps.attend_warp_specialised


def reference_of(length, first, window, group=2):
    """q of the rows, pages, and the first form's output."""
    q, k, v = sequence_of(
        length, torch.float16, WARP_SPECIALISED_HEAD, query_heads=group, key_heads=1
    )
    pages = pages_of(k, v, length)
    return q[first:], pages, attend(q[first:], pages, first, LONG, REFERENCE, window)


def warp_specialised(q, pages, first, window, stages):
    """Every program of `attend_warp_specialised`, in turn, emulated."""
    sequence = PagedSequence(0, q.shape[0], first, PAGES)
    batch = make_batch((sequence,), short_tokens=0)
    out = torch.full_like(q, torch.nan)
    tile = SimpleNamespace(nbytes=TILE_TOKENS * WARP_SPECIALISED_HEAD * q.element_size())
    tiles = [
        SimpleNamespace(tensor=x.view(-1, WARP_SPECIALISED_HEAD), layout=None, block_type=tile)
        for x in pages
    ]
    call = attention_call(q, *pages, out, window, 0.0, None)
    pointers = call.operands._replace(q=Pointer(q), out=Pointer(out))
    arguments = {
        "operands": pointers,
        "k_tiles": tiles[0],
        "v_tiles": tiles[1],
        "blocks": Pointer(batch.blocks),
        "rows": Pointer(batch.rows),
        "tables": Pointer(batch.tables),
        "items": batch.blocks.shape[0] * BLOCK_TOKENS * q.shape[1] // 128,
        "widest": batch.tables.shape[1],
        "window": call.window,
        "SHAPE": call.shape,
        "BLOCK": BLOCK_TOKENS,
        "STAGES": stages,
    }
    others = (attention_whole_split, attention_items, warp_pipeline)
    for program in range(PROGRAMS):
        run_program(KERNEL, (attention_split,), program, arguments, PROGRAMS, others)
    return out


def test_it_has_the_bits_of_the_first_form():
    """One case: once the emulation has replaced names, the interpreter is of no more use here."""
    cuts = [(*cut, None) for cut in CUTS] + [(*cut, 77) for cut in WINDOWED]
    wanted = [reference_of(*cut) for cut in cuts] + [reference_of(200, 0, None, 3)]
    asked = zip(wanted, [*cuts, (200, 0, None)], STAGES, strict=True)
    for (q, pages, out), (length, first, window), stages in asked:
        got = warp_specialised(q, pages, first, window, stages)
        assert_same_bits(got, out, f"{stages} stages, {length} from {first}, {window}")
    q, pages, out = wanted[0]
    moved = [torch.cat([x[:, :, 64:], x[:, :, :64]], 2) for x in pages]
    if same_bits(warp_specialised(q, moved, 490, None, 3), out):
        raise AssertionError("the order of the keys reached no bit: this test shows nothing")
