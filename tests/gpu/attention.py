"""Times of attention on a GPU, beside scaled_dot_product_attention and the floor.

python -m tests.gpu.attention
"""

import sys

from tests.gpu.attention_times import check_times
from tests.gpu.suite import run_parts

if __name__ == "__main__":
    sys.exit(run_parts("attention", {"times": check_times}, sys.argv[1:]))
