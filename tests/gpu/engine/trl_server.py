"""TRL's trainer on one GPU, a server on another, weights by NCCL: the bits of both, at each step.

python -m tests.gpu.engine.trl_server FILE [--steps 20] [--packages FOLDERS]

FOLDERS, joined by colons, hold trl and vllm, for the trainer's process alone, which is
`tests.server.clients.trl_nccl`; see there. The two GPUs are the first two that this process may
use. Appends to a results file, or to one of a folder, and prints the rows. Exits by 1 where a
log-probability differs, where the control does not, or where the server refused anything.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

from tests.gpu.lib.served import served
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.launch.host.interpreter import python_command
from tpdet.tools.measurement.results_file import append_record, run_record
from tpdet.tools.synthetic.make_model import make_model
from tpdet.tools.worlds.machine import machine

SHAPE = {"hidden": 512, "layers": 4, "heads": 8, "kv_heads": 4, "head_dim": 64}
VISIBLE = "CUDA_VISIBLE_DEVICES"
SEEN = b'{"files": '
"""How the trainer's line of results begins, among what libraries print."""


def train(url: str, model: Path, root: Path, options: argparse.Namespace, card: str) -> dict:
    """What the trainer's process saw. Raises RuntimeError where it failed."""
    paths = [path for path in (options.packages, os.environ.get("PYTHONPATH")) if path]
    environment = {
        "PYTHONPATH": os.pathsep.join(paths),
        VISIBLE: card,
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    program = python_command("-m", "tests.server.clients.trl_nccl", url, str(model), str(root))
    done = subprocess.run(
        [*program, str(options.steps)], env=os.environ | environment, stdout=subprocess.PIPE
    )
    if done.returncode:
        raise RuntimeError(f"the trainer ended with {done.returncode}")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith(SEEN)))


def refusals(url: str) -> float:
    """How many requests the server refused, or began and could not finish."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    counted = [line for line in lines if "rejected_total{" in line or 'outcome="failed"' in line]
    return sum(float(line.split()[-1]) for line in counted)


def rows_of(seen: dict) -> list[dict]:
    """The rows of a results file."""
    model = {"model": "qwen3, hidden 512, 4 layers", "dtype": "bfloat16"}
    steps, skipped, sent = seen["steps"], seen["skipped"], seen["sent"]
    tokens = sum(step["tokens"] for step in steps)
    what = "vllm_mode server, weights by NCCL: sampled log-probabilities that"
    facts = {name: seen[name] for name in ("communicator", "nccl", "statuses", "refused", "files")}
    facts |= {"steps": len(steps), "updates": len(seen["weights"]), "sha256": seen["sha256"]}
    facts |= {"weights": seen["weights"][-1]}
    facts["mean_rewards"] = [round(step["reward"], 3) for step in steps]
    rows = [
        {
            "case": f"{what} tpdet.nn computes again",
            "value": sum(step["recomputed"] for step in steps),
            "unit": f"of {tokens:,}",
            **facts,
        },
        {
            "case": f"{what} the stock model computes",
            "value": sum(step["trl"] for step in steps),
            "unit": f"of {tokens:,}",
        },
        {
            "case": "control: weights that were not sent",
            "value": skipped["recomputed"],
            "unit": f"of {skipped['tokens']}",
        },
        {
            "case": "the same weights, sent",
            "value": sent["recomputed"],
            "unit": f"of {sent['tokens']}",
        },
    ]
    return [model | row for row in rows]


def faults(seen: dict, steps: int) -> list[str]:
    """What is not as it should be."""
    tried = {
        "TRL is not 1.16.0": seen["versions"]["trl"] == "1.16.0",
        "steps are missing": len(seen["steps"]) == steps,
        "a step's bits differ": all(s["recomputed"] == s["tokens"] for s in seen["steps"]),
        "the control's bits do not differ": seen["skipped"]["recomputed"] < seen["sent"]["tokens"],
        "bits differ once the weights are sent": seen["sent"]["recomputed"]
        == seen["sent"]["tokens"],
        "the server refused requests": set(seen["statuses"]) == {"200"} and not seen["refused"],
        "an update is missing": len({*seen["weights"]}) == steps + 1,
        "a start has another digest": seen["weights"][-1] == seen["started"],
    }
    return [name for name, good in tried.items() if not good]


def main() -> None:
    """Serve, train, compare and record."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.engine.trl_server")
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--packages", default="", help="folders joined by colons")
    options = parser.parse_args()
    first, second, *_ = os.environ.get(VISIBLE, "0,1").split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", like="qwen3", dtype="bfloat16", vocab=1100, **SHAPE)
        flags = ["--logprobs-mode", "processed_logprobs", "--kv-pages", "256"]
        with served(model, folder, *flags, environment={VISIBLE: first}) as facts:
            seen = train(facts["admin_url"], model, folder, options, second)
            seen["refused"] = refusals(facts["url"])
        last = {"model": str(folder / "last"), "dtype": "bfloat16", "kv_pages": 16}
        config = EngineConfig.from_values(**last)
        seen["started"] = Engine(config, SoloWorld()).weights.digest
    rows = rows_of(seen)
    command = f"python -m tests.gpu.engine.trl_server FILE --steps {options.steps}"
    record = run_record("trl", machine("auto", 2), command, rows) | seen["versions"]
    append_record(options.file, "trl", record)
    print(json.dumps(rows, indent=1), json.dumps(seen["steps"]), sep="\n")
    if wrong := faults(seen, options.steps):
        sys.exit(f"wrong: {wrong}")


if __name__ == "__main__":
    main()
