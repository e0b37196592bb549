"""`python -m tests.server.front.health_watch PORT PATH...`: asks in turn until standard input ends.

A process of its own, so that nothing of a test holds it up. Prints a line once all were
asked, and at the end one of JSON: each path's seconds, an answer each.
"""

import http.client
import json
import select
import sys
import time

PAUSE_SECONDS = 0.01


def main() -> None:
    """Ask on one kept connection a path."""
    port, paths = int(sys.argv[1]), sys.argv[2:]
    connections = {path: http.client.HTTPConnection("127.0.0.1", port) for path in paths}
    seconds: dict[str, list[float]] = {path: [] for path in paths}
    first = True
    while not select.select([0], [], [], PAUSE_SECONDS)[0]:
        for path, connection in connections.items():
            began = time.monotonic()
            connection.request("GET", path)
            found = connection.getresponse()
            found.read()
            seconds[path].append(time.monotonic() - began)
            assert found.status == 200, (path, found.status)
        if first:
            print("asking", flush=True)
        first = False
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
