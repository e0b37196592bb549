"""Reads a checkpoint of safetensors or GGUF slice by slice, and refuses damaged ones."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tpdet.checkpoint.finite import all_finite
from tpdet.checkpoint.forms.parts import in_parts
from tpdet.checkpoint.forms.stacked import ExpertPart
from tpdet.checkpoint.gguf.header import is_gguf, read_header
from tpdet.checkpoint.gguf.tensors import gguf_tensors
from tpdet.checkpoint.model_config.json_file import read_json_object
from tpdet.checkpoint.model_config.stored_form import read_stored_form
from tpdet.checkpoint.pieces import PieceRead, TensorRead, part_of
from tpdet.checkpoint.safetensors_header import read_safetensors_header
from tpdet.checkpoint.shared_read import SharedReads
from tpdet.checkpoint.stored import DTYPES, CheckpointTensor, StoredFile, StoredTensor, Tensors
from tpdet.checkpoint.streamed import StreamedPiece
from tpdet.checkpoint.weight_files import INDEX, SINGLE, find_weights
from tpdet.errors import CheckpointError
from tpdet.kernels.inputs.packed import PackedMatrix

MAX_INDEX_BYTES = 64 << 20

# Old checkpoints store these tensors; they are not read, because tpdet computes them exactly.
_INERT_SUFFIX = ".rotary_emb.inv_freq"
_COMPARED_ROWS = 4096  # rows of two tensors that are compared at a time
_READ_AS_IT_IS = "F32", "BF16", "F16"


class Checkpoint:
    """The tensors of open files.

    rules: how tensors that are quantised become numbers, by name; the others are as stored. forms:
    of those that can stay codes and scales, `CheckpointTensor.form`.
    activations_ignored: whether the checkpoint wants activations quantised, too, which is not done.
    """

    def __init__(
        self, tensors: Tensors, files: Iterable[str], activations_ignored: bool = False
    ) -> None:
        """files: the names of all files, also of those without a tensor of this model."""
        self._tensors = tensors
        self._shared = SharedReads()
        self.activations_ignored = activations_ignored
        self.rules = {name: tensor.rule for name, tensor in tensors.items() if tensor.rule}
        self.forms = {name: tensor.form for name, tensor in tensors.items() if tensor.form}
        self.files = tuple(sorted(files))
        self.names = tuple(sorted(n for n in tensors if not n.endswith(_INERT_SUFFIX)))

    def piece(self, piece: PieceRead, shared: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
        """A piece of a tensor, whole, in the stored dtype.

        shared: the bounds of all pieces of which this is one, each of which is asked for once: what
        lies apart in the file is then read once for all of them.

        Raises CheckpointError for another shape or dtype, for NaN or infinity, and where the file
        has become shorter than it was when it was opened.
        """
        with self._part(piece, shared) as read:
            part = (
                read.contiguous()
                if len(shared) < 2
                else read.clone(memory_format=torch.contiguous_format)
            )
        if not all_finite(part):
            raise self.not_finite(piece.tensor.name)
        return part

    def not_finite(self, name: str) -> CheckpointError:
        """The error of a tensor with NaN or infinity."""
        return CheckpointError(f"{self._tensors[name].file}: tensor {name} holds NaN or infinity")

    def unchecked_piece(self, piece: PieceRead) -> torch.Tensor:
        """The same, whose values nobody has looked at."""
        view, _ = self._typed(piece.tensor.name, piece.tensor.shape)
        before = [slice(None)] * piece.tensor.pieces.dim
        part = view[(*before, slice(piece.first, piece.last))]
        assert isinstance(part, torch.Tensor)
        return part

    def packed(self, read: TensorRead) -> PackedMatrix:
        """The pieces of a quantised matrix that `read` asks for, as codes and scales: a copy.

        Raises CheckpointError for another shape, and for scales that are refused.
        """
        _, view = self.check_shape(read.name, read.shape)
        spans = [range(extent) for extent in read.shape]
        pieces = read.each()
        own = range(pieces[0].first, pieces[-1].last)
        kept = read.pieces.kept
        spans[read.pieces.dim] = own if kept is None else own[kept.start : kept.stop]
        part: PackedMatrix = view.packed(*spans)
        return part.compact()

    def first_packed(self, name: str) -> PackedMatrix:
        """The first values of a quantised matrix as codes and scales, which show their form."""
        view = self._tensors[name].open()
        rows, columns = view.get_shape()
        part: PackedMatrix = view.packed(range(min(rows, 1)), range(columns))
        return part

    def _typed(self, name: str, shape: tuple[int, ...]) -> tuple[Any, torch.dtype]:
        """A view of a tensor, and its dtype. Raises CheckpointError for another shape or dtype."""
        file, view = self.check_shape(name, shape)
        dtype = view.get_dtype()
        if dtype not in _READ_AS_IT_IS:
            raise CheckpointError(
                f"{file}: tensor {name} has dtype {dtype}: use {', '.join(_READ_AS_IT_IS)}"
            )
        return view, DTYPES[dtype]

    def _part(
        self, piece: PieceRead, shared: Sequence[tuple[int, int]]
    ) -> AbstractContextManager[torch.Tensor]:
        """As `piece`, unchecked; maybe in memory that is others' behind the block."""
        name, shape, pieces = piece.tensor
        dim = pieces.dim
        tensor = self._tensors.get(name)
        apart = tensor is not None and (dim > 0 or isinstance(tensor.open(), ExpertPart))
        if not apart or len(shared) < 2 or name in self.rules:
            return nullcontext(self.unchecked_piece(piece))
        view, dtype = self._typed(name, shape)
        return self._shared.part(name, view, dtype, dim, shared, (piece.first, piece.last))

    def streamed(
        self, piece: PieceRead, shared: Sequence[tuple[int, int]] = ()
    ) -> StreamedPiece | None:
        """What is kept of a piece for `StreamedPiece.send`; None where it cannot be sent so.

        `piece` names what is wrong with a tensor that is not there in this shape.
        """
        (name, shape, pieces), _, first, last = piece
        dim, kept = pieces.dim, pieces.kept
        stored = self._tensors[name].stored if name in self._tensors else None
        if stored is None or stored.entry.shape != shape:
            return None
        if kept is None and (first, last) == (0, shape[dim]):
            dim, last = 0, shape[0]  # all of it, so its bytes follow each other
        apart = partial(self._part, part_of(name, shape, dim, first, last), shared)
        found = StreamedPiece(stored, apart, dim, first, last, kept)
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
        tensors = in_parts(gguf_tensors(read_header(directory)), read_stored_form(directory))
        return Checkpoint(tensors, [directory.name])
    tensors, files = stored_tensors(directory)
    form = read_stored_form(directory)
    tensors = in_parts(tensors, form)
    if form.quantisation is None:
        return Checkpoint(tensors, files)
    return Checkpoint(tensors, files, form.quantisation.activations)


def stored_tensors(directory: Path) -> tuple[Tensors, list[str]]:
    """A directory's safetensors as stored, and their files' names. Raises as `open_checkpoint`."""
    if find_weights(directory).name == INDEX:
        return _open_sharded(directory)
    return _open(directory / SINGLE), [SINGLE]


def open_part(directory: Path) -> Checkpoint:
    """The tensors of `model.safetensors` in a directory that is no model of its own."""
    return Checkpoint(_open(directory / SINGLE), [SINGLE])


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
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    tensors: Tensors = {}
    for name, entry in entries.items():
        view = StoredTensor(file, name, entry)
        stored = view if entry.dtype in _READ_AS_IT_IS else None
        tensors[name] = CheckpointTensor(path.name, lambda view=view: view, stored)  # type: ignore[misc]
    return tensors
