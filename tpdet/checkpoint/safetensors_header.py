"""Reads the header of a safetensors file, and refuses one that lies about it; makes new ones.

The library checks headers, too, but names no tensor. The format: 8 bytes of length, a JSON object
of that length, and the tensors' bytes without a gap, each at its `data_offsets` from there.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from tpdet.checkpoint.model_config.json_file import parse_json_object
from tpdet.errors import CheckpointError, NotFoundError
from tpdet.launch.host.regular_file import NotRegularError, open_regular

# Limits far above every model, so that no number of a file can fill a machine's memory.
MAX_HEADER_BYTES = 16 << 20
_MOST_DIMENSIONS = 8

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_KEYS = {"dtype", "shape", "data_offsets"}
_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""The bits of a value, by dtype."""


@dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor of a file; offset and size: its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


def read_safetensors_header(path: Path) -> dict[str, SafetensorsEntry]:
    """The tensors of a file, by name.

    Raises NotFoundError for a file that cannot be read, and CheckpointError naming the tensor and
    the field for one that is damaged or truncated, before its contents are read.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            begin = _LENGTH_BYTES + length
            if size < _LENGTH_BYTES:
                _refuse(path, "the header", f"the file has only {size} bytes")
            if begin > size:
                _refuse(path, "the header", f"{length} bytes end past the file's {size}")
            if length > MAX_HEADER_BYTES:
                _refuse(path, "the header", f"{length} bytes are over the limit")
            text = file.read(length)
    except NotRegularError as error:
        raise CheckpointError(f"{path}: {error.strerror}: put the file in its place") from None
    except OSError as error:
        raise NotFoundError(f"{path} cannot be read ({error.strerror}): check it") from error
    try:
        values = parse_json_object(text.decode("utf-8"), f"{path.name}: the header")
    except UnicodeDecodeError:
        _refuse(path, "the header", "it is not UTF-8")
    notes = values.pop(_METADATA, {})
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        _refuse(path, _METADATA, "it must hold texts, nothing else")
    found = {name: _entry(path, name, value, begin, size) for name, value in values.items()}
    _check_order(path, found, begin, size)
    return found


def make_safetensors_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
) -> tuple[bytes, dict[str, SafetensorsEntry]]:
    """(what a file of these tensors begins with, where the bytes of each go), by dtype and shape.

    Wide dtypes come first, so that each tensor is aligned; then names count.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    last = 0
    for name in sorted(tensors, key=lambda name: (-_BITS[tensors[name][0]], name)):
        dtype, shape = tensors[name]
        first, last = last, last + prod(shape) * _BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (first, last)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    begin = _LENGTH_BYTES + len(text)
    del header[_METADATA]
    entries = {
        name: SafetensorsEntry(
            entry["dtype"],
            entry["shape"],
            begin + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, entries


def _entry(path: Path, name: str, value: Any, begin: int, file_size: int) -> SafetensorsEntry:
    what = f"tensor {name}"
    if not isinstance(value, dict) or value.keys() != _KEYS:
        _refuse(path, what, f"it must have {', '.join(sorted(_KEYS))}, nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        _refuse(path, what, f"dtype {dtype!r:.40} is not known")
    if not _are_counts(shape) or len(shape) > _MOST_DIMENSIONS:
        _refuse(path, what, f"shape {shape!r:.80} is no list of 0 to {_MOST_DIMENSIONS} extents")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(path, what, f"data_offsets {offsets!r:.80} are no begin and end")
    first, last = (begin + offset for offset in offsets)
    if last > file_size:
        _refuse(path, what, f"data_offsets {offsets} end past the file's {file_size} bytes")
    if prod(shape) * _BITS[dtype] != (last - first) * 8:
        _refuse(
            path, what, f"shape {shape} of {dtype} is not what data_offsets {offsets} have room for"
        )
    return SafetensorsEntry(dtype, tuple(shape), first, last - first)


def _check_order(path: Path, found: dict[str, SafetensorsEntry], begin: int, size: int) -> None:
    """Tensors follow each other without overlap or gap, to the end of the file."""
    before, last = "the header", begin
    for name, entry in sorted(found.items(), key=lambda item: (item[1].offset, item[1].size)):
        if entry.offset < last:
            _refuse(path, f"tensor {name}", f"data_offsets begin inside {before}")
        if entry.offset > last:
            _refuse(path, f"tensor {name}", f"data_offsets leave a gap after {before}")
        before, last = f"tensor {name}", entry.offset + entry.size
    if last != size:
        _refuse(path, before, f"{size - last} bytes follow it that are no tensor's")


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _refuse(path: Path, what: str, reason: str) -> NoReturn:
    raise CheckpointError(
        f"{path.name}: {what}: {reason}: it is truncated or damaged, download it again"
    )
