"""GEMMs, folds, norms and SiLU on a GPU: bits, accuracy, then times beside cuBLAS and the floor.

python -m tests.gpu.gemm            everything, about two minutes
python -m tests.gpu.gemm bits       bits and accuracy; --output FILE.json appends their rows
python -m tests.gpu.gemm times      times of the table's choices
python -m tests.gpu.gemm sweep      times of every variant, best first: what the table rests on
"""

import sys

from tests.gpu.column_bits import column_checks
from tests.gpu.gemm_times import check_times, sweep
from tests.gpu.leaf_bits import leaf_checks
from tests.gpu.norm_bits import norm_checks
from tests.gpu.suite import run_suite


def all_checks():
    """Every check of bits and accuracy."""
    return [*column_checks(), *leaf_checks(), *norm_checks()]


if __name__ == "__main__":
    sys.exit(run_suite("gemm", all_checks, {"times": check_times, "sweep": sweep}, sys.argv[1:]))
