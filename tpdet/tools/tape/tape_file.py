"""A tape on disk: JSON lines of what a client asked and got, and of the ids that the answers are.

The first line names the format, the last one the number of turns. A turn's line comes when its
answer has ended, so the lines of turns that ran together may come in any order. Needs no torch.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import blake3
import msgspec

from tpdet import __version__
from tpdet.checkpoint.model_config.json_file import json_object
from tpdet.client.input_file import numbered_lines, read_input
from tpdet.errors import CheckpointError, NotPermittedError, RequestError, ResourceError, UsageError
from tpdet.launch.host.resources import resource_error
from tpdet.requests.body.messages_blocks import BILLING
from tpdet.requests.routes import RECORDED

FORMAT = "tpdet-tape-1"
Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"
"""The last event of a stream that came to its end."""
ENDS = (DONE, b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
"""The same, and that of a message's."""
Ended = Literal["whole", "client_left", "server_lost"]
Source = Literal["server", "tape", "edit"]

UNREAD = frozenset({
    "user", "metadata", "client_metadata", "safety_identifier", "session_id", "prompt_cache_key",
    "context_management",
})  # fmt: skip
"""Fields of a request that no answer depends on: a canonical request has none."""
_HINT = "cache_control"  # of no effect either, in messages and their parts too


class Binary(msgspec.Struct, frozen=True):
    """Bytes that are no UTF-8."""

    base64: bytes


class Head(msgspec.Struct, frozen=True, tag_field="object", tag="tape"):
    """The first line. chat_template_date: the server's, which its chat template prints."""

    format: str
    version: str
    chat_template_date: str | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="turn"):
    """A request, and the answer that its client got. `turn` counts by arrival, from 1.

    path: with its query. status: None where no answer began. event_stream: whether the answer was
    one. answer: the body as it was passed on. ended: how. source: what gave the answer.
    """

    turn: int
    method: str
    path: str
    request: str | Binary
    status: int | None = None
    event_stream: bool = False
    answer: str | Binary = ""
    ended: Ended = "whole"
    source: Source = "server"

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"turn {self.turn}"

    @property
    def url(self) -> str:
        """The path without its query."""
        return self.path.partition("?")[0]

    @property
    def body(self) -> Json | None:
        """The request's JSON object; None for anything else."""
        return json_object(bytes_of(self.request))

    @property
    def is_answer(self) -> bool:
        """Whether a model answered, whole, on a route whose answers can be computed again."""
        asked = self.method == "POST" and self.url in RECORDED and self.body is not None
        whole = self.status == 200 and self.ended == "whole"
        if self.event_stream and not bytes_of(self.answer).endswith(ENDS):
            return False  # an error was the last event
        return asked and whole and self.source != "edit"


class Ids(msgspec.Struct, frozen=True, tag_field="object", tag="ids"):
    """The answer of a turn once more, as `tpdet run-batch --record` keeps it: with ids and bits.

    body: None where there is none, for this reason.
    """

    turn: int
    body: Json | None
    reason: str = ""

    @property
    def origin(self) -> Json:
        """What the answer says of itself under `tpdet`; empty where it says nothing."""
        origin = (self.body or {}).get("tpdet")
        return origin if isinstance(origin, dict) else {}


class End(msgspec.Struct, frozen=True, tag_field="object", tag="end"):
    """The last line."""

    turns: int


TapeLine = Head | Turn | Ids | End
_decoder = msgspec.json.Decoder(TapeLine)


class RunTape(NamedTuple):
    """A tape that was read. ids: by turn; is_whole: its recording came to its end."""

    path: str
    head: Head
    turns: list[Turn]
    ids: dict[int, Ids]
    is_whole: bool

    def turn(self, number: int) -> Turn:
        """A turn by its number. Raises UsageError."""
        for turn in self.turns:
            if turn.turn == number:
                return turn
        raise UsageError(f"--turn {number}: {self.path} has {len(self.turns)} turns")

    @property
    def digest(self) -> str:
        """One name for a run, of its canonical requests and the replay digests of its answers.

        64 hex digits of BLAKE3. Equal runs have one name, whatever their ids, their times and the
        order of turns that ran together.
        """
        digest = blake3.blake3(f"{FORMAT}\n".encode())
        for row in sorted(map(self._digest_of, self.turns)):
            digest.update(row)
        return digest.hexdigest()

    def _digest_of(self, turn: Turn) -> bytes:
        """A turn's part of the digest, 32 bytes; an edited answer counts by its bytes."""
        ids = self.ids.get(turn.turn)
        answer = None if ids is None else ids.origin.get("replay_digest")
        if turn.source == "edit":
            answer = blake3.blake3(bytes_of(turn.answer)).hexdigest()
        request = bytes_of(turn.request)
        asked = request.hex() if turn.body is None else canonical(turn.body)
        row = [turn.method, turn.path, asked, turn.status, turn.ended, answer]
        return blake3.blake3(json.dumps(row, sort_keys=True).encode()).digest()


class TapeWriter:
    """Writes a new tape, of mode 0600, line by line. `failure`: why it ended early, if it did."""

    def __init__(self, path: Path, date: str | None) -> None:
        """Raises UsageError for a file that exists, NotPermittedError where none can be made."""
        self.path, self.turns = path, 0
        self.failure: ResourceError | None = None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        try:
            self._file = os.open(path, flags, 0o600)
        except FileExistsError:
            raise UsageError(
                f"{path} exists, and a tape is never written over: name another with --output"
            ) from None
        except OSError as error:
            raise NotPermittedError(
                f"{path} cannot be written ({error.strerror}): name another with --output"
            ) from None
        self._size = 0
        self.add(Head(FORMAT, __version__, date))

    def add(self, line: TapeLine) -> None:
        """Write a line; where there is no room for it, this is the end of the tape."""
        if self.failure is not None:
            return
        data = msgspec.json.encode(line) + b"\n"
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)  # so that it ends with a whole line
            error.filename = str(self.path)
            self.failure = resource_error(error) or ResourceError(
                f"{self.path} cannot be written ({error.strerror})"
            )
            return
        self._size += len(data)
        self.turns += isinstance(line, Turn)

    def close(self) -> None:
        """End the tape."""
        self.add(End(self.turns))
        os.close(self._file)


def read_tape(path: str) -> RunTape:
    """The tape in a file. Raises NotFoundError, NotPermittedError, CheckpointError of a line."""
    lines = [*_lines(path)]
    head = lines[0] if lines else None
    if not isinstance(head, Head) or head.format != FORMAT:
        raise CheckpointError(f"{path} is no tape of the format {FORMAT}: record one, tape record")
    turns: dict[int, Turn] = {}
    ids: dict[int, Ids] = {}
    ends = [line for line in lines if isinstance(line, End)]
    for line in lines:
        kept: dict[int, Any] = turns if isinstance(line, Turn) else ids
        if isinstance(line, Turn | Ids) and kept.setdefault(line.turn, line) is not line:
            raise CheckpointError(f"{path} has turn {line.turn} twice: record it again")
    whole = [*sorted(turns)] == [*range(1, len(turns) + 1)]
    if ends and not (whole and ends[0].turns == len(turns)):
        raise CheckpointError(
            f"{path} ends with {ends[0].turns} turns, and has the turns {_few(sorted(turns))}: "
            "lines are missing, record it again"
        )
    return RunTape(path, head, [turns[number] for number in sorted(turns)], ids, bool(ends))


def content_of(data: bytes) -> str | Binary:
    """Bytes as they stand on a tape."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return Binary(data)


def bytes_of(content: str | Binary) -> bytes:
    """The bytes that stand on a tape."""
    return content.base64 if isinstance(content, Binary) else content.encode()


def canonical(body: Json) -> Json:
    """A request's JSON without what no answer depends on."""
    kept: Json = _without_hints(body)
    if isinstance(kept.get("system"), list):
        kept["system"] = [block for block in kept["system"] if not _is_billing(block)]
    return {key: value for key, value in kept.items() if key not in UNREAD}


def _is_billing(block: Any) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith(BILLING)


def _without_hints(value: Any) -> Any:
    if isinstance(value, dict):
        hint = value.get(_HINT)
        is_hint = isinstance(hint, dict) and hint.get("type") == "ephemeral"
        kept = {key: one for key, one in value.items() if key != _HINT or not is_hint}
        return {key: _without_hints(one) for key, one in kept.items()}
    return [*map(_without_hints, value)] if isinstance(value, list) else value


def _lines(path: str) -> Iterator[TapeLine]:
    for number, data in numbered_lines(read_input(path, "give a tape")):
        try:
            yield _decoder.decode(data)
        except (msgspec.DecodeError, ValueError, RequestError) as error:
            raise CheckpointError(
                f"{path}, line {number} is no line of a tape ({error}): it is damaged or cut off"
            ) from None


def _few(numbers: Sequence[int], most: int = 12) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown + (", ..." if len(numbers) > most else "")
