"""Decode steps and prompts of hybrids by `LLM.generate`, beside what a step must read.

    python -m tests.gpu.speed.hybrids [--shapes qwen3.5-9b,qwen3.5-35b-a3b] [--tp 1]
        [--batches 1,16,64,256] [--results docs/results]

Random weights in bf16. A row is one shape: milliseconds of a token at each batch and of prompts,
slots of states, and gigabytes that a step of the largest batch reads of weights and of states,
counted: a state at its chunk's start, and half of the rows of a chunk. The recurrent form would
read and write the state itself. Where the GPU's rates are known, floors of decode steps too.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.gpu.lib.generate_times import INPUT, TOKENS, generate_times
from tpdet import LLM
from tpdet.checkpoint.model_config.known_shapes import write_shape
from tpdet.layers.partition import state_shape
from tpdet.models.footprint import weight_bytes
from tpdet.tools.measurement.floor import decode_work, here
from tpdet.tools.measurement.results_file import append_run
from tpdet.tools.worlds.machine import machine

PROMPTS = ((1, 512), (1, 2048), (8, 2048), (1, 16384))
_GIGA = 1e9


def measured(model: str, ranks: int, batches: list[int], context: int) -> dict[str, object]:
    """Start, and measure."""
    begin, most = time.perf_counter(), max(batches)
    with LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=ranks,
        max_num_seqs=most,
        max_model_len=context,
        drafts="off",
    ) as llm:
        runner = llm.engine.runner
        partition = runner.loaded.partition
        shape, dtype = state_shape(partition), getattr(torch, partition.config.dtype)
        assert shape is not None
        row = {
            "start s": round(time.perf_counter() - begin, 1),
            "KV pages": runner.num_pages,
            "slots": list(runner.state_room),
            "GB of weights": round(weight_bytes(partition) / _GIGA, 2),
            "GB of states": round(most * shape.layers * shape.read_bytes(dtype) / _GIGA, 2),
        }
        if (rates := here()) is not None:
            config, half = partition.config, INPUT + TOKENS // 2
            for batch in batches:
                work = decode_work(config, batch, half).over(ranks)
                row[f"floor at {batch}"] = round(1e3 * work.seconds(rates), 3)
        prompts = [(count, length) for count, length in PROMPTS if length < context]
        return row | generate_times(llm, batches, prompts)


def rows_of(shape: str, ranks: int, row: dict[str, object]) -> list[dict[str, object]]:
    """The rows of a results file: a token's time at each batch beside its floor, and prompts'."""
    alike = {"unit": "ms", "model": shape, "dtype": "bfloat16", "tp": ranks}
    rows = []
    for name, value in row.items():
        if name.startswith("ms at "):
            size = name.removeprefix("ms at ")
            floor = {"floor": row[f"floor at {size}"]} if f"floor at {size}" in row else {}
            rows.append({"case": "a token", "value": value, "batch": int(size)} | alike | floor)
        elif name.startswith("ms of "):
            rows.append({"case": f"{name.removeprefix('ms of ')} tokens", "value": value} | alike)
    return rows


def main(arguments: list[str]) -> int:
    """Every shape; 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.speed.hybrids", allow_abbrev=False)
    parser.add_argument("--shapes", default="qwen3.5-9b,qwen3.5-35b-a3b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--max-model-len", type=int, default=17000)
    parser.add_argument("--results", type=Path, help="a results file or folder")
    options = parser.parse_args(arguments)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    batches, failed = [int(batch) for batch in options.batches.split(",")], False
    context = max(options.max_model_len, INPUT + TOKENS)
    with tempfile.TemporaryDirectory(prefix="tpdet-hybrids-") as name:
        for shape in options.shapes.split(","):
            model, named = str(write_shape(Path(name) / shape, shape)), {"shape": shape}
            try:
                row = measured(model, options.tp, batches, context)
            except Exception as error:
                row, failed = {"failed": f"{type(error).__name__}: {error}"}, True
            print(json.dumps(named | {"tp": options.tp} | row), flush=True)
            if options.results and not failed:
                command, rows = "python -m tests.gpu.speed.hybrids", rows_of(shape, options.tp, row)
                append_run(options.results, "hybrids", machine("cuda", options.tp), command, rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
