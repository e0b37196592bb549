"""A file that is sent as multipart/form-data, written to the disk as it comes.

The parser is python-multipart's (`tpdet[batches]`), which is fed in a thread.
"""

import asyncio
from importlib.util import find_spec
from typing import IO

from tpdet.errors import UsageError
from tpdet.requests.body import limits
from tpdet.requests.body.problems import ApiError, bad_request

PURPOSE = "batch"
_FORM = b"multipart/form-data"
_MOST_FIELD_BYTES = 1 << 10


def check_installed() -> None:
    """Raise UsageError where files cannot be received."""
    if find_spec("python_multipart") is None:
        raise UsageError(
            "--batch-dir receives files, which needs a package more: pip install 'tpdet[batches]'"
        )


class Upload:
    """The form of one file: its name and its purpose, once all of it was fed."""

    def __init__(self, content_type: bytes, target: IO[bytes]) -> None:
        """target: what the file's bytes are written to. Raises ApiError for another type."""
        from python_multipart.multipart import (
            MAX_BOUNDARY_LENGTH,
            MultipartParser,
            parse_options_header,
        )

        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind.lower() != _FORM or not 1 <= len(boundary) <= MAX_BOUNDARY_LENGTH:
            raise ApiError(
                415,
                "a file is sent as multipart/form-data with a boundary, in its field `file`, "
                "beside a field `purpose`",
                param="content-type",
            )
        self._options = parse_options_header
        self._target, self.bytes = target, 0
        self.filename: str | None = None
        self._fields: dict[str, bytes] = {}
        self._header, self._value, self._name = b"", b"", ""
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._part_data,
                "on_end": self._end,
            },
        )

    async def feed(self, data: bytes) -> None:
        """Take the next bytes. Raises ApiError for what no such form has, OSError by the disk."""
        from python_multipart.exceptions import FormParserError

        try:
            await asyncio.to_thread(self._parser.write, data)
        except FormParserError:
            raise bad_request("the body is not multipart/form-data by its boundary") from None

    def finish(self) -> str:
        """The file's name. Raises ApiError where a part is missing or wrong."""
        if not self._ended:
            raise bad_request("the body ends before its closing boundary: send all of it")
        if self.filename is None:
            raise bad_request("there is no file: send it in the field `file`", "file")
        purpose = self._fields.get("purpose", b"").decode("utf-8", "replace")
        if purpose != PURPOSE:
            shown = f", not {purpose[:40]!r}" if purpose else ""
            raise bad_request(
                f"files are for batches here: send purpose {PURPOSE}{shown}", "purpose"
            )
        return self.filename

    def _begin_part(self) -> None:
        self._name = ""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        name, value = self._header.lower(), self._value
        self._header = self._value = b""
        if name != b"content-disposition":
            return
        _, options = self._options(value)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == "file":
            if self.filename is not None:
                raise bad_request("there are two files: send one a request", "file")
            self.filename = _base_name(options.get(b"filename", b""))

    def _end_headers(self) -> None:
        if self._name not in ("file", "purpose"):
            name = self._name.partition("[")[0][:64]
            if name == "expires_after":
                remedy = "files are kept until DELETE /v1/files/ID: leave it out"
                raise bad_request(f"expires_after: {remedy}", name, "not_supported")
            raise bad_request(f"{name!r} is no field of a file", name or None, "unknown_field")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name != "file":
            field = self._fields.get(self._name, b"") + data[start:end]
            if len(field) > _MOST_FIELD_BYTES:
                raise bad_request(f"{self._name} is over {_MOST_FIELD_BYTES} bytes", self._name)
            self._fields[self._name] = field
            return
        self.bytes += end - start
        if self.bytes > limits.MAX_FILE_BYTES:
            raise too_large()
        self._target.write(memoryview(data)[start:end])

    def _end(self) -> None:
        self._ended = True


def too_large() -> ApiError:
    """The answer for a file over the limit."""
    return ApiError(413, f"the file is over {limits.MAX_FILE_BYTES} bytes: split it", param="file")


def _base_name(name: bytes) -> str:
    """The last part of a path, which is shown and names nothing on the disk."""
    text = name.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    return text[: limits.MAX_NAME_CHARACTERS] or "file"
