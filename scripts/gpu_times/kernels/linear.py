"""Times of linear attention's kernels on a GPU: `python -m scripts.gpu_times.kernels.linear`.

One layer of Qwen3.5-9B in bf16, whole and cut in two, by the forms that a start would admit.
Microseconds by CUDA events, without the host's work between launches where steps are long. The
states of decode rows are cold. `--results docs/results` keeps the rows, from which
`python -m scripts.fit.planner` makes the planner's constants.
"""

import argparse
import json
import sys
from itertools import cycle
from pathlib import Path

import torch

from tests.gpu.linear.bits import FULL, on_gpu, state_of
from tests.lib.kernels.linear_rows import linear_rows, linear_sequence
from tpdet.kernels.cuda.linear import convolution, delta_rule, gated_norm
from tpdet.kernels.cuda.linear.admission import admit_forms
from tpdet.kernels.inputs.paged_batch import make_batch
from tpdet.tools.measurement.results_file import append_run
from tpdet.tools.worlds.machine import machine

MODEL = "qwen3.5-9b"
PREFILL = (1, 8192), (4, 2048), (16, 512), (1, 1024)
"""Sequences of a step, and rows of each from position 0 on."""
DECODE, POSITION = (1, 16, 64, 256), 40
"""Sequences of a step with one row each, and its place in its chunk."""
STATES = 256
"""Decode rows have so many: more than the GPU's cache holds."""
KERNELS = "advance", "chunk", "convolve", "decode", "keep_in", "norm_and", "pass", "row_factors"


def kernel_us(run, repeats=5):
    """Microseconds of the kernels of a call by Triton's names: means of so many calls."""
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


def rows_of(case, ranks, sequences, length, start=0):
    """The rows of a results file for one step: each kernel, and their sum."""
    heads = FULL | {"key_heads": FULL["key_heads"] // ranks}
    admit_forms(
        (heads["key_heads"], heads["key_heads"] * heads["group"], 128, 128), torch.device("cuda")
    )
    count, turns = sequences * length, max(1, STATES // sequences) if start else 1
    rows = on_gpu(linear_rows(count, **heads, dtype=torch.bfloat16))
    state = state_of(rows, sequences * turns)
    for part in state[1:4]:
        part.nan_to_num_(0.01)
    state.decays.zero_()
    batches = cycle(
        make_batch(
            tuple(
                linear_sequence(i * length, length, start, turn * sequences + i)
                for i in range(sequences)
            ),
            "cuda",
        )
        for turn in range(turns)
    )
    x = torch.randn(count, state.inputs.shape[2], device="cuda").bfloat16()
    taps = torch.randn(x.shape[1], 4, device="cuda").bfloat16()
    factor = torch.ones(128, device="cuda")

    def layer():
        batch = next(batches)
        convolution.short_convolution(x, taps, state, batch)
        o = delta_rule.gated_delta(*rows, state, batch)
        gated_norm.gated_norm(o, rows.v, factor, 1e-6)

    us = kernel_us(layer, max(5, turns))
    found = {key: value for key, value in us.items() if key.startswith(KERNELS)}
    found["all kernels"] = sum(found.values())
    step = {"model": MODEL, "tp": ranks, "batch": sequences, "context": start or length}
    made = [
        {"case": f"{case}: {key}", **step, "value": round(value, 1), "unit": "us"}
        for key, value in found.items()
    ]
    for row in made:
        print(json.dumps(row), flush=True)
    return made


def main(arguments):
    """Print a JSON row for each time; append them to a results file or folder."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_times.kernels.linear", allow_abbrev=False
    )
    parser.add_argument("--results", type=Path)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args(arguments)
    rows = []
    for ranks in options.tp:
        for sequences, length in PREFILL:
            rows += rows_of("linear prefill", ranks, sequences, length)
        for sequences in DECODE:
            rows += rows_of("linear decode", ranks, sequences, 1, POSITION)
    if options.results:
        command = "python -m scripts.gpu_times.kernels.linear"
        append_run(options.results, "linear", machine("cuda", 1), command, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
