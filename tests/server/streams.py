"""Streamed requests to a server under test, and what it said when it ended."""

import json

import httpx

from tests.lib.server.harness import MODEL, Server, eventually

PATH = "/v1/completions"
SLOW = {"cache_salt": "slow=0.05", "max_tokens": 200, "ignore_eos": True}


def stream(server: Server, **fields) -> list[str]:
    """The events of one streamed request, to its end."""
    body = {"model": MODEL, "prompt": "x", "stream": True} | fields
    with httpx.stream("POST", server.url + PATH, json=body, timeout=30) as found:
        assert found.status_code == 200, found.read()
        return found.read().decode().split("\n\n")[:-1]


def in_background(pool, server: Server, count: int, **fields) -> list:
    """Futures of so many `stream`s, once they, and nothing that was asked before, are running."""
    eventually(lambda: running(server) == 0)
    futures = [pool.submit(stream, server, **fields) for _ in range(count)]
    eventually(lambda: running(server) == count)
    return futures


def running(server: Server) -> float:
    """How many requests run."""
    return server.metric("tpdet_requests_running")


def fatal_line(server: Server) -> dict:
    """The last line of the log."""
    return json.loads(server.log.read_text().splitlines()[-1])


def decided(server: Server) -> dict:
    """The exit code in the run directory, and why."""
    return json.loads((server.run / "exit.json").read_text())
