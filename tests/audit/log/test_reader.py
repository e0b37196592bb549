"""Reading and checking a log: what is changed, dropped, forked or missing is named."""

import errno
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.audit.log.audit_logs import (
    IN_MEMORY,
    KEY,
    ORIGIN,
    SECRET,
    leaves_of,
    open_log,
    open_store,
    read_log,
)
from tests.audit.log.simulated_disk import FOLDER, SimulatedDisk
from tpdet.audit.log.checkpoint import LogCheckpoint
from tpdet.audit.log.disk import Disk
from tpdet.audit.log.merkle import leaf_hash, tree_hash, verify_consistency, verify_inclusion
from tpdet.audit.log.tiles import (
    ENTRIES,
    WIDTH,
    RightEdge,
    Tiles,
    decode_entries,
    encode_entries,
    tile_path,
)
from tpdet.errors import AuditError, NotFoundError, NotPermittedError

SIZE = 700
"""Leaves of the log that is damaged: two full tiles and a partial one, and one of level 1."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("log")
    log = open_log(directory)
    for begin, end in (0, 100), (100, SIZE):
        [log.append(leaf) for leaf in leaves_of(begin, end)][-1].result()
        log.publish()
    log.close()
    return directory


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "log"))


def resign(directory: Path, leaves: list[bytes]) -> None:
    """A signed checkpoint of other leaves, as who holds the key can make it."""
    root = tree_hash(map(leaf_hash, leaves))
    note = LogCheckpoint(ORIGIN, len(leaves), root).signed(KEY, SECRET.sign)
    (directory / "checkpoint").write_bytes(note)


def rewrite_leaf(directory: Path, index: int, leaf: bytes) -> None:
    number = index // WIDTH
    path = directory / tile_path(ENTRIES, number, min(WIDTH, SIZE - number * WIDTH))
    leaves = decode_entries(path.read_bytes(), "")
    leaves[index % WIDTH] = leaf
    path.write_bytes(encode_entries(leaves))


def rewrite_hash(directory: Path, level: int, index: int, value: bytes) -> None:
    number = index // WIDTH
    path = directory / tile_path(level, number, min(WIDTH, (SIZE >> 8 * level) - number * WIDTH))
    data = bytearray(path.read_bytes())
    data[index % WIDTH * 32 : (index % WIDTH + 1) * 32] = value
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("index", "path"),
    [(0, "000"), (999, "999"), (1000, "x001/000"), (1234067, "x001/x234/067")],
)
def test_tiles_lie_where_the_specification_says(index, path):
    assert tile_path(0, index) == f"tile/0/{path}"
    assert tile_path(ENTRIES, index, 112) == f"tile/entries/{path}.p/112"


def test_a_tree_of_70000_has_the_tiles_of_the_specification():
    edge = RightEdge()
    full = [tile for tile in edge.extend([b""] * 70_000) if tile.level != ENTRIES]
    partial = [tile for tile in edge.partial() if tile.level != ENTRIES]
    assert [sum(tile.level == level for tile in full) for level in (0, 1, 2)] == [273, 1, 0]
    assert [(tile.level, tile.width) for tile in partial] == [(0, 112), (1, 17), (2, 1)]
    files = {tile.path: tile.data for tile in (*full, *partial)}
    tiles = Tiles(files.__getitem__, 70_000)
    assert tiles.root_at(70_000) == edge.tree().root()
    for size in 1, 255, 257, 65_537:
        assert tiles.root_at(size) == tree_hash([leaf_hash(b"")] * size)


def test_every_leaf_has_a_proof_and_every_size_one_of_consistency(whole):
    reader = read_log(whole)
    reader.verify([reader.checkpoint])
    hashes = [leaf_hash(leaf) for leaf in leaves_of(0, SIZE)]
    for index in range(0, SIZE, 13):
        proof = reader.inclusion_proof(index)
        assert verify_inclusion(hashes[index], index, SIZE, proof, reader.checkpoint.root)
    for old in range(0, SIZE, 29):
        proof = reader.consistency_proof(old)
        roots = tree_hash(hashes[:old]), reader.checkpoint.root
        assert verify_consistency(old, SIZE, proof, *roots)
    for index in -1, SIZE:
        with pytest.raises(NotFoundError, match=f"has {SIZE} leaves, and no leaf {index}"):
            reader.inclusion_proof(index)
        with pytest.raises(NotFoundError):
            reader.leaf(index)
    with pytest.raises(AuditError, match="were taken away"):
        reader.consistency_proof(SIZE + 1)


@pytest.mark.parametrize("index", [0, 3, 255, 256, 511, 512, SIZE - 1])
def test_a_changed_leaf_is_named(copied, index):
    rewrite_leaf(copied, index, b"forged")
    with pytest.raises(AuditError, match=rf"^leaf {index} was changed"):
        read_log(copied).verify()


@pytest.mark.parametrize("index", [0, 3, 255, 256, 511])
def test_a_changed_hash_of_a_full_tile_is_named(copied, index):
    rewrite_hash(copied, 0, index, bytes(32))
    name = rf"^hash {index % WIDTH} of tile/0/00{index // WIDTH} was changed"
    with pytest.raises(AuditError, match=name):
        read_log(copied).verify()


@pytest.mark.parametrize(("level", "index"), [(0, 512), (0, SIZE - 1), (1, 0), (1, 1)])
def test_a_changed_hash_at_the_edge_is_named_by_reading_alone(copied, level, index):
    rewrite_hash(copied, level, index, bytes(32))
    with pytest.raises(AuditError, match=rf"^hash {index % WIDTH} of tile/{level}/00.\S* was "):
        read_log(copied)


def test_a_leaf_and_its_hash_that_were_changed_together_are_found(copied):
    rewrite_leaf(copied, 300, b"forged")
    rewrite_hash(copied, 0, 300, leaf_hash(b"forged"))
    with pytest.raises(AuditError, match=r"^one of the leaves 256-511 was changed: hash 1 of"):
        read_log(copied).verify()
    rewrite_leaf(copied, SIZE - 1, b"forged")
    rewrite_hash(copied, 0, SIZE - 1, leaf_hash(b"forged"))
    with pytest.raises(AuditError, match="neither leads to the signed root"):
        read_log(copied)


def test_two_leaves_that_changed_places_are_found(copied):
    first, second = leaves_of(10, 12)
    rewrite_leaf(copied, 10, second)
    rewrite_leaf(copied, 11, first)
    with pytest.raises(AuditError, match=r"^leaf 10 was changed"):
        read_log(copied).verify()


def test_a_leaf_that_was_taken_out_or_doubled_is_found(copied):
    path = copied / tile_path(ENTRIES, 0)
    leaves = decode_entries(path.read_bytes(), "")
    path.write_bytes(encode_entries(leaves[:-1]))
    with pytest.raises(AuditError, match=r"^tile/entries/000 has 255 leaves"):
        read_log(copied).verify()
    path.write_bytes(encode_entries([*leaves[:7], *leaves[6:-1]]))
    with pytest.raises(AuditError, match=r"^leaf 7 was changed"):
        read_log(copied).verify()
    path.write_bytes(encode_entries(leaves)[:-1])
    with pytest.raises(AuditError, match=r"^tile/entries/000 ends within its leaf 255"):
        read_log(copied).verify()


@pytest.mark.parametrize("name", ["tile/entries/001", "tile/0/000", "tile/1/000.p/2"])
def test_a_missing_or_cut_file_is_named(copied, name):
    data = (copied / name).read_bytes()
    (copied / name).write_bytes(data[:-1])
    with pytest.raises(AuditError, match=name):
        read_log(copied).verify()
    (copied / name).unlink()
    with pytest.raises(AuditError, match=f"^{name} is missing"):
        read_log(copied).verify()


def test_any_flipped_bit_and_any_cut_file_is_found():
    disk = SimulatedDisk()
    store = open_store(disk)
    store.commit(leaves_of(0, 300))
    store.close()
    read_log(disk=disk).verify()
    draw = random.Random(0)
    files = [
        (folder, name)
        for folder, entries in sorted(disk.folders.items())
        for name, entry in sorted(entries.items())
        if entry != FOLDER and name != "lock"
    ]
    assert len(files) == 6, "a checkpoint, two bundles, three tiles"
    for folder, name in files * 25:
        file = disk.folders[folder][name]
        data, place = file.data, draw.randrange(len(file.data))
        flipped = bytes([data[place] ^ 1 << draw.randrange(8)])
        file.data = draw.choice([data[:place], data[:place] + flipped + data[place + 1 :]])
        with pytest.raises(AuditError) as caught:
            read_log(disk=disk).verify()
        path = str((folder / name).relative_to(IN_MEMORY))
        assert name == "checkpoint" or path in str(caught.value) or "leaf " in str(caught.value)
        file.data = data
    read_log(disk=disk).verify()


def test_what_no_log_holds_is_not_read(copied):
    path = copied / "tile" / "entries" / "001"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(AuditError, match="no file of at most 128 MiB"):
        read_log(copied).verify()
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(AuditError, match="no file of at most 128 MiB"):
        read_log(copied).verify()
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(AuditError, match="is a link, which no log holds"):
        read_log(copied).verify()


def test_a_log_that_may_not_be_read_says_so(copied, monkeypatch):
    def refuse(path, *arguments):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "open", refuse)  # root may read all
    with pytest.raises(NotPermittedError, match="checkpoint may not be read"):
        read_log(copied)


def test_a_rewritten_log_is_a_fork_of_the_earlier_one(copied):
    earlier = [LogCheckpoint(ORIGIN, 100, tree_hash(map(leaf_hash, leaves_of(0, 100))))]
    read_log(copied).verify(earlier)
    for folder in "tile", "journal":
        shutil.rmtree(copied / folder)
    (copied / "checkpoint").unlink()
    store = open_store(Disk(), copied)
    store.commit([b"other", *leaves_of(1, SIZE)])
    store.close()
    read_log(copied).verify()
    with pytest.raises(AuditError, match="was forked: its first 100 leaves are not those"):
        read_log(copied).verify(earlier)


def test_a_log_that_was_rolled_back_lacks_leaves(copied):
    later = read_log(copied).checkpoint
    resign(copied, leaves_of(0, 600))
    for path in (copied / "tile").glob("*/002.p"):
        shutil.rmtree(path)
    rest = leaves_of(512, 600)
    for level, data in (ENTRIES, encode_entries(rest)), (0, b"".join(map(leaf_hash, rest))):
        path = copied / tile_path(level, 2, 88)
        path.parent.mkdir()
        path.write_bytes(data)
    read_log(copied).verify()
    with pytest.raises(AuditError, match=f"has 600 leaves, and had {SIZE}: some were taken away"):
        read_log(copied).verify([later])
    with pytest.raises(AuditError, match=r"of another.example: compare it with that log"):
        read_log(copied).verify([LogCheckpoint("another.example", 1, bytes(32))])


def test_a_checkpoint_of_another_tree_is_a_fork(copied):
    resign(copied, [b"other", *leaves_of(1, SIZE)])
    with pytest.raises(AuditError, match=f"was forked: its {SIZE} leaves and their tiles agree"):
        read_log(copied)


def test_a_log_without_its_checkpoint_is_not_begun_anew(copied):
    (copied / "checkpoint").unlink()
    with pytest.raises(NotFoundError, match="has no file checkpoint"):
        read_log(copied)
    with pytest.raises(AuditError, match="holds tiles and no checkpoint"):
        open_log(copied)


def test_a_damaged_log_is_not_appended_to(copied):
    rewrite_hash(copied, 1, 0, bytes(32))
    with pytest.raises(AuditError, match="tile/1/000"):
        open_log(copied)


def journal_of(directory: Path) -> Path:
    """A log of three commits whose process ended without closing it; its journal's segment."""
    log = open_log(directory)
    for leaf in leaves_of(0, 3):
        log.append(leaf).result()
    copy = directory.with_name("killed")
    shutil.copytree(directory, copy)
    log.close()
    (segment,) = (copy / "journal").iterdir()
    return segment


def test_a_journal_that_was_changed_is_found_and_its_torn_end_is_cut_off(tmp_path):
    segment = journal_of(tmp_path / "log")
    directory, data = segment.parents[1], segment.read_bytes()
    assert [*read_log(directory).leaves()] == leaves_of(0, 3)
    begins = [0, data.index(b"tpdetlog", 1), data.rindex(b"tpdetlog")]
    draw = random.Random(0)
    for place in draw.sample(range(begins[2]), 40):
        segment.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(AuditError, match="is damaged at byte"):
            read_log(directory)
        with pytest.raises(AuditError, match="is damaged at byte"):
            open_log(directory)
    for end in draw.sample(range(begins[2], len(data)), 20):
        segment.write_bytes(data[:end] + draw.choice([b"", bytes(50)]))
        assert [*read_log(directory).leaves()] == leaves_of(0, 2)
    open_log(directory).close()
    assert [*read_log(directory).leaves()] == leaves_of(0, 2)


def test_a_journal_that_lacks_its_beginning_or_has_strangers_is_refused(tmp_path):
    segment = journal_of(tmp_path / "log")
    directory = segment.parents[1]
    moved = segment.rename(segment.with_name(f"{1:020}"))
    with pytest.raises(AuditError, match="goes on from leaf 1, not from 0"):
        read_log(directory)
    moved.rename(segment.with_name("notes.txt"))
    with pytest.raises(AuditError, match=r"journal/notes.txt is no part of a log"):
        read_log(directory)
