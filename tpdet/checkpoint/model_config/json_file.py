"""Reads JSON files of a checkpoint strictly: one object, no duplicate keys, finite numbers."""

import json
import math
import re
from pathlib import Path
from typing import Any

from tpdet.errors import CheckpointError, NotFoundError
from tpdet.launch.host.regular_file import NotRegularError, open_regular

MAX_JSON_BYTES = 1 << 20
"""The default limit of a file's size."""

_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # half of the escape of a character past U+FFFF


def read_text_file(
    path: Path, max_bytes: int, remedy: str = "give a complete Hugging Face directory"
) -> str:
    """The text of a UTF-8 file; never blocks on a pipe. remedy: where there is no such file.

    Raises NotFoundError if there is none, CheckpointError if it is no regular file, longer than
    `max_bytes` or not UTF-8.
    """
    try:
        with open_regular(path) as file:
            data = file.read(max_bytes + 1)
    except NotRegularError as error:
        raise CheckpointError(f"{path}: {error.strerror}: put the file in its place") from None
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{path} does not exist: {remedy}") from None
    except OSError as error:
        raise NotFoundError(f"{path} cannot be read ({error.strerror}): check it") from error
    if len(data) > max_bytes:
        raise CheckpointError(f"{path} is over the limit of {max_bytes} bytes: it is no such file")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is not UTF-8 (byte {error.start}): it is damaged, download it again"
        ) from None


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file.

    Raises NotFoundError if it is absent; CheckpointError for a syntax error, duplicate keys, NaN,
    infinity or a number too large, a lone surrogate, anything but an object, and a file over
    `max_bytes`.
    """
    return parse_json_object(read_text_file(path, max_bytes), str(path))


def json_object(data: bytes | str) -> dict[str, Any] | None:
    """The JSON object that this is, which need not be strict; None for anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def parse_json_object(
    text: str, file: str, remedy: str = "it is damaged, download it again"
) -> dict[str, Any]:
    """As `read_json_object`, from text; `file` is its name in messages, `remedy` their end."""

    def number(literal: str) -> float:
        value = float(literal)
        if not math.isfinite(value):
            raise CheckpointError(f"{file}: the number {literal} is not finite: correct it")
        return value

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise CheckpointError(f"{file}: duplicate key {key!r}: keep one of them")
            found[key] = value
        return found

    try:
        value = json.loads(
            text, object_pairs_hook=members, parse_constant=number, parse_float=number
        )
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{file} is nested too deeply: {remedy}") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}): {remedy}") from None
    if _HALF_PAIR.search(text):
        _refuse_lone_surrogates(value, file, remedy)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds {type(value).__name__}, not an object: correct it")
    return value


def _refuse_lone_surrogates(value: object, file: str, remedy: str) -> None:
    """Refuse half a surrogate pair: it is not Unicode, so no message could contain it."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{file} holds a lone surrogate (U+{ord(error.object[error.start]):04X}): {remedy}"
        ) from None
