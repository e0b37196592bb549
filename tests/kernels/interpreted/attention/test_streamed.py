"""Decode attention by programs that stay, without a GPU: the bits of the first form.

Its warps run in `emulated_warps.py`, beside `decode.py` in Triton's interpreter; fp16.
"""

from dataclasses import replace
from types import SimpleNamespace

import torch

from tests.kernels.interpreted.emulated.warps import Pointer, run_program
from tests.kernels.interpreted.paged_inputs import sequence_of
from tests.lib.bits import assert_same_bits, same_bits
from tpdet.kernels.cuda.attention import (
    fp8_tiles,
    streamed,
    streamed_codes,
    streamed_split,
    tile_line,
)
from tpdet.kernels.cuda.attention import split as attention_split
from tpdet.kernels.cuda.attention.attention import attend
from tpdet.kernels.cuda.attention.decode import SplitStates
from tpdet.kernels.cuda.attention.operands import attention_call
from tpdet.kernels.cuda.attention.streamed import StreamedForm, attend_streamed
from tpdet.kernels.cuda.attention.variants import AttentionVariant
from tpdet.kernels.cuda.launch import warp_pipeline
from tpdet.kernels.cuda.pointwise import embedding
from tpdet.kernels.exact.fp8_rows import decode_rows, encode_rows
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.order import TILE_TOKENS

HEAD, REFERENCE = 64, AttentionVariant(16, 4, 1)
LENGTHS = (1, 64, 65, 256, 257, 530, 129, 600, 31)  # keys; every third sequence has 1, 2, 3 rows
LAYOUTS = (
    (streamed, "swapped_layout"),
    (streamed_split, "swapped_layout"),
    (streamed_codes, "swapped_layout"),
    (streamed_codes, "swapped_registers"),
)


def batch_of():
    """q, pages (NaN behind the keys), the batch, and its output by the first form."""
    queries, sequences, wanted, row = [], [], [], 0
    need = [-(-length // 256) for length in LENGTHS]
    numbers = list(range(sum(need)))[::-1]
    pages = [torch.full((sum(need), 2, 256, HEAD), torch.nan, dtype=torch.float16) for _ in "kv"]
    for index, (length, count) in enumerate(zip(LENGTHS, need, strict=True)):
        q, k, v = sequence_of(length, torch.float16, HEAD)
        mapping = tuple(numbers.pop() for _ in range(count))
        embedding.store_kv(k, v, *pages, make_batch((PagedSequence(0, length, 0, mapping),)))
        rows = min(length, 1 + index % 3)
        alone = make_batch((PagedSequence(0, rows, length - rows, mapping),))
        queries.append(q[length - rows :])
        wanted.append(attend(queries[-1], *pages, alone, None, REFERENCE, REFERENCE))
        sequences.append(PagedSequence(row, rows, length - rows, mapping))
        row += rows
    return torch.cat(queries), pages, make_batch(tuple(sequences)), torch.cat(wanted)


def streamed_attention(q, pages, batch, programs, rows, step=1):
    """Every program of `attend_streamed`, in turn or the last first, emulated."""
    out = torch.full_like(q, torch.nan)
    call = attention_call(q, *pages, out, None, 0.0, None)
    fp8 = pages[0].dtype == torch.uint8
    across = HEAD // 2 if fp8 else HEAD
    tile = SimpleNamespace(nbytes=2 * TILE_TOKENS * across, shape=(TILE_TOKENS, across))
    of_two = [x.view(torch.int16) for x in pages] if fp8 else pages
    k_tiles, v_tiles = (
        SimpleNamespace(tensor=x.view(-1, across), layout=None, block_type=tile, dtype=x.dtype)
        for x in of_two
    )
    lines = [SimpleNamespace(tensor=x.view(-1, TILE_TOKENS), layout=None) for x in pages]
    count = batch.splits.shape[0] * call.shape.KEY_HEADS * batch.short_rows * call.shape.GROUP
    states = (torch.full((n,), torch.nan) for n in (count, count, count * HEAD))
    arrivals = torch.zeros(batch.rows.shape[0] * call.shape.KEY_HEADS, dtype=torch.int32)
    arguments = {
        "operands": call.operands._replace(q=Pointer(q), out=Pointer(out)),
        "k_tiles": k_tiles,
        "v_tiles": v_tiles,
        "k_boxes": k_tiles,
        "v_boxes": v_tiles,
        "k_exponents": lines[0],
        "v_exponents": lines[1],
        "states": SplitStates(*map(Pointer, states)),
        "arrivals": Pointer(arrivals),
        "lists": (Pointer(batch.rows), Pointer(batch.tables)),
        "widest": batch.tables.shape[1],
        "sequences": batch.rows.shape[0],
        "short_rows": batch.short_rows,
        "SHAPE": call.shape,
        "FORM": StreamedForm(rows, 4 if fp8 else 3, 32),
        "DEPENDENT": False,
    }
    others = (streamed_split, streamed_codes, tile_line, warp_pipeline, fp8_tiles)
    for program in range(programs)[::step]:
        run_program(attend_streamed, (attention_split,), program, arguments, programs, others)
    if arrivals.any():
        raise AssertionError(f"{programs} programs: arrivals are left over")
    return out


def test_it_has_the_bits_of_the_first_form(monkeypatch):
    """Items whole and cut, in one part and in many; sequences without rows between and behind."""
    q, pages, batch, wanted = batch_of()
    padded = replace(batch, rows=torch.cat([batch.rows, torch.zeros(3, 3, dtype=torch.int32)]))
    moved = [torch.cat([x[:, :, 64:], x[:, :, :64]], 2) for x in pages]
    for module, name in LAYOUTS:
        monkeypatch.setattr(module, name, lambda rows: None)
    cases = (1, 8, batch, 1), (5, 16, padded, 1), (9, 8, padded, -1), (70, 8, batch, -1)
    for programs, rows, each, step in cases:
        got = streamed_attention(q, pages, each, programs, rows, step)
        assert_same_bits(got, wanted, f"{programs} programs, {rows} rows, step {step}")
    if same_bits(streamed_attention(q, moved, batch, 5, 8), wanted):
        raise AssertionError("the order of the keys reached no bit: this test shows nothing")


def test_it_reads_the_numbers_of_fp8_pages(monkeypatch):
    """NaN in every code and exponent behind the keys; a flipped exponent is found."""
    for module, name in LAYOUTS:
        monkeypatch.setattr(module, name, lambda rows: None)
    q, numbers, batch, _ = batch_of()
    q, dtype = q.to(torch.bfloat16), torch.bfloat16
    q[1] *= 2.0**70  # by which no room is left for 2^64
    codes, exponents = zip(*(encode_rows(x.to(dtype) * 9.0) for x in numbers), strict=True)
    pages = [torch.cat([c.flatten(2), e], 2) for c, e in zip(codes, exponents, strict=True)]
    read = [decode_rows(c, e, dtype) for c, e in zip(codes, exponents, strict=True)]
    wanted = streamed_attention(q, read, batch, 5, 8)
    got = streamed_attention(q, pages, batch, 9, 16, -1)
    assert_same_bits(got, wanted)
    pages[1][0, 0, -256] ^= 1  # of the only key of a sequence
    assert not same_bits(streamed_attention(q, pages, batch, 1, 8), wanted)
