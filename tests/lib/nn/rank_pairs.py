"""Log-probabilities of a server beside those of `tpdet.nn`, over every pair of sizes.

    python -m tests.lib.nn.rank_pairs FILE TOKENS      # appends to FILE, a JSON list of runs

TOKENS are compared for each pair of tensor-parallel sizes, of a dense model and one of experts.
Each server samples tokens of its own. The exit code is 1 where one of them differs, where they met
too little (ValueError), or where a control shows no difference.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lib.nn.controls import CONTROLS
from tests.lib.nn.sampled_tokens import (
    SampledTokens,
    loader,
    mismatches,
    recomputed_bits,
    sample_tokens,
)
from tpdet.tools.measurement.results_file import append_run
from tpdet.tools.synthetic.make_model import make_model
from tpdet.tools.worlds.machine import machine

SIZES = (1, 2, 4, 8)
SHAPE = {"hidden": 128, "layers": 2, "kv_heads": 8, "head_dim": 16, "intermediate": 128}
_OF_WAVE = 32


def compare(
    model: Path, tokens: int, sizes: Sequence[int] = SIZES, of_wave: int = _OF_WAVE
) -> tuple[list[dict[str, Any]], SampledTokens]:
    """Each pair of sizes: tokens compared and mismatches, what they met; the last server's tokens.

    Raises ValueError where tokens met too little.
    """
    rows = []
    count = -(-tokens // (2 * of_wave))
    for server in sizes:
        answers = sample_tokens(model, 1, count, None, of_wave, seed=server)
        sampled = sample_tokens(model, server, count, answers, of_wave, seed=server)
        sampled.check_met()
        for ranks in sizes:
            bits = recomputed_bits(loader(model), sampled, ranks)
            row = {"server_tp": server, "nn_tp": ranks, "tokens": sampled.tokens}
            rows.append(row | {"mismatches": mismatches(bits, sampled.bits)} | sampled.met)
            print(json.dumps(rows[-1]), flush=True)
    return rows, sampled


def main(file: Path, tokens: int) -> None:
    """Compare a dense model and one of experts, and append what came to a results file."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for family in ("qwen3", "qwen3_moe"):
            model = make_model(Path(folder) / family, like=family, vocab=1100, **SHAPE)
            pairs, sampled = compare(model, tokens)
            rows += [row_of(family, pair) for pair in pairs]
            for name, control in CONTROLS.items():
                different = control(model, sampled)
                print(f"{family}, {name}: {different} tokens differ", flush=True)
                row = {"case": f"control: {name}", "model": family, "dtype": "float32"}
                rows.append(row | {"value": different, "unit": "tokens differ"})
    command = f"python -m tests.lib.nn.rank_pairs FILE {tokens}"
    append_run(file, "log_prob", machine("cpu", 0), command, rows)
    print(f"{sum(row.get('floor', 0) for row in rows)} tokens compared")
    wrong = [row for row in rows if row["value"] < row.get("floor", 1)]
    if wrong:
        sys.exit(f"bits differ, or a control's do not: {wrong}")


def row_of(family: str, pair: dict[str, Any]) -> dict[str, Any]:
    """A pair as a row of a results file: how many of its tokens (the floor) are equal."""
    case = f"server TP {pair.pop('server_tp')}, tpdet.nn TP {pair.pop('nn_tp')}"
    tokens = pair.pop("tokens")
    equal = {"value": tokens - pair["mismatches"], "unit": "tokens equal", "floor": tokens}
    return {"case": case, "model": family, "dtype": "float32"} | equal | pair


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
