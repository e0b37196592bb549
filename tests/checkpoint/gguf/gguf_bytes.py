"""GGUF files made byte by byte, so that each byte may lie."""

import struct

import numpy as np

CODES = {"u8": (0, "B"), "u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?"),
         "u64": (10, "Q"), "f64": (12, "d")}  # fmt: skip
TEXT, ARRAY = 8, 9
F32 = 0


def text(value):
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def field(name, kind, data):
    return text(name) + struct.pack("<I", kind) + data


def typed(kind, value):
    """(number of the type, bytes) of a value; kind: of CODES, "text", or "list of" one of them."""
    if kind == "text":
        return TEXT, text(value)
    if not kind.startswith("list of "):
        number, code = CODES[kind]
        return number, struct.pack(f"<{code}", value)
    of = kind.removeprefix("list of ")
    number = TEXT if of == "text" else CODES[of][0]
    items = b"".join(typed(of, each)[1] for each in value)
    return ARRAY, struct.pack("<IQ", number, len(value)) + items


def tensor(name="a", shape=(4,), kind=F32, offset=0):
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def file(fields=(), tensors=(), data=b"", version=3, counts=None, magic=b"GGUF"):
    """The bytes of a file; counts: (tensors, fields) where they lie."""
    counts = counts or (len(tensors), len(fields))
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join((*fields, *tensors))
    return head + bytes(-len(head) % 32) + data


def model(fields, tensors=()):
    """The bytes of a model; fields: (kind, value) by name; tensors: F32 arrays by name."""
    places, data = [], b""
    for name, values in dict(tensors).items():
        places.append(tensor(name, values.shape[::-1], offset=len(data)))
        stored = np.ascontiguousarray(values, np.float32).tobytes()
        data += stored + bytes(-len(stored) % 32)
    return file([field(name, *typed(*value)) for name, value in fields.items()], places, data)
