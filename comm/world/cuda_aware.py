"""Asks an MPI library whether it takes GPU memory, through ctypes: mpi4py does not wrap this.

Open MPI and MPICH have a function MPIX_Query_cuda_support. Open MPI 4's function says only how the
library was built (ompi/mpiext/cuda). Its control variable `opal_cuda_support` says whether that is
switched on and the CUDA driver was found; MPI's tool interface reads it (MPI 4.1, section 15.3).
"""

import ctypes
from typing import Any

_SWITCH = b"opal_cuda_support"
_MPI_SUCCESS = 0
_THREAD_SINGLE = 0  # the lowest level is enough: MPI_T is called only here, on one thread


def is_cuda_aware(mpi: Any) -> bool:
    """Whether the library behind mpi4py's initialised module `mpi` says that it takes GPU memory.

    A library without these functions takes none. Symbols are looked up in mpi4py's module and the
    libraries it is linked to, so in the one MPI that it uses.
    """
    try:
        library = ctypes.CDLL(mpi.__file__)
        return library.MPIX_Query_cuda_support() == 1 and _switched_on(library)
    except (OSError, AttributeError):
        return False


def _switched_on(library: ctypes.CDLL) -> bool:
    """The value of the control variable; True for a library without it."""
    provided, index, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    handle, value = ctypes.c_void_p(), (ctypes.c_ubyte * 8)()  # a bool or an int, by version
    if library.MPI_T_init_thread(_THREAD_SINGLE, ctypes.byref(provided)) != _MPI_SUCCESS:
        return True
    try:
        if library.MPI_T_cvar_get_index(_SWITCH, ctypes.byref(index)) != _MPI_SUCCESS:
            return True
        allocate = library.MPI_T_cvar_handle_alloc
        if allocate(index, None, ctypes.byref(handle), ctypes.byref(count)) != _MPI_SUCCESS:
            return True
        read = library.MPI_T_cvar_read(handle, ctypes.byref(value)) == _MPI_SUCCESS
        library.MPI_T_cvar_handle_free(ctypes.byref(handle))
        return any(value) if read else True
    finally:
        library.MPI_T_finalize()
