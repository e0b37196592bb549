"""Attention, rotary embedding and stored keys on a GPU: equal bits first, then accuracy and speed.

python -m tests.gpu.attention            everything
python -m tests.gpu.attention bits       bits and accuracy; --output FILE.json appends their rows
python -m tests.gpu.attention times      beside scaled_dot_product_attention and the floor
"""

import sys

from tests.gpu.attention_bits import attention_checks
from tests.gpu.attention_times import check_times
from tests.gpu.suite import run_suite

if __name__ == "__main__":
    sys.exit(run_suite("attention", attention_checks, {"times": check_times}, sys.argv[1:]))
