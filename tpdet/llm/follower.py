"""`python -m tpdet.llm.follower`: the program of a rank that an `LLM` started (`followers.py`)."""

import os
import signal
import sys
import traceback

import msgspec

from tpdet.config import EngineConfig
from tpdet.errors import PeerLostError, TpdetError
from tpdet.launch.host.processes import die_with_parent
from tpdet.launch.ranks.environment import read_environment
from tpdet.llm.followers import END, FollowerStart
from tpdet.llm.model import open_ranks


def main() -> int:
    """Follow rank 0 until it says END, or standard input ends; an exit code of docs/server.md.

    What goes wrong once the ranks have met is reported to rank 0, and nothing is printed here.
    """
    leash = sys.stdin.buffer
    start = msgspec.json.decode(leash.readline(), type=FollowerStart)
    met = False
    try:
        die_with_parent(signal.SIGKILL, start.parent)
        config = EngineConfig.from_values(**start.settings)
        world = open_ranks(config, read_environment())
        met = True
        from tpdet.engine import Engine

        engine = Engine(config, world, secret=bytes.fromhex(start.secret))
        for line in leash:
            if line == END:
                break
            engine.worker_loop()
        engine.close()
    except PeerLostError as error:  # rank 0 knows, or has ended
        return error.exit_code
    except TpdetError as error:
        if not met:
            print(f"rank {read_environment().rank}: {error}", file=sys.stderr)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return TpdetError.exit_code
    return 0


if __name__ == "__main__":
    os._exit(main())  # at once: rank 0 waits for it
