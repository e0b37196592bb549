"""Digests of weights: of each piece that a rank reads, and of a model, from all ranks' pieces.

A model's digest is the same at every tensor-parallel size, because its pieces are.
"""

from collections.abc import Iterable

import blake3
import msgspec
import torch

from tpdet.comm.world.world import World, rank_on_node
from tpdet.errors import DisagreementError
from tpdet.weights.pieces import PieceRead

PieceKey = tuple[str, int]
"""A tensor's name and the index of its piece."""
Digests = dict[PieceKey, bytes]

_decoder = msgspec.msgpack.Decoder(list[tuple[str, int, bytes]])


def piece_digest(part: torch.Tensor, piece: PieceRead, rule: str) -> bytes:
    """BLAKE3 over the header and the raw bytes of a piece on the CPU."""
    raw = part.contiguous().reshape(-1).view(torch.uint8).numpy()
    return blake3.blake3(piece_header(part.dtype, piece, rule)).update(raw.data).digest()


def piece_header(dtype: torch.dtype, piece: PieceRead, rule: str) -> bytes:
    """What a piece's digest begins with: dtype, whole shape and range.

    rule: how a quantised tensor became these numbers; "" for a tensor that is as stored.
    """
    return f"{rule}{dtype} {list(piece.tensor.shape)} {piece.first}:{piece.last}\n".encode()


def random_piece_digest(part: torch.Tensor, piece: PieceRead, seed: int) -> bytes:
    """BLAKE3 over everything that determines a random piece made on a GPU, which is not read."""
    generator = f"{torch.__version__} {torch.cuda.get_device_name(part.device)}"
    header = piece_header(part.dtype, piece, "").decode()
    return blake3.blake3(f"drawn {seed} {generator} {header}".encode()).digest()


def merge_digests(world: World, digests: Digests) -> str:
    """BLAKE3 (hex) over all ranks' pieces by name and index, equal at every size. Collective.

    Raises DisagreementError when two ranks read different bits of one piece, naming their nodes.
    """
    mine = [(name, index, digest) for (name, index), digest in sorted(digests.items())]
    merged: Digests = {}
    reader: dict[PieceKey, int] = {}
    for rank, data in enumerate(world.gather_bytes(msgspec.msgpack.encode(mine))):
        for name, index, digest in _decoder.decode(data):
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
