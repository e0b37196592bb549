"""A GGUF file that lies about its contents is refused by name, before memory is taken."""

import resource
import struct
import time

import pytest

from tests.checkpoint.gguf.gguf_bytes import field, file, tensor, text
from tpdet.checkpoint.gguf.header import read_header
from tpdet.errors import CheckpointError, NotFoundError

HUGE = 2**63 - 1
SECONDS, KIB = 2.0, 64 << 10


SOUND = file([field("a", 4, struct.pack("<I", 7))], [tensor()], bytes(16))
ARRAY = struct.pack("<IQ", 9, 1)
LIES = {
    "empty": (b"", "truncated"),
    "magic": (file(magic=b"GGML"), "does not begin with GGUF"),
    "version": (file(version=1), "version 1 is none of"),
    "big-endian": (file(version=3 << 24), "version 50331648 is none of"),
    "truncated": (SOUND[:40], "field 0: 1 bytes at offset 32|field .*end past the file"),
    "cut data": (SOUND[:-1], r"tensor a: shape \[4\] of F32 at offset \d+ ends past"),
    "fields": (file(counts=(0, HUGE)), "the number of fields: .* over the limit"),
    "tensors": (file(counts=(HUGE, 0)), "the number of tensors: .* over the limit"),
    "name": (file([struct.pack("<Q", HUGE)], counts=(0, 1)), "field 0: a text of"),
    "text": (file([field("k", 8, struct.pack("<Q", 1 << 20))]), "field k: 1048576 bytes at"),
    "utf-8": (file([field("k", 8, text(b"\xff\xfe"))]), "field k: it is not UTF-8"),
    "type": (file([field("k", 99, b"")]), "field k: type 99 is not known"),
    "array": (file([field("k", 9, struct.pack("<IQ", 0, HUGE))]), "field k: an array of"),
    "texts": (file([field("k", 9, struct.pack("<IQ", 8, 1 << 40))]), "field k: an array of"),
    "nested": (file([field("k", 9, ARRAY * 50)]), "field k: arrays inside arrays"),
    "twice": (file([field("k", 0, b"a")] * 2), "two fields k"),
    "tensor twice": (file((), [tensor(), tensor(offset=32)], bytes(64)), "two tensors a"),
    "overlap": (file((), [tensor(), tensor("b")], bytes(64)), "tensor b: its offset lies inside"),
    "offset": (file((), [tensor(offset=7)], bytes(64)), "tensor a: offset 7 is not a multiple"),
    "far": (file((), [tensor(offset=1 << 62)], bytes(64)), "tensor a: shape .* ends past"),
    "large": (file((), [tensor(shape=(1 << 62, 1 << 62))], bytes(64)), "tensor a: shape .* ends"),
    "empty tensor": (file((), [tensor(shape=(0, 4))], bytes(64)), "tensor a: shape .* is empty"),
    "dimensions": (file((), [tensor(shape=(1,) * 9)], bytes(64)), "tensor a: 9 dimensions"),
    "block": (file((), [tensor(shape=(33,), kind=2)], bytes(64)), "tensor a: rows of 33 values"),
    "kind": (file((), [tensor(kind=77)], bytes(64)), "tensor a: type 77 is not known"),
    "alignment": (
        file([field("general.alignment", 4, struct.pack("<I", 0))]),
        r"field general\.alignment: 0 is no number",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_file_that_lies_is_refused_by_name_in_seconds(name, tmp_path):
    content, message = LIES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(CheckpointError, match=rf"model\.gguf.*({message})"):
        read_header(path)
    assert time.monotonic() - began < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < KIB


def test_the_sound_file_is_read(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(SOUND)
    header = read_header(path)
    assert header.metadata == {"a": 7} and header.tensors["a"].shape == (4,)
    path.write_bytes(file([field("a", 4, struct.pack("<I", 8))]))
    assert read_header(path).metadata == {"a": 8}


def test_a_file_that_is_not_there_is_not_found(tmp_path):
    with pytest.raises(NotFoundError, match="cannot be read"):
        read_header(tmp_path / "none.gguf")
