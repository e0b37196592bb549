"""What the HTTP process costs: `python -m scripts.front_load [--streams N] [--steps N]`.

The real HTTP process runs between an engine without a model, which gives every stream a token a
step, and a raw reader in a process of its own. A step follows when the reader has the events of the
one before the last, so nothing piles up. Printed as JSON: processor time of the HTTP process for an
event and for a request (microseconds), rank 0's for a step, and events a second of wall time.
`--profile FILE` lists the functions of the HTTP process instead of timing them. Processor time is
that of all `--http-processes`; their shares of the streams are shown.
"""

import argparse
import json
import multiprocessing
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil

from tests.lib.server.harness import MODEL, write_tokenizer
from tests.lib.text.made_conversations import CHATML
from tests.lib.tree import ROOT
from tpdet.launch.life.run_secret import new_secret
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.request import Candidate, Request, TokenOutput
from tpdet.requests.routes import path_of
from tpdet.server.front.tally import new_tallies
from tpdet.server.leader.bridge import Bridge, EngineSocket, HttpLink
from tpdet.server.leader.http_child import bind_port, listen
from tpdet.server.wire.process_config import ProcessConfig
from tpdet.server.wire.protocol import process_of

_PROFILED = """
import cProfile, os, pstats, sys
profile, leave = cProfile.Profile(), os._exit
def end(code):
    profile.disable()
    with open(sys.argv[1], "w") as file:
        pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(45)
    leave(code)
os._exit = end
from tpdet.server.front import process
profile.enable()
process.main()
"""


class Engine:
    """Takes every request; each step gives one token to each running choice."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[Request, int]] = {}
        self.wanted = 1 << 30

    def submit(self, request: Request) -> int:
        """Take a request; it has one choice."""
        self.running[request.request_id] = request, 0
        return 1

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Forget a request."""
        self.running.pop(request_id, None)

    def statistics(self) -> "Statistics":
        """How many requests run; none waits."""
        return Statistics(len(self.running), 0)

    def step(self) -> list[TokenOutput]:
        """A token of each running choice."""
        found = []
        for place, (request_id, (request, position)) in enumerate(list(self.running.items())):
            params = request.params
            reason = "length" if position + 1 >= request.max_tokens else None
            top = tuple(Candidate(97 + i, -0.5 - i) for i in range(params.logprobs or 0))
            token = 97 + (place + position) % 26
            found += [
                TokenOutput(request_id, choice, token, -0.5, top, reason)
                for choice in range(params.n)
            ]
            self.running[request_id] = request, position + 1
            if reason is not None:
                del self.running[request_id]
        return found


class Statistics(msgspec.Struct):
    """What the bridge asks of an engine."""

    requests_running: int
    requests_waiting: int


def _read(port: int, path: str, streams: int, body: bytes, events: Any, go: Any) -> None:
    """Open all streams, send one request on each, count the events that arrive."""
    poller = select.epoll()
    sockets = {}
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    data = head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        sockets[connection.fileno()] = connection
        poller.register(connection.fileno(), select.EPOLLIN)
    go.wait()
    for connection in sockets.values():
        connection.sendall(data)
    while sockets:
        for number, _ in poller.poll():
            found = sockets[number].recv(1 << 16)
            events.value += found.count(b"data: ")
            if not found:
                poller.unregister(number)
                sockets.pop(number).close()


def _front(config: ProcessConfig, profile: str | None) -> subprocess.Popen[bytes]:
    program = ["-m", "tpdet.server.front.process"] if not profile else ["-c", _PROFILED, profile]
    process = subprocess.Popen(
        [sys.executable, "-P", *program],
        stdin=subprocess.PIPE,
        pass_fds=(config.socket, config.tallies),
        cwd=ROOT,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config) + b"\n")
    process.stdin.flush()
    return process


def _link(
    options: argparse.Namespace, folder: Path, port: int, tallies: int, index: int
) -> HttpLink:
    """One HTTP process, started."""
    key = new_secret()
    channel = EngineSocket(str(folder), key, index)
    config = ProcessConfig(
        parent_pid=os.getpid(),
        socket=port,
        tallies=tallies,
        index=index,
        processes=options.http_processes,
        run_dir=str(folder),
        session="x",
        engine_address=channel.address,
        channel_key=key.hex(),
        tokenizer_directory=str(folder / "model"),
        chat_template=None,
        chat_template_date=None,
        served_name=MODEL,
        max_queue=4096,
        step_timeout=60.0,
        created=0,
        log_access=False,
        log_statistics=False,
        tool_call_parser=options.parser,
    )
    process = _front(config, options.profile)
    handle = SimpleNamespace(
        pid=process.pid, exit_code=None, wait=lambda s: process.wait(s) == 0, kill=process.kill
    )
    return HttpLink(channel, handle)


def _seconds(processes: list[psutil.Process]) -> float:
    """Processor seconds of all."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _system(processes: list[psutil.Process]) -> float:
    """Of these, the system's."""
    return sum(process.cpu_times().system for process in processes)


def _measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    write_tokenizer(folder / "model", marks=("<tool_call>", "</tool_call>"))
    config = folder / "model" / "tokenizer_config.json"  # with a template that shows tools
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": CHATML}))
    listener = bind_port("127.0.0.1", 0)
    count = options.http_processes
    tallies = new_tallies(count)
    links = [_link(options, folder, listener.fileno(), tallies, i) for i in range(count)]
    bridge, engine = Bridge(links, 60.0), Engine()
    facts = EngineFacts("fp", "c0" * 32, "d1" * 32, 1 << 16, 512, (258,), 1, "fp_other", "float32")
    bridge.open(facts, lambda: listen(listener), lambda: None)
    prompt = [97 + i % 26 for i in range(options.prompt)]
    said = {"messages": [{"role": "user", "content": bytes(prompt).decode()}]}
    asked = said if options.chat else {"prompt": prompt}
    body = {"model": MODEL, **asked, "max_tokens": options.steps, "ignore_eos": True}
    body |= {"stream": not options.whole, "stream_options": {"include_usage": True}}
    body = {k: v for k, v in body.items() if body["stream"] or k != "stream_options"}
    body |= json.loads(options.more)
    events, go = multiprocessing.Value("q", 0, lock=False), multiprocessing.Event()
    path = path_of("chat" if options.chat else "completion")
    sent = json.dumps(body).encode()
    arguments = (listener.getsockname()[1], path, options.streams, sent, events, go)
    reader = multiprocessing.Process(target=_read, args=arguments)
    reader.start()
    watched = [psutil.Process(link.process.pid) for link in links]
    time.sleep(0.5)
    idle = _seconds(watched)
    go.set()
    while len(engine.running) < options.streams:
        bridge.receive(engine, 0.1)
    shares = Counter(map(process_of, engine.running))
    admitted, system, began = _seconds(watched), _system(watched), time.perf_counter()
    rank = sum(_steps(bridge, engine, options, events))
    wall = time.perf_counter() - began
    reader.join()
    tokens = options.streams * options.steps * body.get("n", 1)
    found = {
        "us_an_event": 1e6 * (_seconds(watched) - admitted) / tokens,
        "of_these_system": 1e6 * (_system(watched) - system) / tokens,
        "us_a_request": 1e6 * (admitted - idle) / options.streams,
        "rank_0_us_a_step": 1e6 * rank / options.steps,
        "events_a_second": tokens / wall,
    } | {f"share_{i}": shares[i] for i in range(count) if count > 1}
    bridge.stop()
    return found


def _steps(
    bridge: Bridge, engine: Engine, options: argparse.Namespace, events: Any
) -> Iterator[float]:
    """Rank 0's processor seconds for the delivery of each step."""
    for step in range(options.steps):
        while not options.whole and events.value < (step - 1) * options.streams:
            time.sleep(0.0002)
        bridge.receive(engine, 0.0)
        outputs = engine.step()
        began = time.thread_time()
        bridge.deliver(outputs, 0.01)
        yield time.thread_time() - began
        if options.whole:
            time.sleep(0.002)


def main() -> None:
    """Print the times, or the profile, of one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--http-processes", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--chat", action="store_true", help="chats, not completions")
    parser.add_argument("--parser", default="off", help="what reads calls of tools in them")
    parser.add_argument("--more", default="{}", help="further fields of the request, as JSON")
    parser.add_argument("--whole", action="store_true", help="answers that are not streamed")
    parser.add_argument("--profile", help="a file for the HTTP process's functions")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = _measure(options, Path(folder))
    print(json.dumps({name: round(value, 1) for name, value in found.items()}))


if __name__ == "__main__":
    main()
