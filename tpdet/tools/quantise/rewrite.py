"""One file of safetensors as another, tensor by tensor: memory is that of the largest matrix."""

from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from tpdet.checkpoint.finite import all_finite
from tpdet.checkpoint.safetensors_header import make_safetensors_header
from tpdet.checkpoint.stored import CheckpointTensor, StoredTensor, Tensors
from tpdet.errors import CheckpointError
from tpdet.tools.quantise.encodings import WeightFormat

_DENSE = ("F32", "BF16", "F16")
_COPIED_BYTES = 16 << 20


def write_shard(
    path: Path, file: str, tensors: Tensors, products: Collection[str], encoding: WeightFormat
) -> list[str]:
    """Write those of `tensors` that lie in `file` to a new file at `path`; the names of all in it.

    products: names of tensors that are encoded; the others are copied. Raises CheckpointError for a
    product of another dtype and for one with NaN or infinity.
    """
    own = {name: _stored(tensor) for name, tensor in tensors.items() if tensor.file == file}
    outlines = {}
    for name, stored in own.items():
        if name not in products:
            outlines[name] = stored.entry.dtype, stored.entry.shape
            continue
        rows, columns = stored.entry.shape
        for suffix, outline in encoding.layout(rows, columns).items():
            outlines[_part_name(name, suffix)] = outline
    head, entries = make_safetensors_header(outlines)
    with path.open("xb") as target:
        target.write(head)
        for name, stored in sorted(own.items(), key=lambda item: item[1].entry.offset):
            if name not in products:
                target.seek(entries[name].offset)
                target.writelines(_chunks(stored))
                continue
            for suffix, part in encoding.encode(_weight(stored)).items():
                target.seek(entries[_part_name(name, suffix)].offset)
                target.write(part.contiguous().view(-1).view(torch.uint8).numpy().data)
    return sorted(outlines)


def _part_name(name: str, suffix: str) -> str:
    return f"{name.removesuffix('weight')}{suffix}"


def _stored(tensor: CheckpointTensor) -> StoredTensor:
    view = tensor.open()
    assert isinstance(view, StoredTensor)
    return view


def _weight(stored: StoredTensor) -> torch.Tensor:
    """A matrix in fp32. Raises CheckpointError for another dtype, NaN and infinity."""
    if stored.entry.dtype not in _DENSE:
        raise CheckpointError(
            f"{stored.file.name}: tensor {stored.name} has dtype {stored.entry.dtype}: use "
            f"{', '.join(_DENSE)}"
        )
    weight = stored[:,]
    if not all_finite(weight):
        raise CheckpointError(f"{stored.file.name}: tensor {stored.name} holds NaN or infinity")
    return weight.float()


def _chunks(stored: StoredTensor) -> Iterator[bytearray]:
    """The bytes of a tensor, so many at a time."""
    for first in range(0, stored.entry.size, _COPIED_BYTES):
        chunk = bytearray(min(_COPIED_BYTES, stored.entry.size - first))
        stored.read_into(memoryview(chunk), first)
        yield chunk
