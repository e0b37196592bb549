"""Reads a checkpoint of safetensors or GGUF slice by slice, and refuses damaged ones."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tpdet.checkpoint.finite import all_finite
from tpdet.checkpoint.forms.fused import split_fused
from tpdet.checkpoint.forms.quantised import dequantised
from tpdet.checkpoint.forms.stacked import split_stacked
from tpdet.checkpoint.forms.text_part import text_tensors
from tpdet.checkpoint.gguf.header import is_gguf, read_header
from tpdet.checkpoint.gguf.tensors import gguf_tensors
from tpdet.checkpoint.model_config.json_file import read_json_object
from tpdet.checkpoint.model_config.stored_form import read_stored_form
from tpdet.checkpoint.safetensors_header import read_safetensors_header
from tpdet.checkpoint.stored import CheckpointTensor, StoredFile, StoredTensor, Tensors
from tpdet.checkpoint.streamed import StreamedPiece
from tpdet.checkpoint.weight_files import INDEX, SINGLE, find_weights
from tpdet.errors import CheckpointError

MAX_INDEX_BYTES = 64 << 20

# Old checkpoints store these tensors; they are not read, because tpdet computes them exactly.
_INERT_SUFFIX = ".rotary_emb.inv_freq"
_COMPARED_ROWS = 4096  # rows of two tensors that are compared at a time
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Checkpoint:
    """The tensors of open files.

    rules: how tensors that are quantised become numbers, by name; the others are as stored.
    activations_ignored: whether the checkpoint wants activations quantised, too, which is not done.
    """

    def __init__(
        self, tensors: Tensors, files: Iterable[str], activations_ignored: bool = False
    ) -> None:
        """files: the names of all files, also of those without a tensor of this model."""
        self._tensors = tensors
        self.activations_ignored = activations_ignored
        self.rules = {name: tensor.rule for name, tensor in tensors.items() if tensor.rule}
        self.files = tuple(sorted(files))
        self.names = tuple(sorted(n for n in tensors if not n.endswith(_INERT_SUFFIX)))

    def piece(
        self, name: str, shape: tuple[int, ...], dim: int, first: int, last: int
    ) -> torch.Tensor:
        """Elements [first, last) along `dim` of a tensor of `shape`, in the stored dtype.

        Raises CheckpointError for another shape or dtype, and for NaN or infinity.
        """
        file, view = self.check_shape(name, shape)
        if view.get_dtype() not in _DTYPES:
            raise CheckpointError(
                f"{file}: tensor {name} has dtype {view.get_dtype()}: use {', '.join(_DTYPES)}"
            )
        where = (*(slice(None) for _ in range(dim)), slice(first, last))
        try:
            part = view[where]
        except (SafetensorError, ValueError, OSError) as error:
            raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}") from error
        if not all_finite(part):
            raise CheckpointError(f"{file}: tensor {name} holds NaN or infinity")
        return part

    def streamed(
        self, name: str, shape: tuple[int, ...], dim: int, first: int, last: int, kept: range | None
    ) -> StreamedPiece | None:
        """The same piece for `StreamedPiece.send`, of which `kept` is copied; None where it cannot.

        `piece` names what is wrong with a tensor that is not there in this shape.
        """
        stored = self._tensors[name].stored if name in self._tensors else None
        if stored is None or stored.entry.shape != shape:
            return None
        if kept is None and (first, last) == (0, shape[dim]):
            dim, last = 0, shape[0]  # all of it, so its bytes follow each other
        found = StreamedPiece(stored, self._tensors[name].open, dim, first, last, kept)
        return found if found.fits else None

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether there is a tensor of this name and shape."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return False
        if tensor.stored is not None:
            return tensor.stored.entry.shape == shape
        return tuple(tensor.open().get_shape()) == shape

    def check_shape(self, name: str, shape: tuple[int, ...]) -> tuple[str, Any]:
        """The file of a tensor and a view of it. Raises CheckpointError for another shape."""
        file, view = self._view(name)
        found = tuple(view.get_shape())
        if found != shape:
            raise CheckpointError(
                f"{file}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}"
            )
        return file, view

    def check_equal(self, name: str, twin: str) -> None:
        """Refuse (CheckpointError) a tensor that is tied to `twin` but stored with other bits."""
        (file, view), (_, other) = self._view(name), self._view(twin)
        rows = view.get_shape()[0]
        if view.get_shape() != other.get_shape() or view.get_dtype() != other.get_dtype():
            raise CheckpointError(
                f"{file}: {name} is tied to {twin} but has another shape or dtype"
            )
        for first in range(0, rows, _COMPARED_ROWS):
            left, right = (
                v[first : first + _COMPARED_ROWS].view(torch.uint8) for v in (view, other)
            )
            if not torch.equal(left, right):
                raise CheckpointError(f"{file}: {name} is tied to {twin} but has other bits")

    def check_all_read(self, read: Iterable[str], unread: tuple[str, ...] = ()) -> None:
        """Refuse (CheckpointError) tensors of the checkpoint that the model did not read.

        unread: beginnings of names that it leaves out.
        """
        known = {*read}
        extra = [name for name in self.names if name not in known and not name.startswith(unread)]
        if extra:
            raise CheckpointError(
                f"{self._tensors[extra[0]].file}: tensor {extra[0]} has no place in this model "
                f"({len(extra)} such tensors): is config.json the checkpoint's?"
            )

    def _view(self, name: str) -> tuple[str, Any]:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"tensor {name} is in none of {', '.join(self.files)}")
        return tensor.file, tensor.open()


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open `model.safetensors`, the shards of `model.safetensors.index.json`, or a GGUF file.

    Raises NotFoundError without either, and CheckpointError for a missing, truncated or damaged
    file, for a tensor in two files, and for an index that contradicts the files.
    """
    if is_gguf(directory):
        return Checkpoint(gguf_tensors(read_header(directory)), [directory.name])
    if find_weights(directory).name == INDEX:
        tensors, files = _open_sharded(directory)
    else:
        tensors, files = _open(directory / SINGLE), [SINGLE]
    form = read_stored_form(directory)
    if form.text_part:
        tensors = text_tensors(tensors)
    if form.fused:
        tensors = split_fused(tensors, form.fused)
    if form.stacked:
        tensors = split_stacked(tensors, form.stacked)
    if form.quantisation is None:
        return Checkpoint(tensors, files)
    tensors = dequantised(tensors, form.quantisation)
    return Checkpoint(tensors, files, form.quantisation.activations)


def check_sizes(directory: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check the shapes of the tensors named in `expected`, by the headers of the files.

    This runs before anything of those sizes is allocated: otherwise a wrong number in `config.json`
    would fill the memory before the weights are read and refused. Raises CheckpointError naming the
    file, the tensor and both shapes, or a missing tensor; and as `open_checkpoint`.
    """
    checkpoint = open_checkpoint(directory)
    for name, shape in expected.items():
        checkpoint.check_shape(name, shape)


def _open_sharded(directory: Path) -> tuple[Tensors, list[str]]:
    """The tensors of all shards, and the names of these."""
    index = read_json_object(directory / INDEX, MAX_INDEX_BYTES)
    mapping = index.get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(f"{INDEX}: weight_map is missing")
    for name, shard in mapping.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise CheckpointError(f"{INDEX}: {name} is in {shard!r}, not a file of this directory")
    tensors: Tensors = {}
    shards = sorted(dict.fromkeys(mapping.values()))
    for shard in shards:
        if not (directory / shard).exists():
            raise CheckpointError(f"{INDEX}: shard {shard} does not exist")
        for name, tensor in _open(directory / shard).items():
            if name in tensors:
                raise CheckpointError(f"{shard}: tensor {name} is also in {tensors[name].file}")
            if mapping.get(name) != shard:
                raise CheckpointError(
                    f"{shard}: tensor {name} is listed in {INDEX} as in {mapping.get(name)!r}"
                )
            tensors[name] = tensor
    for name, shard in mapping.items():
        if name not in tensors:
            raise CheckpointError(f"{shard}: tensor {name} is missing, though {INDEX} lists it")
    return tensors, shards


def _open(path: Path) -> Tensors:
    """The tensors of a file of safetensors; those of a known dtype can be read as bytes."""
    entries = read_safetensors_header(path)  # it names the tensor and the field that lie
    try:
        file = StoredFile(path)
        handle = safe_open(path, framework="pt", device="cpu")
        tensors = {}
        for name in handle.keys():  # noqa: SIM118  (a handle, not a dictionary)
            entry = entries[name]
            known = entry.dtype in _DTYPES
            stored = StoredTensor(file, name, entry, _DTYPES[entry.dtype]) if known else None
            tensors[name] = CheckpointTensor(path.name, partial(handle.get_slice, name), stored)
        return tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path.name} is truncated or damaged ({error}): download it again"
        ) from error
