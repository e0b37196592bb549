"""Writes the tables of docs/server.md from the code that they describe.

    python scripts/server_reference.py [--check]

Flags come from the parser, limits from the table that `--print-limits` prints, metrics from a
registry, fields from the models of request bodies, exit codes from the errors. With `--check`
nothing is written: the exit code is 1 when a table is stale.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for a checkout that is not installed

from tpdet import errors  # noqa: E402
from tpdet.requests.body.idle_fields import IDLE  # noqa: E402
from tpdet.requests.body.limits import all_limits  # noqa: E402
from tpdet.requests.body.schema import ChatBody, CompletionBody  # noqa: E402
from tpdet.scheduler.speculator import PLACES  # noqa: E402
from tpdet.scheduler.state_slots import StateCounts  # noqa: E402
from tpdet.server.front.engine_metrics import (  # noqa: E402
    DRAFT_COUNTERS,
    ENGINE_COUNTERS,
    ENGINE_GAUGES,
)
from tpdet.server.front.metrics import Metrics  # noqa: E402
from tpdet.server.settings.settings import make_parser  # noqa: E402
from tpdet.server.wire.protocol import Status  # noqa: E402

PAGE = ROOT / "docs" / "server.md"


def flags_table() -> list[str]:
    """Every flag of a server, in the parser's order."""
    lines = []
    for group in make_parser("tpdet serve")._action_groups[2:]:
        actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        if not actions:
            continue
        lines += ["", f"{group.title[:1].upper()}{group.title[1:]}:", ""] if lines else []
        lines += ["| flag | what it sets |", "|---|---|"]
        for action in actions:
            shown = " / ".join(f"`{name}`" for name in action.option_strings)
            if action.metavar:
                shown += " " + _cell(action.metavar.strip("{}").replace(",", " | "))
            lines.append(f"| {shown} | {_cell((action.help or '').replace('%%', '%'))} |")
    return lines


def limits_table() -> list[str]:
    """Every limit; ranges include their ends unless the name says "above"."""
    lines = ["| limit | value |", "|---|---|"]
    for name, value in all_limits().items():
        shown = f"{value[0]} to {value[1]}" if isinstance(value, list) else str(value)
        lines.append(f"| `{name}` | {shown} |")
    return lines


def fields_table() -> list[str]:
    """Every field of a body that asks for text."""
    lines = ["| field | completions | chat | type and range |", "|---|---|---|---|"]
    schemas = [
        {name: model.model_json_schema()["properties"][name] for name in model.model_fields}
        for model in (CompletionBody, ChatBody)
    ]
    for name in dict.fromkeys([*schemas[0], *schemas[1]]):
        here = ["yes" if name in schema else "" for schema in schemas]
        kinds = dict.fromkeys(_kind(schema[name]) for schema in schemas if name in schema)
        lines.append(f"| `{name}` | {here[0]} | {here[1]} | {'; in chat: '.join(kinds)} |")
    return lines


def idle_table() -> list[str]:
    """The known fields that take only values which ask for nothing."""
    lines = ["| field | taken | anything else is refused |", "|---|---|---|"]
    groups = {
        "": IDLE["chat"],
        "response_format.": IDLE["response_format"],
        "stream_options.": IDLE["stream_options"],
        "messages.": IDLE["message"],
    }
    for place, fields in groups.items():
        for name, idle in sorted(fields.items()):
            taken = ", ".join(f"`{json.dumps(value)}`" for value in idle.values)
            lines.append(f"| `{place}{name}` | {taken} | {_cell(idle.reason)} |")
    return lines


def metrics_table() -> list[str]:
    """Every metric a server can show, whatever its flags."""
    counters = dict.fromkeys((*ENGINE_COUNTERS, *ENGINE_GAUGES), 0.0)
    counters |= {"sequences_running": 0.0, "pages_used": 0.0, "pages_free": 1.0}
    counters |= dict.fromkeys(StateCounts.__struct_fields__, 0.0)
    kinds = (*DRAFT_COUNTERS, *(f"accepted_at.{place}" for place in range(PLACES)))
    counters |= {f"ngram.{kind}": 0.0 for kind in kinds}
    metrics = Metrics("m", lambda: Status("accepting", 0, 0, counters))
    metrics.outcome("completed")  # a metric with labels has no sample before its first event
    metrics.rejected("engine_overloaded")
    metrics.finished("stop", 0.0)
    metrics.answer_cache("hit")
    metrics.tally.set("answer_cache_bytes", 1.0)
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for name, kind, labels, text in metrics.described():
        shown = ", ".join(f"`{label}`" for label in labels)
        lines.append(f"| `{name}` | {kind} | {shown} | {_cell(text)} |")
    return lines


def exits_table() -> list[str]:
    """Every exit code, with the docstrings of its errors."""
    found: dict[int, list[str]] = {0: ["drained, or stopped while idle."]}
    for kind in vars(errors).values():
        if isinstance(kind, type) and "exit_code" in vars(kind):
            text = " ".join((kind.__doc__ or "").split())
            if kind is errors.TpdetError:
                text = "A fault of the server's own; the log has the details."
            found.setdefault(kind.exit_code, []).append(f"`{kind.code}`: {text}")
    lines = ["| exit code | why |", "|---|---|"]
    return lines + [f"| {code} | {_cell(' '.join(found[code]))} |" for code in sorted(found)]


TABLES: dict[str, Callable[[], list[str]]] = {
    "flags": flags_table,
    "limits": limits_table,
    "fields": fields_table,
    "idle fields": idle_table,
    "metrics": metrics_table,
    "exit codes": exits_table,
}


def with_tables(page: str) -> str:
    """The page with every table made anew. Raises ValueError if a table's marks are missing."""
    for name, make in TABLES.items():
        first, last = f"<!-- {name}: made by scripts/server_reference.py -->\n", "<!-- end -->"
        head, found, rest = page.partition(first)
        _, closed, tail = rest.partition(last)
        if not found or not closed:
            raise ValueError(f"docs/server.md has no place for the table of {name}: {first}{last}")
        page = head + first + "\n" + "\n".join(make()) + "\n\n" + last + tail
    return page


def _kind(schema: dict[str, Any]) -> str:
    """A JSON schema in few words."""
    if "anyOf" in schema:
        kinds = (_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
        return ", or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        return f"object `{schema['$ref'].rpartition('/')[2]}`"
    kind = schema.get("type", "any")
    size = f" of at most {schema['maxItems']}" if "maxItems" in schema else ""
    if kind == "array":
        return f"array{size} of ({_kind(schema.get('items', {}))})"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        size = f" of at most {schema['maxProperties']}" if "maxProperties" in schema else ""
        return f"object{size} of ({_kind(schema['additionalProperties'])})"
    words = (
        ("minimum", ">= "), ("exclusiveMinimum", "> "), ("maximum", "<= "),
        ("minLength", "length >= "), ("maxLength", "length <= "),
    )  # fmt: skip
    ranges = [f"{word}{schema[key]}" for key, word in words if key in schema]
    return ", ".join([kind, *ranges])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    page = PAGE.read_text()
    wanted = with_tables(page)
    if not check:
        PAGE.write_text(wanted)
    elif page != wanted:
        print("docs/server.md is stale: run python scripts/server_reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
