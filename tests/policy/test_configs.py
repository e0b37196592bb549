"""The runs in configs/: each is read, planned on its GPUs, and started with a tiny model."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import httpx
import pytest

from tests.lib.thread_world import run_threads
from tests.lib.tree import ROOT
from tpdet.checkpoint.model_config.json_file import read_json_object
from tpdet.checkpoint.model_config.known_shapes import PUBLISHED
from tpdet.engine import Engine
from tpdet.errors import UsageError
from tpdet.requests.request import Request, SamplingParams
from tpdet.server.commands import supervised
from tpdet.server.commands.supervised import serve_command
from tpdet.server.settings.settings import load_settings
from tpdet.tools.plan.command import configured
from tpdet.tools.plan.plan import PlanRequest, plan_size
from tpdet.tools.worlds.shapes import find_model

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
NAMES = [path.name for path in CONFIGS]
OVER_NODES = "llama-3-405b.2x8.toml"
TINY = (
    "--device cpu --transport gather --load-format dummy --kv-pages 8 --max-model-len 64 "
    "--max-num-batched-tokens 64 --max-num-seqs 4"
).split()


def settings(path, *flags):
    return load_settings(["--config", str(path), *flags], "test")


@pytest.fixture(scope="module")
def tiny(tiny_model):
    """Sixteen heads, so that sixteen leaves and ranks can share them."""
    return str(tiny_model("llama", heads=16, kv_heads=8, hidden=64, intermediate=256))


def test_every_run_is_there():
    assert (
        sorted(
            ["demo.toml", OVER_NODES]
            + [f"qwen3-8b.h200-tp{tp}.toml" for tp in (1, 2, 4)]
            + [f"llama-3-70b.h200-tp{tp}.toml" for tp in (4, 8)]
        )
        == NAMES
    )


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_it_is_read_and_its_memory_fits_by_plan(path, tiny):
    found = settings(path)
    model = PUBLISHED.get(found.engine.model, tiny)
    assert model != tiny or path.name == "demo.toml"
    request = configured(PlanRequest(model, find_model(model), "h200", context=1, batch=1), found)
    plan = plan_size(request, found.world.tp or 1)
    assert plan.fits, plan.memory
    assert (plan.batch, plan.context) == (found.engine.max_num_seqs, found.engine.max_model_len)
    twice = plan_size(replace(request, batch=4 * request.batch), plan.tp)
    assert not twice.fits or path.name == "demo.toml"  # the check can fail


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_its_name_says_its_ranks(path):
    world = settings(path).world
    on_one = re.search(r"\.h200-tp(\d+)\.toml", path.name)
    on_many = re.search(r"\.(\d+)x(\d+)\.toml", path.name)
    if on_one:
        assert (world.tp, world.nodes) == (int(on_one.group(1)), 1)
    elif on_many:
        nodes, each = (int(number) for number in on_many.groups())
        assert (world.tp, world.nodes) == (nodes * each, nodes)
    else:
        assert (world.tp, world.nodes) == (None, 1)


def test_a_run_over_nodes_is_refused_by_the_command_of_one_host(tiny):
    (path,) = [path for path in CONFIGS if path.name == OVER_NODES]
    assert "refuses this file" in path.read_text()
    with pytest.raises(UsageError, match="2 nodes, tpdet serve starts the ranks of one host"):
        serve_command(["--config", str(path), "--model", tiny])


def test_the_file_says_how_many_ranks_there_are_and_the_command_line_wins(monkeypatch, tiny):
    started = []
    monkeypatch.setattr(supervised, "check_start", lambda *_: None)  # of other machines
    monkeypatch.setattr(supervised, "serve", lambda ranks, *_, **__: started.append(ranks) or 0)
    (path,) = [path for path in CONFIGS if path.name == "qwen3-8b.h200-tp2.toml"]
    for flags in ([], ["--tp", "4"]):
        assert serve_command(["--config", str(path), "--model", tiny, *flags]) == 0
    assert serve_command([tiny]) == 0
    assert started == [2, 4, 1]


@pytest.mark.parametrize(
    ("text", "word"),
    [("tp = 3\nnodes = 2", "nodes in .* 2 does"), ("tp = 0", "tp"), ("nodes = 99", "nodes")],
)
def test_ranks_that_make_no_sense_are_refused(tmp_path, text, word):
    path = tmp_path / "x.toml"
    path.write_text(f'model = "m"\n{text}\n')
    with pytest.raises(UsageError, match=word):
        settings(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if not re.search("tp8|x8", name)])
def test_the_server_starts_as_the_file_says(name, tiny, tmp_path):
    (path,) = [path for path in CONFIGS if path.name == name]
    run = tmp_path / "run"
    flags = ["--config", str(path), "--model", tiny, *TINY, "--run-dir", str(run), "--port", "0"]
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tpdet", "serve", *flags],
            stdout=file,
            stderr=file,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    try:
        deadline = time.monotonic() + 120
        while not (run / "ready.json").exists():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        ready = read_json_object(run / "ready.json")
        assert ready["tp"] == (settings(path).world.tp or 1)
        model = settings(path).served_name
        asked = {"model": model, "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
        answer = httpx.post(f"{ready['url']}/v1/completions", json=asked, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 3, answer
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


QUICK = "qwen3-8b.h200-tp2.toml"


@pytest.mark.parametrize(
    "name", [n if n == QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_its_engine_starts_with_its_ranks_as_threads(name, tiny):
    """Also where there are more ranks than a small machine has room for processes."""
    (path,) = [path for path in CONFIGS if path.name == name]
    found = settings(path, "--model", tiny, *TINY)

    def rank(world):
        engine = Engine(found.engine, world)
        if world.rank:
            engine.worker_loop()
            return None
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        engine.submit(Request(request_id="r", prompt_token_ids=(5, 6, 7), params=params))
        tokens = 0
        while engine.has_work:
            tokens += len(engine.step())
        engine.stop_workers()
        return tokens

    answers = run_threads(found.world.tp or 1, rank, timeout=200.0)
    assert answers[0] == 3
