"""From `/pause` to `/resume` with all weights of a model sent between, over HTTP, while it serves.

python -m tests.gpu.engine.served_update [--shape qwen3-8b] [--tp 1] [--carrier ipc|nccl]

The trainer is this process: with `ipc` it holds the tensors on the server's GPUs, with `nccl` on
the GPU behind them, and sends them as vLLM's clients do. Prints a JSON row a round: seconds, the
memory of a GPU beside the serving state (of all processes, every 5 ms), and a decode step's time.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import torch

from tests.gpu.engine.weights import NcclTrainer, ipc_handle
from tests.gpu.lib.served import served
from tpdet.checkpoint.model_config.known_shapes import SHAPES, write_shape
from tpdet.tools.synthetic.make_model import tensor_shapes

PACKED = 512 << 20
"""Bytes of a packed chunk, by NCCL."""
READERS = 8
ALLOWED = 512 << 20
"""Bytes that an update may take beside the serving state and one chunk."""


def read(url: str, pipe: Connection) -> None:
    """Read streams in this process; answer each message with the median gap between tokens."""
    gaps: list[float] = []

    def stream(number: int) -> None:
        body = {"model": "m", "prompt": [5, number], "max_tokens": 3000, "ignore_eos": True}
        while True:
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=600
            ) as answer:
                answer.raise_for_status()
                before = time.perf_counter()
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        gaps.append((now := time.perf_counter()) - before)
                        before = now

    for number in range(READERS):
        threading.Thread(target=stream, args=(number,), daemon=True).start()
    while pipe.recv():
        pipe.send(statistics.median(gaps) if gaps else 0.0)
        gaps.clear()


class Memory:
    """The most bytes in use on each GPU while this is open, beside those in use before."""

    def __init__(self, gpus: int) -> None:
        self._gpus = range(gpus)
        self._before = self._used()
        self._most, self._ended = list(self._before), threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _used(self) -> list[int]:
        free = [torch.cuda.mem_get_info(gpu) for gpu in self._gpus]
        return [whole - left for left, whole in free]

    def _look(self) -> None:
        while not self._ended.wait(0.005):
            self._most = [*map(max, self._most, self._used())]

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def extra(self) -> int:
        return max(most - before for most, before in zip(self._most, self._before, strict=True))


class Trainer:
    """The tensors of a shape, and each carrier's calls; `draw` makes new values."""

    def __init__(self, shape: str, tp: int, carrier: str) -> None:
        self._tp, self._carrier = tp, carrier
        shapes = tensor_shapes(SHAPES[shape])
        gpus = range(tp) if carrier == "ipc" else [tp]
        self._copies = [
            {
                name: torch.empty(size, dtype=torch.bfloat16, device=f"cuda:{gpu}")
                for name, size in shapes.items()
            }
            for gpu in gpus
        ]
        self._names = [*shapes]
        self._told = {
            "names": self._names,
            "dtype_names": ["bfloat16"] * len(shapes),
            "shapes": [[*size] for size in shapes.values()],
        }
        sizes = [tensor.nbytes for tensor in self._copies[0].values()]
        self.bytes, self.largest = sum(sizes), max(sizes)
        self._group: NcclTrainer | None = None

    def draw(self) -> None:
        for tensor in self._copies[0].values():
            tensor.normal_(0, 0.02)
        for copy in self._copies[1:]:
            for name, tensor in copy.items():
                tensor.copy_(self._copies[0][name])
        for gpu in range(torch.cuda.device_count()):
            torch.cuda.synchronize(gpu)

    def join(self, tell) -> None:
        """Make the group, once."""
        if self._carrier == "ipc":
            tell("/init_weight_transfer_engine", init_info={"backend": "ipc"})
            return
        self._group = NcclTrainer(self._tp + 1, self._tp)
        thread = threading.Thread(target=self._group.join)
        thread.start()
        where = {"nccl_unique_id_b64": self._group.text, "world_size": self._tp + 1}
        packed = {"packed": True, "packed_buffer_size_bytes": PACKED}
        tell("/init_weight_transfer_engine", init_info={**where, "rank_offset": 1, **packed})
        thread.join()

    def send(self, tell) -> None:
        """All tensors by one call."""
        if self._group is None:
            handles = [
                {key: text for copy in self._copies for key, text in ipc_handle(copy[name]).items()}
                for name in self._names
            ]
            tell("/update_weights", update_info=self._told | {"ipc_handles": handles})
            return
        thread = threading.Thread(target=self._group.send, args=(self._copies[0], PACKED))
        thread.start()
        tell("/update_weights", update_info=self._told)
        thread.join()


def measure(options: argparse.Namespace, folder: Path) -> bool:
    """Print a row a round; whether each kept to its memory."""
    model = write_shape(folder / "m", options.shape)
    flags = ["--tp", str(options.tp), "--load-format", "dummy", "--skip-tokenizer-init"]
    flags += ["--kv-pages", "1024", "--max-model-len", "4096"]
    with served(model, folder, *flags) as facts:
        return rounds(options, facts["url"], facts["admin_url"])


def rounds(options: argparse.Namespace, url: str, admin_url: str) -> bool:
    trainer = Trainer(options.shape, options.tp, options.carrier)
    admin, kept = httpx.Client(base_url=admin_url, timeout=300), True

    def tell(path: str, **body: object) -> dict:
        answer = admin.post(path, json=body) if body else admin.post(path)
        if answer.status_code != 200:
            raise SystemExit(f"{path}: {answer.status_code} {answer.text}")
        return answer.json()

    trainer.join(tell)
    readers, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=read, args=(url, theirs))
    process.start()
    try:
        for number in range(options.rounds):
            trainer.draw()
            readers.send(True)
            readers.recv()
            time.sleep(2)
            readers.send(True)
            step = readers.recv()
            with Memory(options.tp) as memory:
                times = [time.perf_counter()]
                for call in (
                    lambda: tell("/pause?mode=keep"),
                    lambda: tell("/start_weight_update"),
                    lambda: trainer.send(tell),
                    lambda: tell("/finish_weight_update"),
                    lambda: tell("/resume"),
                ):
                    call()
                    times.append(time.perf_counter())
            spent = [after - before for before, after in pairwise(times)]
            kept &= memory.extra <= max(PACKED, trainer.largest) + ALLOWED
            row = {
                "shape": options.shape, "tp": options.tp, "carrier": options.carrier,
                "round": number, "bytes": trainer.bytes, "seconds": times[-1] - times[0],
                "pause": spent[0], "start": spent[1], "send": spent[2], "finish": spent[3],
                "resume": spent[4], "step": step, "extra_bytes": memory.extra,
            }  # fmt: skip
            print(
                json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
            )
            sys.stdout.flush()
    finally:
        process.kill()
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.engine.served_update")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--carrier", choices=("ipc", "nccl"), default="ipc")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 0 if measure(options, Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
