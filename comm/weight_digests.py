"""A model's digest, from the digests of all ranks' pieces of its weights.

It is the same at every tensor-parallel size, because the pieces are.
"""

from typing import NamedTuple

import blake3
import msgspec

from tpdet.checkpoint.digests import Digests, PieceKey
from tpdet.comm.world.world import World, rank_on_node
from tpdet.errors import DisagreementError

_decoder = msgspec.msgpack.Decoder(list[tuple[str, int, bytes]])


class MergedDigests(NamedTuple):
    """BLAKE3 (hex) of all weights, and of each tensor by its name; equal at every size."""

    whole: str
    tensors: dict[str, str]


def merge_digests(world: World, digests: Digests) -> MergedDigests:
    """The digests over all ranks' pieces by name and index. Collective.

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
    whole = blake3.blake3()
    tensors: dict[str, blake3.blake3] = {}
    for name, index in sorted(merged):
        piece = f"{name}\0{index}\0".encode() + merged[name, index]
        whole.update(piece)
        tensors.setdefault(name, blake3.blake3()).update(piece)
    return MergedDigests(
        whole.hexdigest(), {name: digest.hexdigest() for name, digest in tensors.items()}
    )
