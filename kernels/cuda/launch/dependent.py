"""Dependent launches: a kernel's programs come to the GPU while the kernel before it goes.

    await_earlier(DEPENDENT)                                  # the kernel's first statement
    kernel[grid](.., num_warps=4, **dependent_launch(x.device))

CUDA calls it programmatic dependent launch (PTX: griddepcontrol). From the end of one kernel of a
CUDA graph to the start of the next takes 1.1 us plainly, 0.9 so, and a decode step has about 320.
Order and bits are those of plain launches:

- The programs come when every program of the kernel before has ended, and wait, before they touch
  memory, until everything earlier in the stream has ended and what it wrote is visible to them,
  peers' words that it waited for too. The kernel before has itself waited so: one wait covers all.
- A kernel launched plainly (a library's, torch's) waits for a dependent one as for any other.
- Nothing triggers its successor early: programs that come early take room from programs that still
  run (2 us slower under decode attention). So every program of the kernel before has its room, also
  one that a peer waits for, and nothing here can block what it waits for.

While another stream overlaps this one (`multiprocessors.leaving`), launches are plain: a step then
waits for events between kernels, for which CUDA does not say what a dependent launch does in a
capture, and long kernels gain nothing.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.launch.multiprocessors import all_free

Options = dict[str, bool]
_PLAIN: Options = {"DEPENDENT": False}
_DEPENDENT: Options = {"DEPENDENT": True, "launch_pdl": True}


@triton.jit
def await_earlier(DEPENDENT: tl.constexpr):
    """Wait until all that is earlier in the stream is done and visible; in Triton and in Gluon."""
    if DEPENDENT:
        gdc_wait()


def dependent_launch(device: torch.device) -> Options:
    """Keyword arguments of a launch of a kernel that takes DEPENDENT: dependent where that exists.

    Plain on the CPU (Triton's interpreter) and on GPUs before capability 9. Bits are the same.
    """
    dependent = all_free() and hardware.gpu_of(device).dependent_launches
    return _DEPENDENT if dependent else _PLAIN
