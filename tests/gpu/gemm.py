"""GEMMs, fold, norm and SiLU on a GPU: bits, accuracy, then times beside cuBLAS and the floor.

python -m tests.gpu.gemm            everything, about two minutes
python -m tests.gpu.gemm bits       bits and accuracy
python -m tests.gpu.gemm times      times of the table's choices
python -m tests.gpu.gemm sweep      times of every variant, best first: what the table rests on
"""

import sys
import time

import torch
import triton

from tests.gpu.checks import failures
from tests.gpu.gemm_bits import check_bits
from tests.gpu.gemm_times import check_times, sweep


def main(parts):
    print(torch.__version__, triton.__version__, torch.cuda.get_device_name(), flush=True)
    start = time.time()
    if "bits" in parts:
        check_bits()
        print(f"bits: {time.time() - start:.0f} s", flush=True)
    if "times" in parts:
        check_times()
    if "sweep" in parts:
        sweep()
    print(f"{time.time() - start:.0f} s, failed: {', '.join(failures) or 'nothing'}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["bits", "times"]))
