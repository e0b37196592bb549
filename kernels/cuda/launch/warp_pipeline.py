"""What programs share whose fetching warp keeps a ring of places in shared memory full (Hopper)."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.6


@gluon.jit
def release(free):
    """Every warp of the group is done with a place of a ring: only then does one thread say so."""
    tl.debug_barrier()
    mbarrier.arrive(free, count=1)
