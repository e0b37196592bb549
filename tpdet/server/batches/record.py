"""A batch and a file as clients see them: OpenAI's objects."""

import secrets
import time
from typing import Any

import msgspec

from tpdet.requests.body import limits

Json = dict[str, Any]
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
"""The states of a batch that is worked on."""


def new_id(kind: str) -> str:
    """A name that nobody can guess: "file-" or "batch_" and 32 hex digits."""
    return f"{kind}{secrets.token_hex(16)}"


class BatchFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file. `batch`: whose output it is, None for one that was sent; `failed`: of its errors."""

    id: str
    owner: str
    created: int
    filename: str
    bytes: int
    batch: str | None = None
    failed: bool = False

    def shown(self) -> Json:
        """OpenAI's object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created,
            "expires_at": None,
            "filename": self.filename,
            "purpose": "batch" if self.batch is None else "batch_output",
            "status": "processed",
            "status_details": None,
        }


class Batch(msgspec.Struct, kw_only=True):
    """A batch; times are Unix times. `counts` are (all, answered, failed) requests.

    `problems` are those of its lines, for which it is not begun; `digest` is of its output, empty
    before there is one and once something of it was erased. `expired`: its end has
    begun, as its time was over.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    status: str = "validating"
    metadata: dict[str, str] | None = None
    problems: tuple[Json, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    times: dict[str, int] = {}
    counts: tuple[int, int, int] = (0, 0, 0)
    digest: str = ""
    expired: bool = False

    @property
    def expires_at(self) -> int:
        """When it ends, with the answers that there are."""
        return self.created_at + limits.BATCH_SECONDS

    def enter(self, status: str) -> None:
        """Be in another state from now on."""
        self.status = status
        self.times = {**self.times, f"{status}_at": int(time.time())}

    def shown(self) -> Json:
        """OpenAI's object, and under `tpdet` the digest of its output."""
        moments = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling",
                   "cancelled")  # fmt: skip
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": [*self.problems]} if self.problems else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in moments},
            "request_counts": dict(zip(("total", "completed", "failed"), self.counts, strict=True)),
            "metadata": self.metadata,
            "tpdet": {"output_digest": self.digest or None},
        }
