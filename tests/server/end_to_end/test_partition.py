"""Two hosts and what is between them: partitions short and long, a lost host, and who is left.

In the quick tests a rank that says nothing is a stopped one (`test_end_to_end.py`), a server on two
nodes is a Slurm job's (`test_slurm.py`), one under torchrun that of `attack/test_listeners.py`.
"""

import json
import os
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.lib.server.harness import eventually
from tests.server.end_to_end.network_hosts import NetworkHosts, NoNamespacesError
from tpdet.launch.start.torchrun import C10D, STATIC, cluster_command

pytestmark = pytest.mark.long
PORT = 29400
MARGIN = 4.0
"""Seconds past the step timeout in which both sides have to decide."""
STREAMS = 3
TOKENS = 64
AGENTS_SECONDS = 60.0
"""torchrun's agents load torch; on a busy machine they take long to see that a rank has ended."""


@pytest.fixture
def network(tmp_path):
    try:
        found = NetworkHosts(tmp_path)
    except NoNamespacesError as error:
        pytest.skip(f"no network of two hosts here: {error}")
    yield found
    found.close()


class Stream:
    """One answer as it arrives: its tokens, the bits of their logprobs, what ended it."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, str]] = []
        self.end: object = None

    def read(self, url: str, index: int, count: int) -> None:
        """Ask for `count` tokens and read them, in the thread that calls."""
        question = {
            "model": "tiny", "prompt": [5, index], "max_tokens": count, "stream": True,
            "temperature": 0.9 * index, "seed": 7, "logprobs": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        client = httpx.Client(trust_env=False, timeout=120)
        try:
            with client, client.stream("POST", url + "/v1/completions", json=question) as answer:
                for line in filter(None, answer.iter_lines()):
                    self._take(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.end = error

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.end = "done"
            return
        found = json.loads(data)
        if "error" in found:
            self.end = found["error"]["code"]
        for choice in found.get("choices", ()):
            self.tokens += zip(choice["token_ids"], choice["logprob_bits"], strict=True)


class TwoHosts:
    """A server of two ranks, one a host, started by torchrun on each; ready."""

    def __init__(self, network, model, folder, step_timeout, one_command=False):
        """one_command: alike on both hosts, so that the agents meet by torch's c10d rendezvous."""
        self.network, self.timeout = network, step_timeout
        self.runs = [folder / "run0", folder / "run1"]
        self.logs = [folder / "log0", folder / "log1"]
        secret = folder / "secret"
        secret.write_text("5a" * 32)
        secret.chmod(0o600)
        flags = ["--model", str(model), "--served-model-name", "tiny", "--port", "0"]
        flags += ["--kv-pages", "96", "--device", "cpu", "--run-secret-file", str(secret)]
        flags += ["--step-timeout", str(step_timeout), "--canary-interval", "0"]
        places = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        self.agents = []
        for host in (0, 1):
            mine = [*flags, "--run-dir", str(self.runs[host])]
            node = None if one_command else host
            how = C10D if one_command else STATIC
            command = cluster_command(2, 1, f"{network.addresses[0]}:{PORT}", mine, node, how)
            command = network.command(host, command)
            with self.logs[host].open("wb") as log:
                settings = {"env": os.environ | places, "stdout": log, "stderr": log}
                self.agents.append(subprocess.Popen(command, **settings))
        deadline = time.monotonic() + 90
        while not (self.runs[0] / "ready.json").exists():
            assert all(agent.poll() is None for agent in self.agents), self.told()
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.05)
        self.url = json.loads((self.runs[0] / "ready.json").read_text())["url"]
        self.clients = network.clients(0, STREAMS + 1)

    def told(self) -> str:
        """What both hosts logged."""
        return "\n".join(log.read_text() for log in self.logs)

    def ask(self, count):
        """Streams of `count` tokens each, all under way; and the futures of their ends."""
        streams = [Stream() for _ in range(STREAMS)]
        reads = [
            self.clients.submit(stream.read, self.url, index, count)
            for index, stream in enumerate(streams)
        ]
        begun = lambda: all(len(stream.tokens) > 3 for stream in streams)
        eventually(lambda: begun() or any(read.done() for read in reads), 40)
        assert begun(), [read.exception() or read for read in reads if read.done()]
        return streams, reads

    def health(self):
        """The status of /health on the host that serves; None where nobody listens."""

        def get():
            try:
                return httpx.get(self.url + "/health", trust_env=False, timeout=2).status_code
            except httpx.HTTPError:
                return None

        return self.clients.submit(get).result()

    def decided(self, hosts=(0, 1)):
        """Each host's exit code, and when (time.time()) it was decided."""
        paths = [self.runs[host] / "exit.json" for host in hosts]
        return [(json.loads(path.read_text())["exit"], path.stat().st_mtime) for path in paths]

    def wait_lost(self, began, hosts=(0, 1)):
        """All ranks of `hosts` decide for 75, in time, and say so."""
        ends = lambda: all((self.runs[host] / "exit.json").exists() for host in hosts)
        eventually(ends, self.timeout + MARGIN + 5)
        for code, when in self.decided(hosts):
            assert code == 75, self.told()
            assert when - began < self.timeout + MARGIN, self.told()
        for host in hosts:  # rank 0 has said its last words to clients by then
            eventually(lambda host=host: self.last_lines(host) == [75], 15)

    def last_lines(self, host):
        """The exit codes in the fatal lines of a host's ranks."""
        lines = self.logs[host].read_text().splitlines()
        return [json.loads(line)["exit"] for line in lines if line.startswith('{"event": "fatal"')]

    def wait_nobody(self, hosts=(0, 1)):
        """torchrun returns on `hosts`, with its 1, and no process is left; nobody serves."""
        for host in hosts:
            assert self.agents[host].wait(AGENTS_SECONDS) == 1, self.told()
            assert not self.network.processes(host)
        self.network.heal()
        assert self.health() is None


def ends(streams, reads):
    """What ended each stream."""
    for read in reads:
        read.result(150)  # over every step timeout here
    return [stream.end for stream in streams]


@pytest.mark.slow
@pytest.mark.parametrize(("step_timeout", "seconds"), [(6.0, 2.0), (60.0, 5.0)])
def test_a_short_partition_stalls_and_a_long_one_ends_both_sides(
    network, cluster_model, tmp_path, step_timeout, seconds
):
    server = TwoHosts(network, cluster_model, tmp_path, step_timeout)
    streams, reads = server.ask(TOKENS)
    assert ends(streams, reads) == ["done"] * STREAMS
    undisturbed = [stream.tokens for stream in streams]
    assert [len(tokens) for tokens in undisturbed] == [TOKENS] * STREAMS

    streams, reads = server.ask(TOKENS)
    network.cut()
    time.sleep(0.5)
    counts = [len(stream.tokens) for stream in streams]
    time.sleep(seconds - 0.5)
    assert [len(stream.tokens) for stream in streams] == counts  # a stall
    assert max(counts) < TOKENS and server.health() == 200  # it may come back
    network.heal()
    assert ends(streams, reads) == ["done"] * STREAMS, server.told()
    assert [stream.tokens for stream in streams] == undisturbed

    streams, reads = server.ask(2000)
    began = time.time()
    network.cut()
    assert ends(streams, reads) == ["engine_dead"] * STREAMS
    assert server.health() != 200
    server.wait_lost(began)
    assert min(when for _, when in server.decided()) - began > step_timeout - 2
    server.wait_nobody()


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("silent", [True, False])
def test_a_lost_host_ends_the_other(network, cluster_model, tmp_path, lost, silent):
    """Without power (no packet tells of it), or only all its processes killed (resets do)."""
    server = TwoHosts(network, cluster_model, tmp_path, 6.0)
    streams, reads = server.ask(2000)
    began = time.time()
    if silent:
        network.cut()
    network.kill(lost)
    other = 1 - lost
    server.wait_lost(began, (other,))
    assert silent or server.decided((other,))[0][1] - began < 3  # it need not wait
    found = ends(streams, reads)
    assert all(isinstance(end, httpx.HTTPError) or end == "engine_dead" for end in found)
    server.wait_nobody((other,))


@pytest.mark.slow
def test_ranks_end_in_time_under_agents_that_hang(network, cluster_model, tmp_path):
    """torch's c10d rendezvous keeps the agent that is cut off waiting; no rank waits with it."""
    server = TwoHosts(network, cluster_model, tmp_path, 6.0, one_command=True)
    streams, reads = server.ask(2000)
    began = time.time()
    network.cut()
    assert ends(streams, reads) == ["engine_dead"] * STREAMS
    server.wait_lost(began)
    assert server.agents[0].wait(AGENTS_SECONDS) == 1 and not network.processes(0)
    eventually(lambda: len(network.processes(1)) == 1)
    assert b"torch.distributed.run" in Path(f"/proc/{server.agents[1].pid}/cmdline").read_bytes()


def test_no_namespaces_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoNamespacesError, match="need root"):
        NetworkHosts(tmp_path)
