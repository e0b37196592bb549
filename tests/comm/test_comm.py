"""Worlds: bits arrive as sent, and a lost peer is an error, never a hang."""

import json
import time
from dataclasses import replace

import pytest
import torch

from tests.comm.cases import CASES, special_values
from tests.lib import forked
from tests.lib.bits import assert_same_bits
from tests.lib.ports import free_port
from tests.lib.thread_world import run_threads
from tpdet.comm.world.distributed import DistributedWorld, open_store, refuse_multicast
from tpdet.comm.world.frames import GATHER_FRAME, pack_frame, unpack_frame
from tpdet.comm.world.world import MAX_MESSAGE_BYTES, SoloWorld
from tpdet.errors import IntegrityError, PeerLostError, UsageError
from tpdet.launch.ranks.environment import RankEnvironment

RANKS = 4


@pytest.fixture(scope="module")
def gloo(tmp_path_factory) -> list[dict | None]:
    """What each rank of one gloo world of 4 processes reported; None for the two that died."""
    folder = tmp_path_factory.mktemp("gloo")
    shared = {
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    files = [folder / f"{rank}.json" for rank in range(RANKS)]
    ranks = [
        forked.forked(
            "tests.comm.rank",
            files[rank],
            environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(RANKS)
    ]
    try:
        assert forked.exit_codes(ranks[:2]) == [0, 0]
    finally:
        forked.end(ranks)
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_a_gloo_world(gloo, case):
    for report in (gloo[0], gloo[1]):
        assert report["cases"][case] == "passed"


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_thread_world(case, size):
    run_threads(size, case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_solo_world(case):
    case(SoloWorld())


def test_the_bit_cases_would_notice_arithmetic():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sent = special_values(0, dtype)
        with pytest.raises(AssertionError):
            assert_same_bits(sent + 0.0, sent)


def test_a_closed_gloo_world_leaves_no_group(gloo):
    assert not gloo[0]["group left behind"]


def test_a_killed_gloo_rank_is_seen_at_once(gloo):
    for rank in (0, 1):
        seen = gloo[rank]["killed"]
        assert seen["seconds"] < 5.0
        assert f"rank {rank} of 3 lost a peer in gather_bytes" in seen["message"]
        assert "timeout 60 s" in seen["message"]


def test_a_stopped_gloo_rank_is_seen_after_the_timeout(gloo):
    for rank in (0, 1):
        seen = gloo[rank]["stopped"]
        assert 0.5 < seen["seconds"] < 10.0
        assert f"rank {rank} of 4 lost a peer in gather_bytes" in seen["message"]
        assert "timeout 1.5 s" in seen["message"]


def test_a_broken_gloo_world_stays_broken(gloo):
    assert gloo[0]["stopped"]["again"] == gloo[0]["stopped"]["message"]


def test_the_store_of_a_first_world_is_that_of_the_next():
    """Were it gone with its world, a quick rank would come to it just before, and lose it."""
    port = free_port()
    host = RankEnvironment(0, 2, 0, 2, launched=True, address="127.0.0.1", port=port)
    store, hosts = open_store(host, (), 5.0)
    store.set("from", "the first")
    del store
    quick, _ = open_store(replace(host, rank=1, local_rank=1), (), 5.0)
    again, _ = open_store(host, (), 5.0)
    again.set("from", "the next")
    assert hosts and quick.get("from") == b"the next"


def test_an_exception_in_one_thread_ends_the_others_with_peer_lost():
    seen = {}

    def function(world):
        world.barrier()
        if world.rank == 2:
            raise ValueError("rank 2 has had enough")
        try:
            world.broadcast_bytes(b"hello")
        except PeerLostError as error:
            seen[world.rank] = str(error)
            raise

    with pytest.raises(ValueError, match="had enough"):
        run_threads(4, function)
    assert sorted(seen) == [0, 1, 3]
    assert all("rank 2 ended with ValueError: rank 2 has had enough" in m for m in seen.values())


def test_a_silent_thread_is_lost_after_the_timeout():
    def function(world):
        if world.rank == 1:
            time.sleep(0.8)
            return
        world.set_timeout(0.2)
        world.barrier()

    with pytest.raises(PeerLostError, match=r"barrier.*timeout 0.2 s"):
        run_threads(2, function)


def test_a_thread_that_never_returns_is_named():
    def function(world):
        if world.rank == 1:
            time.sleep(2.0)

    with pytest.raises(PeerLostError, match=r"rank 1 of 2 did not come back within 0.3 s"):
        run_threads(2, function, timeout=0.3)


def test_threads_in_different_operations_are_named():
    def function(world):
        if world.rank == 0:
            world.broadcast_bytes(b"plan")
        else:
            world.all_gather(torch.zeros(3))

    with pytest.raises(PeerLostError, match="diverged"):
        run_threads(2, function)


def test_threads_with_different_shapes_are_named():
    with pytest.raises(PeerLostError, match=r"all_gather of \(2,\)"):
        run_threads(2, lambda world: world.all_gather(torch.zeros(2 + world.rank)))


def test_results_come_in_rank_order():
    assert run_threads(4, lambda world: world.rank * 10) == [0, 10, 20, 30]


@pytest.mark.parametrize(
    ("operation", "sequence", "complaint"),
    [("barrier", 7, "sent gather_bytes"), ("gather_bytes", 8, "number 7")],
)
def test_a_frame_of_another_operation_or_number_is_divergence(operation, sequence, complaint):
    frame = pack_frame("gather_bytes", 7, b"digest", GATHER_FRAME)
    assert unpack_frame(frame, "gather_bytes", 7, sender=3) == (6, b"digest")
    with pytest.raises(PeerLostError, match=f"rank 3 diverged.*{complaint}"):
        unpack_frame(frame, operation, sequence, sender=3)


def test_a_frame_with_garbage_or_a_huge_length_is_refused():
    with pytest.raises(PeerLostError, match="magic"):
        unpack_frame(torch.zeros(GATHER_FRAME, dtype=torch.uint8), "barrier", 1, sender=0)
    frame = pack_frame("gather_bytes", 1, b"", GATHER_FRAME)
    frame[12:20] = 255
    with pytest.raises(PeerLostError, match=f"over the cap of {MAX_MESSAGE_BYTES}"):
        unpack_frame(frame, "gather_bytes", 1, sender=0)


def test_rank_0_must_broadcast_something():
    with pytest.raises(IntegrityError, match="None"):
        SoloWorld().broadcast_bytes(None)


def test_nvlink_multicast_is_refused():
    refuse_multicast("0")
    with pytest.raises(UsageError, match="NCCL_NVLS_ENABLE=0"):
        refuse_multicast("1")


def test_a_distributed_world_wants_a_launcher():
    with pytest.raises(UsageError, match="torchrun"):
        DistributedWorld(environment=RankEnvironment())
