"""Atomic file writes: a temporary file is written beside the target, then renamed."""

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpdet.launch.host.regular_file import refuse_special


def write_json(path: Path, content: Mapping[str, Any], only_first: bool = False) -> bool:
    """Write canonical JSON so that `path` appears whole; False if `only_first` and it exists."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":")) + "\n"
    return write_text(path, text, only_first)


def write_text(path: Path, text: str, only_first: bool = False) -> bool:
    """Write a file of mode 0600 so that it appears whole; False if `only_first` and it exists.

    Raises NotRegularError where a device, a pipe or a folder has this name.
    """
    refuse_special(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
    except OSError:  # a full disk: do not leave a partial file behind
        temporary.unlink(missing_ok=True)
        raise
    if not only_first:
        temporary.replace(path)
        return True
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None if there is no such file, or none that can be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
