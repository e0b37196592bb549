"""Bits and accuracy of the GPU's column GEMM: one check a function."""

import torch

from tests.gpu.gemm.shapes import COLUMN_SHAPES, KINDS, ROWS, each, relative_error
from tests.gpu.lib.checks import draw, poisoned_workspaces, same, surrounded
from tests.gpu.lib.suite import Check
from tpdet.kernels.cuda.cost.static import static_tiles
from tpdet.kernels.cuda.gemm import column as gemm
from tpdet.kernels.cuda.gemm.variants.tile import Tile


def variants_are_one_class(dtype, out_dtype, kind, n, k):
    reference = Tile(64, 64, 16, 8, 3) if dtype == torch.float32 else Tile(64, 64, 64, 4, 3)
    x, w = draw(max(ROWS), k, dtype=dtype, kind=kind), draw(n, k, dtype=dtype, kind=kind, seed=1)
    bias = draw(n, dtype=dtype, seed=2) if out_dtype == torch.bfloat16 else None
    variants = [
        variant.at(k)
        for variant in static_tiles(
            float32=dtype == torch.float32,
            wide_out=out_dtype == torch.float32,
            descriptors=torch.cuda.get_device_capability() >= (9, 0),
        )
    ]
    for m in ROWS:
        wanted = gemm.column_gemm(x[:m], w, bias, out_dtype, reference.at(k))
        run = lambda variant, m=m: gemm.column_gemm(x[:m], w, bias, out_dtype, variant)
        each(variants, run, wanted, f"{dtype} {kind} M={m}")
    return f"{len(variants)} variants, {len(ROWS)} row counts"


def the_table_keeps_the_class(n, k, rows):
    for kind in ("normal", "heavy"):
        x, w = draw(max(rows), k, kind=kind), draw(n, k, kind=kind, seed=1)
        for m in rows:
            for out in (torch.bfloat16, torch.float32):
                wanted = gemm.column_gemm(x[:m], w, None, out, Tile(64, 64, 64, 4, 3).at(k))
                same(gemm.column_gemm(x[:m], w, None, out), wanted, f"{kind} M={m} {out}")


def a_row_alone_has_the_bits_of_the_batch(dtype):
    x, w = draw(1024, 4096, dtype=dtype, kind="heavy"), draw(1536, 4096, dtype=dtype, seed=1)
    whole = gemm.column_gemm(x, w, None, dtype)
    poisoned = x.clone()
    poisoned[5] = torch.nan
    with_poison = gemm.column_gemm(poisoned, w, None, dtype)
    for row in (0, 6, 15, 16, 100, 1023):
        alone = gemm.column_gemm(x[row : row + 1], w, None, dtype)[0]
        same(alone, whole[row], f"row {row}")
        same(with_poison[row], whole[row], f"row {row} beside NaN")
    for first, last in ((3, 20), (7, 71), (100, 400)):
        part = gemm.column_gemm(x[first:last], w, None, dtype)
        same(part, whole[first:last], f"rows {first}:{last}")


def shards_have_the_bits_of_the_whole():
    for m in (1, 17, 100, 1024):
        x, w, bias = draw(m, 4096, kind="heavy"), draw(6144, 4096, seed=1), draw(6144, seed=2)
        whole = gemm.column_gemm(x, w, bias, torch.bfloat16)
        for shard in (48, 1536, 2048, 3072):
            parts = [
                gemm.column_gemm(x, w[n : n + shard], bias[n : n + shard], torch.bfloat16)
                for n in range(0, 6144, shard)
            ]
            same(torch.cat(parts, 1), whole, f"M={m} shards of {shard}")


def odd_sizes_keep_the_class(dtype):
    for n, k in ((48, 16), (16, 592), (80, 1040), (272, 4112), (1008, 48)):
        x, w = draw(300, k, dtype=dtype), draw(n, k, dtype=dtype, seed=1)
        wanted = gemm.column_gemm(x, w, None, torch.float32, Tile(64, 64, 16, 4, 3))
        exact = x.double() @ w.double().t()
        error = ((wanted.double() - exact).norm() / exact.norm()).item()
        assert error < 1e-5, f"N={n} K={k}: error {error}"
        for m in (1, 16, 33, 64, 65, 128, 300):
            same(gemm.column_gemm(x[:m], w, None, torch.float32), wanted[:m], f"{m} {n} {k}")


def adding_groups_is_ascending(dtype):
    """A value that only survives in ascending order: 2^30, -2^30, then small ones."""
    k = 256
    x, w = torch.ones(1, k, dtype=dtype, device="cuda"), torch.zeros(16, k, device="cuda")
    w[:, 0], w[:, 16], w[:, 32::16] = 2.0**15, -(2.0**15), 2.0**-12
    y = gemm.column_gemm(x * 1.0, w.to(dtype), None, torch.float32)
    same(y, torch.full_like(y, 14 * 2.0**-12), "ascending")


def poison_changes_nothing():
    """NaN before and behind every operand, in the output and around it."""
    count = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for n, k in ((1536, 4096), (272, 592)):
            x, w, bias = draw(300, k, dtype=dtype), draw(n, k, dtype=dtype, seed=1), None
            bias = draw(n, dtype=dtype, seed=2)
            around = surrounded(w), surrounded(bias)
            for m in (m for m in ROWS if m <= 300):
                for out in (dtype, torch.float32):
                    wanted = gemm.column_gemm(x[:m].contiguous(), w, bias, out)
                    with poisoned_workspaces():
                        found = gemm.column_gemm(surrounded(x[:m]), *around, out)
                    same(found, wanted, f"{dtype} {m} {n} {k} {out}")
                    count += 1
    return {"calls": count}


def errors_are_small(dtype, k, limit):
    """The fp32 sum of one chain, against fp64."""
    x, w = draw(128, k, dtype=dtype), draw(4096, k, dtype=dtype, seed=1) * 0.02
    found = gemm.column_gemm(x, w, None, torch.float32)
    error = relative_error(found, x.double() @ w.double().t())
    if error > limit:
        raise AssertionError(f"relative error {error:.2e} above {limit:.0e}")
    return {"value": error, "unit": "relative error", "limit": limit}


def column_checks():
    """Every check of the column GEMM."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    checks = []
    for dtype, out, n, k in (
        (bf16, bf16, 1536, 4096),
        (bf16, fp32, 1536, 4096),
        (fp16, fp16, 1536, 4096),
        (fp32, fp32, 512, 1024),
    ):
        for kind in KINDS:
            name = f"column variants {dtype} -> {out} {kind}".replace("torch.", "")
            checks.append(Check(name, variants_are_one_class, (dtype, out, kind, n, k)))
    for name, (n, k) in COLUMN_SHAPES.items():
        for ranks in (1, 2, 4):
            rows = [m for m in ROWS if m <= (128 if name == "lm_head" else 4096)]
            arguments = n // ranks, k, rows
            checks.append(Check(f"table {name} TP {ranks}", the_table_keeps_the_class, arguments))
    for dtype in (bf16, fp16, fp32):
        name = str(dtype).removeprefix("torch.")
        checks.append(Check(f"rows {name}", a_row_alone_has_the_bits_of_the_batch, (dtype,)))
        checks.append(Check(f"odd sizes {name}", odd_sizes_keep_the_class, (dtype,)))
        checks.append(Check(f"ascending {name}", adding_groups_is_ascending, (dtype,)))
    checks.append(Check("shards", shards_have_the_bits_of_the_whole))
    checks.append(Check("column poison", poison_changes_nothing))
    checks.append(Check("column accuracy bfloat16", errors_are_small, (bf16, 12288, 3e-5)))
    checks.append(Check("column accuracy float32", errors_are_small, (fp32, 4096, 2e-6)))
    return checks
