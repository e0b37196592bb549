"""Runs of `tpdet verify` as they lie in a results file, read again for a page."""

import struct
from pathlib import Path
from typing import Any

import msgspec

from tpdet.checkpoint.model_config.json_file import read_text_file
from tpdet.errors import CheckpointError, UsageError
from tpdet.tools.verify.compare import Relation

MOST_RESULT_BYTES = 64 << 20


class VerifyRow(Relation, frozen=True, kw_only=True):
    """A relation of a model, as `result_rows` writes it."""

    model: str
    control: bool = False

    def check(self) -> None:
        """Refuse (ValueError) a row that contradicts itself, or bits of no numbers."""
        if self.equal and self.digest != self.reference:
            raise ValueError(f"a relation of {self.model[:80]!r} is equal, and its digests are not")
        if self.logit is not None:
            try:
                str(self.logit)
            except struct.error as error:
                raise ValueError(f"the bits of a logit are none ({error})") from None


class WorldSeconds(msgspec.Struct, frozen=True):
    """A world of ranks, which of the relations it ran, and how long that took, start and all."""

    tp: int
    part: str
    launcher: str
    transport: str
    nodes: int
    seconds: float


class VerifyRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run: its environment and its rows, as `run_record` and `verify` write them.

    began: when, in RFC 3339; seconds: of all worlds, which may overlap. fingerprints: of each dtype
    and mode ("bfloat16 tree").
    """

    bench: str
    rows: tuple[VerifyRow, ...]
    command: str
    date: str
    gpu: str
    gpus: int = 0
    torch: str = ""
    triton: str | None = None
    driver: str | None = None
    python: str = ""
    commit: str | None = None
    note: str = ""
    began: str | None = None
    seconds: float | None = None
    fingerprints: dict[str, str] = {}
    worlds: tuple[WorldSeconds, ...] = ()


def runs_of(records: Any) -> list[VerifyRun]:
    """The runs of a results file's records."""
    return msgspec.convert(records, list[VerifyRun])


def read_runs(path: Path) -> list[VerifyRun]:
    """The runs of an `--output`, oldest first. Raises NotFoundError, UsageError for others."""
    try:
        runs = msgspec.json.decode(read_text_file(path, MOST_RESULT_BYTES), type=list[VerifyRun])
        for row in (row for one in runs for row in one.rows):
            row.check()
    except CheckpointError as error:
        raise UsageError(f"{error}") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is no results file of tpdet verify ({error}): give one that --output wrote"
        ) from None
    if not any(one.rows for one in runs) or {one.bench for one in runs} != {"verify"}:
        raise UsageError(f"{path} has no run of tpdet verify: give a file that --output wrote")
    return runs
