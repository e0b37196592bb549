"""Golden files: recorded answers by name, as JSON that is read in a diff.

`{"format": "tpdet-golden-1", "goldens": {NAME: ANSWER}}`. An answer is what a line of
`tpdet run-batch --record` has, without names and times. Needs no torch.
"""

import fcntl
import json
import os
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tpdet.checkpoint.model_config.json_file import parse_json_object
from tpdet.client.input_file import read_input, text_of
from tpdet.errors import CheckpointError, NotPermittedError
from tpdet.launch.host.whole_file import write_text

FORMAT = "tpdet-golden-1"
_REMEDY = (
    "restore it, or delete it and write it anew (pytest --tpdet-update, or tpdet golden record)"
)
_COLUMNS = 98
Json = dict[str, Any]


def read_goldens(path: Path) -> dict[str, Json]:
    """The answers of a file by name; none where there is no file.

    Raises CheckpointError for a file of another form, NotPermittedError for one that is not
    readable.
    """
    if not path.exists():
        return {}
    text = text_of(read_input(str(path), _REMEDY), str(path), _REMEDY)
    content = parse_json_object(text, str(path), _REMEDY)
    goldens = content.get("goldens")
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {content.get('format')!r:.60}, and this tpdet reads {FORMAT}: "
            f"take the tpdet that wrote it, or {_REMEDY}"
        )
    if not isinstance(goldens, dict) or not all(isinstance(g, dict) for g in goldens.values()):
        raise CheckpointError(f"{path} has no object `goldens` of objects: {_REMEDY}")
    return goldens


def write_goldens(path: Path, changes: Mapping[str, Json | None]) -> None:
    """Write answers into a file, beside the others that it has; None deletes one.

    The file appears whole, also where several processes write; without answers it goes.
    Raises NotPermittedError where the folder cannot be written, else as `read_goldens`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _only_writer(path.parent):
            goldens: dict[str, Json | None] = {**read_goldens(path), **changes}
            kept = {name: goldens[name] for name in sorted(goldens) if goldens[name] is not None}
            if not kept:
                path.unlink(missing_ok=True)
                return
            write_text(path, _pretty({"format": FORMAT, "goldens": kept}) + "\n")
            path.chmod(0o644)  # it is committed, and holds no secret
    except OSError as error:
        if isinstance(error, CheckpointError | NotPermittedError):
            raise
        raise NotPermittedError(
            f"{path} cannot be written ({error.strerror}): make room in its folder, or make it "
            "writable"
        ) from error


def stored_form(line: Json) -> Json:
    """A line of `run-batch --record` as a golden file has it: the same bytes for equal answers."""
    response = line["response"]
    body = response["body"] | {"id": "golden", "created": 0}
    return {
        "request": line["request"],
        "response": {**response, "request_id": "golden", "body": body},
        "error": None,
    }


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Holds the folder's lock: goldens of one file may come from several processes of pytest."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _pretty(value: Any, indent: str = "") -> str:
    """JSON with a line for each value; numbers and texts of an array share lines."""
    inner = indent + " "
    if isinstance(value, dict) and value:
        rows = (f"{_text(key)}: {_pretty(one, inner)}" for key, one in value.items())
        return "{\n" + ",\n".join(inner + row for row in rows) + f"\n{indent}}}"
    if isinstance(value, list) and value:
        if any(isinstance(one, dict | list) for one in value):
            rows = (_pretty(one, inner) for one in value)
            return "[\n" + ",\n".join(inner + row for row in rows) + f"\n{indent}]"
        line = ", ".join(map(_text, value))
        has_blanks = any(isinstance(one, str) and " " in one for one in value)
        short = len(inner) + len(line) < _COLUMNS
        return f"[{line}]" if short or has_blanks else _wrapped(line, indent)
    return _text(value)


def _wrapped(line: str, indent: str) -> str:
    """An array's values, none with a blank in it, in lines of about `_COLUMNS` characters."""
    inner = indent + " "
    return (
        "[\n"
        + textwrap.fill(
            line,
            _COLUMNS,
            initial_indent=inner,
            subsequent_indent=inner,
            break_long_words=False,
            break_on_hyphens=False,
        )
        + f"\n{indent}]"
    )


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
