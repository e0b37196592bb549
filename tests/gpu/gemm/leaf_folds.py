"""What a rank sends, from `leaf_sums` by any choice: what the checks of leaves compare."""

from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.cuda.pointwise import fold
from tpdet.kernels.partial_sums import relative_roots


def leaf_fold(x, weight, roots, slots, choice=None):
    """x [M, L * K], weight [L, N, K], L leaves -> roots [slots, M, N] fp32."""
    sums = leaf_gemm.leaf_sums(x, weight, relative_roots(roots), choice)
    if sums.folded and len(sums.roots) == slots:
        return sums.values
    return fold.fold_roots(sums.values, 0, sums.roots, slots)
