"""A door before a server of fixed tokens: it adds to each request what the model is to say."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from tests.server.tool_server import MARKS

END = "\ue002"
"""The marks of a server behind a door: U+E003 and those after it stand for their tokens."""
_PASSED = ("authorization", "x-api-key", "anthropic-version", "anthropic-beta")


def scripted(text: str) -> str:
    """The `cache_salt` by which an engine of fixed tokens says a text and ends its turn."""
    for place, mark in enumerate(MARKS):
        text = text.replace(mark, chr(0xE003 + place))
    return f"text={text}{END}"


class ScriptedDoor(ThreadingHTTPServer):
    """Passes requests on, unchanged but for a field that scripts the answer.

    url: the server's. says: the model's text for a body, without the end of its turn. bodies and
    answers: of all requests that had tools.
    """

    def __init__(self, url: str, says: Callable[[dict[str, Any]], str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.says, self.bodies, self.answers = says, [], []
        self.client = httpx.Client(base_url=url, timeout=300)

    def open(self) -> "ScriptedDoor":
        """Serve in the background."""
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def close(self) -> None:
        """Serve no more."""
        self.shutdown()
        self.server_close()
        self.client.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedDoor

    def do_POST(self) -> None:
        door = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        headers = {name: self.headers[name] for name in _PASSED if self.headers[name]}
        asked = body | {"cache_salt": scripted(door.says(body))}
        answer = door.client.post(self.path, json=asked, headers=headers)
        if body.get("tools"):  # not what titles are asked for
            door.bodies.append(body)
            door.answers.append(answer)
        self._pass_on(answer)

    def do_GET(self) -> None:
        self._pass_on(self.server.client.get(self.path))

    def _pass_on(self, answer: httpx.Response) -> None:
        self.send_response(answer.status_code)
        self.send_header("content-type", answer.headers["content-type"])
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, *arguments: object) -> None:
        """Nothing is logged."""
