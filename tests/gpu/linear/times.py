"""Times of linear attention's kernels on a GPU: `python -m tests.gpu.linear.times`.

One layer of 32 value and 16 key heads of 128. Microseconds by CUDA events, without the host's work
between launches where steps are long; `--results docs/results` keeps the rows.
"""

import argparse
import json
from pathlib import Path

import torch

from tests.gpu.linear.bits import FULL, on_gpu, state_of
from tests.lib.kernels.linear_rows import linear_rows, linear_sequence
from tpdet.kernels.cuda.linear import convolution, delta_rule, gated_norm
from tpdet.kernels.inputs.paged_batch import make_batch
from tpdet.tools.measurement.results_file import append_run
from tpdet.tools.worlds.machine import machine

STEPS = {
    "prefill, one sequence": [(8192, 0)],
    "prefill, four sequences": [(2048, 0)] * 4,
    "decode of 1": [(1, 40)],
    "decode of 64": [(1, 40)] * 64,
    "decode of 256": [(1, 40)] * 256,
}
"""Rows and first position of each sequence of a step."""


def kernel_us(run, repeats=5):
    """Microseconds of the kernels of a call by Triton's names, and of all of them: medians."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    names = {}
    for event in profile.key_averages():
        names[event.key] = event.device_time_total / repeats
    return names


def rows_of(name, step):
    """The rows of a results file for one step: each kernel, and their sum."""
    count = sum(rows for rows, _ in step)
    rows = on_gpu(linear_rows(count, **FULL, dtype=torch.bfloat16))
    state = state_of(rows, len(step))
    sequences, first_row = [], 0
    for slot, (length, start) in enumerate(step):
        sequences.append(linear_sequence(first_row, length, start, slot))
        first_row += length
    for part in state[1:4]:
        part.nan_to_num_(0.01)
    state.decays.zero_()
    batch = make_batch(tuple(sequences), "cuda")
    x = torch.randn(count, state.inputs.shape[2], device="cuda").bfloat16()
    taps = torch.randn(x.shape[1], 4, device="cuda").bfloat16()
    factor = torch.ones(128, device="cuda")

    def layer():
        convolution.short_convolution(x, taps, state, batch)
        o = delta_rule.gated_delta(*rows, state, batch)
        gated_norm.gated_norm(o, rows.v, factor, 1e-6)

    kernels = ("advance", "chunk", "convolve", "decode", "keep_in", "norm_and", "pass")
    found = {key: us for key, us in kernel_us(layer).items() if key.startswith(kernels)}
    found["all kernels"] = sum(found.values())
    made = [
        {"case": f"{name}: {key}", "batch": count, "value": round(us, 1), "unit": "us"}
        for key, us in found.items()
    ]
    for row in made:
        print(json.dumps(row), flush=True)
    return made


def main():
    """Print a JSON row for each time; append them to a results file or folder."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    rows = [row for name, step in STEPS.items() for row in rows_of(name, step)]
    if options.results:
        command = "python -m tests.gpu.linear.times"
        append_run(options.results, "linear", machine("cuda", 1), command, rows)


if __name__ == "__main__":
    main()
