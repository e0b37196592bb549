import subprocess
import sys

import pytest

from tests.server.cluster import FLAGS, LONG, ask, wait_ready
from tests.server.harness import Server
from tpdet.launch.supervise import stop


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("s"))
    yield found
    assert found.stop() == 0, found.log.read_text()


@pytest.fixture(scope="session")
def cluster_model(tiny_model):
    """The model of the launchers' tests."""
    return tiny_model("qwen3", kv_heads=2)


@pytest.fixture(scope="session")
def answers_alone(cluster_model, tmp_path_factory):
    """What one rank without a launcher answers to the short and the long question."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, "-m", "tpdet.serve", "--model", str(cluster_model), *FLAGS]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--run-dir", str(folder / "run")], stderr=log)
    try:
        alive = lambda: process.poll() is None
        url = wait_ready(folder, "run/ready.json", alive, folder / "log")["url"]
        found = ask(url), ask(url, LONG)
        assert stop(folder / "run") == 0
    finally:
        process.kill()
        process.wait()
    return found
