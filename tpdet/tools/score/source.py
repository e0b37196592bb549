"""Reads what is to be scored: a file, standard input, a text or a list of token ids."""

import argparse
from typing import NamedTuple

import msgspec

from tpdet.client.input_file import STDIN, read_by_each_rank
from tpdet.errors import UsageError

_MAX_BYTES = 64 << 20
"""The most bytes of a text: far more than any context holds."""


class ScoredSource(NamedTuple):
    """A text, or else token ids; `name` is what messages call it."""

    name: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None


def read_source(options: argparse.Namespace) -> ScoredSource:
    """The one source that the flags name.

    Raises UsageError for none or several, for an empty text and for what is no UTF-8 or no list of
    ids; and what `read_by_each_rank` raises.
    """
    given = [
        *(("FILE", path) for path in [options.file] if path is not None),
        *(("--prompt", text) for text in options.prompt or ()),
        *(("--tokens", path) for path in options.tokens or ()),
    ]
    if len(given) != 1:
        said = " and ".join(flag for flag, _ in given) or "none"
        raise UsageError(f"give one of FILE, --prompt and --tokens, not {said}")
    flag, value = given[0]
    if flag == "--tokens":
        if options.add_special_tokens is not None:
            raise UsageError("--add-special-tokens is for texts: leave it out beside --tokens")
        name = f"--tokens {value}"
        return ScoredSource(name, token_ids=_ids(_read(value), name))
    name = flag if flag == "--prompt" else _shown(value)
    text = value if flag == "--prompt" else _decoded(_read(value), name)
    if not text:
        raise UsageError(f"{name} is empty: give a text")
    return ScoredSource(name, text=text)


def _read(path: str) -> bytes:
    return read_by_each_rank(path, "give a file, or --prompt TEXT", _MAX_BYTES)


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert it "
            "(iconv -t UTF-8)"
        ) from None


def _ids(data: bytes, name: str) -> tuple[int, ...]:
    try:
        return tuple(msgspec.json.decode(data, type=list[int]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{name}: {error}: give a JSON list of ids, such as [5, 6, 7]") from None


def _shown(path: str) -> str:
    return "standard input" if path == STDIN else path
