"""The heartbeat's work: every rank shows the digest of its page table as it lies in memory."""

from tpdet.cache.versions import VersionTable, first_difference
from tpdet.comm.world import World
from tpdet.errors import IntegrityError


def compare_tables(world: World, table: VersionTable) -> None:
    """Return if all ranks' tables are equal.

    Raises IntegrityError naming the rank and the page that differ, on every rank.
    """
    digests = world.gather_bytes(table.full_digest())
    if all(digest == digests[0] for digest in digests):
        return
    snapshots = world.gather_bytes(table.snapshot())
    for rank, snapshot in enumerate(snapshots):
        difference = first_difference(snapshots[0], snapshot)
        if difference is not None:
            raise IntegrityError(f"page tables of rank 0 and rank {rank} differ: {difference}")
    raise IntegrityError("the ranks' page tables differ in their history")
