"""Asks a server again that is busy, when it says."""

import time
from collections.abc import Mapping
from typing import Any

from tpdet.client.connection import BusyError, Connection

TRIES = 10


def ask(connection: Connection, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer's JSON. Raises BusyError after TRIES times, and what `Connection.post` raises."""
    tries = 1
    while True:
        try:
            answer: dict[str, Any] = connection.post(route, body)
            return answer
        except BusyError as error:
            if tries == TRIES:
                raise
            tries += 1
            time.sleep(error.seconds)
