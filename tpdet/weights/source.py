"""The source of weights: one interface to checkpoints and to random weights."""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import blake3
import msgspec
import torch

from tpdet.comm.world.world import World, rank_on_node
from tpdet.errors import CheckpointError, DisagreementError
from tpdet.model_config import ModelConfig
from tpdet.weights.ahead import of_next_layer
from tpdet.weights.checkpoint import Checkpoint, all_finite, open_checkpoint
from tpdet.weights.dummy import draw_piece
from tpdet.weights.load_progress import LoadProgress
from tpdet.weights.pieces import Pieces
from tpdet.weights.place import room
from tpdet.weights.staging import Staging

PieceKey = tuple[str, int]
Digests = dict[PieceKey, bytes]
_Bounded = tuple[int, tuple[int, int]]  # a piece's index, and its bounds
Read = tuple[str, tuple[int, ...], Pieces]
"""A tensor's name, its whole shape, and the pieces to read."""
Part = tuple[torch.Tensor, bytes]
"""A piece where it is used, and its digest."""
WeightRead = tuple[str, tuple[int, ...], Pieces | None]
"""One call of `WeightSource.read`: a tensor's name, its whole shape, and the pieces read.

None: of `WeightSource.leave`.
"""

_log = logging.getLogger("tpdet.engine")
_digests_decoder = msgspec.msgpack.Decoder(list[tuple[str, int, bytes]])


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
    ) -> None:
        """Without a checkpoint, pieces are random: a function of `seed`, name and index.

        Pieces of a checkpoint are checked and digested on the CPU, as many at a time as there are
        threads, then copied to `device`; random ones are made there.
        """
        self._device = torch.device(device)
        self._staging = Staging(self._device)
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._seed = seed
        self._digests: Digests = {}
        self._read: dict[str, None] = {}
        self.reads: list[WeightRead] = []
        self._threads: ThreadPoolExecutor | None = None
        self._ahead: dict[str, tuple[Read, list[Future[Part]]]] = {}
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
        asked: list[tuple[Read, _Bounded, torch.Tensor, Future[Part] | None]] = []
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
                asked.append((read, (index, bound), into, part))
        # Random pieces are drawn in turn: a generator has one stream.
        side_by_side = map if self._threads is None else self._threads.map
        digests = side_by_side(lambda each: self._place_piece(*each), asked)
        if self._threads is not None:
            self._begin_next_layer(reads, self._threads)
        for ((name, _, pieces), (index, _), *_), digest in zip(asked, digests, strict=True):
            self._digests[name, index] = digest
            if index == pieces.mine[-1]:
                self._progress.step()
                if self.tick is not None:
                    self.tick()

    def _begin_next_layer(self, reads: Sequence[Read], threads: ThreadPoolExecutor) -> None:
        """Read the same tensors of the next layer meanwhile; what is not asked for is forgotten."""
        assert self._checkpoint is not None
        for name, shape, pieces in reads:
            following = of_next_layer(name)
            if following is None or not self._checkpoint.has(following, shape):
                continue
            parts = [
                threads.submit(self._read_piece, following, shape, pieces, bounded)
                for bounded in pieces.ranges(shape)
            ]
            self._ahead[following] = (following, shape, pieces), parts

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

    def _place_piece(
        self, read: Read, bounded: _Bounded, target: torch.Tensor, begun: Future[Part] | None
    ) -> bytes:
        """Copy what is kept of a piece to its place; the piece's digest."""
        part, digest = self._read_piece(*read, bounded) if begun is None else begun.result()
        target.copy_(part.reshape(target.shape))
        return digest

    def _read_piece(
        self, name: str, shape: tuple[int, ...], pieces: Pieces, bounded: _Bounded
    ) -> Part:
        """What is kept of a piece, in the dtype it has here, on the device; the piece's digest."""
        dim, (index, (first, last)) = pieces.dim, bounded
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
    """BLAKE3 over dtype, whole shape, range and the raw bytes of a piece.

    rule: how a quantised tensor became these numbers; "" for a tensor that is as stored.
    """
    header = f"{rule}{part.dtype} {list(shape)} {first}:{last}\n".encode()
    raw = part.contiguous().reshape(-1).view(torch.uint8).numpy()
    return blake3.blake3(header).update(raw.data).digest()


def _draw_digest(
    seed: int, part: torch.Tensor, shape: tuple[int, ...], first: int, last: int
) -> bytes:
    """BLAKE3 over everything that determines a random piece made on a GPU."""
    generator = f"{torch.__version__} {torch.cuda.get_device_name(part.device)}"
    header = f"drawn {seed} {generator} {part.dtype} {list(shape)} {first}:{last}\n"
    return blake3.blake3(header.encode()).digest()


def _cut(shape: tuple[int, ...], dim: int, extent: int) -> tuple[int, ...]:
    return (*shape[:dim], extent, *shape[dim + 1 :])
