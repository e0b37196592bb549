"""The run secret: who may give it and how, what is none, and the run directory's own."""

import pytest

from tpdet.errors import (
    NotFoundError,
    NotPermittedError,
    UsageError,
)
from tpdet.launch.life.run_directory import RunDirectory
from tpdet.launch.life.run_secret import SECRET_VARIABLE, given_secret

KEY = bytes(range(32))


def test_a_secret_is_given_by_file_or_variable_and_leaves_the_environment(tmp_path):
    file = tmp_path / "secret"
    file.write_text(KEY.hex() + "\n")
    file.chmod(0o600)
    assert given_secret(str(file), {}) == KEY
    environ = {SECRET_VARIABLE: KEY.hex().upper()}
    assert given_secret(None, environ) == KEY and environ == {}
    assert given_secret(None, {}) is None
    with pytest.raises(UsageError, match="use one"):
        given_secret(str(file), {SECRET_VARIABLE: KEY.hex()})


@pytest.mark.parametrize("text", ["", "ab" * 31, "ab" * 33, "zz" * 32, "ab" * 32 + "\nab"])
def test_what_is_no_secret_is_refused_without_showing_it(tmp_path, text):
    file = tmp_path / "secret"
    file.write_text(text)
    file.chmod(0o600)
    for path, environ in ((str(file), {}), (None, {SECRET_VARIABLE: text})):
        with pytest.raises(UsageError, match="64 hex digits") as refused:
            given_secret(path, environ)
        assert not text or text not in str(refused.value)


def test_a_secret_file_that_others_may_read_is_refused(tmp_path):
    file = tmp_path / "secret"
    with pytest.raises(NotFoundError):
        given_secret(str(file), {})
    file.write_text(KEY.hex())
    file.chmod(0o644)
    with pytest.raises(NotPermittedError, match="0644"):
        given_secret(str(file), {})


def test_a_run_directory_has_a_secret_of_its_own_for_each_start(tmp_path):
    first = RunDirectory.own(tmp_path, "one")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    secret = first.secret()
    assert RunDirectory.join(tmp_path, "one").secret() == secret and len(secret) == 32
    first.release()
    second = RunDirectory.own(tmp_path, "two")
    assert second.secret() != secret
    (tmp_path / "engine.sock").touch()
    second.clear_channels()
    assert not (tmp_path / "secret").exists() and not (tmp_path / "engine.sock").exists()
