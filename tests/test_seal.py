"""Sealed messages, the run secret, the control channel: what passes, and what never does."""

import statistics
import time

import msgspec
import pytest
import zmq

from tests.engine_harness import ask, run
from tests.test_plan import PLAN
from tpdet.comm.threads import run_threads
from tpdet.comm.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.engine.control import ControlChannel
from tpdet.errors import (
    DisagreementError,
    IntegrityError,
    NotFoundError,
    NotPermittedError,
    PeerLostError,
    UsageError,
)
from tpdet.launch.run_directory import RunDirectory
from tpdet.launch.run_secret import SECRET_VARIABLE, given_secret, new_secret
from tpdet.plan import PLAN_VERSION, Row, StepPlan
from tpdet.seal import OVERHEAD_BYTES, Opener, Sealer, derive
from tpdet.server import protocol
from tpdet.server.bridge import EngineSocket

KEY = bytes(range(32))


def test_what_was_sealed_opens_in_its_order_once():
    sealer, opener = Sealer(KEY), Opener(KEY)
    for payload in (b"", b"plan", bytes(5000)):
        sealed = sealer.seal(payload)
        assert len(sealed) == len(payload) + OVERHEAD_BYTES
        assert opener.open(sealed) == payload


def test_any_flipped_bit_is_refused():
    sealed = Sealer(KEY).seal(b"a plan")
    for at in range(len(sealed)):
        for bit in (0, 7):
            damaged = bytearray(sealed)
            damaged[at] ^= 1 << bit
            with pytest.raises(IntegrityError, match="MAC"):
                Opener(KEY).open(bytes(damaged))


def test_any_truncation_or_extension_is_refused():
    sealed = Sealer(KEY).seal(b"a plan")
    for wrong in [*(sealed[:length] for length in range(len(sealed))), sealed + b"\0"]:
        with pytest.raises(IntegrityError, match="MAC"):
            Opener(KEY).open(wrong)


def test_a_message_of_another_key_or_direction_is_refused():
    with pytest.raises(IntegrityError, match="somebody else"):
        Opener(KEY).open(Sealer(bytes(32)).seal(b"x"))
    end = protocol.EngineEnd(KEY)
    with pytest.raises(IntegrityError, match="MAC"):
        end.decode(protocol.EngineEnd(KEY).encode(protocol.Stop()))  # sent back to its sender
    assert derive(KEY, "a") != derive(KEY, "b") != derive(KEY, "b", b"n")


def test_a_message_sent_again_left_out_or_swapped_is_refused_and_so_is_all_that_follows():
    sealer, opener = Sealer(KEY), Opener(KEY)
    first, second, third = (sealer.seal(text) for text in (b"1", b"2", b"3"))
    assert opener.open(first) == b"1"
    with pytest.raises(IntegrityError, match="number 0 where 1 was due"):
        opener.open(first)
    for late in (second, third):
        with pytest.raises(IntegrityError):
            opener.open(late)
    opener = Opener(KEY)
    with pytest.raises(IntegrityError, match="number 1 where 0"):
        opener.open(second)


# --- between the HTTP process and the engine ---------------------------------------------------


def test_both_ends_of_the_bridge_understand_each_other_and_no_third():
    engine, http = protocol.EngineEnd(KEY), protocol.HttpEnd(KEY)
    for message in (protocol.Hello(7), protocol.Abort("a", 1), protocol.Ping()):
        assert engine.decode(http.encode(message)) == message
    for message in (protocol.Accepted("g", 3), protocol.Stop()):
        assert http.decode(engine.encode(message)) == message
    with pytest.raises(IntegrityError, match="HTTP process is refused"):
        engine.decode(protocol.HttpEnd(bytes(32)).encode(protocol.Ping()))
    with pytest.raises(IntegrityError, match="engine process is refused"):
        http.decode(msgspec.msgpack.encode(protocol.Stop()))


def test_a_rightly_sealed_message_must_still_fit_the_schema():
    sealer = Sealer(derive(KEY, "tpdet http to engine"))
    with pytest.raises(IntegrityError, match="refused"):
        protocol.EngineEnd(KEY).decode(sealer.seal(msgspec.msgpack.encode({"type": "submit"})))


@pytest.mark.parametrize("right", [True, False])
def test_who_connects_to_the_socket_without_the_key_is_not_heard(tmp_path, right):
    engine = EngineSocket(str(tmp_path), KEY)
    context = zmq.Context()
    stranger = context.socket(zmq.PAIR)
    stranger.connect(engine.address)
    stranger.send(protocol.HttpEnd(KEY if right else bytes(32)).encode(protocol.Ping()))
    try:
        if right:
            assert engine.receive(10.0) == [protocol.Ping()]
        else:
            with pytest.raises(IntegrityError, match="somebody else"):
                engine.receive(10.0)
    finally:
        engine.close()
        context.destroy(linger=0)


def test_nobody_at_the_socket_is_a_lost_peer_not_a_mistake_of_ours(tmp_path):
    """What a killed HTTP process leaves behind, while rank 0 hands out a step."""
    engine = EngineSocket(str(tmp_path), KEY)
    try:
        with pytest.raises(PeerLostError, match="HTTP process") as lost:
            engine.send(protocol.Stop())
        assert lost.value.exit_code == 75
    finally:
        engine.close()


# --- the secret --------------------------------------------------------------------------------


def test_a_secret_is_given_by_file_or_variable_and_leaves_the_environment(tmp_path):
    file = tmp_path / "secret"
    file.write_text(KEY.hex() + "\n")
    file.chmod(0o600)
    assert given_secret(str(file), {}) == KEY
    environ = {SECRET_VARIABLE: KEY.hex().upper()}
    assert given_secret(None, environ) == KEY and environ == {}
    assert given_secret(None, {}) is None
    with pytest.raises(UsageError, match="use one"):
        given_secret(str(file), {SECRET_VARIABLE: KEY.hex()})


@pytest.mark.parametrize("text", ["", "ab" * 31, "ab" * 33, "zz" * 32, "ab" * 32 + "\nab"])
def test_what_is_no_secret_is_refused_without_showing_it(tmp_path, text):
    file = tmp_path / "secret"
    file.write_text(text)
    file.chmod(0o600)
    for path, environ in ((str(file), {}), (None, {SECRET_VARIABLE: text})):
        with pytest.raises(UsageError, match="64 hex digits") as refused:
            given_secret(path, environ)
        assert not text or text not in str(refused.value)


def test_a_secret_file_that_others_may_read_is_refused(tmp_path):
    file = tmp_path / "secret"
    with pytest.raises(NotFoundError):
        given_secret(str(file), {})
    file.write_text(KEY.hex())
    file.chmod(0o644)
    with pytest.raises(NotPermittedError, match="0644"):
        given_secret(str(file), {})


def test_a_run_directory_has_a_secret_of_its_own_for_each_start(tmp_path):
    first = RunDirectory.own(tmp_path, "one")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    secret = first.secret()
    assert RunDirectory.join(tmp_path, "one").secret() == secret and len(secret) == 32
    first.release()
    second = RunDirectory.own(tmp_path, "two")
    assert second.secret() != secret
    (tmp_path / "engine.sock").touch()
    second.clear_channels()
    assert not (tmp_path / "secret").exists() and not (tmp_path / "engine.sock").exists()


# --- between the ranks -------------------------------------------------------------------------


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


@pytest.mark.alone
def test_sealing_a_plan_of_256_rows_costs_little():
    """Bound far above what it takes (about 20 us), far below a step: CI machines are slow."""
    rows = tuple(Row(i, 0, 2**63 + i, 900, (7,), (1, 2, 3, 4), (5, 6, 7, 8), 1) for i in range(256))
    data = msgspec.msgpack.encode(StepPlan(PLAN_VERSION, 1, (), rows, bytes(32)))
    key = new_secret()
    sealer, opener = Sealer(key), Opener(key)
    times = []
    for _ in range(200):
        began = time.perf_counter()
        assert opener.open(sealer.seal(data)) == data
        times.append(time.perf_counter() - began)
    assert statistics.median(times) < 500e-6
    print(f"{len(data)} bytes: {statistics.median(times) * 1e6:.1f} us to seal and open")
