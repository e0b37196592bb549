"""A safetensors file that lies about its contents is refused by name, before memory is taken."""

import json
import resource
import struct
import time

import pytest

from tpdet.checkpoint.checkpoint import open_checkpoint
from tpdet.checkpoint.safetensors_header import read_safetensors_header
from tpdet.checkpoint.weight_files import SINGLE
from tpdet.errors import CheckpointError, NotFoundError

SECONDS, KIB = 2.0, 64 << 10
HUGE = 2**62


def entry(**changes):
    return {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]} | changes


def file(header=None, data=bytes(48), length=None, **tensors):
    """The bytes of a file of tensors a and b; length: where the header's lies."""
    found = {"a": entry(), "b": entry(shape=[4], data_offsets=[32, 48])} | tensors
    text = header if isinstance(header, bytes) else json.dumps(found).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def twice():
    return b'{"a": 1, ' + json.dumps({"a": entry()}).encode()[1:]


LIES = {
    "empty": (b"", "the header: the file has only 0 bytes"),
    "cut header": (file()[:60], "the header: .* end past the file's 60"),
    "header of 2^60": (file(length=2**60), "the header: 1152921504606846976 bytes end past"),
    "header of 2^64": (file(length=2**64 - 1), "the header: 18446744073709551615 bytes end past"),
    "long header": (file(b" " * (17 << 20)), "the header: 17825792 bytes are over the limit"),
    "no JSON": (file(b"{"), "the header is not valid JSON"),
    "UTF-8": (file(b'{"\xff": 1}'), "the header: it is not UTF-8"),
    "a list": (file(b"[]"), "the header holds list"),
    "nested": (file(b'{"a":' * 50_000), "the header is nested too deeply"),
    "metadata": (file(__metadata__={"a": {}}), "__metadata__: it must hold texts"),
    "tensor twice": (file(twice()), "the header: duplicate key 'a'"),
    "entry": (file(a=3), "tensor a: it must have data_offsets, dtype, shape"),
    "a missing field": (file(a={"dtype": "F32"}), "tensor a: it must have data_offsets, dtype"),
    "a field more": (file(a=entry(stride=1)), "tensor a: it must have data_offsets, dtype"),
    "dtype": (file(a=entry(dtype="F99")), "tensor a: dtype 'F99' is not known"),
    "no dtype": (file(a=entry(dtype=[1])), r"tensor a: dtype \[1\] is not known"),
    "negative shape": (file(a=entry(shape=[-2, 4])), r"tensor a: shape \[-2, 4\] is no list"),
    "many dimensions": (file(a=entry(shape=[1] * 1000)), "tensor a: shape .* is no list"),
    "huge shape": (file(a=entry(shape=[HUGE] * 2)), "tensor a: shape .* of F32 is not what data"),
    "another size": (file(a=entry(dtype="F16")), r"tensor a: shape \[2, 4\] of F16 is not what"),
    "far": (file(a=entry(data_offsets=[HUGE, HUGE + 32])), "tensor a: data_offsets .* end past"),
    "negative": (file(a=entry(data_offsets=[-32, 0])), "tensor a: data_offsets .* are no begin"),
    "backwards": (file(a=entry(data_offsets=[32, 0])), "tensor a: data_offsets .* are no begin"),
    "one offset": (file(a=entry(data_offsets=[0])), "tensor a: data_offsets .* are no begin"),
    "overlap": (
        file(b=entry(shape=[4], data_offsets=[16, 32])), "tensor b: data_offsets begin inside"
    ),
    "gap": (
        file(b=entry(shape=[4], data_offsets=[40, 56]), data=bytes(56)),
        "tensor b: data_offsets leave a gap after tensor a",
    ),
    "more bytes": (file(data=bytes(50)), "tensor b: 2 bytes follow it that are no tensor's"),
    "cut data": (file(data=bytes(47)), "tensor b: data_offsets .* end past the file's"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_file_that_lies_is_refused_by_name_in_seconds(name, tmp_path):
    content, message = LIES[name]
    (tmp_path / SINGLE).write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {message}"):
        open_checkpoint(tmp_path)
    assert time.monotonic() - began < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < KIB


def test_the_sound_file_is_read(tmp_path):
    path = tmp_path / SINGLE
    path.write_bytes(file(__metadata__={"format": "pt"}))
    found = read_safetensors_header(path)
    assert found["a"].shape == (2, 4) and (found["b"].size, found["b"].dtype) == (16, "F32")
    assert found["b"].offset == path.stat().st_size - 16
    with pytest.raises(NotFoundError, match="cannot be read"):
        read_safetensors_header(tmp_path / "none.safetensors")
