"""An attempt on one of the server's limits: what to send, and what must come back."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from tests.lib.server.harness import Server

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
KIND = {"content-type": "application/json"}


@dataclass(frozen=True)
class Attempt:
    """Something to send, and what must come back: a status, and the field an error names.

    `send` gives a status and a body; `says` is in a refusal's message.
    """

    name: str
    send: Callable[[Server], tuple[int, bytes]]
    status: int
    param: str | None = None
    says: str = ""

    def check(self, server: Server) -> None:
        """Send it. AssertionError when another thing comes back."""
        status, body = self.send(server)
        assert status == self.status, (self.name, status, body[:300])
        if status == 200:
            return
        assert len(body) <= 4096
        error = json.loads(body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error", (self.name, error)
        assert error["param"] == self.param and self.says in error["message"], (self.name, error)
        assert error["code"] == ("not_found" if status == 404 else None), (self.name, error)
