"""Times of prefill attention's forms, in CUDA graphs over rotating pages.

    python -m scripts.gpu_times.kernels.prefill

Interleaved with scaled_dot_product_attention pinned to cuDNN and to flash.
"""

import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts.gpu_times.graphs import interleaved_medians
from scripts.gpu_times.parts import run_parts
from tests.gpu.attention.case import draw
from tests.gpu.attention.prefill import FIRST, WARP_SPECIALISED, Step
from tests.gpu.lib.checks import attempt
from tpdet.kernels.cuda.attention.variants import prefill_variant
from tpdet.kernels.cuda.hardware import gpu_of

PEAK = 989e12  # data-sheet bf16 FLOP/s of an H200


def peer_of(prompts, length, head, backend):
    """A function that runs the library's attention of the same step by one of its backends."""
    q, k, v = (draw(prompts, 32, length, head, dtype=torch.bfloat16, seed=s) for s in (0, 1, 2))

    def run(_):
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return run


def timed(prompts, length, head, copies, candidates):
    """A line a candidate: microseconds, TFLOP/s, share of cuDNN's and of flash's speed."""
    step = Step(prompts, length, head, copies)
    backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
    runs = [peer_of(prompts, length, head, backend) for backend in backends]
    runs += [partial(step.attend, variant=variant) for variant in candidates.values()]
    took = interleaved_medians(runs, list(range(copies)), 5)
    work = 2 * length**2 * head * 32 * prompts
    lines = [f"floor {work / PEAK * 1e6:.0f} us"]
    for name, us in zip(("cuDNN", "flash", *candidates), took, strict=True):
        lines.append(
            f"{name:26} {us:8.1f} us {work / us / 1e6:4.0f} TFLOP/s, "
            f"of cuDNN {took[0] / us:.3f}, of flash {took[1] / us:.3f}"
        )
    return "\n    ".join(lines)


def print_times():
    """Speed of every form; heads other than 128 have the table's alone."""
    for prompts, length, copies in ((1, 4096, 4), (1, 16384, 2), (2, 4096, 8)):
        name = f"{prompts} x {length} tokens, head 128"
        attempt(name, timed, prompts, length, 128, copies, {"first form": FIRST} | WARP_SPECIALISED)
    for head in (64, 256):
        chosen = prefill_variant(torch.bfloat16, head, gpu_of(torch.device("cuda")))
        attempt(f"1 x 4096 tokens, head {head}", timed, 1, 4096, head, 2, {"table": chosen})


def main(arguments):
    """Print all times."""
    return run_parts("kernels.prefill", {"times": print_times}, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
