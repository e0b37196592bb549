"""`python -m tpdet.tools.diff.rank FOLDER`: one rank of a trace, which it leaves in the folder."""

import sys
from pathlib import Path
from typing import Any

import msgspec

from tpdet.comm.device import open_world
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.tools.diff.operations import TracedOperation, noted
from tpdet.tools.worlds.worlds import run_rank

ASKED = "asked.json"


class AskedTrace(msgspec.Struct, frozen=True):
    """The engine's settings, and the ids behind which the logits are computed."""

    settings: dict[str, Any]
    token_ids: tuple[int, ...]


class RankTrace(msgspec.Struct, frozen=True):
    """What a rank computed, in order, under which contract and weights."""

    contract: str
    weights: str
    operations: list[TracedOperation]


def main(arguments: list[str]) -> int:
    """Compute, and write this rank's report. Raises as `Engine`."""
    folder = Path(arguments[0])
    asked = msgspec.json.decode((folder / ASKED).read_bytes(), type=AskedTrace)
    config = EngineConfig.from_values(**asked.settings)
    world = open_world(config.device, config.step_timeout, transport=config.transport)
    engine = Engine(config, world)
    runner = engine.runner
    operations = noted(engine, asked.token_ids)
    report = RankTrace(runner.contracts.strict, runner.model_digest, operations)
    (folder / f"rank{world.rank}.json").write_bytes(msgspec.json.encode(report))
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(run_rank(main))
