"""RFC 9162 Merkle trees (section 2.1): hashes, inclusion and consistency proofs, their checks.

A proof is a list of SHA-256 hashes (32 bytes each), in the order of the RFC. D[a:b] are the leaves
from a up to b, and their hash is the RFC's MTH(D[a:b]).
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256

HASH_BYTES = 32
EMPTY_ROOT = sha256(b"").digest()

SubtreeHash = Callable[[int, int], bytes]
"""Gives the hash of D[begin:end]."""


def leaf_hash(leaf: bytes) -> bytes:
    """The hash of a tree of one leaf."""
    return sha256(b"\0" + leaf).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash of an inner node by those of its children."""
    return sha256(b"\1" + left + right).digest()


def tree_hash(hashes: Iterable[bytes]) -> bytes:
    """The root over leaf hashes, or over the hashes of equal complete subtrees, from the left."""
    level = [*hashes]
    if not level:
        return EMPTY_ROOT
    while len(level) > 1:
        pairs = [node_hash(*level[left : left + 2]) for left in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


class CompactRange:
    """A growing tree as the roots of its complete subtrees, the largest first: 32 log2(n) bytes."""

    def __init__(self, size: int = 0, subtrees: Iterable[bytes] = ()) -> None:
        self.size, self.subtrees = size, [*subtrees]

    def append(self, leaf: bytes) -> None:
        """Add one leaf by its hash."""
        position, node = self.size, leaf
        while position & 1:
            node = node_hash(self.subtrees.pop(), node)
            position >>= 1
        self.subtrees.append(node)
        self.size += 1

    def extended(self, leaves: Iterable[bytes]) -> "CompactRange":
        """This tree and more leaves, given as bytes; this one stays as it is."""
        larger = CompactRange(self.size, self.subtrees)
        for leaf in leaves:
            larger.append(leaf_hash(leaf))
        return larger

    def root(self) -> bytes:
        """The tree's hash."""
        if not self.subtrees:
            return EMPTY_ROOT
        *others, root = self.subtrees
        for left in reversed(others):
            root = node_hash(left, root)
        return root


def split(size: int) -> int:
    """The largest power of two below `size`: where the RFC cuts a tree of two leaves or more."""
    return 1 << (size - 1).bit_length() - 1


def inclusion_proof(index: int, size: int, subtree: SubtreeHash) -> list[bytes]:
    """PATH(index, D[0:size]) of RFC 9162, 2.1.3.1. Raises ValueError for a leaf outside."""
    if not 0 <= index < size:
        raise ValueError(f"leaf {index} is not in a tree of {size}: ask for one below its size")
    begin, end, proof = 0, size, []
    while end - begin > 1:
        middle = begin + split(end - begin)
        if index < middle:
            proof.append(subtree(middle, end))
            end = middle
        else:
            proof.append(subtree(begin, middle))
            begin = middle
    return proof[::-1]


def consistency_proof(old: int, new: int, subtree: SubtreeHash) -> list[bytes]:
    """PROOF(old, D[0:new]) of RFC 9162, 2.1.4.1. Raises ValueError where the old is larger."""
    if not 0 <= old <= new:
        raise ValueError(f"a tree of {new} does not hold one of {old}: the later one comes second")
    if old in (0, new):
        return []
    begin, end, proof = 0, new, []
    while old != end:
        middle = begin + split(end - begin)
        if old <= middle:
            proof.append(subtree(middle, end))
            end = middle
        else:
            proof.append(subtree(begin, middle))
            begin = middle
    if begin:
        proof.append(subtree(begin, end))
    return proof[::-1]


def verify_inclusion(
    leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes
) -> bool:
    """Whether the proof leads from a leaf's hash to the root: RFC 9162, 2.1.3.2."""
    if not 0 <= index < size or not _are_hashes([leaf, root, *proof]):
        return False
    position, last, node = index, size - 1, leaf
    for other in proof:
        if last == 0:
            return False
        if position & 1 or position == last:
            node = node_hash(other, node)
            while position and not position & 1:
                position, last = position >> 1, last >> 1
        else:
            node = node_hash(node, other)
        position, last = position >> 1, last >> 1
    return last == 0 and node == root


def verify_consistency(
    old: int, new: int, proof: Sequence[bytes], old_root: bytes, new_root: bytes
) -> bool:
    """Whether the tree of `old` leaves is the beginning of that of `new`: RFC 9162, 2.1.4.2."""
    if not 0 <= old <= new or not _are_hashes([old_root, new_root, *proof]):
        return False
    if old == new:
        return not proof and old_root == new_root
    if old == 0:
        return not proof and old_root == EMPTY_ROOT
    nodes = [*proof] if old & (old - 1) else [old_root, *proof]
    if not nodes:
        return False
    position, last = old - 1, new - 1
    while position & 1:
        position, last = position >> 1, last >> 1
    smaller = larger = nodes[0]
    for other in nodes[1:]:
        if last == 0:
            return False
        if position & 1 or position == last:
            smaller, larger = node_hash(other, smaller), node_hash(other, larger)
            while position and not position & 1:
                position, last = position >> 1, last >> 1
        else:
            larger = node_hash(larger, other)
        position, last = position >> 1, last >> 1
    return last == 0 and smaller == old_root and larger == new_root


def _are_hashes(values: Iterable[bytes]) -> bool:
    return all(len(value) == HASH_BYTES for value in values)
