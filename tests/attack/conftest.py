import pytest

from tests.lib.server.harness import Server

KEYS = ("sk-alpha-Q7x", "sk-beta-Z9w")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server with two keys that logs all it logs."""
    folder = tmp_path_factory.mktemp("a")
    keys = folder / "keys"
    keys.write_text("".join(f"{key}\n" for key in KEYS))
    keys.chmod(0o600)
    found = Server(folder, "--api-key-file", str(keys))
    yield found
    assert found.stop() == 0, found.log.read_text()
