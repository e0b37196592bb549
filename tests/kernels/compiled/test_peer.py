"""The exchange kernels without peers: compiled for Hopper."""

import re

import pytest

pytest.importorskip("triton")

import torch

from tests.kernels.compiled.hopper_kernels import hopper_kernel
from tests.kernels.compiled.test_gemm import compile_for_hopper, finish_of
from tests.lib.some_slow import some_slow
from tpdet.kernels import order
from tpdet.kernels.cuda.exchange import direct as peer_direct
from tpdet.kernels.cuda.exchange import gather as peer_gather
from tpdet.kernels.cuda.exchange import one_shot as peer_fold
from tpdet.kernels.cuda.exchange import owned_rows as peer_owned
from tpdet.kernels.cuda.exchange import spread as peer_spread
from tpdet.kernels.cuda.exchange import two_shot as peer_two_shot
from tpdet.kernels.cuda.exchange.arguments import (
    ALL_PHASES,
    Buffers,
    Flags,
    KernelWorld,
    Links,
    OwnSums,
    Slots,
)
from tpdet.kernels.cuda.exchange.words import warps_for
from tpdet.kernels.cuda.pointwise.finish import StreamRows
from tpdet.kernels.fold_program import own_program, rank_program
from tpdet.kernels.partial_sums import relative_roots

LINKS = Links("*i64", "*i64", "*i64")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SPILL_ALLOWANCE = 256  # bytes a thread, rows of 8,192 values


def constants(name, ranks, rank, n, dtype, behind):
    plan = order.fold_plan(name, 8, ranks)
    roots = relative_roots(plan.roots[rank])
    return {
        "WORLD": KernelWorld(rank, ranks, True),
        "SLOTS": Slots(0, 64, plan.slots),
        "RULE": finish_of(n, behind=behind, dtype=DTYPES[dtype]),
        "SENT": own_program(roots),
        "WHOLE": rank_program(plan.final, rank, roots, plan.slots),
        "PHASES": ALL_PHASES,
    }


def aligned_compile(kernel, types, values, warps):
    """PTX and log of an `aligned_kernel`."""
    done = aligned_kernel(kernel, types, values, warps)
    return done.ptx, done.log


def aligned_kernel(kernel, types, values, warps):
    """Pointers are aligned, and strides, which stand beside them in tuples."""
    aligned = [name for name, kind in types.items() if kind[0].startswith("*")]
    options = {"num_warps": warps, "num_stages": 3}
    done = hopper_kernel(kernel, types, values, aligned, options)
    check_armed_behind_barriers(done.ttgir)
    return done


def check_armed_behind_barriers(ttgir):
    """All warps meet between the last look at words and the store that arms them; how many such."""
    armed = set(re.findall(r"(%\w+) = arith\.constant dense<-1> : tensor<\w+xi(?:16|32)\b", ttgir))
    met, stores = False, 0
    for line in ttgir.splitlines():
        met = "barrier" in line or (met and "isVolatile" not in line)
        store = re.search(r"tt\.store \S+, (%\w+)", line)
        if store and store[1] in armed:
            assert met, f"words are armed before all warps have seen them: {line}"
            stores += 1
    return stores


def check(ptx, log, name, floats=True):
    """Words come whole and are looked at anew; nothing is fused; one integer atomic counts."""
    for wanted in ("ld.volatile.global", "atom.global.gpu.relaxed.add.u64", "%globaltimer"):
        assert wanted in ptx, f"{name}: no {wanted}"
    assert "st.global.v4.b32" in ptx or not floats, f"{name}: narrow stores"
    assert "ld.volatile.global.v4.b32" in ptx or not floats, f"{name}: narrow loads of slots"
    assert not re.search(r"(atom|red)\.[\w.]*\.f(16|32|64)", ptx), f"{name}: a float atomic"
    assert not re.search(r"fma\.rn\.f(32|64)", ptx), f"{name}: a fused multiply-add"
    assert "multimem" not in ptx
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", log)]
    assert spilled and max(spilled) <= SPILL_ALLOWANCE, f"{name}: {log}"
    return max(spilled)


QUICK = (
    ("pairs", 2, 1, 4096, "bf16", "fp32", True),
    ("tree", 8, 7, 1024, "fp32", "fp32", False),
)
OTHERS = (
    ("pairs", 4, 1, 4096, "bf16", "bf16", False),
    ("sequential", 2, 1, 8192, "bf16", "bf16", False),
    ("pairs", 2, 1, 4096, "bf16", "fp32", False),
)


@pytest.mark.parametrize(
    ("name", "ranks", "rank", "n", "dtype", "factor", "behind"),
    some_slow(QUICK, [*QUICK, *OTHERS]),
)
def test_exchange_kernels_compile(name, ranks, rank, n, dtype, factor, behind):
    types = {"links": LINKS, "sums": OwnSums("*fp32", "i32"), "m": "i32"}
    types["stream"] = StreamRows("*fp32", "i32", f"*{factor}", f"*{factor}", "*fp32")
    values = constants(name, ranks, rank, n, dtype, behind)
    warps = peer_two_shot.two_shot_warps(n)
    more_warps = peer_fold.one_shot_warps(n)
    found = aligned_compile(peer_fold.one_shot, types | {"y": f"*{dtype}"}, values, more_warps)
    one = check(*found, f"one-shot {name}")
    words = {"y_words": "*i16" if dtype == "bf16" else "*i32"}
    values |= {"ROOTS": values.pop("SLOTS"), "FINISHED": Slots(1 << 32, 8192)}
    spilled = [one]
    for tile in (1, 2) if n <= 4096 else (1,):
        more = aligned_compile(
            peer_two_shot.two_shot,
            types | words,
            values | {"TILE": tile, "GROUP": max(1, min(ranks, 16384 // tile // n))},
            warps * tile,
        )
        spilled.append(check(*more, f"two-shot {name}, {tile} rows at once"))
    found = aligned_compile(peer_spread.two_shot_spread, types | words, values, more_warps)
    spilled.insert(0, check(*found, f"spread {name}"))
    del values["FINISHED"]
    values |= {"FLAGS": Flags(1 << 30, 256), "TILE": 1}
    kinds = types | {"y_begin": "i64"}
    ptx, log = aligned_compile(peer_direct.two_shot_direct, kinds, values, warps)
    spilled.insert(0, check(ptx, log, f"direct {name}"))
    assert "atom.global.sys.release" in ptx or "atom.release.sys.global" in ptx, "flags"
    assert n > 4096 or max(spilled[:4]) <= 16, "spills at the width of most models"


def test_rows_of_the_stream_are_pushed_by_their_owners():
    """Every warp waits for the ranks' words by itself; negative control: armed without barriers."""
    types = {"links": LINKS, "h": "*i32", "numbers": "*i64", "whole": "*i32"}
    types |= dict.fromkeys(("rows", "first", "m", "early", "late"), "i32")
    values = {"WORLD": KernelWorld(1, 4, True), "BUFFERS": Buffers(4096, 1 << 20)}
    values |= {"N": 4096, "BLOCK": 2048, "PHASES": ALL_PHASES}
    done = aligned_kernel(peer_owned.push_owned_rows, types, values, 8)
    check(done.ptx, done.log, "owned rows")
    assert check_armed_behind_barriers(done.ttgir) == 2
    with pytest.raises(AssertionError, match="before all warps"):
        check_armed_behind_barriers(re.sub(r".*barrier.*\n", "", done.ttgir))


def test_no_word_is_cut_over_some_warps_and_repeated_by_others():
    found = [warps_for(words, 8) for words in (2, 16, 32, 64, 256, 2048)]
    assert found == [1, 1, 1, 2, 8, 8]


def test_words_are_gathered_and_rows_read_by_address():
    types = {"links": LINKS, "x": "*i32", "gathered": "*i32", "words": "i32"}
    values = {"WORLD": KernelWorld(1, 4, True), "SLOTS": Buffers(4096, 65536), "BLOCK": 1024}
    values |= {"PHASES": ALL_PHASES}
    ptx, log = aligned_compile(peer_gather.gather_words, types, values, 4)
    check(ptx, log, "gather", floats=False)
    assert re.search(r"ld\.volatile\.global(\.v2)?\.b64", ptx)  # bits and tag in one access
    types = {"ids": "*i64", "part": "*bf16", "table": "*i64", "y": "*fp32"}
    values = {"RANKS": 4, "SHARE": 38016, "N": 4096, "BLOCK": 2048}
    ptx, _ = compile_for_hopper(peer_gather.rows_of_peers, types, values, 4, 3)
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
