"""The source of weights: one interface to checkpoints and to random weights."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from tpdet.checkpoint.checkpoint import Checkpoint, open_checkpoint
from tpdet.checkpoint.digests import Digests, piece_digest, piece_header, random_piece_digest
from tpdet.checkpoint.dummy import draw_piece
from tpdet.checkpoint.finite import all_finite
from tpdet.checkpoint.load_progress import LoadProgress
from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.model_config.quantisation import Quantisation
from tpdet.checkpoint.model_config.stored_form import read_stored_form
from tpdet.checkpoint.next_layer import Begun, NextLayer, Part, in_jobs
from tpdet.checkpoint.packing import Packing
from tpdet.checkpoint.pieces import PieceRead, Pieces, TensorLeft, TensorRead
from tpdet.checkpoint.place import memory_for
from tpdet.checkpoint.staging import Staging
from tpdet.errors import CheckpointError
from tpdet.kernels.inputs.packed import PackedMatrix

WeightRead = TensorRead | TensorLeft
"""A call of `WeightSource.read` or of `leave`."""

_log = logging.getLogger("tpdet.engine")


class PieceTarget(NamedTuple):
    """A piece, where it goes, and the job that reads it ahead, if one does."""

    piece: PieceRead
    target: torch.Tensor
    begun: Begun | None


class WeightSource:
    """Reads this rank's pieces, checks and digests each of them; each tensor is read once.

    `reads` lists the calls of `read` and `leave`, in order; `tick`, if set, is called after each
    tensor that was read.
    """

    tick: Callable[[], None] | None = None
    from_files = True
    """Whether tensors of a checkpoint have to be read; else they are in memory."""

    def __init__(
        self,
        checkpoint: Checkpoint | None,
        dtype: torch.dtype,
        seed: int,
        show_progress: bool,
        device: torch.device | str = "cpu",
        threads: int = 1,
        staging: Staging | None = None,
    ) -> None:
        """Without a checkpoint, pieces are random: a function of `seed`, name and index.

        Pieces of a checkpoint are checked and digested on the CPU, as many at a time as there are
        threads, then copied to `device`; random ones are made there. staging: for `device`.
        """
        self._device = torch.device(device)
        self._staging = Staging(self._device) if staging is None else staging
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._seed = seed
        self._digests: Digests = {}
        self._read: dict[str, None] = {}
        self.packing = Packing(checkpoint, dtype, self._device, seed)
        self.reads: list[WeightRead] = []
        self._threads: ThreadPoolExecutor | None = None
        self._next_layer: NextLayer | None = None
        self._torch_threads = torch.get_num_threads()
        if checkpoint is not None:
            # A piece has one thread: those that torch would give each as well get in the way.
            self._threads = ThreadPoolExecutor(threads, "weights", torch.set_num_threads, (1,))
            self._next_layer = NextLayer(self._threads, checkpoint.has)
        total = len(checkpoint.names) if checkpoint is not None else None
        self._progress = LoadProgress(total, show_progress)

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the checkpoint's files, sorted; () for random weights."""
        return () if self._checkpoint is None else self._checkpoint.files

    def read(self, name: str, shape: tuple[int, ...], pieces: Pieces) -> torch.Tensor:
        """This rank's pieces of a tensor, joined along their dimension, in the model's dtype.

        shape: that of the whole tensor. Raises CheckpointError naming file and tensor for a missing
        tensor, a wrong shape or dtype, or a value that is not finite.
        """
        (tensor,) = self.read_all([TensorRead(name, shape, pieces)])
        return tensor

    def read_all(self, reads: Sequence[TensorRead]) -> list[torch.Tensor]:
        """Several tensors as `read` reads one; pieces of all of them are read at a time."""
        targets = [
            torch.empty(read.held, dtype=self.dtype_of(read.pieces), device=self._device)
            for read in reads
        ]
        self.read_into(reads, targets)
        return targets

    @property
    def forms(self) -> Mapping[str, object]:
        """`Checkpoint.forms`; none of random weights."""
        return {} if self._checkpoint is None else self._checkpoint.forms

    def read_packed(self, read: TensorRead) -> PackedMatrix:
        """This rank's pieces of a matrix that `packing.packs` has, on the device.

        They are checked and digested as numbers, which are gone afterwards. Raises as `read`.
        """
        self.read(*read)
        return self.packing.matrix(read)

    def read_for(self, take: Callable[..., object], *reads: TensorRead) -> None:
        """Read tensors as `read_all`, and call `take` with them: here at once.

        A source whose tensors are still to arrive (`transfer/arriving.py`) calls it later.
        """
        take(*self.read_all(reads))

    def read_into(self, reads: Sequence[TensorRead], targets: Sequence[torch.Tensor]) -> None:
        """The same, each tensor into memory that is there already, and copied once.

        targets: of `TensorRead.held` and any strides; dimensions of a tensor in one piece may be
        split.
        """
        targeted: list[PieceTarget] = []
        for read, target in zip(reads, targets, strict=True):
            if read.name in self._read:
                raise CheckpointError(f"tensor {read.name} is asked for twice: each is read once")
            self._read[read.name] = None
            self.reads.append(read)
            begun = None if self._next_layer is None else self._next_layer.take(read)
            pieces, offset = read.each(), 0
            for number, piece in enumerate(pieces):
                whole = len(pieces) == 1
                into = target if whole else target.narrow(read.pieces.dim, offset, piece.width)
                targeted.append(PieceTarget(piece, into, begun[number] if begun else None))
                offset += piece.width
        try:
            self._place_all(reads, targeted)
        except BaseException:
            if self._next_layer is not None:
                self._next_layer.cancel()
            raise

    def _place_all(self, reads: Sequence[TensorRead], targeted: list[PieceTarget]) -> None:
        """Copy each piece to its place, begin the next layer, and note the digests."""
        # Random pieces are drawn in turn: a generator has one stream.
        side_by_side = map if self._threads is None else self._threads.map
        jobs = [*in_jobs(targeted, [target.piece.size for target in targeted])]
        digests = side_by_side(self._place_pieces, jobs)
        if self._next_layer is not None:
            self._next_layer.begin(reads, self._read_piece)
        for job, of_job in zip(jobs, digests, strict=True):
            self._note(job, of_job)

    def _note(self, targeted: Sequence[PieceTarget], digests: Sequence[bytes]) -> None:
        """Take note of the digests of pieces that are in their places."""
        for (piece, *_), digest in zip(targeted, digests, strict=True):
            self._digests[piece.tensor.name, piece.number] = digest
            if piece.number == piece.tensor.pieces.mine[-1]:
                self._progress.step()
                if self.tick is not None:
                    self.tick()

    def memory_for(self, held: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
        """Memory for weights of a shape: what is held already, or new. Raises as `place`."""
        return memory_for(held, shape, self._dtype, self._device)

    def dtype_of(self, pieces: Pieces) -> torch.dtype:
        """The dtype of the elements that are read."""
        return torch.float32 if pieces.exact else self._dtype

    def read_again(self, reads: Iterable[WeightRead]) -> None:
        """Repeat the calls of another source, and keep nothing."""
        for read in reads:
            if isinstance(read, TensorRead):
                self.read(*read)
            else:
                self.leave(*read)

    def leave(self, name: str, shape: tuple[int, ...]) -> None:
        """A tensor that only other ranks read: it is checked for its shape alone.

        Raises CheckpointError for a missing tensor and for another shape.
        """
        if self._checkpoint is not None:
            self._checkpoint.check_shape(name, shape)
        self._read[name] = None
        self.reads.append(TensorLeft(name, shape))
        self._progress.step()

    def _place_pieces(self, job: Sequence[PieceTarget]) -> list[bytes]:
        """Copy what is kept of each piece to its place; the pieces' digests."""
        digests = []
        for piece, target, begun in job:
            part, digest = self._read_piece(piece, target) if begun is None else begun.part()
            if part is not target:
                target.copy_(part if part.shape == target.shape else part.reshape(target.shape))
            digests.append(digest)
        return digests

    def _read_piece(self, piece: PieceRead, target: torch.Tensor | None = None) -> Part:
        """What is kept of a piece, in the dtype it has here, on the device; the piece's digest.

        target: where it is to go, and is at once if that can be; it is returned then.
        """
        name, dtype = piece.tensor.name, self.dtype_of(piece.tensor.pieces)
        bounds = piece.tensor.own_bounds if self.from_files else ()
        if self._checkpoint is not None:
            streamed = self._checkpoint.streamed(piece, bounds)
            if streamed is not None and streamed.tensor.dtype == dtype:
                return streamed.send(self._staging, piece_header(dtype, piece, ""), target)
        if self._checkpoint is not None:
            part = self._checkpoint.piece(piece, bounds)
        elif self.packing.draws(name):
            part = self.packing.draw(piece).numbers()
        else:
            part = draw_piece(self._seed, name, piece.number, piece.shape, self._device)
        if self._checkpoint is not None or part.device.type == "cpu":
            digest = piece_digest(part.cpu(), piece, self._rule(name))
        else:  # a random piece made on a GPU stays there, unread
            digest = random_piece_digest(part, piece, self._seed)
        return self._kept(part, piece), digest

    def _kept(self, part: torch.Tensor, piece: PieceRead) -> torch.Tensor:
        """What is kept of a piece as it is stored, in the dtype it has here, on the device."""
        name, _, pieces = piece.tensor
        narrow = part.to(self.dtype_of(pieces))
        if narrow is not part and self._checkpoint is not None and not all_finite(narrow):
            raise CheckpointError(
                f"tensor {name} holds values too large for {self._dtype}: use another --dtype"
            )
        if pieces.kept is not None:
            narrow = narrow.narrow(pieces.dim, pieces.kept.start, len(pieces.kept))
        return self._staging.move(narrow)

    def _rule(self, name: str) -> str:
        return "" if self._checkpoint is None else self._checkpoint.rules.get(name, "")

    def finish(self, tied: tuple[str, str] | None = None, unread: tuple[str, ...] = ()) -> Digests:
        """The digests of all pieces read. Raises CheckpointError for tensors that were not read.

        tied: (name, twin): the checkpoint may also contain `name`, with the bits of `twin`. unread:
        what names of tensors begin with that the model has no use for.
        """
        self._progress.close()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            torch.set_num_threads(self._torch_threads)
        if self._next_layer is not None:
            self._next_layer.cancel()
        if self._checkpoint is not None:
            if tied is not None and tied[0] in self._checkpoint.names:
                self._checkpoint.check_equal(*tied)
                self._read[tied[0]] = None
            self._checkpoint.check_all_read(self._read, unread)
        return self._digests


class UnreadWeights(WeightSource):
    """Memory of the right shapes, in which nothing means anything: a load fills it later."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, packing: Packing | None = None
    ) -> None:
        """packing: of the source that fills it."""
        super().__init__(None, dtype, seed=0, show_progress=False, device=device)
        if packing is not None:
            self.packing = packing

    def read_packed(self, read: TensorRead) -> PackedMatrix:
        """Codes and scales of the right shapes."""
        return self.packing.unread(read)

    def read_into(self, reads: Sequence[TensorRead], targets: Sequence[torch.Tensor]) -> None:
        """Leave the targets as they are."""


def open_weights(
    directory: Path,
    config: ModelConfig,
    load_format: str,
    seed: int,
    show_progress: bool,
    device: torch.device | str = "cpu",
    threads: int = 1,
    packed: bool = False,
) -> WeightSource:
    """The weights of a model directory for `device`; random ones for load_format "dummy".

    threads: how many pieces of a tensor are read at a time. packed: `Packing.enabled`.
    """
    checkpoint = None if load_format == "dummy" else open_checkpoint(directory)
    if checkpoint is not None and checkpoint.rules and show_progress:
        rules = ", ".join(sorted({*checkpoint.rules.values()}))
        if packed:
            _log.info("quantised weights (%s) stay packed", rules)
        else:
            _log.info(
                "quantised weights (%s) become %s: memory is that of a checkpoint in %s "
                "(--weights packed keeps them as they are stored)",
                rules,
                config.dtype,
                config.dtype,
            )
        if checkpoint.activations_ignored:
            _log.info("the checkpoint wants quantised activations, too: they stay %s", config.dtype)
    dtype = getattr(torch, config.dtype)
    source = WeightSource(checkpoint, dtype, seed, show_progress, device, threads)
    packing = source.packing
    packing.enabled = packed
    if checkpoint is None:
        packing.drawn = _drawn_form(directory)
    return source


def _drawn_form(directory: Path) -> Quantisation | None:
    """The form in which random weights are drawn: the first that `config.json` says of them."""
    stored = read_stored_form(directory).quantisation if directory.is_dir() else None
    return None if stored is None else stored.forms[0]
