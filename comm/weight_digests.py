"""A model's digest, from the digests of all ranks' pieces of its weights.

It is the same at every tensor-parallel size, because the pieces are.
"""

from collections.abc import Iterable

import blake3
import msgspec

from tpdet.checkpoint.digests import Digests, PieceKey
from tpdet.comm.world.world import World, rank_on_node
from tpdet.errors import DisagreementError

_decoder = msgspec.msgpack.Decoder(list[tuple[str, int, bytes]])


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
