"""Lets the ranks of one host act as if they were on several nodes, for tests of two-level folds.

Ranks read it from torchrun's environment variables, which take precedence over other launchers'.
GPUs are divided among the nodes. Where there are too few for all ranks, but enough for one node,
the nodes share them, and each node still has its peer memory. NCCL connects these nodes as it
connects hosts.
"""

import os
from collections.abc import MutableMapping

from tpdet.errors import UsageError
from tpdet.launch.ranks.environment import read_environment
from tpdet.launch.ranks.node_name import NODE_VARIABLE, this_node
from tpdet.tools.worlds.placement import VISIBLE


def pretend_nodes(nodes: int, environ: MutableMapping[str, str] | None = None) -> None:
    """Divide this world's ranks into `nodes` nodes; call it before torch looks for GPUs.

    Ranks that were started on several hosts are divided further within each host. Raises UsageError
    if that is impossible.
    """
    environ = os.environ if environ is None else environ
    here = read_environment(environ)
    ranks, left = divmod(here.size, nodes)
    # Neighbours on one host follow by rank, not by the launcher's local rank.
    local = here.rank if here.one_host else here.local_rank
    if left or here.local_size % ranks or (here.rank - local) % ranks:
        raise UsageError(
            f"rank {here.rank} of {here.size}, local rank {here.local_rank} of "
            f"{here.local_size}: hosts like this one are not cut into {nodes} nodes"
        )
    if here.local_size == ranks:
        return
    node, local_rank = divmod(local, ranks)
    environ.update(
        RANK=str(here.rank),
        WORLD_SIZE=str(here.size),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(ranks),
        NCCL_HOSTID=f"{os.uname().nodename}-{node}",
    )
    # The roll call knows nodes by name, for every launcher.
    environ[NODE_VARIABLE] = f"{this_node(here, environ).name}-{here.rank // ranks}"
    if here.address:
        environ.update(MASTER_ADDR=here.address, MASTER_PORT=str(here.port))
    if gpus := [name for name in environ.get(VISIBLE, "").split(",") if name]:
        share = max(len(gpus) * ranks // here.local_size, min(ranks, len(gpus)))
        first = node * share % (len(gpus) - len(gpus) % share)
        environ[VISIBLE] = ",".join(gpus[first : first + share])
