"""A node that differs, gives up, falls silent or never comes is named: on its side and the others'.

Real processes over gloo, on two pretended nodes "left" and "right"; two ranks of each when slow.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import httpx
import msgspec
import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.lib import forked
from tests.lib.ports import free_port
from tests.lib.server.harness import eventually
from tpdet.comm.world.roll_call import ExitReason, RollCall, rank_list
from tpdet.errors import IntegrityError, PeerLostError, UsageError
from tpdet.launch.ranks.environment import RankEnvironment, read_environment
from tpdet.launch.ranks.node_name import (
    NODE_VARIABLE,
    Node,
    check_places,
    expected_nodes,
    node_names,
    this_node,
)
from tpdet.server.leader.bridge import last_message

CASES = ("healthy", "secret", "package", "checkpoint", "damaged", "diverges", "silent", "absent")
SHARED_OUT = "model.layers.0.mlp.up_proj.weight"
NAMES = ("left", "right")


def reports(folder, model, ranks, cases, drop=()):
    """What each of 2 x `ranks` processes saw of the cases; `drop`: ranks that are not started."""
    shutil.copytree(model, folder / "model")
    other = shutil.copytree(model, folder / "other") / "model.safetensors"
    tensors = load_file(other)
    tensors[SHARED_OUT] = tensors[SHARED_OUT] * 1.5
    save_file(tensors, other)
    size = 2 * ranks
    shared = {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "MODELS": str(folder),
    }  # fmt: skip
    started = []
    try:
        for rank in [rank for rank in range(size) if rank not in drop]:
            node, local = divmod(rank, ranks)
            place = {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node)}
            place |= {NODE_VARIABLE: NAMES[node]}
            file = folder / f"{rank}.json"
            started.append(
                forked.forked("tests.comm.failing_node", file, *cases, environment=shared | place)
            )
        assert forked.exit_codes(started) == [0] * (size - len(drop))
    finally:
        forked.end(started)
    return [
        json.loads((folder / f"{rank}.json").read_text())
        for rank in range(size)
        if rank not in drop
    ]


def check(found, ranks):
    """What every rank has to say of every case."""
    last = 2 * ranks - 1
    odd, there = f"rank {ranks} on node right", f"rank {last} on node right"
    for rank, report in enumerate(found):
        told = {case: report[case]["message"] for case in report}
        codes = {case: report[case]["exit"] for case in report}
        assert codes["healthy"] == 0, told
        assert codes["secret"] == codes["package"] == codes["checkpoint"] == 78, told
        assert "run secret: " in told["secret"] and "--run-secret-file" in told["secret"]
        assert "on node left and" in told["secret"] or "on node right and" in told["secret"]
        assert "node left" in told["secret"] and "node right" in told["secret"]
        assert "package tokenizers: rank 0 on node left has '" in told["package"]
        assert f"{odd} has '9.9'" in told["package"]
        assert f"checkpoint tensor {SHARED_OUT}: rank 0 on node left has '" in told["checkpoint"]
        assert f", {odd} has '" in told["checkpoint"]
        # One rank's own refusal: its exit code and name are everybody's, its words not a client's.
        assert codes["damaged"] == 65, told
        assert "tensor x cannot be read" in told["damaged"]
        assert "secret" not in report["damaged"]["public"]
        assert codes["diverges"] == 75 and report["diverges"]["code"] == "integrity_error"
        wanted = f"step 3: the page table of {there} has digest "
        assert wanted in told["diverges"] and wanted in report["diverges"]["public"], told
        assert "that of rank 0 on node left has 0000000000000000" in report["diverges"]["public"]
        if rank != last:
            assert told["damaged"].startswith(f"{there} gave up: model.safetensors")
            assert report["damaged"]["public"] == f"{there} gave up"
            assert report["diverges"]["public"].startswith(f"{there} gave up: step 3")
            assert report["diverges"]["seconds"] < 20.0  # not by a timeout
            assert codes["silent"] == 75 and f": {there} does not answer" in told["silent"], told
            # A follower that waits for the first plan is still at the start.
            assert report["silent"]["public"].startswith(("step ", "the start: "))
            assert codes["absent"] == 75 and f"missing: rank {last};" in told["absent"], told
            assert " on node left" in told["absent"] and "--start-timeout" in told["absent"]


def test_two_nodes_of_one_rank(tiny_model, tmp_path):
    check(reports(tmp_path, tiny_model("qwen3", kv_heads=2), 1, CASES), 1)


@pytest.mark.slow
def test_two_nodes_of_two_ranks(tiny_model, tmp_path):
    check(reports(tmp_path, tiny_model("qwen3", kv_heads=2), 2, CASES), 2)


@pytest.mark.slow
def test_a_rank_0_that_never_comes_is_named_by_the_others(tiny_model, tmp_path):
    (report,) = reports(tmp_path, tiny_model("qwen3", kv_heads=2), 1, ("no_leader",), drop=(0,))
    found = report["no_leader"]
    assert found["exit"] == 75 and "where rank 0 has to listen" in found["message"]
    assert "nobody answers at 127.0.0.1:" in found["message"]
    assert "--start-timeout" in found["message"]


@pytest.mark.slow
def test_a_server_on_two_nodes_names_the_node_in_its_streams_and_on_both_sides(
    tiny_model, tmp_path
):
    """The page table of the right node is not the plan's: 75 on both, and clients are told."""
    secret = tmp_path / "secret"
    secret.write_text("5a" * 32)
    secret.chmod(0o600)
    common = {
        "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
        "TPDET_FAULTS": "rank=1,step=60,action=diverge",
    }  # fmt: skip
    flags = ["--model", str(tiny_model("qwen3", kv_heads=2)), "--served-model-name", "tiny"]
    flags += ["--port", "0", "--kv-pages", "16", "--device", "cpu", "--run-secret-file"]
    flags += [str(secret), "--allow-faults", "--canary-interval", "0"]
    ranks = []
    try:
        for rank, name in enumerate(NAMES):
            place = {"RANK": str(rank), "GROUP_RANK": str(rank), NODE_VARIABLE: name}
            command = [sys.executable, "-m", "tpdet.serve", *flags]
            with (tmp_path / f"{rank}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [*command, "--run-dir", str(tmp_path / name)],
                        env=os.environ | common | place,
                        stderr=log,
                    )
                )
        eventually((tmp_path / "left" / "ready.json").exists, 120)
        url = json.loads((tmp_path / "left" / "ready.json").read_text())["url"]
        body = {"model": "tiny", "prompt": [5, 7], "max_tokens": 200, "ignore_eos": True}
        with httpx.stream(
            "POST", url + "/v1/completions", json=body | {"stream": True}, timeout=60
        ) as answer:
            events = [line for line in answer.iter_lines() if line]
        assert [rank.wait(60) for rank in ranks] == [75, 75]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    wanted = "the page table of rank 1 on node right has digest"
    assert error["code"] == "integrity_error" and wanted in error["message"], error
    for at in (0, 1):
        last = json.loads((tmp_path / f"{at}.log").read_text().splitlines()[-1])
        assert last["exit"] == 75 and wanted in last["message"], last
        assert "that of rank 0 on node left has 0000000000000000" in last["message"]


# --- names -------------------------------------------------------------------------------------


def place(rank=2, launcher="torchrun", size=4, local_size=2):
    return RankEnvironment(rank, size, rank % local_size, local_size, True, launcher)


def test_a_node_is_called_as_its_launcher_calls_it():
    slurm = {"SLURMD_NODENAME": "gpu07", "SLURM_NODEID": "5"}
    assert this_node(place(launcher="Slurm"), slurm) == Node("gpu07", 5)
    assert this_node(place(), slurm | {"GROUP_RANK": "1"}) == Node("gpu07", 1)
    assert this_node(place(launcher="Open MPI"), {}).name == socket.gethostname()
    found = this_node(place(3), {NODE_VARIABLE: "a b/c\n"})
    assert (found.name, found.number) == ("a_b_c_", None)  # no launcher numbered it


def test_nodes_that_share_a_name_are_told_apart_by_their_number_or_their_machine():
    nodes = [Node("localhost", 0), Node("localhost", 0), Node("localhost", 1), Node("c", 2)]
    assert node_names(nodes) == ("localhost#0", "localhost#0", "localhost#1", "c")
    a, b, c = Node("localhost", None, "a"), Node("localhost", None, "b"), Node("c", None, "a")
    assert node_names([a, b, c, a, b]) == (
        "localhost#0",
        "localhost#1",
        "c",
        "localhost#0",
        "localhost#1",
    )
    assert node_names([a, c, a]) == ("localhost", "c", "localhost")


def test_processes_of_one_machine_are_on_one_node_whatever_their_ranks(tmp_path):
    here = this_node(place(0, "Open MPI", 4, 4), {})
    assert here == this_node(place(3, "Open MPI", 4, 4), {}) and here.machine
    if os.geteuid() == 0 and shutil.which("unshare"):
        module = "tpdet.launch.ranks.node_name"
        code = f"from {module} import *; print(this_node(RankEnvironment(), {{}}).machine)"
        apart = subprocess.run(
            ["unshare", "--net", sys.executable, "-c", code], capture_output=True, text=True
        )
        assert apart.returncode != 0 or apart.stdout.strip() not in ("", here.machine)


@pytest.mark.parametrize(
    ("names", "places", "message"),
    [
        ("aabb", [(0, 2), (0, 2), (0, 2), (1, 2)], "node a, where 2 of 4 ranks are: rank 0 says"),
        ("aabb", [(0, 2), (1, 2), (0, 1), (0, 1)], "node b, where 2 of 4 ranks are: rank 2 says"),
        ("aaab", [(0, 2), (1, 2), (0, 2), (1, 2)], "node a, where 3 of 4 ranks are: rank 0 says"),
        ("abcd", [(0, 1), (0, 1), (0, 1), (1, 2)], "node d, where 1 of 4 ranks are: rank 3 says"),
    ],
)
def test_local_ranks_that_are_no_permutation_are_refused_by_rank_and_node(names, places, message):
    with pytest.raises(UsageError, match=f"{message} local rank .*set TPDET_NODE on each"):
        check_places(names, places)


def test_any_permutation_of_local_ranks_on_any_ranks_is_taken():
    for order in permutations(range(4)):
        check_places("aaaa", [(local, 4) for local in order])
        check_places([f"node {local // 2}" for local in order], [(local % 2, 2) for local in order])
    check_places("abbab", [(1, 2), (2, 3), (0, 3), (0, 2), (1, 3)])


def test_ranks_that_contradict_each_other_are_refused_by_all_who_met():
    store = dist.HashStore()

    def arrive(rank):
        with pytest.raises(UsageError, match="rank 0 says local rank 1 of 2, rank 1 says local "):
            RollCall(store, rank, 2, rank == 0).arrive(Node("n", 0), (), 60.0, (1, 2))
        return rank

    with ThreadPoolExecutor(2) as threads:
        began = time.monotonic()
        assert list(threads.map(arrive, range(2))) == [0, 1]
        assert time.monotonic() - began < 30  # the host waited for the other, not for its time


def test_slurm_tells_where_a_missing_rank_should_have_been():
    environ = {
        "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "5", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n[1-3]",
    }  # fmt: skip
    found = expected_nodes(read_environment(environ), environ)
    assert found == ("n1", "n1", "n2", "n2", "n3")
    assert expected_nodes(place(), {}) == ()
    in_turn = environ | {"SLURM_DISTRIBUTION": "cyclic:block"}
    assert expected_nodes(read_environment(environ), in_turn) == ("n1", "n2", "n3", "n1", "n2")
    planes = environ | {"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "2"}
    assert expected_nodes(read_environment(environ), planes) == found
    last = {"SLURM_PROCID": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
    assert expected_nodes(read_environment(environ | last), environ | last) == found
    # This rank knows that it is elsewhere: Slurm deals in a way that is not known here.
    assert expected_nodes(read_environment(environ | last), in_turn | last) == ()
    wrong = environ | {"SLURM_STEP_NODELIST": "n[1"}
    assert expected_nodes(read_environment(environ), wrong) == ()
    assert (
        rank_list([1, 2, 3], dict(enumerate(found)))
        == "rank 1 on node n1 and ranks 2, 3 on node n2"
    )


# --- the roll call -----------------------------------------------------------------------------


def test_a_missing_rank_is_named_with_the_node_that_slurm_gave_it():
    call = RollCall(dist.HashStore(), 0, 3, False)
    with pytest.raises(PeerLostError) as error:
        call.arrive(Node("n1", 0), ("n1", "n2", "n3"), 0.1)
    assert "missing: rank 1 on node n2 and rank 2 on node n3; arrived: rank 0 on node n1" in str(
        error.value
    )


def test_an_exit_reason_is_found_at_once_and_silence_after_its_time():
    store = dist.HashStore()
    calls = [RollCall(store, rank, 3, False) for rank in range(3)]
    calls[2].report(ExitReason(True, 65, "bad_checkpoint", "public", "reason"))
    began = time.monotonic()
    heard = calls[0].report(ExitReason(False), 60.0)
    assert heard.reasons[2].exit_code == 65 and time.monotonic() - began < 30.0
    quiet = [RollCall(dist.HashStore(), rank, 2, False) for rank in range(2)]
    began = time.monotonic()
    assert quiet[0].report(ExitReason(False), 0.3).reasons == {}
    assert 0.25 < time.monotonic() - began < 30.0


def test_a_store_that_hangs_or_is_gone_holds_nobody_up():
    class Hangs(dist.HashStore):
        def set(self, key, value):
            time.sleep(5.0)

    class Gone(dist.HashStore):
        def set(self, key, value):
            raise dist.DistNetworkError("gone")

    for store in (Hangs(), Gone()):
        began = time.monotonic()
        assert not RollCall(store, 1, 2, False).report(ExitReason(False), 0.2).store_answers
        assert time.monotonic() - began < 4.5


def test_a_forged_exit_reason_ends_nothing_but_itself():
    store = dist.HashStore()
    store.set("exit/1", msgspec.json.encode({"not": "a reason"}).decode())
    assert not RollCall(store, 0, 2, False).report(ExitReason(False), 0.2).reasons


# --- clients -----------------------------------------------------------------------------------


def test_streams_are_told_the_node_and_nothing_that_is_not_public():
    lost = PeerLostError("rank 1 at 10.0.0.7 is gone").explained(
        "step 7: rank 1 on node right is gone"
    )
    assert last_message(lost).message.endswith("stopped: step 7: rank 1 on node right is gone")
    damage = IntegrityError.in_public("step 7: page table of rank 1 on node right")
    found = last_message(damage)
    assert found.code == "integrity_error" and found.message.endswith("on node right")
    assert last_message(PeerLostError("at /secret/path")).message == "the engine has stopped"
