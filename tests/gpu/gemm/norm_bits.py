"""Bits of the GPU's norms and SiLU: one check a function."""

import torch

from tests.gpu.lib.checks import draw, poisoned_workspaces, same, surrounded
from tests.gpu.lib.suite import Check
from tpdet.kernels import order
from tpdet.kernels.cpu.pointwise import finish as cpu_finish
from tpdet.kernels.cpu.pointwise import norm as cpu_norm
from tpdet.kernels.cuda.pointwise import activation, finish, norm
from tpdet.kernels.inputs.gated import interleaved
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.known import golden
from tpdet.kernels.partial_sums import PartialSums, whole_sum


def norms_have_the_bits_of_the_cpu():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size in (64, 200, 4096, 5120, 20000):
            for kind in ("normal", "heavy"):
                x = draw(67, size, dtype=torch.float32, kind=kind)
                x[1], x[2], x[3], x[4] = 0.0, x[2] * 1e-4, x[3] * 1e-42, x[4] * 1e30
                x[5:11] = golden.hard_rows(x[11:].cpu()).cuda()
                w, v = draw(size, dtype=dtype, seed=1), draw(size, dtype=dtype, seed=4)
                what = f"{dtype} {size} {kind}"
                got = norm.rms_norm(x, Norm(w, 1e-6)).cpu()
                same(got, cpu_norm.rms_norm(x.cpu(), Norm(w.cpu(), 1e-6)), f"rms_norm {what}")
                if size not in (200, 4096):
                    continue
                total = draw(67, size, dtype=torch.float32, seed=3)
                rounded = total.to(dtype)  # a gathered product
                of_w, of_v = Norm(w, 1e-5), Norm(v, 1e-5)
                for norms in ((of_w, None), (of_w, of_v), (None, of_v)):
                    for added in (total, rounded):
                        both = finish.fold_and_norm(whole_sum(added), Finish(x, *norms))
                        on_cpu = [each and Norm(each.weight.cpu(), 1e-5) for each in norms]
                        wanted = cpu_finish.fold_and_norm(
                            whole_sum(added.cpu()), Finish(x.cpu(), *on_cpu)
                        )
                        for name, one, other in zip("hy", both, wanted, strict=True):
                            same(one.cpu(), other, f"{name} of sums, {what}")
    x = draw(2, 64)
    x[0, 3], x[1, 4] = torch.nan, torch.inf
    assert norm.rms_norm(x, Norm(x[0], 1e-6)).isnan().all(), "NaN and infinity give NaN"


def the_golden_norms_are_those_of_the_cpu():
    real = golden.rms_norm, golden.fold_and_norm
    calls = []

    def here(by):
        calls.append(by)
        return Norm(by.weight.cuda(), by.eps)

    def fold_and_norm(sums, by):
        sums = PartialSums(sums.values.cuda(), sums.roots)
        found = finish.fold_and_norm(sums, Finish(by.residual.cuda(), here(by.norm)))
        return tuple(each.cpu() for each in found)

    golden.rms_norm = lambda x, by: norm.rms_norm(x.cuda(), here(by)).cpu()
    golden.fold_and_norm = fold_and_norm
    try:
        assert golden.golden_digest() == order.GOLDEN_SHA256, "another digest"
    finally:
        golden.rms_norm, golden.fold_and_norm = real
    assert len(calls) == 6, "the vectors were not computed here"


def silu_gives_a_slice_the_bits_of_the_whole():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        gate, up = draw(33, 12288, dtype=dtype), draw(33, 12288, dtype=dtype, seed=1)
        gate[0, :4] = torch.tensor([0.0, -0.0, -300.0, 300.0])
        rows = interleaved(gate.t(), up.t()).t().contiguous()
        whole = activation.activate_and_multiply(rows, dtype)
        exact = gate.double() / (1 + (-gate.double()).exp()) * up.double()
        bound = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2e-6}[dtype]
        wrong = (whole.double() - exact).abs() > bound * exact.abs() + 1e-7
        assert not wrong.any(), f"{dtype}: {int(wrong.sum())} values are wrong"
        for first, last in ((0, 8), (8, 24), (96, 3176), (6144, 12288)):
            got = activation.activate_and_multiply(rows[5:9, 2 * first : 2 * last], dtype)
            same(got, whole[5:9, first:last].contiguous(), f"{dtype} {first}:{last}")


def poison_changes_nothing():
    """NaN before and behind every operand, in the outputs and around them."""
    for dtype in (torch.bfloat16, torch.float32):
        for size in (200, 4096):
            x, total = (draw(67, size, dtype=torch.float32, seed=seed) for seed in (0, 3))
            w, wide = draw(size, dtype=dtype, seed=1), draw(67, 16 * (size // 16), dtype=dtype)
            wanted = (
                norm.rms_norm(x, Norm(w, 1e-6)),
                *finish.fold_and_norm(whole_sum(total), Finish(x, Norm(w, 1e-6))),
            )
            silu = activation.activate_and_multiply(wide, dtype)
            x, w, total, wide = (surrounded(each) for each in (x, w, total, wide))
            with poisoned_workspaces():
                found = (
                    norm.rms_norm(x, Norm(w, 1e-6)),
                    *finish.fold_and_norm(whole_sum(total), Finish(x, Norm(w, 1e-6))),
                )
                same(activation.activate_and_multiply(wide, dtype), silu, f"SiLU {dtype} {size}")
            for left, right in zip(found, wanted, strict=True):
                same(left, right, f"{dtype} {size}")


def norm_checks():
    """Every check of norms and SiLU."""
    return [
        Check("norms as on the CPU", norms_have_the_bits_of_the_cpu),
        Check("golden norms", the_golden_norms_are_those_of_the_cpu),
        Check("SiLU", silu_gives_a_slice_the_bits_of_the_whole),
        Check("norm poison", poison_changes_nothing),
    ]
