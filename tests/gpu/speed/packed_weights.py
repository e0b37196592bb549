"""Decode steps, prompts and memory of packed weights beside dense ones, by `LLM.generate`.

    python -m tests.gpu.speed.packed_weights [--shape qwen3-8b] [--formats int4-g128,fp8-block]
        [--turns 5] [--results docs/results]

Random weights of a quantised config, the same ones packed and dense. A row is one way of one
format: milliseconds of a token at 1, 16, 64 and 256 sequences and of prompts of 512, 2,048 and
16,384 tokens, bytes of the GPU, and the digest of all ids, which both ways have in common. Fails
where they differ.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.gpu.lib.generate_times import generate_times, started
from tests.lib.models.quantised_config import quantisation_config
from tpdet.checkpoint.model_config.known_shapes import write_shape
from tpdet.tools.measurement.results_file import append_run
from tpdet.tools.worlds.machine import machine

BATCHES = (1, 16, 64, 256)
PROMPTS = ((1, 512), (1, 2048), (8, 2048))  # prompts and tokens of each


def quantised_shape(folder: Path, shape: str, format_name: str) -> Path:
    """The directory of a shape whose config says that it is quantised."""
    directory = write_shape(folder / format_name, shape)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = quantisation_config(format_name)
    path.write_text(json.dumps(config))
    return directory


def one_way(model: str, weights: str, turns: int) -> dict[str, object]:
    """Start, and measure so many times."""
    llm, row = started(model, BATCHES, 4096, weights=weights)
    row |= generate_times(llm, BATCHES, PROMPTS, turns)
    row["KV pages"] = llm.engine.runner.num_pages
    llm.close()
    return row


def rows_beside(
    format_name: str, shape: str, dense: dict[str, object], packed: dict[str, object]
) -> list[dict[str, object]]:
    """The rows of a results file: each time of the packed way beside the dense one's."""
    rows = []
    for name, value in packed.items():
        size = name.partition(" at ")[2]
        if not name.startswith("ms "):
            continue
        case = f"{format_name}, {'a token' if size else name.removeprefix('ms of ') + ' tokens'}"
        row = {"case": case, "value": value, "unit": "ms", "model": shape, "dtype": "bfloat16"}
        row |= {"tp": 1, "peer": "dense", "peer_value": dense[name]}
        row |= {"ratio": round(float(str(value)) / float(str(dense[name])), 3)}
        rows.append(row | ({"batch": int(size)} if size else {}))
    return rows


def main(arguments: list[str]) -> int:
    """Every format, dense and packed; 1 where ids differ."""
    if arguments[:1] == ["--one"]:
        row = one_way(arguments[1], arguments[2], int(arguments[3]))
        Path(arguments[4]).write_text(json.dumps(row))
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.speed.packed_weights", allow_abbrev=False
    )
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--formats", default="int4-g128,fp8-block")
    parser.add_argument("--turns", default="5")
    parser.add_argument("--results", type=Path, help="a results file or folder")
    options = parser.parse_args(arguments)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    failed = False
    with tempfile.TemporaryDirectory(prefix="tpdet-packed-") as name:
        folder = Path(name)
        for format_name in options.formats.split(","):
            model, ids = str(quantised_shape(folder, options.shape, format_name)), set()
            rows: dict[str, dict[str, object]] = {}
            for weights in ("dense", "packed"):
                out = folder / "row.json"
                out.unlink(missing_ok=True)
                command = [sys.executable, "-m", "tests.gpu.speed.packed_weights", "--one"]
                subprocess.run([*command, model, weights, options.turns, str(out)], check=False)
                if not out.exists():
                    print(json.dumps({"format": format_name, "weights": weights, "failed": True}))
                    failed = True
                    continue
                row = json.loads(out.read_text())
                ids.add(row["ids"])
                print(json.dumps({"format": format_name, "weights": weights} | row), flush=True)
                rows[weights] = row
            failed |= len(ids) != 1
            if options.results and len(rows) == 2 and len(ids) == 1:
                command = "python -m tests.gpu.speed.packed_weights"
                beside = rows_beside(format_name, options.shape, **rows)
                append_run(options.results, "packed", machine("cuda", 1), command, beside)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
