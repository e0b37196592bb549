"""`LLM(tensor_parallel_size=2)` without a launcher: it starts its second rank, and ends it."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress

import pytest

from tpdet import LLM, AsyncLLM, SamplingParams
from tpdet.errors import NotFoundError, PeerLostError, UsageError
from tpdet.launch.host.processes import children_of, process_status

SAMPLED = SamplingParams(temperature=0.9, n=2, seed=3, max_tokens=9, logprobs=2, ignore_eos=True)
PROMPTS = ["The for statement", [5, 6, 7], "A list"]


@pytest.fixture(scope="module")
def settings(tiny_model):
    model = str(tiny_model("qwen3", kv_heads=2))
    return {"model": model, "kv_pages": 32, "device": "cpu", "step_timeout": 30}


def answers(llm):
    """The answers' bits, and all that their readers see."""
    return [
        (output.replay_digest, output.system_fingerprint, output.prompt_token_ids, output.outputs)
        for output in llm.generate(PROMPTS, SAMPLED)
    ]


@pytest.fixture(scope="module")
def alone(settings):
    """The answers of one rank."""
    with LLM(**settings) as llm:
        return answers(llm)


def followers():
    """The processes that hang by this one and follow it."""
    found = []
    for child in children_of(os.getpid()):
        with open(f"/proc/{child.pid}/cmdline") as file:
            if "tpdet.llm.follower" in file.read():
                found.append(child.pid)
    return found


def test_two_ranks_answer_as_one_and_end_together(settings, alone):
    llm = LLM(**settings, tensor_parallel_size=2)
    assert answers(llm) == alone
    assert "tensor_parallel_size=2" in repr(llm)
    with pytest.raises(UsageError, match=r"tensor_parallel_size 2: .* another LLM .*: close that"):
        LLM(**settings, tensor_parallel_size=2)

    def press():
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("not a bar")

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SAMPLED, use_tqdm=lambda **_: press())
    assert answers(llm) == alone  # the follower went on with the call
    (follower,) = followers()
    os.kill(follower, signal.SIGKILL)
    with pytest.raises(PeerLostError, match=r"^rank 1 was ended by SIGKILL") as lost:
        llm.generate(PROMPTS, SAMPLED)
    assert lost.value.exit_code == 75
    with pytest.raises(UsageError, match="ended by PeerLostError: rank 1 was ended by SIGKILL"):
        llm.generate(PROMPTS, SAMPLED)
    llm.close()
    assert not followers()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"model": "./nowhere"}, NotFoundError, "'./nowhere' is not a directory"),
        ({"tensor_parallel_size": 3}, UsageError, "size 3 does not fit .* use one of 1, 2, 4, 8"),
        ({"device": "cuda"}, UsageError, "device cuda: .* use --device cpu"),
        ({"tensor_parallel_size": 0}, UsageError, "must be a number of ranks, not 0"),
    ],
)
def test_what_can_be_refused_starts_no_process(settings, monkeypatch, given, error, message):
    def start(*_, **__):
        pytest.fail("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(error, match=message):
        LLM(**{**settings, "tensor_parallel_size": 2, **given})


def test_under_a_launcher_the_number_is_that_of_its_ranks(settings, monkeypatch):
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**names, "MASTER_ADDR": "localhost", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UsageError, match=r"torchrun started 1: .* without a launcher, and it start"
    ):
        LLM(**settings, tensor_parallel_size=2)


@pytest.mark.slow
def test_a_rank_that_cannot_start_ends_the_start_at_once(settings, monkeypatch, tmp_path):
    broken = tmp_path / "tpdet_broken.pth"
    broken.write_text("")
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.exit(9)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    began = time.monotonic()
    with pytest.raises(PeerLostError, match=r"^rank 1 ended with \d+ before all ranks had met$"):
        LLM(**settings, tensor_parallel_size=2)
    assert time.monotonic() - began < 60 and not followers()


@pytest.mark.slow
def test_one_that_is_dropped_ends_its_ranks_and_the_next_one_starts(settings, alone):
    for _ in range(2):
        llm = LLM(**settings, tensor_parallel_size=2)
        assert answers(llm) == alone
        del llm
        assert not followers()


@pytest.mark.slow
def test_a_fork_is_refused_and_holds_no_rank(settings, alone):
    with LLM(**settings, tensor_parallel_size=2) as llm:
        fork = os.fork()
        if not fork:
            signal.alarm(60)
            with suppress(UsageError):
                llm.generate(PROMPTS, SAMPLED)
                os._exit(1)
            llm.close()  # not this process's: nothing happens
            signal.pause()
        try:
            assert answers(llm) == alone
            began = time.monotonic()
            llm.close()
            assert time.monotonic() - began < 8 and not followers()
            assert os.waitpid(fork, os.WNOHANG) == (0, 0)
        finally:
            os.kill(fork, signal.SIGKILL)
            os.waitpid(fork, 0)


@pytest.mark.slow
def test_the_thread_that_made_it_may_end(settings, alone):
    made = []
    maker = threading.Thread(target=lambda: made.append(LLM(**settings, tensor_parallel_size=2)))
    maker.start()
    maker.join()
    time.sleep(0.5)  # the kernel would have ended a child of that thread by now
    with made.pop() as llm:
        assert answers(llm) == alone


@pytest.mark.slow
def test_the_asynchronous_one_starts_its_ranks_too(settings, alone):
    async def run():
        async with AsyncLLM(**settings, tensor_parallel_size=2) as llm:
            outputs = llm.generate(PROMPTS[0], SAMPLED)
            assert [output async for output in outputs][-1].replay_digest == alone[0][0]
            os.kill(followers()[0], signal.SIGKILL)
            with pytest.raises(PeerLostError, match="rank 1 was ended by SIGKILL"):
                await anext(llm.generate(PROMPTS[0], SAMPLED))

    asyncio.run(run())
    assert not followers()


SCRIPT = """
import os, sys
from tpdet import LLM, SamplingParams
from tpdet.launch.host.processes import children_of
llm = LLM({model!r}, tensor_parallel_size=2, kv_pages=32)
output = llm.generate("A list", SamplingParams(temperature=0, max_tokens=3, seed=1))[0]
print(output.replay_digest, *(c.pid for c in children_of(os.getpid())), flush=True)
if sys.argv[1:]:
    os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [None, signal.SIGKILL, signal.SIGTERM])
def test_a_script_needs_no_guard_and_leaves_no_process(settings, tmp_path, number):
    """However it ends, with Python's own names as files in the working directory."""
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(textwrap.dedent(SCRIPT).format(**settings))
    for name in ("queue", "msgspec", "signal"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w')")
    command = [sys.executable, str(script), *([] if number is None else [str(int(number))])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == -(number or 0), done.stderr
    digest, *children = done.stdout.split()
    assert len(digest) == 64 and children and not (tmp_path / "executed").exists()
    deadline = time.monotonic() + 20
    while any(map(process_status, map(int, children))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert done.stderr == ""
