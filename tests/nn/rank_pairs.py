"""Log-probabilities of a server beside those of `tpdet.nn`, over every pair of sizes.

    python -m tests.nn.rank_pairs FILE TOKENS [FAMILY ...]
    torchrun --nproc-per-node 2 -m tests.nn.rank_pairs FILE TOKENS      # each rank on a GPU

Appends to FILE, a JSON list of runs, or to one of a folder. TOKENS are compared for each pair of
tensor-parallel sizes, of a dense model and one of experts unless families are named: 1, 2, 4 and 8
as threads of one process, or 1 and as many as there are processes. Each server samples tokens of
its own. The exit code is 1 where one of them differs, where they met too little (ValueError), or
where a control shows no difference.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.nn.controls import CONTROLS
from tests.nn.sampled_tokens import (
    TIMEOUT,
    SampledTokens,
    loader,
    mismatches,
    recomputed_bits,
    sample_tokens,
)
from tpdet.comm.device import open_world
from tpdet.comm.world.world import World
from tpdet.tools.measurement.results_file import append_run
from tpdet.tools.synthetic.make_model import make_model
from tpdet.tools.worlds.machine import machine

FAMILIES = ("qwen3", "qwen3_moe")
SIZES = (1, 2, 4, 8)
SHAPE = {"hidden": 128, "layers": 2, "kv_heads": 8, "head_dim": 16, "intermediate": 128}
GPU_SHAPE = {
    **{"hidden": 512, "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 64},
    **{"intermediate": 1024, "dtype": "bfloat16"},
}
_OF_WAVE = 32


def compare(
    model: Path,
    tokens: int,
    sizes: Sequence[int] = SIZES,
    of_wave: int = _OF_WAVE,
    processes: World | None = None,
) -> tuple[list[dict[str, Any]], SampledTokens]:
    """Each pair of sizes: tokens compared and mismatches, what they met; the last server's tokens.

    processes: as for `on_ranks`. Raises ValueError where tokens met too little.
    """
    rows = []
    count = -(-tokens // (2 * of_wave))
    for server in sizes:
        answers = sample_tokens(model, 1, count, None, of_wave, server, processes)
        sampled = sample_tokens(model, server, count, answers, of_wave, server, processes)
        sampled.check_met()
        for ranks in sizes:
            bits = recomputed_bits(loader(model), sampled, ranks, processes=processes)
            row = {"server_tp": server, "nn_tp": ranks, "tokens": sampled.tokens}
            rows.append(row | {"mismatches": mismatches(bits, sampled.bits)} | sampled.met)
            if processes is None or processes.rank == 0:
                print(json.dumps(rows[-1]), flush=True)
    return rows, sampled


def main(file: Path, tokens: int, families: Sequence[str]) -> None:
    """Compare a model of each family, and append what came to a results file."""
    world = open_world("auto", TIMEOUT)
    here = machine("auto", world.size)
    processes, sizes = (None, SIZES) if world.size == 1 else (world, (1, world.size))
    shape = SHAPE if here.gpu == "cpu" else GPU_SHAPE
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for family in families or FAMILIES:
            model = make_model(Path(folder) / family, like=family, vocab=1100, **shape)
            pairs, sampled = compare(model, tokens, sizes, processes=processes)
            of_model = {"model": family, "dtype": shape.get("dtype", "float32")}
            rows += [row_of(pair) | of_model for pair in pairs]
            for name, control in CONTROLS.items() if world.rank == 0 else ():
                different = control(model, sampled)
                print(f"{family}, {name}: {different} tokens differ", flush=True)
                row = {"case": f"control: {name}"} | of_model
                rows.append(row | {"value": different, "unit": "tokens differ"})
    world.close()
    if world.rank:
        return
    launch = "python" if processes is None else f"torchrun --nproc-per-node {world.size}"
    command = " ".join([launch, "-m tests.nn.rank_pairs FILE", str(tokens), *families])
    append_run(file, "log_prob", here, command, rows)
    print(f"{sum(row.get('floor', 0) for row in rows)} tokens compared")
    wrong = [row for row in rows if row["value"] < row.get("floor", 1)]
    if wrong:
        sys.exit(f"bits differ, or a control's do not: {wrong}")


def row_of(pair: dict[str, Any]) -> dict[str, Any]:
    """A pair as a row of a results file: how many of its tokens (the floor) are equal."""
    case = f"server TP {pair.pop('server_tp')}, tpdet.nn TP {pair.pop('nn_tp')}"
    tokens = pair.pop("tokens")
    equal = {"value": tokens - pair["mismatches"], "unit": "tokens equal", "floor": tokens}
    return {"case": case} | equal | pair


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
