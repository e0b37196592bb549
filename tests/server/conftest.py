import pytest

from tests.server.harness import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("s"))
    yield found
    assert found.stop() == 0, found.log.read_text()
