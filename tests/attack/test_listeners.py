"""What listens while a real server runs: of ours the API's port and nothing beyond loopback."""

import json
import os
import socket
import subprocess
import sys

import psutil
import pytest

from tests.lib.ports import free_port, is_loopback
from tests.lib.server.harness import eventually
from tests.lib.server.served import Served
from tpdet.launch.host.listeners import Listener, listeners
from tpdet.launch.life.stop import stop

pytestmark = pytest.mark.long


def whole_tree(pid):
    """The process and all it has started."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def held(processes):
    """(pid, Listener) of every socket of TCP and UDP that takes what comes to it."""
    return {(p.pid, found) for p in processes for found in listeners(p.pid)}


def test_every_listener_of_this_process_is_seen_and_told_apart():
    with (
        socket.create_server(("127.0.0.1", 0)) as local,
        socket.create_server(("::", 0), family=socket.AF_INET6) as six,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        datagrams.bind(("0.0.0.0", 0))
        wanted = [
            Listener("tcp", "127.0.0.1", local.getsockname()[1]),
            Listener("tcp", "::", six.getsockname()[1]),
            Listener("udp", "0.0.0.0", datagrams.getsockname()[1]),
        ]
        found = listeners(os.getpid())
        assert {*wanted} <= {*found}
        assert [is_loopback(w) for w in wanted] == [True, False, False]
        assert [w.everywhere for w in wanted] == [False, True, True]
    assert not {*wanted} & {*listeners(os.getpid())}
    assert is_loopback(Listener("tcp", "::ffff:127.0.0.1", 1))


def check_what_listens(served):
    """The HTTP process's port and, on loopback addresses, gloo's of each rank: no other."""
    tree = whole_tree(served.process.pid)
    assert not any("torch.distributed.run" in process.cmdline() for process in tree)
    found = held(tree)
    port = int(served.ready["url"].rsplit(":", 1)[1])
    api = {(pid, one) for pid, one in found if one.port == port}
    assert {pid for pid, _ in api} == {served.pid(0), served.http_pid()}  # bound and handed down
    assert all(is_loopback(one) and one.protocol == "tcp" for _, one in found)
    # With one rank there is nobody to talk to.
    talking = {*map(served.pid, range(served.tp))} if served.tp > 1 else set()
    assert {pid for pid, _ in found - api} == talking
    store = served.run / "store"
    assert store.stat().st_mode & 0o777 == 0o600 and served.run.stat().st_mode & 0o077 == 0


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_supervised_server_opens_its_port_and_otherwise_loopback_only(tiny_model, tmp_path, tp):
    """The server of two ranks in `server/end_to_end/test_faults.py` is looked at, too."""
    served = Served(tiny_model("qwen3", kv_heads=2), tmp_path, tp)
    try:
        check_what_listens(served)
        assert served.end() == 0
    finally:
        served.kill()


@pytest.mark.parametrize(
    "form", [["--standalone"], pytest.param(["--master-addr=127.0.0.1"], marks=pytest.mark.slow)]
)
def test_under_torchrun_its_agent_alone_listens_beyond_loopback_and_rank_0_says_so(
    tiny_model, tmp_path, form
):
    port = free_port()
    meeting = form if "--standalone" in form else [*form, f"--master-port={port}"]
    command = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node=2"]
    command += ["-m", "tpdet.serve", "--model", str(tiny_model("qwen3", kv_heads=2))]
    run, log, ready = tmp_path / "run", tmp_path / "log", tmp_path / "run" / "ready.json"
    with log.open("wb") as file:
        agent = subprocess.Popen(
            [*command, "--port", "0", "--run-dir", str(run), "--kv-pages", "96"],
            stderr=file,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    try:
        eventually(lambda: ready.exists() or agent.poll() is not None, 120)
        assert agent.poll() is None, log.read_text()
        beyond = {(pid, one) for pid, one in held(whole_tree(agent.pid)) if not is_loopback(one)}
        assert {pid for pid, _ in beyond} == {agent.pid}  # none of ours
        assert all(one.everywhere and one.protocol == "tcp" for _, one in beyond)
        ports = sorted({one.port for _, one in beyond})
        if "--standalone" in form:  # the agents' rendezvous, and the store where ranks meet
            environ = psutil.Process(json.loads(ready.read_text())["ranks"][0]["pid"]).environ()
            assert len(ports) == 2 and int(environ["MASTER_PORT"]) in ports
        else:
            assert ports == [port]
        told = ", ".join(map(str, ports))
        assert f"torchrun listens on every address (port {told})" in log.read_text()
        assert stop(run) == 0
        assert agent.wait(60) == 0 and not ready.exists()
    finally:
        agent.kill()
        agent.wait()
