import shutil

import psutil
import pytest

from tests.lib.server.cluster import LONG, QUESTION, ask_here
from tests.lib.server.harness import Server, eventually


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A server of no flags, for all files that neither stop it nor count what it did before."""
    found = Server(tmp_path_factory.mktemp("s"))
    yield found
    assert found.stop() == 0, found.log.read_text()


@pytest.fixture
def unharmed(server):
    """After every refusal the same processes answer with the same bits."""
    before = server.canary()
    yield
    assert server.canary() == before
    assert server.process.poll() is None and server.child.is_running()


@pytest.fixture
def start_server(tmp_path):
    """Starts servers that may end in any way; nothing of them may be left."""
    started: list[Server] = []

    def make(*flags: str, **settings) -> Server:
        found = Server(tmp_path / str(len(started)), *flags, **settings)
        started.append(found)
        return found

    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    yield make
    for found in started:
        children = (
            psutil.Process(found.process.pid).children() if found.process.poll() is None else []
        )
        found.process.kill()
        found.process.wait()
        for child in [*children, *([found.child] if hasattr(found, "child") else [])]:
            eventually(lambda child=child: not child.is_running() or child.status() == "zombie")


@pytest.fixture(scope="session")
def cluster_model(tiny_model):
    """The model of the launchers' tests."""
    return tiny_model("qwen3", kv_heads=2, layers=1)


@pytest.fixture(scope="session")
def answers_alone(cluster_model):
    """What one rank answers to the short and the long question."""
    return tuple(ask_here(cluster_model, (QUESTION, LONG)))


@pytest.fixture
def model(tiny_model, tmp_path):
    """A model of 2 key heads, to be damaged."""
    found = tmp_path / "model"
    shutil.copytree(tiny_model("qwen3", kv_heads=2), found)
    return found
