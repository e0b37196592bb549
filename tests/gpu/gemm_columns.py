"""Column products on a GPU: bits of every candidate; the table's choice beside `linear`.

python -m tests.gpu.gemm_columns                times with this GPU's committed table
python -m tests.gpu.gemm_columns TABLE.json     bits, then times, with another table
python -m tests.gpu.gemm_columns candidates     the fastest candidates of the narrow shards
"""

import math
import sys
import time
from functools import cache, partial
from pathlib import Path

import torch

from tests.gpu.checks import attempt, draw, failures, same
from tests.gpu.suite import Check
from tests.gpu.times import interleaved_medians
from tpdet.kernels.cuda.gemm import admission
from tpdet.kernels.cuda.gemm import column as gemm
from tpdet.kernels.cuda.gemm.choice import library as library_gemm
from tpdet.kernels.cuda.gemm.choice import shape_table, tile_text
from tpdet.kernels.cuda.gemm.choice.candidates import column_candidates
from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.tune.precompile import precompile
from tpdet.tune.product import ProductTuner
from tpdet.tune.run import compile_jobs
from tpdet.tune.shapes import tuned_products

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
MODELS = ("qwen3-8b", "llama-3-70b")
RANKS = (1, 2, 4)
NARROW = (1, 16, 32, 64, 128)
LIMITS = {"column": 8192, "head": 256}
FLOOR_BYTES, FLOOR_FLOPS = 4.5e12, 0.79e15  # measured on an H200


def candidates_are_one_class(kind, wide_out):
    n, k, count, wrong = 1536, 4096, 0, []
    x, w = draw(1100, k, kind=kind), draw(n, k, kind=kind, seed=1)
    out = torch.float32 if wide_out else torch.bfloat16
    wanted = gemm.column_gemm(x, w, None, out, admission.REFERENCE)
    for bucket in shape_table.BUCKETS[:-3]:
        for columns in (n, 24576):
            for tile in column_candidates(bucket, columns, k, wide_out=wide_out, descriptors=True):
                count += 1
                for m in (bucket, bucket - bucket // 3, min(1100, bucket + 5)):
                    try:
                        got = gemm.column_gemm(x[:m], w, None, out, tile)
                        same(got, wanted[:m], f"{tile_text.format_tile(tile)} M={m}")
                    except Exception as error:
                        torch.cuda.synchronize()
                        wrong.append(str(error)[:150])
    if wrong:
        raise AssertionError(f"{len(wrong)} of {count}: " + " || ".join(dict.fromkeys(wrong)))
    return f"{count} candidates"


def odd_columns_keep_the_class():
    k = 1536
    for n in (48, 144, 1008, 37984):
        x, w = draw(70, k, kind="heavy"), draw(n, k, seed=1)
        wanted = gemm.column_gemm(x, w, None, torch.float32, admission.REFERENCE)
        for m in (1, 7, 33, 64):
            for tile in column_candidates(m, n, k, wide_out=True, descriptors=True):
                got = gemm.column_gemm(x[:m], w, None, torch.float32, tile)
                same(got, wanted[:m], f"N={n} M={m} {tile_text.format_tile(tile)}")


def a_bias_is_added_before_the_rounding():
    x, w, shift = draw(70, 4096, kind="heavy"), draw(1536, 4096, seed=1), draw(1536, seed=2)
    wanted = gemm.column_gemm(x, w, shift, x.dtype, admission.REFERENCE)
    plain = gemm.column_gemm(x, w, None, torch.float32, admission.REFERENCE)
    same((plain + shift.float()).to(x.dtype), wanted, "the reference")
    for name in ("16x64x128 w4 s6 swap tma", "64x64x128 w4 s6 tma", "16x16x512 w4 s4 swap"):
        tile = tile_text.parse_tile(name)
        same(gemm.column_gemm(x, w, shift, x.dtype, tile), wanted, name)


def the_library_is_judged():
    """Where cuBLAS keeps the class, in a graph it gives the same bits; split K must be found."""
    said = []
    for n, k in ((6144, 4096), (1536, 4096)):
        x, w = draw(4096, k, kind="heavy"), draw(n, k, seed=1)
        wanted = gemm.column_gemm(x, w, None, x.dtype, admission.REFERENCE)
        for way in library_gemm.LIBRARIES:
            marks = ""
            for m in (1, 16, 64, 128, 256, 1024, 4096):
                run = partial(library_gemm.library_product, x[:m], w, x.dtype, m, way)
                eager = run()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    captured = run()
                graph.replay()
                same(captured, eager, f"{way} {n}x{k} M={m} in a graph")
                marks += "." if bool((eager != wanted[:m]).any()) else "1"
            said.append(f"{way} {n}: {marks}")
    x = draw(1000, 4096)
    padded = library_gemm.library_product(x, draw(6144, 4096), x.dtype, 1024, "mm")
    same(padded, gemm.column_gemm(x, draw(6144, 4096), None, x.dtype), "padded rows")
    return "; ".join(said)


def the_table_is_admitted(table):
    begin = time.perf_counter()
    device = torch.device("cuda", torch.cuda.current_device())
    products = tuned_products(MODELS[:1], (1,))
    admission.check(products, device, LIMITS, table=table)  # compiles
    begin = time.perf_counter()
    found = admission.check(products, device, LIMITS, table=table)
    torch.cuda.synchronize()
    took = time.perf_counter() - begin
    everything = admission.check(tuned_products(MODELS, RANKS), device, LIMITS, table=table)
    if took > 2.0:
        raise AssertionError(f"{took:.1f} s for {found}")
    return f"{took:.2f} s: {found}; all: {everything}"


@cache
def admitted(device):
    """What start-up admits of the committed table."""
    return admission.check(tuned_products(MODELS, RANKS), device, LIMITS).admitted


def times_of(product, ratios):
    n, k, head = product.n, product.k, product.kind == "head"
    out = admission.output_dtype(product)
    copies = max(1, int(150e6 // (n * k * 2)))
    weights = [draw(n, k) * 0.02]
    weights += [weights[0].clone() for _ in range(copies)]
    line = []
    for m in ROWS:
        if head and m > LIMITS["head"]:
            continue
        x = draw(m, k)
        mine = admitted(x.device)
        ours = lambda w, x=x, mine=mine: gemm.column_gemm(x, w, None, out, admitted=mine)
        peer = lambda w, x=x: torch.nn.functional.linear(x, w)
        taken, theirs = interleaved_medians((ours, peer), weights, repeats=11)
        flops, size = 2 * m * n * k, 2 * (n * k + m * k) + m * n * out.itemsize
        floor = max(flops / FLOOR_FLOPS, size / FLOOR_BYTES) * 1e6
        choice = mine.choice(x, n, out)
        library = "L" if choice is not None and choice.library and m == choice.bucket else ""
        ratios.append((taken / theirs, f"{product} M={m}"))
        line.append(f"{m}:{taken:.1f}us/{taken / floor:.2f}f/{taken / theirs:.2f}{library}")
    torch.cuda.empty_cache()
    print(f"{product!s:20s} {' '.join(line)}", flush=True)


def check_times():
    ratios = []
    for product in tuned_products(MODELS, RANKS):
        attempt(str(product), times_of, product, ratios)
    for title, found in (
        ("columns", [r for r in ratios if "head" not in r[1]]),
        ("heads", [r for r in ratios if "head" in r[1]]),
        ("all", ratios),
    ):
        mean = math.exp(sum(math.log(r) for r, _ in found) / len(found))
        worst = ", ".join(f"{r:.2f} {name}" for r, name in sorted(found, reverse=True)[:4])
        print(f"{title}: geometric mean {mean:.3f} of {len(found)}, worst {worst}", flush=True)


def show_candidates():
    """Every candidate of the narrow shards at a few row counts, fastest first."""
    products = [p for p in tuned_products(MODELS[:1], RANKS) if p.n <= 6144]
    device = torch.device("cuda", torch.cuda.current_device())
    precompile(compile_jobs(products, 128, device))
    for product in products:
        tuner = ProductTuner(product, 128, 5, device)
        for m in NARROW:
            for line in tuner.ranking(m):
                print(f"{product!s:20s} M={m:4d} {line}", flush=True)


def more_jobs():
    """What the checks of bits launch beside the products' own."""
    return {
        (tile, True, variant_of(tile).descriptors or even)
        for even in (True, False)
        for n in (1536, 24576)
        for m in shape_table.BUCKETS
        for tile in column_candidates(m, n, 4096, wide_out=True, descriptors=True)
        if even or m <= 64
    } | {(admission.REFERENCE, True, False)}


def main(arguments):
    if arguments[:1] == ["candidates"]:
        show_candidates()
        return 0
    if arguments:
        check_bits(shape_table.parse_table(Path(arguments[0]).read_text(), arguments[0]))
    else:
        attempt("admission", the_table_is_admitted, None)
    check_times()
    print(f"failed: {', '.join(failures) or 'nothing'}", flush=True)
    return 1 if failures else 0


def column_checks():
    """One check, for its kernels are compiled together."""
    return [Check("with this GPU's committed table", all_bits, (), 1200.0)]


def all_bits():
    check_bits(None)
    if failures:
        raise AssertionError(", ".join(failures))


def check_bits(table):
    """Bits of every candidate and of a table, None being this GPU's; `failures` names the wrong."""
    begin = time.time()
    device = torch.device("cuda", torch.cuda.current_device())
    jobs = compile_jobs(tuned_products(MODELS, RANKS), 8192, device) | more_jobs()
    print(f"{len(jobs)} kernels, {precompile(jobs)} refused")
    print(f"compiled: {time.time() - begin:.0f} s", flush=True)
    for kind in ("normal", "heavy", "cancelling", "tiny"):
        attempt(f"candidates {kind}", candidates_are_one_class, kind, False)
    attempt("candidates to fp32", candidates_are_one_class, "heavy", True)
    attempt("bias", a_bias_is_added_before_the_rounding)
    attempt("odd columns", odd_columns_keep_the_class)
    attempt("library", the_library_is_judged)
    attempt("admission", the_table_is_admitted, table)
    print(f"bits: {time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
