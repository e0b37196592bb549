"""Decode steps, prompts and pages of an fp8 KV cache beside one in bf16, by `LLM.generate`.

    python -m tests.gpu.speed.fp8_pages [--shape qwen3-8b] [--turns 3]

Random weights. A row is one dtype of the cache: milliseconds of a token at 1, 16, 64 and 256
sequences behind 128 tokens and at 256 behind 600, of prompts of 512 and 8 x 2,048 tokens, and how
many pages there are; last, what fp8 takes of bf16's.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.gpu.lib import generate_times as times
from tpdet.checkpoint.model_config.known_shapes import write_shape

BATCHES = (1, 16, 64, 256)
PROMPTS = ((1, 512), (8, 2048))  # prompts and tokens of each
LONG = 600 - times.TOKENS // 2
"""Tokens of the prompts behind which 256 sequences have 600 tokens on average."""


def one_dtype(model: str, kv_cache_dtype: str, turns: int) -> dict[str, object]:
    """Start, and measure so many times."""
    llm, row = times.started(model, BATCHES, 8192, kv_cache_dtype=kv_cache_dtype)
    row["KV pages"] = llm.engine.runner.num_pages
    row |= times.generate_times(llm, (256,), (), turns, prompt_tokens=LONG)
    row["ms at 256 x 600"] = row.pop("ms at 256")
    print(json.dumps({"kv_cache_dtype": kv_cache_dtype} | row), flush=True)
    row |= times.generate_times(llm, BATCHES, PROMPTS, turns)
    llm.close()
    return row


def main(arguments: list[str]) -> int:
    """Both dtypes of the cache, one after the other."""
    if arguments[:1] == ["--one"]:
        row = one_dtype(arguments[1], arguments[2], int(arguments[3]))
        Path(arguments[4]).write_text(json.dumps(row))
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.speed.fp8_pages", allow_abbrev=False)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--turns", default="3")
    options = parser.parse_args(arguments)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    rows = {}
    with tempfile.TemporaryDirectory(prefix="tpdet-fp8-") as name:
        model, out = str(write_shape(Path(name) / "model", options.shape)), Path(name) / "row.json"
        for kv_cache_dtype in ("auto", "fp8"):
            out.unlink(missing_ok=True)
            command = [sys.executable, "-P", "-m", "tests.gpu.speed.fp8_pages", "--one", model]
            command += [kv_cache_dtype, options.turns, str(out)]
            subprocess.run(command, check=False)
            if not out.exists():
                return 1
            rows[kv_cache_dtype] = json.loads(out.read_text())
            print(json.dumps({"kv_cache_dtype": kv_cache_dtype} | rows[kv_cache_dtype]), flush=True)
    shares = {
        name: round(rows["fp8"][name] / value, 3)
        for name, value in rows["auto"].items()
        if isinstance(value, (int, float))
    }
    print(json.dumps({"fp8 / auto": shares}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
