"""Merkle hashes and proofs: Certificate Transparency's vectors, and another implementation."""

import random

import pytest

from tpdet.audit.log.merkle import (
    EMPTY_ROOT,
    CompactRange,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    tree_hash,
    verify_consistency,
    verify_inclusion,
)

LEAVES_HEX = (
    "", "00", "10", "2021", "3031", "40414243", "5051525354555657",
    "606162636465666768696a6b6c6d6e6f",
)  # fmt: skip
LEAVES = [*map(bytes.fromhex, LEAVES_HEX)]
ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
INCLUSION_OF_5_IN_8 = [
    "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
]
CONSISTENCY_OF_6_AND_8 = [
    "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
    "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
]


class Tree:
    """A tree in memory: its leaves, and the hash of any stretch of them."""

    def __init__(self, leaves: list[bytes]) -> None:
        self.hashes = [leaf_hash(leaf) for leaf in leaves]
        self.size = len(leaves)

    def subtree(self, begin: int, end: int) -> bytes:
        return tree_hash(self.hashes[begin:end])

    def root(self, size: int) -> bytes:
        return self.subtree(0, size)


def test_the_published_roots_and_proofs():
    tree = Tree(LEAVES)
    assert [tree.root(size).hex() for size in range(9)] == ROOTS
    assert [node.hex() for node in inclusion_proof(5, 8, tree.subtree)] == INCLUSION_OF_5_IN_8
    found = consistency_proof(6, 8, tree.subtree)
    assert [node.hex() for node in found] == CONSISTENCY_OF_6_AND_8


def test_a_compact_range_has_the_root_of_every_size():
    growing = CompactRange()
    assert growing.root() == EMPTY_ROOT
    tree = Tree([b"%d" % i for i in range(300)])
    for size, node in enumerate(tree.hashes, 1):
        growing.append(node)
        assert growing.root() == tree.root(size)
    assert growing.extended([]).root() == growing.root() != growing.extended([b"300"]).root()


def test_every_proof_of_small_trees_holds_and_no_other_does():
    tree = Tree([b"%d" % i for i in range(17)])
    for size in range(1, 18):
        for index in range(size):
            proof = inclusion_proof(index, size, tree.subtree)
            leaf, root = tree.hashes[index], tree.root(size)
            assert verify_inclusion(leaf, index, size, proof, root)
            assert not verify_inclusion(leaf, index, size, [*proof, root], root)
            assert not verify_inclusion(leaf, index, size, proof[:-1], root) or not proof
            for other in range(size):
                if other != index:
                    assert not verify_inclusion(leaf, other, size, proof, root)
                    assert not verify_inclusion(tree.hashes[other], index, size, proof, root)
        for old in range(size + 1):
            proof = consistency_proof(old, size, tree.subtree)
            roots = tree.root(old), tree.root(size)
            assert verify_consistency(old, size, proof, *roots)
            assert not verify_consistency(old, size, [*proof, roots[1]], *roots)
            assert not verify_consistency(old, size, proof[:-1], *roots) or not proof
            assert not verify_consistency(old, size, proof, bytes(32), roots[1])
            assert not verify_consistency(old, size, proof, roots[0], bytes(32)) or not old


@pytest.mark.parametrize("call", [(3, 3), (-1, 3), (0, 0)])
def test_no_proof_is_made_of_a_leaf_outside(call):
    with pytest.raises(ValueError, match="is not in a tree of"):
        inclusion_proof(*call, Tree(LEAVES).subtree)
    with pytest.raises(ValueError, match="does not hold one of 4"):
        consistency_proof(4, 3, Tree(LEAVES).subtree)


@pytest.mark.parametrize("trees", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_proofs_agree_with_another_implementation_on_random_trees(trees):
    other = pytest.importorskip("scitt_cose")
    draw = random.Random(trees)
    for _ in range(trees):
        size = draw.choice([draw.randrange(1, 9), draw.randrange(1, 70), draw.randrange(1, 300)])
        leaves = [draw.randbytes(draw.randrange(40)) for _ in range(size)]
        tree, entries = Tree(leaves), [leaf.hex() for leaf in leaves]
        index, old = draw.randrange(size), draw.randrange(1, size + 1)
        root, old_root = tree.root(size), tree.root(old)
        assert root.hex() == other.merkle_root(entries)
        proof = inclusion_proof(index, size, tree.subtree)
        path = [node.hex() for node in proof]
        assert path == other.inclusion_proof(entries, index)
        wrong = draw.randrange(size)
        for place in index, wrong:
            holds = verify_inclusion(tree.hashes[index], place, size, proof, root)
            assert holds == other.verify_inclusion(entries[index], place, size, path, root.hex())
            assert holds == (place == index)
        proof = consistency_proof(old, size, tree.subtree)
        path = [node.hex() for node in proof]
        assert path == other.consistency_proof(entries, old, size)
        for smaller in old, draw.randrange(1, size + 1):
            found = verify_consistency(smaller, size, proof, old_root, root)
            roots = old_root.hex(), root.hex()
            assert found == other.verify_consistency(*roots, smaller, size, path)
            assert found == (smaller == old)
