"""One rank of the two pretended nodes that tests/comm/test_node_failures.py starts over gloo.

Runs the cases named by its further arguments in turn, each in a world of its own, and writes what
ended each of them to the JSON file that the first argument names. The last node is the odd one.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

from tpdet.comm import agreement
from tpdet.comm.world.distributed import DistributedWorld, open_store
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.engine.fault_points import FaultPoints
from tpdet.errors import CheckpointError, TpdetError
from tpdet.launch.life.faults import Fault
from tpdet.launch.ranks.environment import read_environment
from tpdet.requests.request import Request, SamplingParams
from tpdet.runner.start import loading

MODELS = Path(os.environ["MODELS"])
ODD = os.environ["GROUP_RANK"] == str(int(os.environ["GROUP_WORLD_SIZE"]) - 1)
LAST = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
FIRST = os.environ["RANK"] == "0"


def engine_of(secret=bytes(32), model="model", faults=None, timeout=20.0, start=60.0):
    """An engine over a new world of all ranks."""
    path = str(MODELS / model)
    config = EngineConfig.from_values(model=path, kv_pages=4, step_timeout=timeout, device="cpu")
    world = DistributedWorld(timeout=timeout, start_timeout=start)
    return Engine(config, world, secret=secret, faults=faults)


def run(engine):
    """Plan by plan until something ends it, or all is answered and the workers are let go."""
    if engine.world.rank > 0:
        engine.worker_loop()
        return
    parameters = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    engine.submit(Request(request_id="a", prompt_token_ids=(5, 7, 9), params=parameters))
    while engine.has_work:
        engine.step()
    engine.stop_workers()


def healthy():
    """Nothing is wrong: the control, without which the other cases would show nothing."""
    engine = engine_of()
    run(engine)
    engine.close()


def secret():
    """The odd node was given another run secret."""
    engine_of(secret=bytes([ODD]) * 32)


def package():
    """The odd node has another version of a package."""
    real = agreement.package_version
    if ODD:
        agreement.package_version = lambda name: "9.9" if name == "tokenizers" else real(name)
    try:
        engine_of()
    finally:
        agreement.package_version = real


def checkpoint():
    """The odd node has weights from another training, in a tensor that ranks share out."""
    engine_of(model="other" if ODD else "model")


def damaged():
    """The last rank alone cannot load its model."""
    real = loading.Loader.begin

    def begin(self, *given):
        raise CheckpointError("model.safetensors: tensor x cannot be read at /secret/path")

    if LAST:
        loading.Loader.begin = begin
    try:
        engine_of()
    finally:
        loading.Loader.begin = real


def diverges():
    """The last rank's page table is not the plan's at step 3."""
    last = int(os.environ["WORLD_SIZE"]) - 1
    rank = int(os.environ["RANK"])
    run(engine_of(faults=FaultPoints([Fault(last, 3, "diverge")], rank)))


def silent():
    """The last rank leaves the conversation without a word: it is as good as stopped."""
    engine = engine_of(timeout=1.5)
    if LAST:
        time.sleep(4.0)
        raise TpdetError("slept")
    run(engine)


def absent():
    """The last rank does not come."""
    if LAST:
        raise TpdetError("did not come")
    engine_of(start=1.0)


def no_leader():
    """Rank 0, which hosts the store, does not come. To be run alone: the store outlives a world."""
    if FIRST:
        raise TpdetError("did not come")
    engine_of(start=1.0)


def main() -> None:
    """Run the cases; what ended each, as it reaches `end_process` and the clients."""
    torch.set_num_threads(1)
    report = {}
    for name in sys.argv[2:]:
        began = time.monotonic()
        try:
            globals()[name]()
            found = {"message": "", "exit": 0, "code": "", "public": ""}
        except TpdetError as error:
            found = {"message": str(error), "exit": error.exit_code, "code": error.code}
            found |= {"public": error.public}
        report[name] = found | {"seconds": time.monotonic() - began}
    Path(sys.argv[1]).write_text(json.dumps(report))
    if sys.argv[2] != "no_leader":
        # Rank 0's process hosts the store: it stays until nobody asks about the last case any more.
        store, _ = open_store(read_environment(), (), 60.0)
        store.set(f"done/{os.environ['RANK']}", "")
        if FIRST:
            store.wait([f"done/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))])


if __name__ == "__main__":
    main()
