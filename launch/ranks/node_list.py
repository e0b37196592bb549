"""Reads Slurm's short forms: a list of hosts ("gpu[01-03,07],login"), tasks of nodes ("8(x2),4").

The forms are those of `scontrol show hostnames` and of SLURM_TASKS_PER_NODE in `man sbatch`. We do
not call `scontrol`, because every rank reads the list and a container has no `scontrol`.
"""

import re
from collections.abc import Iterator
from itertools import islice, product

from tpdet.errors import UsageError

_MAX_HOSTS = 65536
_PART = re.compile(r"(?:[^,\[\]]|\[[0-9,-]+\])+", re.ASCII)
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_TASKS = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?", re.ASCII)


def hosts(text: str) -> list[str]:
    """The hosts of a list, in its order. Raises UsageError for any other text."""
    names = list(islice(_hosts(text), _MAX_HOSTS + 1))
    if len(names) > _MAX_HOSTS:
        raise UsageError(f"Slurm's node list {text[:100]!r} names over {_MAX_HOSTS} hosts")
    return names


def first_host(text: str) -> str:
    """The first host of a list. Raises UsageError for what is no such list."""
    return next(_hosts(text))


def tasks_on_node(text: str, node: int) -> int:
    """How many tasks node `node` (from 0) has. Raises UsageError if the text names none."""
    left = node
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            break
        left -= int(match[2] or 1)
        if left < 0:
            return int(match[1])
    raise UsageError(f"Slurm's tasks per node, {text[:100]!r}, do not tell those of node {node}")


def _hosts(text: str) -> Iterator[str]:
    position = 0
    while True:
        match = _PART.match(text, position)
        if match is None or text[match.end() : match.end() + 1] not in ("", ","):
            raise UsageError(f"{text[:100]!r} is not a node list such as gpu[01-03],login")
        pieces = re.split(r"\[([0-9,-]+)\]", match[0])
        yield from map("".join, product(*_choices(pieces, text)))
        position = match.end() + 1
        if match.end() == len(text):
            return


def _choices(pieces: list[str], text: str) -> list[list[str]]:
    """The spellings of each piece; every second piece is what stood in brackets."""
    choices = [[piece] for piece in pieces]
    for index in range(1, len(pieces), 2):
        choices[index] = []
        for part in pieces[index].split(","):
            match = _RANGE.fullmatch(part)
            first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
            count = int(last) - int(first) + 1
            if not 0 < count <= _MAX_HOSTS:
                raise UsageError(f"{text[:100]!r}: {part!r} is not a range of hosts")
            choices[index] += [
                str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)
            ]
    return choices
