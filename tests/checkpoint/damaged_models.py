"""Damaged model directories, each loaded in a forked child with bounds on time and memory.

`python -m tests.checkpoint.damaged_models MODEL SCRATCH EVERY`: of the cases with a changed value
each EVERYth (all with 1), the others always. One line of JSON a case, `[name, exit code, seconds,
message]`; an exit code below zero is the signal that ended the child.
"""

import copy
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tpdet.config import EngineConfig
from tpdet.errors import TpdetError
from tpdet.runner.start.loading import read_model
from tpdet.text.tokenizer import Tokenizer

SECONDS, MEMORY = 6, 3 << 30
FILES = (
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json", "chat_template.jinja",
)  # fmt: skip
VALUES = (
    10**9, 2**31 - 1, 2**31, 4_000_000_000, 10**400, -1, 0, 1.5, 1e308, -1e308, True, "x",
    "9" * 5000, "\ud800", [], [[]], [10**9] * 3, {}, {"a": {}}, "\0", "../../etc/passwd",
)  # fmt: skip
Case = tuple[str, Callable[[Path], None]]


def write(path: Path, content: object) -> None:
    """JSON in the place of a file, which may be a link to the sound one."""
    path.unlink(missing_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # an address has at most 107 bytes
    socket.socket(socket.AF_UNIX).bind(path.name)
    os.chdir(here)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _sparse(path: Path, size: int) -> None:
    write(path, "")
    os.truncate(path, size)


def special_files() -> Iterator[Case]:
    """No file in a file's place."""
    for name in FILES:
        for make in (_pipe, _socket, _device, Path.mkdir):

            def damage(folder: Path, name: str = name, make: Any = make) -> None:
                (folder / name).unlink(missing_ok=True)
                make(folder / name)

            yield f"{name}: {make.__name__}", damage


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value can be replaced; of a long list or object the first two places."""
    if path:
        yield path
    inner = list(value.items()) if isinstance(value, dict) else []
    inner = list(enumerate(value)) if isinstance(value, list) else inner
    for key, item in inner[:2] if len(inner) > 40 else inner:
        yield from places(item, (*path, key))


def changed_values(model: Path, name: str) -> Iterator[Case]:
    """Every place of a JSON file with every odd value."""
    original = json.loads((model / name).read_text())
    for place in places(original):
        for value in VALUES:

            def damage(folder: Path, place: Any = place, value: object = value) -> None:
                found = copy.deepcopy(original)
                inner = found
                for key in place[:-1]:
                    inner = inner[key]
                inner[place[-1]] = value
                write(folder / name, found)

            yield f"{name}: {'.'.join(map(str, place))} = {str(value)[:30]!r}", damage


def _nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


def _normalizer(folder: Path, *steps: dict[str, Any], part: str = "normalizer") -> None:
    found = json.loads((folder / "tokenizer.json").read_text())
    found[part] = {"type": "Sequence", f"{part}s": list(steps)}
    write(folder / "tokenizer.json", found)


def _deep_normalizer(folder: Path, depth: int) -> None:
    found = json.loads((folder / "tokenizer.json").read_text())
    step: dict[str, Any] = {"type": "NFC"}
    for _ in range(depth):
        step = {"type": "Sequence", "normalizers": [step]}
    write(folder / "tokenizer.json", found | {"normalizer": step})


def _tenfold(letter: str = "a") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": letter}, "content": letter * 10}


def _vocabulary_id(folder: Path, id_: int) -> None:
    found = json.loads((folder / "tokenizer.json").read_text())
    found["model"]["vocab"]["qqqq"] = id_
    write(folder / "tokenizer.json", found)


def bombs() -> Iterator[Case]:
    """Small files that become large."""
    for name in FILES:
        if name.endswith(".json"):
            yield f"{name}: nested", lambda f, n=name: write(f / n, _nested(900))
            yield f"{name}: nested deep", lambda f, n=name: write(f / n, _nested(100_000))
            yield f"{name}: keys twice", lambda f, n=name: write(f / n, '{"a": 1, "a": 2}')
            yield f"{name}: a list", lambda f, n=name: write(f / n, "[]")
            yield f"{name}: long", lambda f, n=name: _sparse(f / n, 600 << 20)
            yield f"{name}: zeros", lambda f, n=name: write(f / n, "\0" * 100)
    yield "nine normalizers of ten", lambda f: _normalizer(f, *[_tenfold()] * 9)
    yield "nine decoders of ten", lambda f: _normalizer(f, *[_tenfold()] * 9, part="decoder")
    regex = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 100}
    yield "a normalizer that matches nothing", lambda f: _normalizer(f, regex, regex)
    for depth in (100, 400):
        yield f"{depth} sequences", lambda f, d=depth: _deep_normalizer(f, d)
    for id_ in (4_000_000_000, 2**63, 10**30, 1 << 24, (1 << 24) - 1):
        yield f"vocabulary id {id_}", lambda f, i=id_: _vocabulary_id(f, i)
    for source in (
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{{ 'a' * 10**10 }}",
        "{%" * 9999,
        "{{ 'x'|center(10**10) }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% if 1 %}" * 300 + "{% endif %}" * 300,
    ):
        yield f"template {source[:12]!r}", lambda f, s=source: write(f / "chat_template.jinja", s)


def cases(model: Path, every: int) -> Iterator[Case]:
    """All of them, but of changed values only each `every`th."""
    yield from special_files()
    yield from bombs()
    for name in FILES:
        if name.endswith(".json"):
            yield from islice(changed_values(model, name), 0, None, every)


def load(folder: Path) -> None:
    """What a server reads before it is ready, but for the weights' values."""
    read_model(EngineConfig.from_values(model=str(folder)), "cpu")
    tokenizer = Tokenizer.load(folder)
    tokenizer.decode(tokenizer.encode("aaaa hello"))


def attempt(model: Path, folder: Path, damage: Callable[[Path], None]) -> tuple[int, float, str]:
    """Exit code, seconds and message of one case."""
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    damage(folder)
    reader, writer = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _child(folder, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        said = file.read().decode(errors="replace")
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status), time.monotonic() - began, said


def _child(folder: Path, writer: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    signal.alarm(SECONDS)
    code, message = 0, ""
    try:
        load(folder)
    except TpdetError as error:
        code, message = error.exit_code, str(error)
    except BaseException as error:
        code, message = 70, f"{type(error).__name__}: {error}"
    os.write(writer, message.encode(errors="replace")[:2000])
    os._exit(code)


def main() -> None:
    """Run the cases."""
    model, scratch, every = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    for number, (name, damage) in enumerate(cases(model, every)):
        found = attempt(model, scratch / str(number), damage)
        print(json.dumps([name, *found]), flush=True)


if __name__ == "__main__":
    main()
