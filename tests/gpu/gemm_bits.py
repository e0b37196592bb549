"""Bits and accuracy of the GPU's GEMMs, fold, norm and SiLU: one check a function."""

import torch

from tests.gpu.checks import attempt, draw, same
from tpdet.kernels import golden, order
from tpdet.kernels.cpu import fold as cpu_fold
from tpdet.kernels.cpu import norm as cpu_norm
from tpdet.kernels.cuda import activation, fold, gemm, gemm_fold, norm
from tpdet.kernels.cuda.gemm_variants import Variant, every_fold_variant, every_variant

ROWS = (1, 3, 16, 17, 33, 64, 100, 128, 300, 512, 1024, 4096)
KINDS = ("normal", "heavy", "cancelling", "tiny")
COLUMN_SHAPES = {"qkv": (6144, 4096), "gate_up": (24576, 4096), "lm_head": (151936, 4096)}
ROW_SHAPES = {"o": (4096, 4096), "down": (4096, 12288)}
LEAVES = 8


def each(variants, run, wanted, what):
    """Every variant gives `wanted`; all that differ are named at once."""
    wrong = []
    for variant in variants:
        try:
            same(run(variant), wanted, what)
        except Exception as error:
            wrong.append(f"{variant}: {str(error)[:160]}")
    if wrong:
        raise AssertionError(f"{what}: {len(wrong)} variants: " + " || ".join(wrong[:4]))


def variants_are_one_class(dtype, out_dtype, kind, n, k):
    reference = Variant(64, 64, 16, 8, 3) if dtype == torch.float32 else Variant(64, 64, 64, 4, 3)
    x, w = draw(max(ROWS), k, dtype=dtype, kind=kind), draw(n, k, dtype=dtype, kind=kind, seed=1)
    bias = draw(n, dtype=dtype, seed=2) if out_dtype == torch.bfloat16 else None
    variants = [
        variant.at(k)
        for variant in every_variant(
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
                wanted = gemm.column_gemm(x[:m], w, None, out, Variant(64, 64, 64, 4, 3).at(k))
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
        wanted = gemm.column_gemm(x, w, None, torch.float32, Variant(64, 64, 16, 4, 3))
        exact = x.double() @ w.double().t()
        error = ((wanted.double() - exact).norm() / exact.norm()).item()
        assert error < 1e-5, f"N={n} K={k}: error {error}"
        for m in (1, 16, 33, 64, 65, 128, 300):
            same(gemm.column_gemm(x[:m], w, None, torch.float32), wanted[:m], f"{m} {n} {k}")


def leaf_weights(n, k, dtype, kind="normal"):
    """A weight [L, N, K / L], leaf-major, and x's columns in leaf order."""
    return draw(LEAVES, n, k // LEAVES, dtype=dtype, kind=kind, seed=1)


def leaves_fold_alike_at_every_size(n, k, dtype, rows, kind):
    w = leaf_weights(n, k, dtype, kind)
    width = k // LEAVES
    for m in rows:
        x = draw(m, k, dtype=dtype, kind=kind)
        for name in order.FOLD_ORDERS:
            partials = gemm.leaf_gemm(x, w)
            tree = order.fold_tree(name, LEAVES)
            wanted = order.evaluate(tree, lambda leaf, partials=partials: partials[leaf], torch.add)
            for ranks in (1, 2, 4, 8):
                plan, share = order.fold_plan(name, LEAVES, ranks), LEAVES // ranks
                sent = []
                for rank, roots in enumerate(plan.roots):
                    first = rank * share
                    mine = x[:, first * width : (first + share) * width]
                    part, what = w[first : first + share], f"M={m} {name} {ranks} ranks {rank}"
                    folded = gemm.leaf_fold_gemm(mine, part, first, roots, plan.slots)
                    leaves = gemm.leaf_gemm(mine, part)
                    same(leaves, partials[first : first + share], f"{what} leaves")
                    same(fold.fold_roots(leaves, first, roots, plan.slots), folded, what)
                    sent.append(folded)
                same(
                    fold.fold_final(torch.stack(sent), plan.final), wanted, f"M={m} {name} {ranks}"
                )


def fold_variants_are_one_class(n, k, kind):
    w, count = leaf_weights(n, k, torch.bfloat16, kind), 0
    for m in (33, 100, 300, 1024):
        x = draw(m, k, kind=kind)
        partials = gemm.leaf_gemm(x, w)
        for name in order.FOLD_ORDERS:
            for ranks, rank in ((1, 0), (2, 1)):
                plan, share = order.fold_plan(name, LEAVES, ranks), LEAVES // ranks
                first, roots = rank * share, plan.roots[rank]
                form = gemm_fold.root_form(first, share, roots)
                mine = x[:, first * (k // LEAVES) : (first + share) * (k // LEAVES)]
                wanted = fold.fold_roots(partials[first : first + share], first, roots, plan.slots)
                if form.leaves_alone:
                    continue
                paired = form.pair * form.parts > 1
                variants = [v.at(k // LEAVES) for v in every_fold_variant(paired=paired)]
                run = lambda variant, first=first, share=share, roots=roots, mine=mine, plan=plan: (
                    gemm.leaf_fold_gemm(
                        mine, w[first : first + share], first, roots, plan.slots, variant
                    )
                )
                each(variants, run, wanted, f"M={m} {name} {ranks} {form}")
                count += len(variants)
    return f"{count} cases"


def leaf_variants_are_one_class(kind):
    n, k = 1024, 4096
    w = leaf_weights(n, k, torch.bfloat16, kind)
    variants = [
        variant.at(k // LEAVES)
        for variant in every_variant(float32=False, wide_out=True, descriptors=True)
    ]
    for m in (1, 17, 100, 300):
        x = draw(m, k, kind=kind)
        wanted = gemm.leaf_gemm(x, w, Variant(64, 64, 64, 4, 3).at(k // LEAVES))
        each(variants, lambda v, x=x: gemm.leaf_gemm(x, w, v), wanted, f"M={m}")
        chains = [
            gemm.column_gemm(part.contiguous(), w[i], None, torch.float32)
            for i, part in enumerate(x.chunk(LEAVES, 1))
        ]
        same(torch.stack(chains), wanted, f"M={m} leaf against column")


def a_fold_keeps_minus_zero_and_its_neighbours():
    partials = torch.full((2, 3, 64), -0.0, device="cuda")
    same(fold.fold_roots(partials, 0, ((0, 1),), 1)[0], partials[0], "-0.0")
    w, x = draw(4, 80, 512), draw(40, 4 * 512)
    clean = gemm.leaf_gemm(x, w)
    x[:, 512:1024], w[1] = torch.nan, torch.nan
    dirty = gemm.leaf_gemm(x, w)
    for leaf in (0, 2, 3):
        same(dirty[leaf], clean[leaf], f"leaf {leaf} beside NaN")
    roots = (0, 1, 2, 3)
    same(gemm.leaf_fold_gemm(x, w, 0, roots, 4)[0], clean[0], "a root beside NaN")


def adding_groups_is_ascending(dtype):
    """A value that only survives in ascending order: 2^30, -2^30, then small ones."""
    k = 256
    x, w = torch.ones(1, k, dtype=dtype, device="cuda"), torch.zeros(16, k, device="cuda")
    w[:, 0], w[:, 16], w[:, 32::16] = 2.0**15, -(2.0**15), 2.0**-12
    y = gemm.column_gemm(x * 1.0, w.to(dtype), None, torch.float32)
    same(y, torch.full_like(y, 14 * 2.0**-12), "ascending")


def norms_have_the_bits_of_the_cpu():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size in (64, 200, 4096, 5120, 20000):
            for kind in ("normal", "heavy"):
                x = draw(67, size, dtype=dtype, kind=kind).clamp(-6e4, 6e4)
                x[1], x[2] = 0.0, x[2] * 1e-4
                if dtype == torch.float32:
                    x[3], x[4] = x[3] * 1e-42, x[4] * 1e30
                w, bias = draw(size, dtype=dtype, seed=1), draw(size, dtype=dtype, seed=4)
                what = f"{dtype} {size} {kind}"
                got = norm.rms_norm(x, w, 1e-6).cpu()
                same(got, cpu_norm.rms_norm(x.cpu(), w.cpu(), 1e-6), f"rms_norm {what}")
                if size not in (200, 4096):
                    continue
                total = draw(67, size, dtype=torch.float32, seed=3)
                for shift in (None, bias):
                    cpu_shift = None if shift is None else shift.cpu()
                    h = cpu_norm.add_residual(total.cpu(), cpu_shift, x.cpu())
                    same(norm.add_residual(total, shift, x).cpu(), h, f"residual {what}")
                    both = norm.add_residual_and_norm(total, shift, x, w, 1e-5)
                    same(both[0].cpu(), h, f"fused residual {what}")
                    same(both[1].cpu(), cpu_norm.rms_norm(h, w.cpu(), 1e-5), f"fused norm {what}")
    x = draw(2, 64)
    x[0, 3], x[1, 4] = torch.nan, torch.inf
    assert norm.rms_norm(x, x[0], 1e-6).isnan().all(), "NaN and infinity give NaN"


def the_golden_norms_are_those_of_the_cpu():
    real = golden.rms_norm
    golden.rms_norm = lambda x, w, eps: norm.rms_norm(x.cuda(), w.cuda(), eps).cpu()
    try:
        assert golden.golden_digest() == order.GOLDEN_SHA256, "another digest"
    finally:
        golden.rms_norm = real


def silu_gives_a_slice_the_bits_of_the_whole():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        gate, up = draw(33, 12288, dtype=dtype), draw(33, 12288, dtype=dtype, seed=1)
        gate[0, :4] = torch.tensor([0.0, -0.0, -300.0, 300.0])
        whole = activation.silu_and_multiply(torch.cat([gate, up], 1))
        exact = gate.double() / (1 + (-gate.double()).exp()) * up.double()
        bound = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2e-6}[dtype]
        wrong = (whole.double() - exact).abs() > bound * exact.abs() + 1e-7
        assert not wrong.any(), f"{dtype}: {int(wrong.sum())} values are wrong"
        for first, last in ((0, 1), (3, 19), (100, 3172), (6144, 12288)):
            part = torch.cat([gate[5:9, first:last], up[5:9, first:last]], 1)
            got = activation.silu_and_multiply(part)
            same(got, whole[5:9, first:last].contiguous(), f"{dtype} {first}:{last}")


def folds_have_the_bits_of_the_cpu():
    for leaves in (4, 8, 16):
        partials = draw(leaves, 37, 4096, dtype=torch.float32, kind="heavy")
        for name in order.FOLD_ORDERS:
            for ranks in (1, 2, leaves):
                plan, share, sent = order.fold_plan(name, leaves, ranks), leaves // ranks, []
                for rank, roots in enumerate(plan.roots):
                    mine = partials[rank * share : (rank + 1) * share]
                    got = fold.fold_roots(mine, rank * share, roots, plan.slots)
                    wanted = cpu_fold.fold_roots(mine.cpu(), rank * share, roots, plan.slots)
                    same(got.cpu(), wanted, f"{name} {leaves} {ranks}")
                    sent.append(got)
                gathered = torch.stack(sent)
                wanted = cpu_fold.fold_final(gathered.cpu(), plan.final)
                same(fold.fold_final(gathered, plan.final).cpu(), wanted, f"{name} final")


def errors_are_small():
    x, w = draw(128, 12288), draw(4096, 12288, seed=1) * 0.02
    exact = x.double() @ w.double().t()
    wanted = lambda y: ((y.double() - exact).norm() / exact.norm()).item()
    one = wanted(gemm.column_gemm(x, w, None, torch.float32))
    leaves = w.view(4096, LEAVES, -1).transpose(0, 1).contiguous()
    errors = []
    for name in order.FOLD_ORDERS:
        tree = (order.fold_tree(name, LEAVES),)
        errors.append(wanted(gemm.leaf_fold_gemm(x, leaves, 0, tree, 1)[0]))
    assert max(errors) < 2e-6 and one < 3e-5, f"{one} {errors}"
    wide = x[:, :4096].float()
    exact = wide.double() @ w[:, :4096].double().t()
    plain = wanted(gemm.column_gemm(wide, w[:, :4096].float(), None, torch.float32))
    assert plain < 2e-6, f"fp32 {plain}"
    return (
        f"one chain {one:.1e}, leaves "
        + " ".join(f"{e:.1e}" for e in errors)
        + f", fp32 {plain:.1e}"
    )


def check_bits():
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for kind in KINDS:
        attempt(f"variants bf16 {kind}", variants_are_one_class, bf16, bf16, kind, 1536, 4096)
    attempt("variants bf16 -> fp32 heavy", variants_are_one_class, bf16, fp32, "heavy", 1536, 4096)
    attempt("variants fp16", variants_are_one_class, fp16, fp16, "normal", 1536, 4096)
    attempt("variants fp32", variants_are_one_class, fp32, fp32, "heavy", 512, 1024)
    for name, (n, k) in COLUMN_SHAPES.items():
        for ranks in (1, 2, 4):
            rows = [m for m in ROWS if m <= (128 if name == "lm_head" else 4096)]
            attempt(f"table {name}/{ranks}", the_table_keeps_the_class, n // ranks, k, rows)
    for dtype in (bf16, fp32):
        attempt(f"rows {dtype}", a_row_alone_has_the_bits_of_the_batch, dtype)
    attempt("shards", shards_have_the_bits_of_the_whole)
    for dtype in (bf16, fp16, fp32):
        attempt(f"odd sizes {dtype}", odd_sizes_keep_the_class, dtype)
        attempt(f"ascending {dtype}", adding_groups_is_ascending, dtype)
    for kind in ("normal", "heavy", "cancelling", "tiny"):
        attempt(f"leaf variants {kind}", leaf_variants_are_one_class, kind)
        attempt(f"fold variants {kind}", fold_variants_are_one_class, 1024, 4096, kind)
    for name, (n, k) in ROW_SHAPES.items():
        rows = (1, 16, 64, 300, 1024)
        attempt(f"leaves {name}", leaves_fold_alike_at_every_size, n, k, bf16, rows, "heavy")
    attempt(
        "leaves odd", leaves_fold_alike_at_every_size, 272, 8 * 592, fp16, (3, 40, 100), "normal"
    )
    attempt("leaves fp32", leaves_fold_alike_at_every_size, 256, 2048, fp32, (3, 40), "normal")
    attempt("neighbours", a_fold_keeps_minus_zero_and_its_neighbours)
    attempt("folds", folds_have_the_bits_of_the_cpu)
    attempt("norms", norms_have_the_bits_of_the_cpu)
    attempt("golden", the_golden_norms_are_those_of_the_cpu)
    attempt("silu", silu_gives_a_slice_the_bits_of_the_whole)
    for width in (16, 48, 64, 128):  # leaves of one and of few steps of K
        args = (512, 8 * width, torch.bfloat16, (20, 100, 300, 1000), "normal")
        attempt(f"fold, leaves of {width}", leaves_fold_alike_at_every_size, *args)
    attempt("accuracy", errors_are_small)
