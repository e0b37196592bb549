"""Tasks for agents: what a user asks, tools, and what a model says to it, turn by turn."""

import json
from collections.abc import Callable
from itertools import groupby
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field

from tests.server.parrot import called

Json = dict[str, Any]
City = Annotated[str, Field(max_length=12, description="its name in its own language")]
Count = Annotated[int, Field(ge=0, le=99)]


class Person(BaseModel):
    """Somebody who is invited."""

    name: Annotated[str, Field(max_length=12)]
    email: Annotated[str, Field(max_length=20)]


def get_weather(city: City, unit: Literal["c", "f"]) -> str:
    """Tell the weather of a city, as it is now."""
    return f"{len(city) + 11} degrees {unit}, {'rain' if len(city) % 2 else 'sun'}"


def search(query: Annotated[str, Field(max_length=24)], limit: Count) -> str:
    """Find lines in all files; one line each, with its file and its number."""
    found = [f"src/{name}.py:{10 * len(name)}: {query}" for name in ("pages", "rows", "step")]
    return "\n".join(found[:limit]) or "nothing found"


def read_file(path: Annotated[str, Field(pattern="^[a-z]{1,8}(\\.py|\\.md)$")]) -> str:
    """Read a file of the project."""
    if path.endswith(".md"):
        return f"Error: {path}: no such file"
    return f'"""{path}: counts pages."""\n\n\ndef pages(tokens):\n\treturn -(-tokens // 256)\n'


def write_file(path: Annotated[str, Field(pattern="^[a-z]{1,8}\\.py$")], text: str) -> str:
    """Write a file of the project, whole."""
    return json.dumps({"path": path, "bytes": len(text.encode())})


def run_command(command: Annotated[list[str], Field(min_length=1, max_length=3)]) -> str:
    """Run a program, and tell what it printed."""
    return f"$ {' '.join(command)}\n3 passed, 1 failed: test_last_page\n[exit code 1]"


def create_event(title: str, attendees: list[Person], room: Literal["4.12", "Süd"]) -> str:
    """Put a meeting into the calendar."""
    return f"“{title}” in {room}, {len(attendees)} people ✓"


def add_up(numbers: Annotated[list[Count], Field(min_length=1, max_length=4)]) -> str:
    """Add numbers."""
    return str(sum(numbers))


def now() -> str:
    """Tell the time."""
    return "2026-11-27T12:00:00+00:00"


class Task(NamedTuple):
    """What users ask in turn; the tools; what a model says, a text a turn."""

    asked: tuple[str, ...]
    tools: tuple[Callable[..., str], ...]
    said: tuple[str, ...]


_ANA = [{"name": "Ana", "email": "ana@example.com"}, {"name": "Bo", "email": "bo@example.com"}]
TASKS = (
    Task(
        ("What is the weather in Paris and in 東京?", "Thanks! And in Köln, in Fahrenheit?"),
        (get_weather, now),
        (
            "\n".join(called("get_weather", city=city, unit="c") for city in ("Paris", "東京")),
            "Paris has 16 degrees and rain, 東京 13 and sun.",
            called("get_weather", city="Köln", unit="f"),
            "15 degrees F, and sun.",
        ),
    ),
    Task(
        ("Why does the test of the last page fail? Please fix it.",),
        (search, read_file, write_file, run_command),
        (
            f"I look for it.\n\n{called('search', query='last_page', limit=2)}",
            called("read_file", path="notes.md"),
            f"There are no notes.\n\n{called('read_file', path='pages.py')}",
            called("write_file", path="pages.py", text="def pages(tokens):\n\treturn 1\n"),
            called("run_command", command=["pytest", "-q"]),
            "One test fails still: the last page is rounded up twice.",
        ),
    ),
    Task(
        ("Invite Ana and Bo to the review in Süd.", "What is 17 + 4 + 21?", "And twice that?"),
        (create_event, add_up),
        (
            called("create_event", title="Review: café ☕", attendees=_ANA, room="Süd"),
            "Both are invited.",
            called("add_up", numbers=[17, 4, 21]),
            "42",
            called("add_up", numbers=[42, 42]),
            "84",
        ),
    ),
    Task(
        ("Is it late, and is it cold in São Paulo? Think first.",),
        (now, get_weather, search),
        (
            f"<think>\nTwo tools.\n</think>\n\n{called('now')}",
            "<think>\nNoon.\n</think>\n\nIt is noon.\n\n"
            + called("get_weather", city="São Paulo", unit="c"),
            "No, and no: 20 degrees.",
        ),
    ),
    Task(
        ("Which of 9.9 and 9.11 is larger?", "Say it in one word."),
        (add_up,),
        ("9.9 is larger: 9.90 against 9.11.", "9.9"),
    ),
    Task(
        ("Read rows.py and step.py, and add their sizes.",),
        (read_file, add_up),
        (
            f"{called('read_file', path='rows.py')}\n{called('read_file', path='step.py')}",
            called("add_up", numbers=[81, 81]),
            "162 bytes.",
        ),
    ),
)
INSTRUCTIONS = "You are an agent of a small project. Use the tools, and be brief. " * 8


def model_turns(body: Json) -> int:
    """How often the model has spoken in the history that a request sends."""
    history = body.get("messages") or body.get("input")
    if not isinstance(history, list):
        return 0
    own = [
        item.get("role") == "assistant"
        or item.get("type") in ("reasoning", "function_call", "custom_tool_call")
        for item in history
    ]
    if "messages" in body:
        return sum(own)
    return sum(1 for is_own, _ in groupby(own) if is_own)


def answer_to(body: Json) -> str | None:
    """What the model says to a request about a task; None for any other."""
    text = json.dumps(body.get("messages") or body.get("input"), ensure_ascii=False)
    for task in TASKS:
        if task.asked[0] in text:
            return task.said[min(model_turns(body), len(task.said) - 1)]
    return None
