"""Kernels compiled for compute capability 9.0 without a GPU; one that can is a dependent launch's.

What such a kernel must not do is to touch memory before everything earlier in its stream has ended:
`check_waits_first` reads that in the PTX.
"""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from tpdet.kernels.cuda.launch.dependent import ALONE, FIRST, SECOND

WAIT, TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
_TOUCHES = re.compile(
    r"(?<![\w.])(?:(?:ld|st)\.(?!param|shared|local|const)|atom\.|red\.|cp\.|mbarrier\.|prefetch|"
    r"multimem\.|tensormap\.|wgmma\.|bar\.|barrier\.)[\w.:]*"
)


class HopperKernel(NamedTuple):
    """What Triton made of a kernel: its PTX, the log of ptxas -v, bytes of shared memory, TTGIR."""

    ptx: str
    log: str
    shared: int
    ttgir: str


def hopper_kernel(kernel, signature, constants, attributes, options):
    """A `HopperKernel`; a kernel that takes DEPENDENT gets it, `ALONE` by default, and is checked.

    signature: name -> type of what is no constant, a tuple of types for a tuple; attributes: names
    that are multiples of 16, with every member of a tuple that is no float.
    """
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    dependent = "DEPENDENT" in names
    if dependent:
        constants = {"DEPENDENT": ALONE} | constants
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={path: [["tt.divisibility", 16]] for path in _paths(names, signature, attributes)},
    )
    options = {"enable_fp_fusion": False, "launch_pdl": dependent} | options
    done = compiled(source, options)
    if dependent:
        _CHECKS[constants["DEPENDENT"]](done.ptx)
    return done


class HopperPTX(NamedTuple):
    """What Triton made of a kernel before the assembler: PTX, bytes of shared memory, TTGIR."""

    ptx: str
    shared: int
    ttgir: str


def compiled(source, options):
    """A `HopperKernel` of a source of Triton or Gluon."""
    done = hopper_ptx(source, options)
    return HopperKernel(done.ptx, assemble(done.ptx), done.shared, done.ttgir)


def hopper_ptx(source, options):
    """A `HopperPTX` of a source of Triton or Gluon: Triton's own run of ptxas is left out.

    What has no code is kept apart from Triton's cache.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    uncoded = mock.patch.object(CUDABackend, "make_cubin", lambda *_: b"")
    with triton.knobs.cache.scope(), uncoded:
        triton.knobs.cache.dir = f"{triton.knobs.cache.dir}-without-code"
        done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert done.metadata.launch_pdl == options.get("launch_pdl", False)
    return HopperPTX(done.asm["ptx"], done.metadata.shared, done.asm["ttgir"])


def assemble(ptx):
    """The log of the bundled assembler that knows this PTX version."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    for tool in ("ptxas", "ptxas-blackwell"):
        command = [str(tools / tool), "-v", "--gpu-name=sm_90a", "/dev/stdin", "-o", "/dev/null"]
        done = subprocess.run(command, input=ptx, capture_output=True, text=True)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def _paths(names, signature, attributes):
    """Where the arguments of these names stand, member by member."""
    for name in attributes:
        kind, index = signature[name], names.index(name)
        if isinstance(kind, str):
            yield (index,)
        else:
            yield from ((index, i) for i, each in enumerate(kind) if each != "fp32")


def _waiting_code(ptx, triggers):
    """A kernel's code without comments, which waits once and lets in so often."""
    code = re.sub(r"//.*", "", ptx[ptx.index(".entry") :])
    assert code.count(WAIT) == 1, f"{code.count(WAIT)} waits"
    assert code.count(TRIGGER) == triggers, "its successor is let in early"
    return code


def check_waits_first(ptx, triggers=0):
    """One wait, of every program and before anything touches memory; no early trigger.

    Where warps take different parts, the first four wait before they start the others.
    """
    code = _waiting_code(ptx, triggers)
    before = code[code.index("{") : code.index(WAIT)]
    touched = _TOUCHES.search(before)
    assert touched is None, f"{touched.group()} before the wait"
    branches = re.findall(r"(?<![\w.])(?:bra|brx)\b", before)
    assert not branches or "setmaxnreg" in code, "a branch before the wait"


def check_lets_in(ptx):
    """The first of a pair: it waits first and then lets the second in, before all else."""
    check_waits_first(ptx, triggers=1)
    code = _waiting_code(ptx, 1)
    touched = _TOUCHES.search(code[code.index(WAIT) : code.index(TRIGGER)])
    assert touched is None, f"{touched.group()} before the second is let in"


def check_waits_last(ptx):
    """The second of a pair: one wait, of every program and behind all that touches memory.

    Where warps take different parts, the first four wait, and tell the others when to end.
    """
    code = _waiting_code(ptx, 0)
    touched = _TOUCHES.search(code[code.index(WAIT) :])
    assert touched is None or "setmaxnreg" in code, f"{touched.group()} behind the wait"


_CHECKS = {ALONE: check_waits_first, FIRST: check_lets_in, SECOND: check_waits_last}
