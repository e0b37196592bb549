"""The work of a heartbeat: all ranks compare the digests of their page tables."""

from tpdet.cache.versions import VersionTable, first_difference
from tpdet.comm.world.world import World, rank_on_node
from tpdet.errors import IntegrityError


def compare_tables(world: World, table: VersionTable, step: int) -> None:
    """Return if all ranks' tables are equal at a step.

    Raises IntegrityError, on every rank, naming the first rank that differs from rank 0, both
    nodes and digests, and the page.
    """
    digests = world.gather_bytes(table.full_digest())
    if all(digest == digests[0] for digest in digests):
        return
    snapshots = world.gather_bytes(table.snapshot())
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    difference = first_difference(snapshots[0], snapshots[rank]) or "in their history alone"
    raise IntegrityError.in_public(
        f"step {step}: page tables of {rank_on_node(world, 0)} (digest {digests[0].hex()[:16]})"
        f" and {rank_on_node(world, rank)} (digest {digests[rank].hex()[:16]}) differ: {difference}"
    )
