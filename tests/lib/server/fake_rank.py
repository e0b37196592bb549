"""`tpdet.serve` as rank 0 alone, on a FakeEngine; TPDET_TEST holds its numbers as JSON."""

import json
import os
import sys
import time

OPTIONS = json.loads(os.environ.get("TPDET_TEST", "{}"))
if OPTIONS.get("limits"):
    # A fork has imported the modules that take them as defaults.
    for name in [name for name in sys.modules if name.startswith(("tpdet", "tests.lib.server"))]:
        del sys.modules[name]
from tpdet.requests.body import limits  # noqa: E402

for name, value in OPTIONS.get("limits", {}).items():
    setattr(limits, name, value)

from tests.lib.server.fake_engine import FakeEngine  # noqa: E402
from tpdet import serve  # noqa: E402


def build(settings, environment) -> FakeEngine:
    time.sleep(OPTIONS.get("slow_start", 0.0))
    found = FakeEngine(
        vocab_size=OPTIONS.get("vocab_size", 512),
        eos=OPTIONS.get("eos", 258),
        max_model_len=settings.engine.max_model_len or 256,
        max_queue=settings.engine.max_queue,
        seats=settings.engine.max_num_seqs,
    )
    found.config.seed_policy = settings.engine.seed_policy
    found.damaged_after = OPTIONS.get("damaged_after", 0)
    found.drift_after = OPTIONS.get("drift_after", 0)
    return found


if __name__ == "__main__":
    sys.exit(serve.main(build=build))
