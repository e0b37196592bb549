"""Loading a checkpoint's files is bounded, and what the bounds end is a bad checkpoint."""

import resource
import signal
import subprocess
import sys

import pytest

from tpdet.errors import CheckpointError, PeerLostError
from tpdet.server.leader import bridge
from tpdet.server.wire import load_bounds
from tpdet.server.wire.load_bounds import bounded_load

pytestmark = pytest.mark.alone
KINDS = (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_CORE)
ENDLESS = """
from tpdet.server.wire import load_bounds
load_bounds.CPU_SECONDS = 0
with load_bounds.bounded_load():
    while True:
        pass
"""


def test_the_bounds_hold_while_it_loads_and_no_longer():
    before = [resource.getrlimit(kind) for kind in KINDS]
    with pytest.raises(MemoryError), bounded_load():
        bytearray(2 * load_bounds.MEMORY_BYTES)
    assert [resource.getrlimit(kind) for kind in KINDS] == before


def test_a_load_that_does_not_end_is_ended_and_is_the_checkpoints_fault():
    code = subprocess.run([sys.executable, "-c", ENDLESS], timeout=60).returncode
    assert code == -signal.SIGXCPU and code in load_bounds.ENDINGS
    error = bridge.start_failure(code)
    assert isinstance(error, CheckpointError) and error.exit_code == 65 and "SIGXCPU" in str(error)
    assert isinstance(bridge.start_failure(-signal.SIGKILL), PeerLostError)
