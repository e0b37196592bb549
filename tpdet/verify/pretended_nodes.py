"""Nodes that one host pretends to have: its ranks, neighbours together, each as on a node alone.

Ranks are told so in torchrun's names, which count before those of other launchers. GPUs are shared
out: where there are too few for all ranks, but enough for those of a node, nodes sit on the same
ones, and each still has its peer memory. NCCL goes from node to node as between hosts.
"""

import os
from collections.abc import MutableMapping

from tpdet.errors import UsageError
from tpdet.launch.ranks.environment import read_environment
from tpdet.launch.ranks.node_name import NODE_VARIABLE, this_node
from tpdet.verify.placement import VISIBLE


def pretend_nodes(nodes: int, environ: MutableMapping[str, str] | None = None) -> None:
    """Lay this world's ranks out on `nodes` nodes; before torch looks for GPUs.

    A launcher that started them on several hosts already has its nodes cut further. Raises
    UsageError if they do not lie in blocks that can be cut so.
    """
    environ = os.environ if environ is None else environ
    place = read_environment(environ)
    ranks, left = divmod(place.size, nodes)
    # Of one host's ranks neighbours are those by rank, however the launcher numbers local ranks.
    local = place.rank if place.one_host else place.local_rank
    if left or place.local_size % ranks or (place.rank - local) % ranks:
        raise UsageError(
            f"rank {place.rank} of {place.size}, local rank {place.local_rank} of "
            f"{place.local_size}: hosts like this one are not cut into {nodes} nodes"
        )
    if place.local_size == ranks:
        return
    node, local_rank = divmod(local, ranks)
    environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.size),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(ranks),
        NCCL_HOSTID=f"{os.uname().nodename}-{node}",
    )
    # Where ranks meet, nodes are known by name, whoever started the ranks.
    environ[NODE_VARIABLE] = f"{this_node(place, environ).name}-{place.rank // ranks}"
    if place.address:
        environ.update(MASTER_ADDR=place.address, MASTER_PORT=str(place.port))
    if gpus := [name for name in environ.get(VISIBLE, "").split(",") if name]:
        each = max(len(gpus) * ranks // place.local_size, min(ranks, len(gpus)))
        first = node * each % (len(gpus) - len(gpus) % each)
        environ[VISIBLE] = ",".join(gpus[first : first + each])
