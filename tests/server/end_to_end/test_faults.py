"""What goes wrong inside a running server: each fault ends what it must, and changes no bit.

One server of two ranks meets several fault points in turn; the full matrix of lost processes under
32 streams is slow.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import openai
import psutil
import pytest

from tests.attack.test_listeners import check_what_listens
from tests.lib.ports import free_port
from tests.lib.server.harness import eventually
from tests.lib.server.served import STEP_TIMEOUT, Served, streams
from tpdet.errors import UsageError
from tpdet.launch.life.faults import ACTIONS, FAULTS_VARIABLE, Fault, read_faults

pytestmark = pytest.mark.long


def read(text, allowed=True):
    return read_faults(allowed, {FAULTS_VARIABLE: text})


def answer(served, index=1):
    """The bits of the beginning of the answer that the stream of this index gets."""
    found = served.client.completions.create(
        model="tiny",
        prompt=[5, index],
        temperature=0,
        max_tokens=12,
        logprobs=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    return found.choices[0].token_ids, found.choices[0].logprob_bits


# --- the schema --------------------------------------------------------------------------------


def test_faults_are_read():
    assert read("rank=1,step=20,action=kill") == (Fault(1, 20, "kill"),)
    several = read(";".join(f"rank=0,step=3,action={action}" for action in ACTIONS))
    assert [fault.action for fault in several] == list(ACTIONS)
    assert read_faults(True, {}) == read_faults(False, {}) == ()


@pytest.mark.parametrize(
    "text",
    [
        "", ";", "kill", "rank=1,step=20", "rank=1,step=20,action=kill;",
        "step=1,rank=1,action=kill", "rank=1,step=20,action=kill,x=1",
        "rank=-1,step=20,action=kill", "rank=1,step=2e1,action=kill",
        " rank=1,step=20,action=kill", "rank=1,step=20,action=kill\n", "rank=1,step=20,action=burn",
        "rank=1,step=20,action=KILL", "rank=1,step=²,action=kill", "rank=1,step=5,action=nan-row",
        ";".join(["rank=1,step=20,action=kill"] * 17),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_schema_is_refused(text):
    with pytest.raises(UsageError, match=FAULTS_VARIABLE):
        read(text)


def test_faults_are_an_error_where_they_are_not_allowed(tiny_model, monkeypatch):
    with pytest.raises(UsageError, match="--allow-faults"):
        read("rank=1,step=20,action=kill", allowed=False)
    with pytest.raises(UsageError, match="unset it"):
        read("", allowed=False)
    from tpdet import LLM
    from tpdet.server.commands.supervised import serve_command

    monkeypatch.setenv(FAULTS_VARIABLE, "rank=0,step=1,action=kill")
    with pytest.raises(UsageError, match="--allow-faults"):
        LLM(str(tiny_model("qwen3", kv_heads=2)))
    with pytest.raises(UsageError, match="--allow-faults"):
        serve_command(["model"])


# --- one server, several faults ----------------------------------------------------------------


def test_faults_in_turn_end_what_they_must_and_nothing_else(tiny_model, tmp_path):
    """NaN ends one row; a full disk and a stalled log nobody; a diverging rank the server."""
    faults = (
        "rank=0,step=50,action=disk-full;rank=1,step=50,action=slow-log;"
        "rank=0,step=100,action=nan-row;rank=1,step=170,action=diverge"
    )
    served = Served(
        tiny_model("qwen3", kv_heads=2, layers=1),
        tmp_path,
        2,
        "--allow-faults",
        "--canary-interval",
        "0",
        environment={FAULTS_VARIABLE: faults},
        fresh=True,
    )
    try:
        check_what_listens(served)
        secret = (served.run / "secret").read_text().strip()
        assert (served.run / "secret").stat().st_mode & 0o777 == 0o600
        assert (served.run / "engine.sock").stat().st_mode & 0o777 == 0o600
        for process in [psutil.Process(served.process.pid), *served.everyone]:
            assert secret not in repr((process.cmdline(), process.environ()))
        expected = [answer(served, index)[0] for index in (0, 1)]
        threads, outcomes, ids = streams(served, 2)
        for thread in threads:
            thread.join(60)
        spoiled = [i for i in (0, 1) if "numerical_error" in repr(vars(outcomes[i]))]
        assert len(spoiled) == 1, outcomes
        other = 1 - spoiled[0]
        assert isinstance(outcomes[other], openai.APIError), outcomes
        assert len(ids[other]) > len(ids[spoiled[0]]) + 50  # it went on alone
        assert [found[:12] for found in ids] == expected
        assert served.end(None, wait=STEP_TIMEOUT + 30) == 75, served.log.read_text()
        assert secret not in served.log.read_text()
    finally:
        served.kill()


# --- the matrix of lost processes --------------------------------------------------------------

CASES = [
    (who, number)
    for who in ("rank 0", "rank 1", "http", "supervisor")
    for number in ("KILL", "STOP", "SEGV")
    if (who, number) != ("supervisor", "STOP")  # it may be stopped: see below
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """One run directory for all cases, and the bits that every restart must give again."""
    return {"folder": tmp_path_factory.mktemp("matrix"), "bits": None}


def pid_of(served, who):
    if who.startswith("rank"):
        return served.pid(int(who.split()[1]))
    return served.http_pid() if who == "http" else served.process.pid


@pytest.mark.slow
@pytest.mark.parametrize(("who", "number"), CASES)
def test_a_lost_process_ends_32_streams_and_a_restart_gives_the_same_bits(
    tiny_model, place, who, number
):
    draw = random.Random(f"{who} {number}")
    rank = who.removeprefix("rank ")
    fault = f"rank={rank},step={draw.randrange(60, 160)},action={number.lower()}"
    environment = {FAULTS_VARIABLE: fault} if who.startswith("rank") else {}
    served = Served(
        tiny_model("qwen3", kv_heads=2),
        place["folder"],
        2,
        "--allow-faults",
        "--canary-interval",
        "0",
        environment=environment,
    )
    try:
        bits = answer(served)
        place["bits"] = place["bits"] or bits
        assert bits == place["bits"]
        threads, outcomes, _ = streams(served, 32)
        begin = time.monotonic()
        if not environment:
            time.sleep(draw.random() * 2)
            os.kill(pid_of(served, who), getattr(signal, f"SIG{number}"))
        code = served.end(None, wait=STEP_TIMEOUT + 40)
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        assert all(isinstance(outcome, Exception) for outcome in outcomes), outcomes
        assert time.monotonic() - begin < STEP_TIMEOUT + 40
        killed = -getattr(signal, f"SIG{number}")
        assert code == (killed if who == "supervisor" else 75), served.log.read_text()
    finally:
        served.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_rank_that_hangs_ends_every_stream_and_the_server(tiny_model, tmp_path, tp, rank):
    served = Served(
        tiny_model("qwen3", kv_heads=2),
        tmp_path,
        tp,
        "--allow-faults",
        "--canary-interval",
        "0",
        environment={FAULTS_VARIABLE: f"rank={rank},step=80,action=hang"},
    )
    try:
        threads, outcomes, _ = streams(served, 4)
        assert served.end(None, wait=STEP_TIMEOUT + 60) == 75, served.log.read_text()
        for thread in threads:
            thread.join(20)
        assert all(isinstance(outcome, Exception) for outcome in outcomes), outcomes
    finally:
        served.kill()


@pytest.mark.slow
def test_a_stopped_supervisor_is_nothing_that_anybody_waits_for(tiny_model, tmp_path):
    """It holds nothing that a step needs: answers go on, and once continued it drains."""
    served = Served(tiny_model("qwen3", kv_heads=2), tmp_path, 2, "--canary-interval", "0")
    try:
        bits = answer(served)
        served.process.send_signal(signal.SIGSTOP)
        time.sleep(STEP_TIMEOUT + 2)
        assert answer(served) == bits
        served.process.send_signal(signal.SIGCONT)
        assert served.end() == 0
    finally:
        served.kill()


@pytest.mark.slow
def test_a_full_disk_ends_a_drained_server_with_0(tiny_model, tmp_path):
    """exit.json cannot be written; the supervisor goes by how the ranks ended."""
    served = Served(
        tiny_model("qwen3", kv_heads=2),
        tmp_path,
        1,
        "--allow-faults",
        "--canary-interval",
        "0",
        environment={FAULTS_VARIABLE: "rank=0,step=60,action=disk-full"},
    )
    try:
        threads, outcomes, _ = streams(served, 1, max_tokens=100)
        threads[0].join(60)
        assert outcomes == ["completed"]
        assert served.end() == 0, served.log.read_text()
        assert not (served.run / "exit.json").exists()
        assert not list(served.run.glob(".*")), "half a file was left"
    finally:
        served.kill()


# --- ranks on several hosts --------------------------------------------------------------------


def two_hosts(model, folder, *flags):
    """Two ranks, each its host's only one as far as it knows: two run directories, one world."""
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    common |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tpdet.serve",
                "--model",
                str(model),
                "--port",
                "0",
                "--run-dir",
                str(folder / str(rank)),
                "--kv-pages",
                "16",
                *flags,
            ],
            env=os.environ | common | {"RANK": str(rank), "GROUP_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]


@pytest.mark.slow
def test_hosts_without_one_secret_are_refused_with_78(tiny_model, tmp_path):
    ranks = two_hosts(tiny_model("qwen3", kv_heads=2), tmp_path)
    for rank in ranks:
        _, errors = rank.communicate(timeout=90)
        last = json.loads(errors.splitlines()[-1])
        assert rank.returncode == last["exit"] == 78, errors
        assert "different run secrets" in last["message"]
        assert "--run-secret-file" in last["message"]


@pytest.mark.slow
def test_hosts_that_were_given_one_secret_serve(tiny_model, tmp_path):
    secret = tmp_path / "given"
    secret.write_text("5a" * 32)
    secret.chmod(0o600)
    flags = ("--run-secret-file", str(secret))
    ranks = two_hosts(tiny_model("qwen3", kv_heads=2), tmp_path, *flags)
    try:
        eventually((tmp_path / "0" / "ready.json").exists, 90)
        ranks[0].terminate()
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
