"""Digests of the pieces of weights that a rank reads (`comm/weight_digests.py` merges them)."""

import blake3
import torch

from tpdet.checkpoint.pieces import PieceRead

PieceKey = tuple[str, int]
"""A tensor's name and the index of its piece."""
Digests = dict[PieceKey, bytes]


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
