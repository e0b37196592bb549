"""Between the ranks: what the control channel carries under a run secret, and what never passes."""

import msgspec
import pytest

from tests.control.test_plan import PLAN
from tests.lib.engine_harness import ask, run
from tests.lib.thread_world import run_threads
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.control.seal import Sealer
from tpdet.engine import Engine
from tpdet.engine.control import ControlChannel
from tpdet.errors import (
    DisagreementError,
    IntegrityError,
)

KEY = bytes(range(32))


def channels(secrets, act, size=2):
    """`act(channel, world)` in every rank, each under its own of `secrets`."""
    return run_threads(
        size, lambda world: act(ControlChannel(world, secrets[world.rank]), world), timeout=30.0
    )


def carry(channel, world):
    """Three plans and some bytes from rank 0 to everybody."""
    plans = [
        channel.send_plan(plan) if world.rank == 0 else channel.receive_plan()
        for plan in (PLAN, PLAN, msgspec.structs.replace(PLAN, stop=True))
    ]
    return plans, channel.broadcast(b"more" if world.rank == 0 else None)


@pytest.mark.parametrize("secrets", [(KEY,) * 3, (None,) * 3])
def test_every_rank_reads_what_rank_0_says(secrets):
    results = channels(secrets, carry, size=3)
    assert results[0] == results[1] == results[2]
    assert results[0][0][2].stop and results[0][1] == b"more"


@pytest.mark.parametrize(
    ("secrets", "message"),
    [
        ((KEY, bytes(32)), "run secret: rank [01] on node node0 and rank .*--run-secret-file"),
        ((KEY, None), "rank 0 on node node0 was given one, rank 1 on node node0 was not"),
        ((None, KEY), "rank 1 on node node0 was given one, rank 0 on node node0 was not"),
    ],
)
def test_ranks_with_different_secrets_are_refused_with_78(secrets, message):
    with pytest.raises(DisagreementError, match=message) as refused:
        channels(secrets, carry)
    assert refused.value.exit_code == 78
    assert KEY.hex() not in str(refused.value)


class Tampering:
    """A world whose rank 1 hears what `change` makes of rank 0's messages."""

    def __init__(self, world, change):
        self._world, self._change, self._heard = world, change, []
        self.rank, self.size, self.node_names = world.rank, world.size, world.node_names

    def gather_bytes(self, data):
        return self._world.gather_bytes(data)

    def broadcast_bytes(self, data):
        found = self._world.broadcast_bytes(data)
        self._heard.append(found)
        return self._change(self._heard) if self.rank == 1 else found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda heard: heard[0], "number 0 where 1 was due: sent again"),
        (lambda heard: heard[-1][:-1] + b"\x01", "MAC is wrong"),
        (lambda heard: Sealer(bytes(32)).seal(b"stop"), "MAC is wrong"),
        (lambda heard: b"", "MAC is wrong"),
    ],
)
def test_a_replayed_or_forged_plan_is_refused_with_rank_step_and_remedy(change, reason):
    def act(world):
        begun = []
        tampered = Tampering(world, lambda heard: change(heard) if begun else heard[-1])
        channel = ControlChannel(tampered, KEY)
        for _ in range(2):
            if world.rank == 0:
                channel.send_plan(PLAN)
            else:
                channel.receive_plan()
            begun.append(True)

    with pytest.raises(
        IntegrityError, match=r"rank 1 on node node0 refused .* after step 12: .*isolate"
    ) as error:
        run_threads(2, act, timeout=30.0)
    assert reason in str(error.value) and error.value.exit_code == 75


def test_what_was_recorded_in_another_run_with_the_same_secret_is_refused():
    heard = []
    recorder = SoloWorld()
    send = recorder.broadcast_bytes
    recorder.broadcast_bytes = lambda data: heard.append(data) or send(data)
    ControlChannel(recorder, KEY).send_plan(PLAN)
    later = SoloWorld()
    later.broadcast_bytes = lambda data: heard[0]
    with pytest.raises(IntegrityError, match="MAC"):
        ControlChannel(later, KEY).receive_plan()


def test_a_secret_changes_no_answer(tiny_model):
    """The engine under a secret of the ranks' own, and under one that rank 0 hands out."""
    model = tiny_model("qwen3", kv_heads=2)
    alone = run(model, [ask("a", range(5))], look=False).answer("a")
    config = EngineConfig.from_values(model=str(model), kv_pages=8)

    def rank(world):
        engine = Engine(config, world, secret=KEY)
        if world.rank > 0:
            return engine.worker_loop()
        engine.submit(ask("a", range(5)))
        found = []
        while engine.has_work:
            found += engine.step()
        engine.stop_workers()
        return [(o.token_id, o.logprob, o.top, o.finish_reason, o.stop_token_id) for o in found]

    assert run_threads(2, rank, timeout=60.0)[0] == alone
