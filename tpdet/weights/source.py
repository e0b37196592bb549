"""The source of weights: one interface to checkpoints and to random weights."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

import blake3
import msgspec
import torch

from tpdet.comm.world.world import World, rank_on_node
from tpdet.errors import CheckpointError, DisagreementError
from tpdet.model_config import ModelConfig
from tpdet.weights.ahead import of_next_layer
from tpdet.weights.checkpoint import Checkpoint, open_checkpoint
from tpdet.weights.dummy import draw_piece
from tpdet.weights.finite import all_finite
from tpdet.weights.load_progress import LoadProgress
from tpdet.weights.pieces import Pieces
from tpdet.weights.place import room
from tpdet.weights.staging import Staging

PieceKey = tuple[str, int]
Digests = dict[PieceKey, bytes]
_Bounded = tuple[int, tuple[int, int]]  # a piece's index, and its bounds
_JOB_BYTES = 16 << 20
"""A thread reads pieces of this many bytes, or one that is larger, before it is asked again."""
Read = tuple[str, tuple[int, ...], Pieces]
"""A tensor's name, its whole shape, and the pieces to read."""
Part = tuple[torch.Tensor, bytes]
"""A piece where it is used, and its digest."""
_Begun = tuple[Future[list[Part]], int]
"""A job of pieces that are read ahead, and which of its pieces is meant."""
WeightRead = tuple[str, tuple[int, ...], Pieces | None]
"""One call of `WeightSource.read`: a tensor's name, its whole shape, and the pieces read.

None: of `WeightSource.leave`.
"""

_Piece = TypeVar("_Piece")

_log = logging.getLogger("tpdet.engine")
_digests_decoder = msgspec.msgpack.Decoder(list[tuple[str, int, bytes]])


class _Asked(NamedTuple):
    """A piece, where it goes, and the job that reads it ahead, if one does."""

    read: Read
    bounded: _Bounded
    target: torch.Tensor
    begun: _Begun | None


class WeightSource:
    """Reads this rank's pieces, checks and digests each of them; each tensor is read once.

    `reads` lists the calls of `read`, in order; `tick`, if set, is called after each of them.
    """

    tick: Callable[[], None] | None = None

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
        self.reads: list[WeightRead] = []
        self._threads: ThreadPoolExecutor | None = None
        self._ahead: dict[str, tuple[Read, list[_Begun]]] = {}
        self._torch_threads = torch.get_num_threads()
        if checkpoint is not None:
            # A piece has one thread: those that torch would give each as well get in the way.
            self._threads = ThreadPoolExecutor(threads, "weights", torch.set_num_threads, (1,))
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
        (found,) = self.read_all([(name, shape, pieces)])
        return found

    def read_all(self, reads: Sequence[Read]) -> list[torch.Tensor]:
        """Several tensors as `read` reads one; pieces of all of them are read at a time."""
        targets = [
            torch.empty(pieces.held(shape), dtype=self.dtype_of(pieces), device=self._device)
            for _, shape, pieces in reads
        ]
        self.read_into(reads, targets)
        return targets

    def read_into(self, reads: Sequence[Read], targets: Sequence[torch.Tensor]) -> None:
        """The same, each tensor into memory that is there already, and copied once.

        targets: of `Pieces.held` and any strides; dimensions of a tensor in one piece may be split.
        """
        asked: list[_Asked] = []
        for read, target in zip(reads, targets, strict=True):
            name, shape, pieces = read
            if name in self._read:
                raise CheckpointError(f"tensor {name} is asked for twice: each is read once")
            self._read[name] = None
            self.reads.append(read)
            places = pieces.places(shape)
            begun, parts = self._ahead.pop(name, (None, []))
            for number, (index, bound, place) in enumerate(places):
                into = target if len(places) == 1 else target.narrow(pieces.dim, *place)
                part = parts[number] if begun == read else None
                asked.append(_Asked(read, (index, bound), into, part))
        try:
            self._place_all(reads, asked)
        except BaseException:
            for _, parts in self._ahead.values():
                for job, _ in parts:
                    job.cancel()
            self._ahead.clear()
            raise

    def _place_all(self, reads: Sequence[Read], asked: list[_Asked]) -> None:
        """Copy each piece to its place, begin the next layer, and note the digests."""
        # Random pieces are drawn in turn: a generator has one stream.
        side_by_side = map if self._threads is None else self._threads.map
        jobs = [*_in_jobs(asked, [_size(each.read, each.bounded) for each in asked])]
        digests = side_by_side(self._place_pieces, jobs)
        if self._threads is not None:
            self._begin_next_layer(reads, self._threads)
        for job, of_job in zip(jobs, digests, strict=True):
            for ((name, _, pieces), (index, _), *_), digest in zip(job, of_job, strict=True):
                self._digests[name, index] = digest
                if index == pieces.mine[-1]:
                    self._progress.step()
                    if self.tick is not None:
                        self.tick()

    def _begin_next_layer(self, reads: Sequence[Read], threads: ThreadPoolExecutor) -> None:
        """Read the same tensors of the next layer meanwhile; what is not asked for is forgotten."""
        assert self._checkpoint is not None
        guessed: list[tuple[Read, _Bounded]] = []
        for name, shape, pieces in reads:
            following = of_next_layer(name)
            if following is not None and self._checkpoint.has(following, shape):
                read = following, shape, pieces
                guessed += [(read, bounded) for bounded in pieces.ranges(shape)]
                self._ahead[following] = read, []
        for job in _in_jobs(guessed, [_size(*each) for each in guessed]):
            parts = threads.submit(self._read_pieces, job)
            for number, ((name, *_), _) in enumerate(job):
                self._ahead[name][1].append((parts, number))

    def room(self, held: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
        """Memory for weights of a shape: what is held already, or new. Raises as `place`."""
        return room(held, shape, self._dtype, self._device)

    def dtype_of(self, pieces: Pieces) -> torch.dtype:
        """Of the elements that are read."""
        return torch.float32 if pieces.exact else self._dtype

    def read_again(self, reads: Iterable[WeightRead]) -> None:
        """Repeat the calls of another source, and keep nothing."""
        for name, shape, pieces in reads:
            if pieces is None:
                self.leave(name, shape)
            else:
                self.read(name, shape, pieces)

    def leave(self, name: str, shape: tuple[int, ...]) -> None:
        """A tensor that only other ranks read: it is checked for its shape alone.

        Raises CheckpointError for a missing tensor and for another shape.
        """
        if self._checkpoint is not None:
            self._checkpoint.check_shape(name, shape)
        self._read[name] = None
        self.reads.append((name, shape, None))
        self._progress.step()

    def _place_pieces(self, job: Sequence[_Asked]) -> list[bytes]:
        """Copy what is kept of each piece to its place; the pieces' digests."""
        digests = []
        for read, bounded, target, begun in job:
            if begun is None:
                part, digest = self._read_piece(*read, bounded)
            else:
                part, digest = begun[0].result()[begun[1]]
            target.copy_(part if part.shape == target.shape else part.reshape(target.shape))
            digests.append(digest)
        return digests

    def _read_pieces(self, job: Sequence[tuple[Read, _Bounded]]) -> list[Part]:
        return [self._read_piece(*read, bounded) for read, bounded in job]

    def _read_piece(
        self, name: str, shape: tuple[int, ...], pieces: Pieces, bounded: _Bounded
    ) -> Part:
        """What is kept of a piece, in the dtype it has here, on the device; the piece's digest."""
        dim, (index, (first, last)) = pieces.dim, bounded
        if self._checkpoint is not None and self._staging.used:
            streamed = self._checkpoint.streamed(name, shape, dim, first, last, pieces.kept)
            if streamed is not None and streamed.tensor.dtype == self.dtype_of(pieces):
                header = _header(streamed.tensor.dtype, shape, first, last, "")
                return streamed.send(self._staging, header)
        if self._checkpoint is not None:
            part = self._checkpoint.piece(name, shape, dim, first, last)
        else:
            size = _cut(shape, dim, last - first)
            part = draw_piece(self._seed, name, index, size, self._device)
        if part.device.type == "cpu":
            digest = _digest(part, shape, first, last, self._rule(name))
        else:  # a random piece made on a GPU stays there, unread
            digest = _draw_digest(self._seed, part, shape, first, last)
        narrow = part.to(self.dtype_of(pieces))
        if narrow is not part and part.device.type == "cpu" and not all_finite(narrow):
            raise CheckpointError(
                f"tensor {name} holds values too large for {self._dtype}: use another --dtype"
            )
        if pieces.kept is not None:
            narrow = narrow.narrow(dim, pieces.kept.start, len(pieces.kept))
        return self._staging.move(narrow), digest

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
            self._ahead.clear()
            torch.set_num_threads(self._torch_threads)
        if self._checkpoint is not None:
            if tied is not None and tied[0] in self._checkpoint.names:
                self._checkpoint.check_equal(*tied)
                self._read[tied[0]] = None
            self._checkpoint.check_all_read(self._read, unread)
        return self._digests


class UnreadWeights(WeightSource):
    """Memory of the right shapes, in which nothing means anything: a load fills it later."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(None, dtype, seed=0, show_progress=False, device=device)

    def read_into(self, reads: Sequence[Read], targets: Sequence[torch.Tensor]) -> None:
        """Leave the targets as they are."""


def open_weights(
    directory: Path,
    config: ModelConfig,
    load_format: str,
    seed: int,
    show_progress: bool,
    device: torch.device | str = "cpu",
    threads: int = 1,
) -> WeightSource:
    """The weights of a model directory for `device`; random ones for load_format "dummy".

    threads: how many pieces of a tensor are read at a time.
    """
    checkpoint = None if load_format == "dummy" else open_checkpoint(directory)
    if checkpoint is not None and checkpoint.rules and show_progress:
        _log.info(
            "quantised weights (%s) become %s: memory is that of a checkpoint in %s",
            ", ".join(sorted({*checkpoint.rules.values()})),
            config.dtype,
            config.dtype,
        )
        if checkpoint.activations_ignored:
            _log.info("the checkpoint wants quantised activations, too: they stay %s", config.dtype)
    dtype = getattr(torch, config.dtype)
    return WeightSource(checkpoint, dtype, seed, show_progress, device, threads)


def merge_digests(world: World, digests: Digests) -> str:
    """BLAKE3 (hex) over all ranks' pieces by name and index, equal at every size. Collective.

    Raises DisagreementError when two ranks read different bits of one piece, naming their nodes.
    """
    mine = [(name, index, digest) for (name, index), digest in sorted(digests.items())]
    merged: Digests = {}
    reader: dict[PieceKey, int] = {}
    for rank, data in enumerate(world.gather_bytes(msgspec.msgpack.encode(mine))):
        for name, index, digest in _digests_decoder.decode(data):
            if merged.setdefault((name, index), digest) != digest:
                first = reader[name, index]
                raise DisagreementError(
                    f"piece {index} of tensor {name}: {rank_on_node(world, first)} read digest "
                    f"{merged[name, index].hex()[:16]}, {rank_on_node(world, rank)} "
                    f"{digest.hex()[:16]}: point every rank at the same checkpoint"
                )
            reader.setdefault((name, index), rank)
    return _combine((name, index, merged[name, index]) for name, index in sorted(merged))


def _combine(pieces: Iterable[tuple[str, int, bytes]]) -> str:
    digest = blake3.blake3()
    for name, index, piece in pieces:
        digest.update(f"{name}\0{index}\0".encode())
        digest.update(piece)
    return digest.hexdigest()


def _digest(part: torch.Tensor, shape: tuple[int, ...], first: int, last: int, rule: str) -> bytes:
    """BLAKE3 over the header and the raw bytes of a piece."""
    header = _header(part.dtype, shape, first, last, rule)
    raw = part.contiguous().reshape(-1).view(torch.uint8).numpy()
    return blake3.blake3(header).update(raw.data).digest()


def _header(dtype: torch.dtype, shape: tuple[int, ...], first: int, last: int, rule: str) -> bytes:
    """What a piece's digest begins with: dtype, whole shape and range.

    rule: how a quantised tensor became these numbers; "" for a tensor that is as stored.
    """
    return f"{rule}{dtype} {list(shape)} {first}:{last}\n".encode()


def _draw_digest(
    seed: int, part: torch.Tensor, shape: tuple[int, ...], first: int, last: int
) -> bytes:
    """BLAKE3 over everything that determines a random piece made on a GPU."""
    generator = f"{torch.__version__} {torch.cuda.get_device_name(part.device)}"
    header = f"drawn {seed} {generator} {part.dtype} {list(shape)} {first}:{last}\n"
    return blake3.blake3(header.encode()).digest()


def _size(read: Read, bounded: _Bounded) -> int:
    """About the bytes of a piece: its values, two bytes each."""
    (_, shape, pieces), (_, (first, last)) = read, bounded
    return 2 * prod(_cut(shape, pieces.dim, last - first))


def _in_jobs(pieces: list[_Piece], sizes: list[int]) -> Iterator[list[_Piece]]:
    """Neighbours together up to _JOB_BYTES: asking a thread for a small one costs more than it."""
    job: list[_Piece] = []
    held = 0
    for piece, size in zip(pieces, sizes, strict=True):
        job.append(piece)
        held += size
        if held >= _JOB_BYTES:
            yield job
            job, held = [], 0
    if job:
        yield job


def _cut(shape: tuple[int, ...], dim: int, extent: int) -> tuple[int, ...]:
    return (*shape[:dim], extent, *shape[dim + 1 :])
