"""docs/server.md is true: its tables are those of the code, and what stands around them exists."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import openai
import pytest

from scripts.server_reference import PAGE, TABLES, with_tables
from tests.lib.some_slow import some_slow
from tests.lib.tree import ROOT
from tpdet.cli import main as tpdet_command
from tpdet.requests.body import problems
from tpdet.serve import ready_content
from tpdet.server.about.operations import CONTROL_OPERATIONS
from tpdet.server.front.app import Services, make_app
from tpdet.server.front.door import PUBLIC_PATHS
from tpdet.text.outputs import DEAD_END

TEXT = PAGE.read_text()


def section(title: str) -> str:
    """The part of the page under a heading."""
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def cells(title: str) -> list[list[str]]:
    """The rows of the first table under a heading."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def names(text: str) -> set[str]:
    """What stands between backticks."""
    return set(re.findall(r"`([^`]+)`", text))


def test_the_tables_are_those_of_the_code():
    command = [sys.executable, "scripts/server_reference.py", "--check"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0, "run scripts/server_reference.py"


@pytest.mark.parametrize("name", some_slow([*TABLES][:2], TABLES))
def test_a_stale_table_is_seen(name):
    """Negative control: a line less, and the page is made anew; no place for it, and it says so."""
    first = f"<!-- {name}: made by scripts/server_reference.py -->\n"
    stale = TEXT.replace(TABLES[name]()[-1] + "\n", "")
    assert stale != TEXT and with_tables(stale) == TEXT
    with pytest.raises(ValueError, match=name):
        with_tables(TEXT.replace(first, ""))


def test_the_endpoints_are_the_routes():
    app = make_app(Services(None, None, None, None, "m", 1.0, 0, True))
    routes = {
        (route.path.replace(":path}", "}"), method, path_is_public(route.path))
        for route in app.routes
        for method in route.methods
    }
    found = {(path.strip("`"), method, key == "no") for path, method, key, _ in cells("Endpoints")}
    assert found == routes


def test_every_control_route_is_told():
    told = names((ROOT / "docs" / "rl.md").read_text())
    assert {*CONTROL_OPERATIONS} <= told


def path_is_public(path: str) -> bool:
    """Whether a path asks for no key."""
    return path in PUBLIC_PATHS


def test_every_code_of_an_error_is_told():
    """An ApiError of another code cannot be made; two types stand where there is no code."""
    told = set().union(*(names(code) for _, _, code, _ in cells("Errors")))
    assert told == {*problems.CODES} - {"invalid_request_error", "authentication_error"}


def test_the_errors_have_the_types_and_statuses_that_are_told():
    told = {}
    for status, kind, code, _ in cells("Errors"):
        told |= {one: (status, kind.strip("`")) for one in names(code)}
    for code in (*problems.RETRYABLE, *problems.SERVER_FAULTS):
        error = problems.from_code(code, "x")
        assert told[code] == (str(error.status), error.kind)
        assert (("retry-after", "1") in error.headers) is (error.status == 503)


def test_a_client_sends_again_what_may_be_answered_then():
    """By the openai client's own rule: after each 503, and after nothing that stays as it is."""
    client = openai.OpenAI(api_key="k")
    in_vain = set()
    for status, kind, code, _ in cells("Errors"):
        for one in names(code):
            error = problems.ApiError(int(status), "x", kind=kind.strip("`"), code=one)
            found = SimpleNamespace(status_code=error.status, headers=dict(error.headers))
            again = client._should_retry(found)
            assert again or error.status != 503
            if not again and error.status in (409, *range(500, 600)):
                in_vain.add(one)
    assert in_vain == {"conflict", "resume_mismatch", "numerical_error"} <= names(section("Errors"))


def test_the_keys_of_ready_json_are_told():
    engine = SimpleNamespace(system_fingerprint="f", model_config=SimpleNamespace(vocab_size=1))
    run = SimpleNamespace(records=list)
    keys = ready_content("u", run, engine, SimpleNamespace(size=1)).keys()
    assert keys <= names(section("Start, stop, reload"))
    assert f"`{DEAD_END}`" in section("Answers")


@pytest.mark.parametrize("command", ["stop", "reload"])
def test_the_commands_take_the_flags_that_are_told(capsys, command):
    with pytest.raises(SystemExit):
        tpdet_command([command, "--help"])
    flags = set(re.findall(r"(--[a-z-]+)", capsys.readouterr().out)) - {"--help"}
    (line,) = re.findall(rf"^    tpdet {command} .*$", TEXT, re.MULTILINE)
    assert flags == set(re.findall(r"(--[a-z-]+)", line))


def test_a_running_server_shows_no_metric_that_is_not_told(server):
    assert server.complete().status_code == 200 and server.complete(n=0).status_code == 400
    shown = set(re.findall(r"^# TYPE (\S+)", server.http.get("/metrics").text, re.MULTILINE))
    told = {name.strip("`") for name, *_ in cells("Metrics")}
    assert {"tpdet_requests_total", "tpdet_rejected_total", "tpdet_step_seconds"} <= shown
    assert shown <= told


def test_a_running_server_tells_the_limits_that_are_told(server):
    told = {name.strip("`"): value for name, value in cells("Limits")}
    limits = server.http.get("/server_info").json()["limits"]
    assert told.keys() == limits.keys()
    assert told["n"] == " to ".join(map(str, limits["n"])) and json.loads(told["json_depth"]) == 32
