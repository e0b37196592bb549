"""A source of weights whose tensors arrive in any order: each goes straight to its place.

`Decoder.load` runs once over such a source when an update begins. It reads nothing then: it says
which tensors it wants and what to do with each. When a tensor arrives, this rank's pieces of it are
read by the code that reads them from files, so they are checked, digested and laid out alike.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from tpdet.checkpoint.checkpoint import Checkpoint
from tpdet.checkpoint.digests import Digests, piece_header
from tpdet.checkpoint.finite import first_not_finite
from tpdet.checkpoint.forms.parts import in_parts
from tpdet.checkpoint.model_config.stored_form import StoredForm
from tpdet.checkpoint.pieces import TensorLeft, TensorRead
from tpdet.checkpoint.source import PieceTarget, WeightRead, WeightSource
from tpdet.checkpoint.stored import CheckpointTensor, Tensors
from tpdet.checkpoint.transfer.announced import FILE, AnnouncedTensor, ArrivedTensor
from tpdet.errors import CheckpointError

HashParts = Callable[[Sequence[bytes], Sequence[torch.Tensor]], list[bytes]]
"""BLAKE3 of each header followed by the bytes of a tensor, row-major."""

BATCH_BYTES = 128 << 20
"""Pieces of about so many bytes are read before they are laid out: what an update takes at most,
beside what a carrier hands over, unless one tensor is larger."""


@dataclass
class _Consumer:
    """What waits for one or several tensors: `take` is called with them, once they are all there.

    target: where a single one is read to, if that is its place already.
    """

    reads: tuple[TensorRead, ...]
    take: Callable[..., object] | None
    target: torch.Tensor | None
    values: dict[str, torch.Tensor]


class ArrivingWeights(WeightSource):
    """Places tensors as they are announced, then arrive; one thread at a time may use it."""

    from_files = False

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        threads: int,
        form: StoredForm,
        tied: tuple[str, str] | None,
        unread: tuple[str, ...],
        hash_parts: HashParts | None = None,
    ) -> None:
        """form: how the model's tensors may be stored; tied, unread: as in `finish`.

        hash_parts: digests tensors that arrive on the device where they lie; None: on the CPU.
        """
        super().__init__(Checkpoint({}, [FILE]), dtype, 0, False, device, threads)
        self._next_layer = None
        self._hash_parts = hash_parts
        self._form = replace(form, quantisation=None)  # what is sent has the model's dtype
        self._tied, self._unread = tied, unread
        self._expected: dict[str, tuple[WeightRead, _Consumer | None]] = {}
        self._announced: dict[str, tuple[ArrivedTensor, Tensors]] = {}
        self._sources: dict[str, str] = {}
        self._arrived: set[str] = set()
        self.begun = False
        """Whether a tensor arrived, so that weights are no longer the old ones."""

    def read_for(self, take: Callable[..., object], *reads: TensorRead) -> None:
        """Have `take` called with the tensors once they all have arrived."""
        self._expect(_Consumer(reads, take, None, {}))

    def read_into(self, reads: Sequence[TensorRead], targets: Sequence[torch.Tensor]) -> None:
        """Have each tensor read into its place when it arrives."""
        for read, target in zip(reads, targets, strict=True):
            self._expect(_Consumer((read,), None, target, {}))

    def leave(self, name: str, shape: tuple[int, ...]) -> None:
        """Have a tensor that only other ranks read checked for its shape when it is announced."""
        self._expected[name] = TensorLeft(name, shape), None

    def _expect(self, consumer: _Consumer) -> None:
        for read in consumer.reads:
            self._expected[read.name] = read, consumer

    def expect_tied(self) -> None:
        """Take the twin of a tied tensor, too, if it is sent: for its digest alone.

        Called once the model's own tensors are known.
        """
        if self._tied is not None:
            name, twin = self._tied
            read, _ = self._expected[twin]
            assert isinstance(read, TensorRead)
            nothing = replace(read.pieces, kept=range(0))
            self._expect(_Consumer((TensorRead(name, read.shape, nothing),), _drop, None, {}))

    def check(self, tensors: Iterable[AnnouncedTensor]) -> None:
        """Check what is to arrive, and take note of nothing. Raises as `announce`."""
        self._parts_of(tensors)

    def announce(self, tensors: Iterable[AnnouncedTensor]) -> None:
        """Take note of what is to arrive, before a byte of it does.

        Raises CheckpointError for a name that the model does not have or that came before, and for
        another shape. Nothing is announced then.
        """
        announced, sources = self._parts_of(tensors)
        self._announced |= announced
        self._sources |= sources

    def _parts_of(
        self, tensors: Iterable[AnnouncedTensor]
    ) -> tuple[dict[str, tuple[ArrivedTensor, Tensors]], dict[str, str]]:
        """Each announced tensor's parts, and of each part the tensor that it comes from."""
        announced: dict[str, tuple[ArrivedTensor, Tensors]] = {}
        sources: dict[str, str] = {}
        for tensor in tensors:
            name = tensor.name
            if name in announced or name in self._announced:
                raise CheckpointError(f"{FILE}: tensor {name} is sent twice: send each once")
            view = ArrivedTensor(tensor)
            stored = CheckpointTensor(FILE, lambda view=view: view)  # type: ignore[misc]
            parts = self._known_parts(in_parts({name: stored}, self._form))
            for part in parts:
                before = sources.get(part, self._sources.get(part))
                if before is not None:
                    raise CheckpointError(
                        f"{FILE}: tensor {part} is a part of {before} and of {name}: send one"
                    )
                sources[part] = name
            announced[name] = view, parts
        return announced, sources

    def _known_parts(self, parts: Tensors) -> Tensors:
        """The parts that the model reads, their shapes checked. Raises CheckpointError."""
        checkpoint = Checkpoint(parts, [FILE])
        known: Tensors = {}
        for name in checkpoint.names:
            if name.startswith(self._unread) and name not in self._expected:
                continue
            if name not in self._expected:
                raise CheckpointError(
                    f"{FILE}: tensor {name} has no place in this model: is it the model's that "
                    "serves?"
                )
            checkpoint.check_shape(name, self._expected[name][0].shape)
            known[name] = parts[name]
        return known

    def arrive(self, values: dict[str, torch.Tensor]) -> None:
        """Lay out tensors that were announced; their memory may be used again afterwards.

        Raises CheckpointError for NaN and infinity; weights are neither old nor new then.
        """
        self.begun = True
        parts: Tensors = {}
        views = []
        for name, tensor in values.items():
            view, of_tensor = self._announced[name]
            view.values = tensor
            views.append(view)
            parts |= of_tensor
        self._checkpoint = Checkpoint(parts, [FILE])
        try:
            self._read_batches([*parts])
        finally:
            for view in views:
                view.values = None
        self._arrived.update(parts)

    def _read_batches(self, names: Sequence[str]) -> None:
        batch: list[tuple[TensorRead, _Consumer]] = []
        size = 0
        for name in names:
            read, consumer = self._expected[name]
            if consumer is None or isinstance(read, TensorLeft):
                self._read[name] = None
                continue
            batch.append((read, consumer))
            if consumer.target is None:
                size += sum(piece.size for piece in read.each())
            if size >= BATCH_BYTES:
                self._read_batch(batch)
                batch, size = [], 0
        self._read_batch(batch)

    def _read_batch(self, batch: Sequence[tuple[TensorRead, _Consumer]]) -> None:
        """Read this rank's pieces of tensors that are here, and hand over what is complete."""
        reads = [read for read, _ in batch]
        targets = [
            torch.empty(read.held, dtype=self.dtype_of(read.pieces), device=self._device)
            if consumer.target is None
            else consumer.target
            for read, consumer in batch
        ]
        super().read_into(reads, targets)
        for (read, consumer), target in zip(batch, targets, strict=True):
            if consumer.take is None:
                continue
            consumer.values[read.name] = target
            if len(consumer.values) == len(consumer.reads):
                consumer.take(*(consumer.values.pop(asked.name) for asked in consumer.reads))

    def _place_all(self, reads: Sequence[TensorRead], targeted: list[PieceTarget]) -> None:
        """Copy each piece to its place and note the digests, several pieces' at a time."""
        if self._hash_parts is None:
            super()._place_all(reads, targeted)
            return
        assert self._checkpoint is not None
        batch: list[PieceTarget] = []
        parts: list[torch.Tensor] = []
        for target in targeted:
            part = self._checkpoint.unchecked_piece(target.piece)
            if part.device.type != self._device.type:  # a carrier that brings it through the host
                part = part.to(self._device)
            target.target.copy_(self._kept(part, target.piece).reshape(target.target.shape))
            batch.append(target)
            parts.append(part)
            if sum(part.nbytes for part in parts) >= BATCH_BYTES:
                self._hash_batch(self._hash_parts, batch, parts)
                batch, parts = [], []
        self._hash_batch(self._hash_parts, batch, parts)

    def _hash_batch(
        self, hash_parts: HashParts, batch: list[PieceTarget], parts: list[torch.Tensor]
    ) -> None:
        assert self._checkpoint is not None
        wrong = first_not_finite(parts)
        if wrong is not None:
            raise self._checkpoint.not_finite(batch[wrong].piece.tensor.name)
        headers = [
            piece_header(part.dtype, target.piece, "")
            for target, part in zip(batch, parts, strict=True)
        ]
        self._note(batch, hash_parts(headers, parts))

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of tensors that did not arrive, sorted; a tied twin may stay away."""
        optional = {self._tied[0]} if self._tied is not None else set()
        return tuple(sorted(self._expected.keys() - self._arrived - optional))

    def close(self) -> None:
        """Let go of threads; for an update that is given up."""
        with suppress(CheckpointError):
            super().finish()

    def finish_arrived(self) -> Digests:
        """The digests of all pieces, as `finish` of a directory with these tensors has them.

        Raises CheckpointError where something is missing, or a tied twin has other bits.
        """
        if self.missing:
            raise CheckpointError(f"{FILE}: tensor {self.missing[0]} did not arrive")
        self._checkpoint = None
        digests = self.finish()
        if self._tied is None:
            return digests
        name, twin = self._tied
        for key in [key for key in digests if key[0] == name]:
            if digests.pop(key) != digests[twin, key[1]]:
                raise CheckpointError(f"{FILE}: {name} is tied to {twin} but has other bits")
        return digests


def _drop(read: torch.Tensor) -> None:
    """Take a tensor that nobody uses."""
