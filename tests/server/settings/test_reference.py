"""docs/server.md is true: its tables are those of the code, and what stands around them exists."""

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import tpdet.requests
import tpdet.server
from scripts.server_reference import PAGE, TABLES, with_tables
from tests.lib.tree import ROOT
from tpdet.cli import main as tpdet_command
from tpdet.requests.body import problems
from tpdet.serve import ready_content
from tpdet.server.front.app import Services, make_app
from tpdet.server.front.middleware import PUBLIC_PATHS
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


@pytest.mark.parametrize("name", TABLES)
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


def path_is_public(path: str) -> bool:
    """Whether a path asks for no key."""
    return path in PUBLIC_PATHS


def codes_in_source() -> set[str]:
    """The codes that modules of the server and of requests give their errors by name."""
    found = set()
    rooms = [Path(inspect.getfile(room)).parent for room in (tpdet.server, tpdet.requests)]
    for path in sorted(path for room in rooms for path in room.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            if call.func.id == "ApiError":
                given = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
            else:
                given = call.args[2:3] if call.func.id == "bad_request" else []
            found |= {value.value for value in given if isinstance(value, ast.Constant)}
    return found


def test_every_code_of_an_error_is_told():
    codes = codes_in_source() | {*problems.SERVER_FAULTS, *problems.RETRYABLE}
    assert {"not_found", "invalid_api_key", "unknown_field", "not_supported"} <= codes
    told = set().union(*(names(code) for _, _, code, _ in cells("Errors")))
    assert told == codes


def test_the_errors_have_the_types_and_statuses_that_are_told():
    told = {}
    for status, kind, code, _ in cells("Errors"):
        told |= {one: (status, kind.strip("`")) for one in names(code)}
    for code in (*problems.RETRYABLE, *problems.SERVER_FAULTS):
        error = problems.from_code(code, "x")
        assert told[code] == (str(error.status), error.kind)
        assert (error.headers != ()) is (error.status == 503)


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
