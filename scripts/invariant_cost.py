"""Times models of transformers inside `tpdet.nn.invariant()` and outside; docs/rl.md quotes them.

    python scripts/invariant_cost.py DEVICE docs/results

Random weights, four layers of 256, sequences of 128 tokens: a forward pass, and one with its
backward pass. A time is the least of three, ours and stock in turn, with one thread on a CPU.
"""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.nn.small_models import FAMILIES, small_model  # noqa: E402
from tpdet.nn import invariant  # noqa: E402
from tpdet.tools.measurement.results_file import append_run  # noqa: E402
from tpdet.tools.worlds.machine import machine  # noqa: E402

LENGTH, REPEATS, BATCHES = 128, 3, {torch.float32: (1, 8), torch.bfloat16: (1,)}
WIDE = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 768}
SIZES = {
    "llama": WIDE,
    "qwen3_moe": {"hidden_size": 256, "num_hidden_layers": 4, "moe_intermediate_size": 192},
    "gpt2": {"n_embd": 256, "n_layer": 4},
}


def main() -> None:
    """Print and record a row for each model, dtype, pass and batch."""
    device, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    rows = []
    for family in FAMILIES:
        for dtype, batches in BATCHES.items():
            model = small_model(family, **SIZES[family]).to(device, dtype)
            for batch in batches:
                rows += rows_of(
                    model, family, torch.ones(batch, LENGTH, dtype=torch.int64, device=device)
                )
    command = f"scripts/invariant_cost.py {device}"
    append_run(folder, "invariant", machine(device, 1), command, rows)


def rows_of(model: Any, family: str, ids: torch.Tensor) -> list[dict[str, Any]]:
    """The rows of one model and batch."""

    def forward() -> None:
        with torch.no_grad():
            model(ids, use_cache=False)

    def backward() -> None:
        model(ids, use_cache=False).logits.float().log_softmax(-1)[..., 1].sum().backward()

    rows = []
    for name, step in (("forward", forward), ("forward and backward", backward)):
        ours, stock = least_ms(step)
        rows.append(
            {"case": name, "model": family, "dtype": str(model.dtype).removeprefix("torch.")}
            | {"batch": len(ids), "value": round(ours, 2), "unit": "ms", "peer": "stock PyTorch"}
            | {"peer_value": round(stock, 2), "ratio": round(ours / stock, 2)}
        )
        print(rows[-1], flush=True)
    return rows


def least_ms(step: Callable[[], None]) -> tuple[float, float]:
    """The least milliseconds of a step inside and outside, the two in turn."""
    times: dict[Callable[[], AbstractContextManager[None]], list[float]] = {}
    for _ in range(REPEATS + 1):
        for context in (invariant, nullcontext):
            with context():
                begin = time.perf_counter()
                step()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                times.setdefault(context, []).append(time.perf_counter() - begin)
    inside, outside = (min(seconds[1:]) * 1e3 for seconds in times.values())
    return inside, outside


if __name__ == "__main__":
    main()
