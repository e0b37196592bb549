"""Kernels compiled for compute capability 9.0 without a GPU; one that can is a dependent launch's.

What such a kernel must not do is to touch memory before everything earlier in its stream has ended:
`check_waits_first` reads that in the PTX.
"""

import re

WAIT, TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
_TOUCHES = re.compile(
    r"(?<![\w.])(?:(?:ld|st)\.(?!param|shared|local|const)|atom\.|red\.|cp\.|mbarrier\.|prefetch|"
    r"multimem\.|tensormap\.|wgmma\.|bar\.|barrier\.)[\w.:]*"
)


def hopper_kernel(kernel, signature, constants, attributes, options):
    """What Triton compiles; a kernel that takes DEPENDENT gets it, and is checked.

    signature: name -> type of what is no constant, a tuple of types for a tuple; attributes: names
    that are multiples of 16, with every member of a tuple.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    dependent = "DEPENDENT" in names
    if dependent:
        constants = constants | {"DEPENDENT": True}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={path: [["tt.divisibility", 16]] for path in _paths(names, signature, attributes)},
    )
    options = {"enable_fp_fusion": False, "launch_pdl": dependent} | options
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert done.metadata.launch_pdl == dependent
    if dependent:
        check_waits_first(done.asm["ptx"])
    return done


def _paths(names, signature, attributes):
    """Where the arguments of these names stand, member by member."""
    for name in attributes:
        kind, index = signature[name], names.index(name)
        yield from [(index,)] if isinstance(kind, str) else [(index, i) for i in range(len(kind))]


def check_waits_first(ptx):
    """One wait, of every program and before anything touches memory; no early trigger.

    Where warps take different parts, the first four wait before they start the others.
    """
    code = re.sub(r"//.*", "", ptx[ptx.index(".entry") :])
    assert code.count(WAIT) == 1, f"{code.count(WAIT)} waits"
    assert TRIGGER not in code, "its successor is let in early"
    before = code[code.index("{") : code.index(WAIT)]
    touched = _TOUCHES.search(before)
    assert touched is None, f"{touched.group()} before the wait"
    branches = re.findall(r"(?<![\w.])(?:bra|brx)\b", before)
    assert not branches or "setmaxnreg" in code, "a branch before the wait"
