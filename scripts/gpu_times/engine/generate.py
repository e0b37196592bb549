"""Decode steps and prompts by `LLM.generate` of random weights: ways to compute beside a usual one.

    python -m scripts.gpu_times.engine.generate packed | fp8_pages | hybrids [--shapes qwen3-8b]
        [--formats int4-g128,fp8-block] [--tp 1] [--turns 5] [--results docs/results]

`packed`: weights of a quantised config, packed beside dense; the ids of both must be equal.
`fp8_pages`: a KV cache in fp8 beside one in bf16. `hybrids`: linear attention beside the floors of
its steps, where the GPU's rates are known. A JSON row a way: milliseconds of a token at each
batch and of prompts (how many x tokens), pages, bytes, the digest of all ids. Exits by 1 where a
way failed or ids differ that are to be equal.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_times.engine.generate_times import INPUT, TOKENS, generate_times, started
from tests.lib.models.quantised_config import quantisation_config
from tpdet import LLM
from tpdet.checkpoint.model_config.known_shapes import write_shape
from tpdet.layers.partition import state_shape
from tpdet.models.footprint import weight_bytes
from tpdet.tools.measurement.floor import decode_work, here
from tpdet.tools.measurement.results_file import append_run
from tpdet.tools.worlds.machine import machine

PROGRAM = "scripts.gpu_times.engine.generate"
BATCHES = (1, 16, 64, 256)
LONG = 600 - TOKENS // 2
"""Tokens of the prompts behind which 256 sequences have 600 tokens on average."""
_GIGA = 1e9


@dataclass(frozen=True)
class ComparedWays:
    """What is started in turn: settings of `LLM` by name, the first of them the usual way."""

    ways: dict[str, dict[str, str]]
    prompts: tuple[tuple[int, int], ...]
    context: int
    shapes: str = "qwen3-8b"
    same_ids: bool = False
    long_decode: bool = False  # a row of 256 sequences behind 600 tokens, too
    formats: tuple[str, ...] = field(default=("",))


COMPARISONS = {
    "packed": ComparedWays(
        {weights: {"weights": weights} for weights in ("dense", "packed")},
        ((1, 512), (1, 2048), (8, 2048)),
        4096,
        same_ids=True,
        formats=("int4-g128", "fp8-block"),
    ),
    "fp8_pages": ComparedWays(
        {"bf16": {"kv_cache_dtype": "auto"}, "fp8": {"kv_cache_dtype": "fp8"}},
        ((1, 512), (8, 2048)),
        8192,
        long_decode=True,
    ),
    "hybrids": ComparedWays(
        {"": {}},
        ((1, 512), (1, 2048), (8, 2048), (1, 16384)),
        17000,
        shapes="qwen3.5-9b,qwen3.5-35b-a3b",
    ),
}


def model_of(folder: Path, shape: str, format_name: str) -> str:
    """The directory of a shape, whose config says that it is quantised where a format is named."""
    directory = write_shape(folder / f"{shape}{format_name}", shape)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    if format_name:
        config["quantization_config"] = quantisation_config(format_name)
    path.write_text(json.dumps(config))
    return str(directory)


def one_way(
    comparison: ComparedWays, way: str, model: str, ranks: int, turns: int
) -> dict[str, Any]:
    """Start, and measure so many times."""
    llm, row = started(
        model,
        BATCHES,
        comparison.context,
        tensor_parallel_size=ranks,
        **comparison.ways[way],
    )
    row |= counted(llm, ranks)
    if comparison.long_decode:
        row |= generate_times(llm, (256,), (), turns, prompt_tokens=LONG)
        row["ms at 256 x 600"] = row.pop("ms at 256")
    row |= generate_times(llm, BATCHES, comparison.prompts, turns)
    llm.close()
    return row


def counted(llm: LLM, ranks: int) -> dict[str, object]:
    """Pages; of linear attention slots, and gigabytes that a step of the largest batch reads.

    A state is read at its chunk's start, and half of the rows of a chunk: the recurrent form would
    read and write the state itself. Where the GPU's rates are known, the floors of decode steps.
    """
    runner = llm.engine.runner
    partition = runner.loaded.partition
    row: dict[str, object] = {"KV pages": runner.num_pages}
    shape, dtype = state_shape(partition), getattr(torch, partition.config.dtype)
    if shape is None:
        return row
    states = max(BATCHES) * shape.layers * shape.read_bytes(dtype)
    row |= {
        "slots": list(runner.state_room),
        "GB of weights": round(weight_bytes(partition) / _GIGA, 2),
        "GB of states": round(states / _GIGA, 2),
    }
    if (rates := here()) is not None:
        for batch in BATCHES:
            work = decode_work(partition.config, batch, INPUT + TOKENS // 2).over(ranks)
            row[f"floor at {batch}"] = round(1e3 * work.seconds(rates), 3)
    return row


def results_rows(
    case: str, shape: str, ranks: int, usual: dict[str, Any], row: dict[str, Any], name: str
) -> Iterator[dict[str, object]]:
    """The rows of a results file: each time beside its floor, and beside the usual way's.

    case: begins the rows' cases. name: the usual way's, or "" where there is no other.
    """
    for key, value in row.items():
        if not key.startswith("ms "):
            continue
        size = key.partition("ms at ")[2]
        what = "a token" if size.isdecimal() else f"{key.removeprefix('ms of ')} tokens"
        what = "a token behind 600" if size.endswith("x 600") else what
        found = {"case": case + what, "value": value, "unit": "ms", "model": shape}
        found |= {"dtype": "bfloat16", "tp": ranks}
        if size:
            found["batch"] = int(size.split()[0])
        if f"floor at {size}" in row:
            found["floor"] = row[f"floor at {size}"]
        if name:
            ratio = round(float(value) / float(usual[key]), 3)
            found |= {"peer": name, "peer_value": usual[key], "ratio": ratio}
        yield found


def compared(name: str, shape: str, format_name: str, options: argparse.Namespace) -> bool:
    """Run every way of a comparison in a process of its own; whether all is well."""
    comparison, rows = COMPARISONS[name], {}
    told = {"shape": shape, "format": format_name, "tp": options.tp}
    with tempfile.TemporaryDirectory(prefix=f"tpdet-{name}-") as place:
        model, out = model_of(Path(place), shape, format_name), Path(place) / "row.json"
        for way in comparison.ways:
            out.unlink(missing_ok=True)
            arguments = ["--one", name, way, model, str(options.tp), str(options.turns), str(out)]
            subprocess.run([sys.executable, "-P", "-m", PROGRAM, *arguments], check=False)
            rows[way] = json.loads(out.read_text()) if out.exists() else {"failed": True}
            print(json.dumps(told | {"way": way} | rows[way]), flush=True)
    if any("failed" in row for row in rows.values()):
        return False
    if comparison.same_ids and len({row["ids"] for row in rows.values()}) != 1:
        return False
    (usual_name, usual), *others = rows.items()
    case = f"{format_name}, " if format_name else ""
    found = [
        row
        for _, other in others or [("", usual)]
        for row in results_rows(case, shape, options.tp, usual, other, others and usual_name)
    ]
    if options.results:
        command = f"python -m {PROGRAM} {name}"
        append_run(options.results, name, machine("cuda", options.tp), command, found)
    for row in found:
        print(json.dumps(row), flush=True)
    return True


def main(arguments: list[str]) -> int:
    """Every shape and format of a comparison; 1 where one failed."""
    if arguments[:1] == ["--one"]:
        name, way, model, ranks, turns, out = arguments[1:]
        row = one_way(COMPARISONS[name], way, model, int(ranks), int(turns))
        Path(out).write_text(json.dumps(row))
        return 0
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", allow_abbrev=False)
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("--shapes", help="names of known shapes, with commas between")
    parser.add_argument("--formats", help="of packed weights, as tpdet quantise names them")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--results", type=Path, help="a results file or folder")
    options = parser.parse_args(arguments)
    name = options.comparison
    formats = (options.formats or ",".join(COMPARISONS[name].formats)).split(",")
    shapes = (options.shapes or COMPARISONS[name].shapes).split(",")
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    good = [compared(name, shape, each, options) for shape in shapes for each in formats]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
