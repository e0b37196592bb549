"""What the operands of the gated delta rule lose and cost.

    python -m scripts.gpu_times.kernels.linear_operands [times] [errors]

Every product of a chunk (k.k, q.k, S'k, S'q, P w, k w') with its fp32 operands in one bf16 term, in
two (hi + lo), in tf32 and in fp32. Errors against fp64 by torch at 5,000 and 32,000 tokens; times
of 8,192 rows by a prototype in Triton, whose rows of 16 are solved in turn or by an inverse made
beforehand. Keys enter raw: their norm is a factor in fp32. `--results docs/results` keeps the rows.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from scripts.gpu_times.graphs import interleaved_medians
from tests.gpu.linear.delta_rule import BLOCK, CHUNK, HEAD, MODES, delta_rule, inputs
from tpdet.kernels.cuda.compile.pool import compile_all
from tpdet.kernels.cuda.compile.recording import recording
from tpdet.tools.measurement.results_file import append_run
from tpdet.tools.worlds.machine import machine

PASSES = (
    (32, 4, True, "rows"), (32, 4, True, "inverse"), (32, 4, False, "rows"),
    (32, 4, False, "inverse"), (16, 4, True, "rows"), (64, 4, True, "rows"), (32, 2, True, "rows"),
)  # fmt: skip
"""Columns of a program, its warps, whether fp32 operands have two terms, how rows are solved."""

_LN2 = tl.constexpr(0.6931471805599453)

_LOG2_E = tl.constexpr(1.4426950408889634)


def errors(tokens, heads, device, head=HEAD):
    """A row for each regime and mode: root mean square and largest error, over that of o."""
    rows = []
    for regime in ("initial", "remembering"):
        told = inputs(-(-tokens // CHUNK) * CHUNK, heads, regime, device, head)
        exact = delta_rule(*told, "fp64")
        scale = exact.square().mean().sqrt()
        rounding = (exact.float().bfloat16().double() - exact).square().mean().sqrt() / scale
        for mode in list(MODES)[1:]:
            wrong = (delta_rule(*told, mode).double() - exact).abs()
            rows.append(
                {"case": "error of o", "model": regime, "mode": mode, "context": tokens}
                | {"value": float(wrong.square().mean().sqrt() / scale), "unit": "of its size"}
                | {"largest": float(wrong.max() / scale), "rounding of o": float(rounding)}
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


@triton.jit
def exp64(x):
    """exp of fp64 x <= 0, by additions and multiplications; +0 below -700."""
    x = tl.maximum(x, -700.0)
    turns = tl.floor(x * _LOG2_E + 0.5)
    rest = x - turns * _LN2
    total = tl.full(x.shape, 1.0, tl.float64)
    for i in tl.static_range(12):
        total = total * rest * (1.0 / (12 - i)) + 1.0
    return total * ((turns.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def split_product(left, right, total, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """total + left @ right, smallest products first; operands in one bf16 term or in two."""
    left_high = left.to(tl.bfloat16)
    right_high = right.to(tl.bfloat16)
    if LEFT == 2:
        left_low = (left - left_high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(left_low, right_high, total)
    if RIGHT == 2:
        right_low = (right - right_high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(left_high, right_low, total)
    return tl.dot(left_high, right_high, total)


class Operands(NamedTuple):
    """q, k [M, Hk, D], v and out [M, Hv, D] bf16; l, c, n, e [M, Hv]; what chunks make of them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    logs: torch.Tensor
    scale: torch.Tensor
    norms: torch.Tensor
    begun: torch.Tensor
    products: torch.Tensor
    inverses: torch.Tensor
    state: torch.Tensor
    out: torch.Tensor


@triton.jit
def chunk_factors(
    operands, heads, per_key, HEAD: tl.constexpr, EXACT: tl.constexpr, INVERSE: tl.constexpr
):
    """A program a chunk and value head: decayed k.k and q.k [2, 64, 64]; inverses of 16 rows."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, 64)
    lane = tl.arange(0, HEAD)
    rows = chunk * 64 + row
    key = (rows[:, None] * (heads // per_key) + head // per_key) * HEAD + lane[None, :]
    here, there = tl.load(operands.k + key), tl.load(operands.q + key)
    log = tl.cumsum(tl.load(operands.logs + rows * heads + head), 0)
    between = (log[:, None] - log[None, :]).to(tl.float64) * (2.0**-40)
    visible = row[:, None] >= row[None, :]
    between = tl.where(visible, between, 0.0)
    if EXACT:
        factor = exp64(between).to(tl.float32)
    else:
        factor = tl.exp2(between.to(tl.float32) * 1.4426950408889634)
    base = (
        operands.products
        + (chunk * heads + head) * (2 * 64 * 64)
        + row[:, None] * 64
        + row[None, :]
    )
    kk = tl.where(visible, factor * tl.dot(here, tl.trans(here)), 0.0)
    tl.store(base, kk)
    tl.store(base + 64 * 64, tl.where(visible, factor * tl.dot(there, tl.trans(here)), 0.0))
    tl.store(
        operands.begun + rows * heads + head, exp64(log.to(tl.float64) * (2.0**-40)).to(tl.float32)
    )
    if INVERSE:
        tl.debug_barrier()
        small = tl.arange(0, 16)
        for block in tl.static_range(4):
            inside = block * 16 + small
            tile = inside[:, None] * 64 + inside[None, :]
            of_row = (chunk * 64 + inside) * heads + head
            strength = tl.load(operands.scale + of_row) * tl.load(operands.norms + of_row)
            cell = operands.products + (chunk * heads + head) * (2 * 64 * 64) + tile
            power = -tl.load(cell) * strength[:, None]
            power = tl.where(small[:, None] > small[None, :], power, 0.0)
            total = power + tl.where(small[:, None] == small[None, :], 1.0, 0.0)
            for _ in tl.static_range(3):
                power = tl.dot(power, power, input_precision="ieee")
                total = tl.dot(total, power, total, input_precision="ieee")
            to = operands.inverses + ((chunk * heads + head) * 4 + block) * 256
            tl.store(to + small[:, None] * 16 + small[None, :], total)


@triton.jit
def pass_states(
    operands,
    chunks,
    heads,
    per_key,
    HEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    SOLVE: tl.constexpr,
):
    """A program a value head and COLUMNS of its values: all chunks of one sequence in turn."""
    head, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, HEAD)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    small = tl.arange(0, 16)
    cell = operands.state + head * HEAD * HEAD + lane[:, None] * HEAD + column[None, :]
    total = tl.load(cell)
    empty = tl.zeros((16, COLUMNS), tl.float32)
    for chunk in range(chunks):
        first, second, third = empty, empty, empty
        moved = tl.zeros((HEAD, COLUMNS), tl.float32)
        base = operands.products + (chunk * heads + head).to(tl.int64) * (2 * 64 * 64)
        last = tl.load(operands.begun + (chunk * 64 + 63) * heads + head)
        for block in tl.static_range(4):
            rows = (chunk * 64 + block * 16 + small).to(tl.int64)
            key = (rows[:, None] * (heads // per_key) + head // per_key) * HEAD + lane[None, :]
            here, there = tl.load(operands.k + key), tl.load(operands.q + key)
            ours = (rows[:, None] * heads + head) * HEAD + column[None, :]
            e = tl.load(operands.begun + rows * heads + head)[:, None]
            c = tl.load(operands.scale + rows * heads + head)[:, None]
            n = tl.load(operands.norms + rows * heads + head)[:, None]
            of_keys = split_product(here, total, empty, 1, TERMS)
            of_queries = e * split_product(there, total, empty, 1, TERMS)
            added, seen = empty, empty
            tile = base + (block * 16 + small)[:, None] * 64 + small[None, :]
            for j in tl.static_range(block):
                earlier = first if j == 0 else second if j == 1 else third
                added = split_product(tl.load(tile + j * 16), earlier, added, TERMS, TERMS)
                seen = split_product(tl.load(tile + j * 16 + 4096), earlier, seen, TERMS, TERMS)
            rest = tl.load(operands.v + ours).to(tl.float32) - n * (e * of_keys + added)
            seen = of_queries + seen
            if SOLVE == "inverse":
                of_block = ((chunk * heads + head) * 4 + block).to(tl.int64) * 256
                inverse = tl.load(
                    operands.inverses + of_block + small[:, None] * 16 + small[None, :]
                )
                rest = split_product(inverse, c * rest, empty, TERMS, TERMS)
                p = tl.load(tile + block * 16 + 4096)
                seen = split_product(p, rest, seen, TERMS, TERMS)
            else:
                for j in range(16):
                    spot = block * 16 + j
                    pk = tl.load(base + (block * 16 + small) * 64 + spot)[:, None]
                    pq = tl.load(base + 4096 + (block * 16 + small) * 64 + spot)[:, None]
                    alone = tl.where((small == j)[:, None], c * rest, 0.0)
                    w = tl.sum(alone, axis=0)[None, :]
                    rest = tl.where((small > j)[:, None], rest - (n * pk) * w, rest)
                    rest = tl.where((small == j)[:, None], w, rest)
                    seen = tl.where((small >= j)[:, None], seen + pq * w, seen)
            tl.store(operands.out + ours, seen.to(tl.bfloat16))
            # The decay from a row to the end is the quotient of a prototype; it underflows.
            left = rest * (last / tl.maximum(e, 1e-30))
            moved = split_product(tl.trans(here), left, moved, 1, TERMS)
            if block == 0:
                first = rest
            elif block == 1:
                second = rest
            elif block == 2:
                third = rest
        total = last * total + moved
    tl.store(cell, total)


class Prototype:
    """The two kernels over one step of `tokens` rows of one sequence."""

    def __init__(self, tokens, heads, per_key, device, head=HEAD):
        q, k, v, decay, b = inputs(tokens, heads, "remembering", device, head)
        q, k, v, decay, b = (
            x.transpose(0, 1).contiguous() for x in (q[::per_key], k[::per_key], v, decay, b)
        )
        norms = (k.float().square().sum(-1) + 1e-6).rsqrt().repeat_interleave(per_key, 1)
        chunks, fp32 = tokens // CHUNK, partial(torch.zeros, device=device)
        self.operands = Operands(
            q,
            k,
            v,
            logs=(decay * 2.0**40).round().long(),
            scale=b * norms,
            norms=norms.contiguous(),
            begun=fp32(tokens, heads),
            products=fp32(chunks, heads, 2, CHUNK, CHUNK),
            inverses=fp32(chunks, heads, 4, BLOCK, BLOCK),
            state=fp32(heads, head, head),
            out=torch.empty_like(v),
        )
        self.chunks, self.heads, self.per_key, self.head = chunks, heads, per_key, head

    def factors(self, exact, inverse):
        """Launch the kernel of chunks' factors."""
        forms = {"HEAD": self.head, "EXACT": exact, "INVERSE": inverse}
        options = {"num_warps": 4, "enable_fp_fusion": False}
        grid = self.chunks, self.heads
        chunk_factors[grid](self.operands, self.heads, self.per_key, **forms, **options)

    def states(self, columns, warps, two, solve):
        """Launch the kernel that passes states."""
        forms = {"HEAD": self.head, "COLUMNS": columns, "TERMS": 2 if two else 1, "SOLVE": solve}
        options = {"num_warps": warps, "enable_fp_fusion": False}
        grid = self.heads, self.head // columns
        pass_states[grid](self.operands, self.chunks, self.heads, self.per_key, **forms, **options)


def times(device):
    """Rows of microseconds of 8,192 rows of one sequence: 32 value heads, 16 key heads."""
    prototype, rows = Prototype(8192, 32, 2, device), []
    cases = {
        "factors, exp in fp64": lambda _: prototype.factors(True, False),
        "factors, exp2 in fp32": lambda _: prototype.factors(False, False),
        "factors and inverses": lambda _: prototype.factors(True, True),
    }
    for columns, warps, two, solve in PASSES:
        name = f"pass, {2 if two else 1} terms, {solve}, {columns} columns, {warps} warps"
        cases[name] = lambda _, form=(columns, warps, two, solve): prototype.states(*form)
    with recording() as asked:
        for run in cases.values():
            run(None)
    for line in compile_all(asked.values(), 12):
        print(line, flush=True)
    left, right = torch.randn(4096, 64, 128, device=device), torch.randn(4096, 128, 128).to(device)
    half_left, half_right = left.bfloat16(), right.bfloat16()
    cases["S'k alone in fp32 (torch.bmm)"] = lambda _: torch.bmm(left, right)
    cases["S'k alone in bf16 (torch.bmm)"] = lambda _: torch.bmm(half_left, half_right)
    begin = time.time()
    for name, run in cases.items():
        if time.time() - begin > 60:
            print(json.dumps({"case": name, "note": "left out: out of time"}), flush=True)
            continue
        (taken,) = interleaved_medians((run,), [None], repeats=5)
        rows.append({"case": name, "batch": 8192, "value": round(taken, 1), "unit": "us"})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main(arguments):
    """Print a JSON row for each error and time; append them to a results file or folder."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_times.kernels.linear_operands", allow_abbrev=False
    )
    parser.add_argument("--results", type=Path)
    parser.add_argument("parts", nargs="*", default=["times", "errors"])
    options = parser.parse_args(arguments)
    device = torch.device("cuda")
    rows = times(device) if "times" in options.parts else []
    if "errors" in options.parts:
        for tokens in (5000, 32000):
            rows += errors(tokens, 8, device)
    if options.results:
        command = "python -m scripts.gpu_times.kernels.linear_operands"
        append_run(options.results, "linear", machine("cuda", 1), command, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
