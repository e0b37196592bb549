"""Reads a checkpoint of safetensors or GGUF slice by slice, and refuses damaged ones."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tpdet.checkpoint.finite import all_finite
from tpdet.checkpoint.forms.fused import split_fused
from tpdet.checkpoint.forms.quantised import QuantisedFile
from tpdet.checkpoint.forms.stacked import split_stacked
from tpdet.checkpoint.forms.text_part import text_names
from tpdet.checkpoint.gguf.header import is_gguf, read_header
from tpdet.checkpoint.gguf.tensors import GgufFile
from tpdet.checkpoint.model_config.json_file import read_json_object
from tpdet.checkpoint.model_config.stored_form import StoredForm, read_stored_form
from tpdet.checkpoint.safetensors_header import read_safetensors_header
from tpdet.checkpoint.stored import StoredFile, StoredTensor
from tpdet.checkpoint.streamed import StreamedPiece
from tpdet.checkpoint.weight_files import INDEX, SINGLE, find_weights
from tpdet.errors import CheckpointError

MAX_INDEX_BYTES = 64 << 20

# Old checkpoints store these tensors; they are not read, because tpdet computes them exactly.
_INERT_SUFFIX = ".rotary_emb.inv_freq"
_COMPARED_ROWS = 4096  # rows of two tensors that are compared at a time
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class NamedViews:
    """Tensors under other names than their files', in the form of a safetensors handle."""

    def __init__(self, views: Mapping[str, Callable[[], Any]]) -> None:
        self._views = views

    def get_slice(self, name: str) -> Any:
        """A tensor, nothing of which is read yet."""
        return self._views[name]()


class Checkpoint:
    """Open files, and which file has which tensor.

    rules: how tensors that are quantised become numbers, by name; the others are as stored.
    """

    activations_ignored = False
    """Whether the checkpoint wants activations quantised, too, which is not done."""

    def __init__(
        self,
        files: dict[str, Any],
        holder: dict[str, str],
        rules: Mapping[str, str] = MappingProxyType({}),
        stored: Mapping[str, StoredTensor] = MappingProxyType({}),
    ) -> None:
        """files: open handles by file name, as safetensors has them; holder: file by tensor.

        stored: those tensors whose values are bytes of a file as they lie there.
        """
        self.rules = rules
        self._stored = stored
        self._files = files
        self._holder = holder
        self.files = tuple(sorted(files))
        self.names = tuple(sorted(n for n in holder if not n.endswith(_INERT_SUFFIX)))

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
        tensor = self._stored.get(name)
        if tensor is None or tensor.entry.shape != shape:
            return None
        if kept is None and (first, last) == (0, shape[dim]):
            dim, last = 0, shape[0]  # all of it, so its bytes follow each other
        found = StreamedPiece(tensor, lambda: self._view(name)[1], dim, first, last, kept)
        return found if found.fits else None

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether there is a tensor of this name and shape."""
        if name in self._stored:
            return self._stored[name].entry.shape == shape
        return name in self._holder and tuple(self._view(name)[1].get_shape()) == shape

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
                f"{self._holder[extra[0]]}: tensor {extra[0]} has no place in this model "
                f"({len(extra)} such tensors): is config.json the checkpoint's?"
            )

    def _view(self, name: str) -> tuple[str, Any]:
        file = self._holder.get(name)
        if file is None:
            raise CheckpointError(f"tensor {name} is in none of {', '.join(sorted(self._files))}")
        return file, self._files[file].get_slice(name)


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open `model.safetensors`, the shards of `model.safetensors.index.json`, or a GGUF file.

    Raises NotFoundError without either, and CheckpointError for a missing, truncated or damaged
    file, for a tensor in two files, and for an index that contradicts the files.
    """
    if is_gguf(directory):
        file = GgufFile(read_header(directory))
        name = directory.name
        return Checkpoint({name: file}, dict.fromkeys(file.keys(), name), file.rules())
    if find_weights(directory).name == INDEX:
        files, holder, stored = _open_sharded(directory)
    else:
        file, stored = _open(directory / SINGLE)
        files, holder = {SINGLE: file}, dict.fromkeys(file.keys(), SINGLE)
    return _in_usual_form(files, holder, stored, read_stored_form(directory))


def check_sizes(directory: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check the shapes of the tensors named in `expected`, by the headers of the files.

    This runs before anything of those sizes is allocated: otherwise a wrong number in `config.json`
    would fill the memory before the weights are read and refused. Raises CheckpointError naming the
    file, the tensor and both shapes, or a missing tensor; and as `open_checkpoint`.
    """
    checkpoint = open_checkpoint(directory)
    for name, shape in expected.items():
        checkpoint.check_shape(name, shape)


def _in_usual_form(
    files: dict[str, Any],
    holder: dict[str, str],
    stored: dict[str, StoredTensor],
    form: StoredForm,
) -> Checkpoint:
    """The tensors by the names, and with the values, of a text model that is not quantised."""
    if form == StoredForm():
        return Checkpoint(files, holder, stored=stored)
    names = text_names(holder) if form.text_part else {name: name for name in holder}
    views: dict[str, Callable[[], Any]] = {
        name: partial(files[holder[other]].get_slice, other) for name, other in names.items()
    }
    of_views, whole = {name: holder[other] for name, other in names.items()}, views
    views, of_views = split_fused(views, of_views, form.fused)
    views, of_views = split_stacked(views, of_views, form.stacked)
    if form.quantisation is None:
        opened: NamedViews | QuantisedFile = NamedViews(views)
        as_stored = {
            name: stored[names[name]]._replace(name=name)
            for name, view in views.items()
            if view is whole.get(name) and names[name] in stored
        }
        return Checkpoint(dict.fromkeys(files, opened), of_views, stored=as_stored)
    opened = QuantisedFile(views, of_views, form.quantisation)
    found = {name: opened.file_of(name, of_views) for name in opened.keys()}  # noqa: SIM118
    checkpoint = Checkpoint(dict.fromkeys(files, opened), found, opened.rules())
    checkpoint.activations_ignored = form.quantisation.activations
    return checkpoint


def _open_sharded(
    directory: Path,
) -> tuple[dict[str, Any], dict[str, str], dict[str, StoredTensor]]:
    """Open files, which has which tensor, by name, and where its bytes lie."""
    index = read_json_object(directory / INDEX, MAX_INDEX_BYTES)
    mapping = index.get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(f"{INDEX}: weight_map is missing")
    for name, shard in mapping.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise CheckpointError(f"{INDEX}: {name} is in {shard!r}, not a file of this directory")
    files = {}
    holder: dict[str, str] = {}
    stored: dict[str, StoredTensor] = {}
    for shard in sorted(dict.fromkeys(mapping.values())):
        if not (directory / shard).exists():
            raise CheckpointError(f"{INDEX}: shard {shard} does not exist")
        files[shard], of_shard = _open(directory / shard)
        stored |= of_shard
        for name in files[shard].keys():  # noqa: SIM118  (a handle, not a dictionary)
            if name in holder:
                raise CheckpointError(f"{shard}: tensor {name} is also in {holder[name]}")
            if mapping.get(name) != shard:
                raise CheckpointError(
                    f"{shard}: tensor {name} is listed in {INDEX} as in {mapping.get(name)!r}"
                )
            holder[name] = shard
    for name, shard in mapping.items():
        if name not in holder:
            raise CheckpointError(f"{shard}: tensor {name} is missing, though {INDEX} lists it")
    return files, holder, stored


def _open(path: Path) -> tuple[Any, dict[str, StoredTensor]]:
    """A handle of safetensors, and where the bytes of each tensor lie that has a known dtype."""
    entries = read_safetensors_header(path)  # it names the tensor and the field that lie
    try:
        file = StoredFile(path)
        stored = {
            name: StoredTensor(file, name, entry, _DTYPES[entry.dtype])
            for name, entry in entries.items()
            if entry.dtype in _DTYPES
        }
        return safe_open(path, framework="pt", device="cpu"), stored
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path.name} is truncated or damaged ({error}): download it again"
        ) from error
