"""Seconds in which weights are read and placed: `python scripts/load_times.py [SHAPE ..]`.

A checkpoint of each shape is written into memory, of random bytes, so that no disk is timed: its
size must fit beside a rank's own memory. Then `LLM` starts twice, the second time with compiled
kernels.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import prod
from pathlib import Path

import torch

from tpdet.checkpoint.model_config.known_shapes import write_shape
from tpdet.llm import LLM
from tpdet.tools.synthetic.make_model import tensor_shapes

MEMORY = Path("/dev/shm")
SHAPES = ("qwen3-8b", "qwen3-30b-a3b")
SHARDS, BLOCK = 16, 16 << 20  # files; values that are drawn, and written again and again
CONTEXT, STARTS = 8192, 2


def write_checkpoint(directory, shards=SHARDS, block=BLOCK):
    """Safetensors in bf16 beside a directory's config.json, as its family names them; bytes."""
    shapes = tensor_shapes(json.loads((directory / "config.json").read_text()))
    values = (torch.randn(block) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy()
    names = list(shapes)
    cuts = [len(names) * i // shards for i in range(shards + 1)]
    parts = [names[begin:end] for begin, end in pairwise(cuts)]

    def write(shard):
        header, size = {}, 0
        for name in parts[shard]:
            end = size + 2 * prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [size, end]}
            size = end
        text = json.dumps(header).encode()
        with (directory / f"model-{shard}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for begin in range(0, size, values.nbytes):
                file.write(values[: size - begin])
        return size

    with ThreadPoolExecutor() as pool:
        size = sum(pool.map(write, range(shards)))
    places = {name: f"model-{i}.safetensors" for i, part in enumerate(parts) for name in part}
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return size


def time_start(directory):
    """One start, in a process that ends with it."""
    begin = time.perf_counter()
    with LLM(str(directory), skip_tokenizer_init=True, max_model_len=CONTEXT) as llm:
        took, runner = time.perf_counter() - begin, llm.engine.runner
        kept = sum(it.keys.nbytes + it.values.nbytes for it in runner.pages.layers)
        size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        rate = size / runner.times.seconds["load"]
        print(
            f"{directory.name}: LLM() {took:.1f} s, {runner.times}; {size / 1e9:.1f} GB at "
            f"{rate / 1e9:.1f} GB/s, KV cache {kept / 1e9:.1f} GB",
            flush=True,
        )


def main(arguments) -> int:
    """Write and load each shape; with --start, load the directory that is named."""
    if arguments[:1] == ["--start"]:
        time_start(Path(arguments[1]))
        return 0
    for shape in arguments or SHAPES:
        folder = Path(tempfile.mkdtemp(prefix="tpdet-load-", dir=MEMORY))
        try:
            directory = write_shape(folder / shape, shape)
            write_checkpoint(directory)
            for _ in range(STARTS):
                again = [sys.executable, "-P", __file__, "--start", str(directory)]
                subprocess.run(again, check=True)
        finally:
            shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
