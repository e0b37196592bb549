"""Sealed messages, the run secret, the control channel: what passes, and what never does."""

import statistics
import time

import msgspec
import pytest
import zmq

from tpdet.control.plan import PLAN_VERSION, PlanRows, Row, StepPlan
from tpdet.control.seal import OVERHEAD_BYTES, Opener, Sealer, derive
from tpdet.errors import (
    IntegrityError,
    PeerLostError,
)
from tpdet.launch.life.run_secret import new_secret
from tpdet.server.leader.bridge import EngineSocket
from tpdet.server.wire import protocol

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


@pytest.mark.alone
def test_sealing_a_plan_of_256_rows_costs_little():
    """Bound far above what it takes (about 20 us), far below a step: CI machines are slow."""
    made = [Row(i, 0, 2**63 + i, 900, (7,), (1, 2, 3, 4), (5, 6, 7, 8), 1) for i in range(256)]
    rows = PlanRows.of(made)
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
