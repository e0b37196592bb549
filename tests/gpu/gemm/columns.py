"""Column and gated products on a GPU: bits of every candidate.

python -m tests.gpu.gemm.columns TABLE.json     the same with another table than this GPU's
"""

import sys
import time
from functools import partial
from pathlib import Path

import torch

from tests.gpu.lib.checks import Differences, attempt, draw, ended, failures, gives, same
from tests.gpu.lib.suite import Check
from tpdet.kernels.cuda.cost.static import static_tiles
from tpdet.kernels.cuda.gemm import admission, trial_data
from tpdet.kernels.cuda.gemm import column as gemm
from tpdet.kernels.cuda.gemm.choice import library as library_gemm
from tpdet.kernels.cuda.gemm.choice import shape_table, tile_text
from tpdet.kernels.cuda.gemm.choice.candidates import column_candidates
from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.kernels.cuda.gemm.gated import gated_gemm, gated_library_product
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.cuda.pointwise import activation
from tpdet.tools.tune.column_operands import ColumnOperands
from tpdet.tools.tune.measure import compile_all_of
from tpdet.tools.tune.products import launches
from tpdet.tools.tune.run import buckets_of
from tpdet.tools.tune.shapes import tuned_products

MODELS = ("qwen3-8b", "llama-3-70b")
RANKS = (1, 2, 4)
LIMITS = {"column": 8192, "head": 256}
GATED_SHARDS = (96, 2368, 2880)
GATED_ROWS = (1, 7, 16, 33, 64, 100, 256, 512, 700, 1024, 4096)


def candidates_are_one_class(kind, product):
    n, k, found = 1536, 4096, Differences()
    x, w = draw(1100, k, kind=kind), draw(n, k, kind=kind, seed=1)
    wanted = admission.by_tile(product, x, w, admission.REFERENCE)
    for bucket in shape_table.BUCKETS[:-3]:
        for columns in (n, 24576):
            for tile in column_candidates(bucket, columns, k, product, H200):
                name = tile_text.format_tile(tile)
                for m in (bucket, bucket - bucket // 3, min(1100, bucket + 5)):
                    run = partial(admission.by_tile, product, x[:m], w, tile)
                    found.keep(gives, run, wanted[:m], f"{name} M={m}")
    return found.finish()


def odd_columns_keep_the_class():
    k = 1536
    for n in (48, 144, 1008, 37984):
        x, w = draw(70, k, kind="heavy"), draw(n, k, seed=1)
        wanted = gemm.column_gemm(x, w, None, torch.float32, admission.REFERENCE)
        for m in (1, 7, 33, 64):
            for tile in column_candidates(m, n, k, "head", H200):
                got = gemm.column_gemm(x[:m], w, None, torch.float32, tile)
                same(got, wanted[:m], f"N={n} M={m} {tile_text.format_tile(tile)}")


def gated_tiles_are_the_activation_of_fp32_sums(data, n):
    """Every candidate and static tile of a shard of n weight rows, at row counts up to 4,096.

    Against the reference tile; that against the activation kernel over the reference's sums in
    fp32; and those against a candidate's, a static tile's and the library's.
    """
    k, found = 4096, Differences()
    device = torch.device("cuda", torch.cuda.current_device())
    rows = trial_data.trial_rows(data, max(GATED_ROWS), k, device)
    weight = trial_data.trial_weight(data, n, k, device)
    reference = admission.REFERENCE.at(k)
    wide = gemm.column_gemm(rows, weight, None, torch.float32, reference)
    wanted = activation.activate_and_multiply(wide, rows.dtype)
    same(gated_gemm(rows, weight, reference), wanted, f"{n} {data}: the reference")
    rounded = activation.activate_and_multiply(wide.to(rows.dtype), rows.dtype)
    if torch.equal(rounded.view(torch.int16), wanted.view(torch.int16)):
        raise AssertionError(f"{n} {data}: that gates are not rounded reached no bit")
    for m in GATED_ROWS:
        x, mine = rows[:m], wanted[:m]
        tiles = {
            *column_candidates(m, n, k, "gated", H200),
            *column_candidates(m, 24576, k, "gated", H200),
            *(t.at(k) for t in static_tiles(float32=False, wide_out=False, descriptors=True)),
        }
        runs = {tile_text.format_tile(tile): partial(gated_gemm, x, weight, tile) for tile in tiles}
        runs["the static choice"] = partial(gated_gemm, x, weight)
        if m in shape_table.BUCKETS and n % 8 == 0:
            way = library_gemm.LIBRARIES[0]
            product = library_gemm.library_product(x, weight, torch.float32, m, way)
            if torch.equal(product.view(torch.int32), wide[:m].view(torch.int32)):
                runs[f"library {way}"] = partial(gated_library_product, x, weight, m, way)
        for name, run in runs.items():
            found.keep(gives, run, mine, f"{n} {data} M={m} {name}")
    return found.finish()


def gated_shards_are_columns_of_the_whole():
    """A rank's eights of gates and ups give the whole's columns, a row alone the whole's row."""
    n, k = 4736, 4096
    x, weight = draw(300, k, kind="heavy"), draw(n, k, seed=1)
    whole = gated_gemm(x, weight, admission.REFERENCE)
    for ranks in (2, 4):
        parts = [gated_gemm(x, part.contiguous()) for part in weight.chunk(ranks)]
        same(torch.cat(parts, 1), whole, f"{ranks} ranks")
    for row in (0, 150, 299):
        same(gated_gemm(x[row : row + 1], weight)[0], whole[row], f"row {row} alone")


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


def all_launches(device):
    """Calls that launch what the checks of bits do, of products on few rows' operands."""
    for product in tuned_products(MODELS, RANKS):
        operands = ColumnOperands([product], max(buckets_of(product, 64)), device)
        yield from launches(operands, buckets_of(product, 8192))
    yield from (partial(launch, device, *job) for job in sorted(more_jobs(), key=str))


def launch(device, tile, kind, even):
    """A tile's kernel on small operands; even: whether its columns divide N."""
    n, k = 2 * tile.columns + (0 if even else 16), 2 * tile.depth
    x = torch.zeros(1, k, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(n, k, dtype=torch.bfloat16, device=device)
    admission.by_tile(kind, x, weight, tile)


def more_jobs():
    """What the checks of bits launch beside the products' own: tiles, kinds, even columns."""
    return {
        (tile, kind, variant_of(tile).descriptors or even)
        for kind in ("head", "gated")
        for even in (True, False)
        for n in (1536, 24576)
        for m in shape_table.BUCKETS
        for tile in column_candidates(m, n, 4096, kind, H200)
        if even or m <= 64 or kind == "gated"
    } | {(admission.REFERENCE, kind, False) for kind in ("head", "gated")}


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
    count, refused = compile_all_of(all_launches(device))
    print(f"{count} kernels, {refused} refused")
    print(f"compiled: {time.time() - begin:.0f} s", flush=True)
    for kind in ("normal", "heavy", "cancelling", "tiny"):
        attempt(f"candidates {kind}", candidates_are_one_class, kind, "column")
    attempt("candidates to fp32", candidates_are_one_class, "heavy", "head")
    for kind in ("normal", "heavy"):
        attempt(f"gated candidates {kind}", candidates_are_one_class, kind, "gated")
    for data in trial_data.KINDS:
        for n in GATED_SHARDS:
            attempt(f"gated {n} {data}", gated_tiles_are_the_activation_of_fp32_sums, data, n)
    attempt("gated shards", gated_shards_are_columns_of_the_whole)
    attempt("bias", a_bias_is_added_before_the_rounding)
    attempt("odd columns", odd_columns_keep_the_class)
    attempt("library", the_library_is_judged)
    attempt("admission", the_table_is_admitted, table)
    print(f"bits: {time.time() - begin:.0f} s", flush=True)


def main(arguments):
    check_bits(shape_table.parse_table(Path(arguments[0]).read_text(), arguments[0]))
    return ended()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
