"""What the request limits use of uvicorn's private API is there, and still called by uvicorn.

A newer uvicorn that fails here needs a look at `tpdet/server/http1` before pyproject.toml admits
it; that the limits still hold then is what test_http_refusals.py and test_framing.py show.
"""

import ast
import inspect
import re
import textwrap

import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tests.lib.tree import ROOT
from tpdet.server.front.process import HttpServer
from tpdet.server.http1.protocol import GuardedProtocol
from tpdet.server.http1.request_order import OrderedProtocol

OURS = (OrderedProtocol, GuardedProtocol)
CALLED_BY_THE_LOOP_OR_THE_PARSER = {
    "connection_made", "connection_lost", "data_received", "eof_received", "pause_writing",
    "resume_writing", "on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body",
    "on_message_complete",
}  # fmt: skip


def tree(kind: type) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(kind)))


def fields(kind: type, owners: tuple[str, ...] = ("self",), stored: bool = False) -> set[str]:
    """Names that a class reads (or, with `stored`, sets) on the objects so called."""
    return {
        node.attr
        for node in ast.walk(tree(kind))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in owners
        and isinstance(node.ctx, ast.Store) == stored
    }


def test_the_protocol_has_what_ours_reads_and_extends():
    theirs = set(dir(HttpToolsProtocol)) | fields(HttpToolsProtocol, stored=True)
    stored = set().union(*(fields(kind, stored=True) for kind in OURS))
    own = {name for kind in OURS for name in vars(kind)}
    own |= {name for name in stored if name.startswith("_")}
    used = set().union(*(fields(kind) for kind in OURS)) | stored
    extended = set().union(*(fields(kind, ("super()",)) for kind in OURS))
    inherited = used - own | extended - {"__init__", "_all_answered"}
    assert {"pipeline", "cycle", "transport", "_start_asgi_task"} <= inherited
    assert inherited <= theirs, inherited - theirs


def test_the_cycle_has_what_ours_reads():
    theirs = fields(RequestResponseCycle, stored=True) | set(dir(RequestResponseCycle))
    owners = ("cycle", "self.cycle", "self._running")
    used = set().union(*(fields(kind, owners, stored) for kind in OURS for stored in (0, 1)))
    assert {"response_complete", "disconnected", "message_event"} <= used
    assert used <= theirs, used - theirs


@pytest.mark.parametrize("kind", OURS)
def test_what_ours_replaces_has_the_same_parameters_and_is_still_called(kind):
    source = inspect.getsource(httptools_impl)
    replaced = {
        name: method
        for name, method in vars(kind).items()
        if inspect.isfunction(method) and hasattr(HttpToolsProtocol, name) and name != "__init__"
    }
    assert replaced
    for name, method in replaced.items():
        theirs = inspect.signature(getattr(HttpToolsProtocol, name)).parameters
        assert list(inspect.signature(method).parameters) == list(theirs), name
        if name not in CALLED_BY_THE_LOOP_OR_THE_PARSER:
            assert re.search(rf"self\.{name}\b", source), f"uvicorn calls {name} no more"


def test_the_status_line_and_the_servers_signals_are_there():
    assert httptools_impl.STATUS_LINE[400].startswith(b"HTTP/1.1 400 ")
    assert "self.capture_signals()" in inspect.getsource(uvicorn.Server)
    assert "capture_signals" in vars(HttpServer)


def test_the_range_of_versions_has_both_ends():
    (pin,) = re.findall(r'"uvicorn([^"]*)"', (ROOT / "pyproject.toml").read_text())
    low, high = re.fullmatch(r">=([\d.]+),<([\d.]+)", pin).groups()
    found = [tuple(map(int, version.split("."))) for version in (low, uvicorn.__version__, high)]
    assert found[0] <= found[1] < found[2]
