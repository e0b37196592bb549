"""Gathering columns without peers: compiled for Hopper."""

import re

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.kernels.compiled.test_gemm import STREAM, finish_of
from tests.kernels.compiled.test_peer import LINKS, aligned_compile, check
from tpdet.kernels.cuda.exchange import columns as peer_columns
from tpdet.kernels.cuda.exchange import one_shot as peer_fold
from tpdet.kernels.cuda.exchange import rows as peer_rows
from tpdet.kernels.cuda.exchange.arguments import ALL_PHASES, Buffers, KernelWorld


@pytest.mark.parametrize(("ranks", "width"), [(2, 12288), (4, 4096)])
def test_gathered_columns_travel_in_wide_words(ranks, width):
    types = {"links": LINKS} | {"x": "*i32", "gathered": "*i32", "m": "i32"}
    part = width // 2 // ranks
    values = {"WORLD": KernelWorld(1, ranks, True), "BUFFERS": Buffers(0, 1 << 26), "PART": part}
    values |= {"BLOCK": min(triton.next_power_of_2(part), 2048 // ranks)}
    values |= {"PHASES": ALL_PHASES}
    ptx, log = aligned_compile(peer_columns.gather_columns, types, values, 4)
    assert check(ptx, log, "gather columns") == 0


@pytest.mark.parametrize(("ranks", "n"), [(2, 4096), (4, 4096), (4, 8192)])
@pytest.mark.parametrize("few", [True, False])
def test_gathering_with_the_norm_compiles(ranks, n, few):
    types = {"links": LINKS, "stream": STREAM, "x": "*i16", "y": "*bf16", "m": "i32"}
    values = {"WORLD": KernelWorld(1, ranks, True), "BUFFERS": Buffers(0, 1 << 27)}
    values |= {"RULE": finish_of(n), "DTYPE": tl.bfloat16, "PHASES": ALL_PHASES}
    values |= {"PART_BLOCK": triton.next_power_of_2(n // ranks)}
    warps = peer_fold.one_shot_warps(n) if few else min(16, n // 256)
    found = aligned_compile(peer_columns.gather_and_norm, types, values, warps)
    ptx, log = found
    assert re.search(r"ld\.volatile\.global\.v[24]\.b32", ptx), "narrow loads of slots"
    assert re.search(r"st\.global\.v[24]\.b32", ptx), "narrow stores"
    assert check(ptx, log, "gather and norm", floats=False) <= 16


@pytest.mark.parametrize(("ranks", "columns"), [(2, 75_968), (4, 37_984)])
def test_exchanged_rows_travel_in_wide_words(ranks, columns):
    types = {"links": LINKS} | {"x": "*i32", "mine": "*i32"}
    types |= {"m": "i32", "share": "i32"}
    values = {"WORLD": KernelWorld(1, ranks, True), "BUFFERS": Buffers(0, 1 << 26)}
    values |= {"PART": columns, "BLOCK": 8192 // ranks, "PHASES": ALL_PHASES}
    ptx, log = aligned_compile(peer_rows.take_rows, types, values, 8)
    assert check(ptx, log, "exchange rows") == 0
