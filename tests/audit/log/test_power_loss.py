"""A writer that loses power, is killed or fails at every operation: nothing promised is lost."""

import errno
import random
from contextlib import suppress

import pytest

from tests.audit.log.audit_logs import IN_MEMORY, KEY, leaves_of, open_store, read_log
from tests.audit.log.simulated_disk import PowerLoss, SimulatedDisk
from tpdet.audit.log.checkpoint import verified_checkpoint
from tpdet.errors import AuditError, AuditUnavailableError, NotFoundError

BATCHES = (1, 2, "publish", 250, "publish", 1, 4, "publish", 3, "open", 2, "publish")
"""What a writer does: commits of so many leaves, past the end of a tile; publishing; a restart."""
LONG = (*BATCHES, 300, "publish", 1, "open", 600, "publish", 5, "publish", "open", "open", 1)


class Writer:
    """Writes as told; knows which leaves it was promised, and the last that a reader saw."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.disk, self.submitted, self.promised = disk, [], 0
        self.seen = []

    def run(self, batches: tuple) -> None:
        store = open_store(self.disk)
        for batch in batches:
            if batch == "publish":
                store.publish()
            elif batch == "open":
                store.close()
                store = open_store(self.disk)
            else:
                leaves = leaves_of(len(self.submitted), len(self.submitted) + batch)
                self.submitted += leaves
                assert store.commit(leaves) == len(self.submitted) - batch
                self.promised = len(self.submitted)
                self.seen = [read_log(disk=self.disk).checkpoint]
        store.close()

    def check(self, disk: SimulatedDisk, seen: tuple = ()) -> None:
        """The log has all that was promised, nothing else, verifies before and after a start."""
        seen = [*self.seen, *seen]
        try:
            reader = read_log(disk=disk)
        except NotFoundError:
            assert not self.promised and not any(checkpoint.size for checkpoint in seen)
        else:
            reader.verify(seen)
            assert self.promised <= reader.checkpoint.size
            assert [*reader.leaves()] == self.submitted[: reader.checkpoint.size]
            seen.append(reader.checkpoint)
        store = open_store(disk)
        assert self.promised <= store.size <= len(self.submitted)
        kept, more = self.submitted[: store.size], leaves_of(5000, 5010)
        store.commit(more)
        store.close()
        after = read_log(disk=disk)
        after.verify(seen)
        assert after.published == after.checkpoint
        assert [*after.leaves()] == kept + more


MINUTES = pytest.mark.slow, pytest.mark.timeout(3600)


@pytest.mark.parametrize(
    ("batches", "draws"), [(BATCHES, 0), pytest.param(LONG, 30, marks=MINUTES)]
)
def test_a_power_loss_at_any_operation_loses_nothing_promised(batches, draws):
    disk = SimulatedDisk()
    writer = Writer(disk)

    def lose_power():
        draw, seen = random.Random(disk.operations), []
        before = disk.after_kill()
        with suppress(NotFoundError, FileNotFoundError):  # who looks now is not told lies either
            if disk.operations % 2:
                seen = [read_log(disk=before).checkpoint]
            else:
                seen = [verified_checkpoint(before.read(IN_MEMORY / "checkpoint"), [KEY])]
        for drawn in [None, *[draw] * draws] if draws else [draw.choice([None, draw])]:
            writer.check(before.after_power_loss(drawn), seen)

    disk.watch = lose_power
    writer.run(batches)
    assert writer.promised == len(writer.submitted) > 256 and disk.operations > 200
    disk.watch()


@pytest.mark.parametrize(("batches", "step"), [(BATCHES, 9), pytest.param(LONG, 1, marks=MINUTES)])
def test_a_kill_and_then_a_power_loss_lose_nothing_promised(batches, step):
    """The second process stands on files that the first one wrote and did not sync."""
    disk = SimulatedDisk()
    writer = Writer(disk)

    def kill():
        if disk.operations % step:
            return
        draw = random.Random(disk.operations)
        writer.check(disk.after_kill())
        second = disk.after_kill()
        second.power_loss_at = second.operations + draw.randrange(40)
        heir = Writer(second)
        heir.submitted, heir.promised = [*writer.submitted], writer.promised
        try:
            store = open_store(second)
            heir.promised = store.size
            heir.submitted = heir.submitted[: store.size] + leaves_of(9000, 9005)
            store.commit(leaves_of(9000, 9005))
            heir.promised = len(heir.submitted)
            store.publish()
        except PowerLoss:
            pass
        for drawn in None, draw, draw:
            heir.check(second.after_power_loss(drawn))

    disk.watch = kill
    writer.run(batches)


class Careless(SimulatedDisk):
    """Leaves out one kind of sync."""

    left_out = "sync"

    def sync(self, descriptor):
        self._operation("sync")
        if self.left_out != "sync":
            super().sync(descriptor)

    def sync_folder(self, path):
        self._operation("sync_folder")
        if self.left_out != "sync_folder":
            super().sync_folder(path)


@pytest.mark.parametrize("left_out", ["sync", "sync_folder"])
def test_a_writer_that_does_not_sync_is_found_out(left_out):
    disk = Careless()
    disk.left_out = left_out
    writer = Writer(disk)
    writer.run(BATCHES)
    with pytest.raises((AssertionError, AuditError)):
        writer.check(disk.after_power_loss())


@pytest.mark.parametrize("name", ["create", "write", "sync", "rename", "sync_folder"])
def test_a_disk_that_fails_refuses_commits_until_it_works_again(name):
    disk = SimulatedDisk()
    store = open_store(disk)
    store.commit(leaves_of(0, 3))
    disk.failing[name] = errno.EIO
    for begin in 3, 4:
        with pytest.raises(AuditUnavailableError, match="cannot be written"):
            store.commit(leaves_of(begin, begin + 1))
            store.publish()
    del disk.failing[name]
    first = store.commit(leaves_of(9, 10))
    assert [*read_log(disk=disk).leaves()][first:] == leaves_of(9, 10)
    read_log(disk=disk.after_power_loss()).verify()
    store.close()
    read_log(disk=disk).verify()


def test_a_full_disk_refuses_commits_until_there_is_room():
    for room in range(0, 400, 3):
        disk = SimulatedDisk()
        store = open_store(disk)
        store.commit(leaves_of(0, 3))
        disk.room = room
        promised = 3
        with pytest.raises(AuditUnavailableError, match="No space left"):
            for index in range(3, 9):
                assert store.commit(leaves_of(index, index + 1)) == index
                promised += 1
        assert [*read_log(disk=disk.after_power_loss()).leaves()][:promised] == leaves_of(
            0, promised
        )
        disk.room = None
        store.commit(leaves_of(9, 10))
        reader = read_log(disk=disk.after_power_loss())
        reader.verify()
        assert [*reader.leaves()][-1:] == leaves_of(9, 10)
        store.close()
