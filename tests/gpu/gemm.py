"""GEMMs, folds, norms and SiLU on a GPU: checks of bits and accuracy; times beside cuBLAS.

python -m tests.gpu.gemm times      times of the table's choices
python -m tests.gpu.gemm sweep      times of every variant, best first: what the table rests on
"""

import sys

from tests.gpu.column_bits import column_checks
from tests.gpu.gemm_times import check_times, sweep
from tests.gpu.leaf_bits import leaf_checks
from tests.gpu.norm_bits import norm_checks
from tests.gpu.suite import run_parts


def all_checks():
    """Every check of bits and accuracy."""
    return [*column_checks(), *leaf_checks(), *norm_checks()]


if __name__ == "__main__":
    parts = {"times": check_times, "sweep": sweep}
    sys.exit(run_parts("gemm", parts, sys.argv[1:] or ["times"]))
