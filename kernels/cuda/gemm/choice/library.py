"""Matrix products by the vendor's library, where it is in the bit class.

    y = round(x W^T)        x [M, K], weight [N, K]

cuBLAS adds one ascending chain wherever it does not split K. It chooses its kernel by M, N, K,
alignment, workspace and version, so an answer for one M says nothing about another: a library
product runs at exactly the row count that was tested (the bucket), with rows padded up to it, under
the environment it was tested in (`environment`), and start-up tests it again (`admission`).

Two ways to the library, without a global switch: `mm` is cuBLAS, `addmm` cuBLASLt (torch takes that
way for a bias vector; ours is zero, and a chain that starts from +0 never ends in -0, so adding it
changes nothing). Neither takes a bias of the model: the contract's rounding order is ours to keep.
"""

import ctypes
import os
from functools import cache
from pathlib import Path

import torch

from tpdet.kernels.inputs.product import Product

LIBRARIES = ("mm", "addmm")
GATED_LIBRARY_ROWS = 512
"""Rows up to which gate and up may stand in memory in fp32."""
_ALIGNMENT = 256  # bytes, of both operands: what torch's allocator gives, and the tests had


def library_product(
    x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype, rows: int, way: str
) -> torch.Tensor:
    """x [M, K], weight [N, K] -> [M, N] in out_dtype, computed at `rows` >= M rows.

    Pad rows hold whatever lies in memory. `way` is one of LIBRARIES; `addmm` rounds to the
    weight's dtype only. Raises ValueError for fewer rows than M or a way that does not exist.
    """
    m = x.shape[0]
    if rows < m:
        raise ValueError(f"{m} rows do not fit {rows}: take a larger bucket")
    if rows > m:
        padded = x.new_empty(rows, x.shape[1])
        padded[:m].copy_(x)
        x = padded
    if way == "mm" and out_dtype == x.dtype:
        y = torch.mm(x, weight.t())
    elif way == "mm":
        y = torch.mm(x, weight.t(), out_dtype=out_dtype)
    elif way == "addmm" and out_dtype == x.dtype:
        y = torch.addmm(_zeros(weight.shape[0], x.dtype, x.device), x, weight.t())
    else:
        raise ValueError(f"library product {way!r} to {out_dtype}: use one of {LIBRARIES}")
    return y[:m]


def library_ways(product: Product, bucket: int) -> tuple[str, ...]:
    """The library's ways that may compute a product of one leaf at a bucket.

    Results in fp32 have one way, and those of gates and ups must not fill the memory.
    """
    if product.gated:
        return LIBRARIES[:1] if bucket <= GATED_LIBRARY_ROWS else ()
    return LIBRARIES[:1] if product.kind == "head" else LIBRARIES


def library_fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the operands lie as those that were tested: dense and aligned."""
    return (
        x.is_contiguous()
        and weight.is_contiguous()
        and x.data_ptr() % _ALIGNMENT == 0
        and weight.data_ptr() % _ALIGNMENT == 0
    )


@cache
def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype, device=device)


def environment(device: torch.device) -> dict[str, str]:
    """What chooses the library's kernel: versions, GPU and flags. A change voids an admission."""
    properties = torch.cuda.get_device_properties(device)
    matmul = torch.backends.cuda.matmul
    return {
        "gpu": properties.name,
        "multiprocessors": str(properties.multi_processor_count),
        "torch": torch.__version__,
        "cublas": cublas_version(),
        "cublas workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "default"),
        "cublaslt workspace": os.environ.get("CUBLASLT_WORKSPACE_SIZE", "default"),
        "tunable": str(torch.cuda.tunable.is_enabled()),
        "preferred blas": str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2],
        "bf16 reduced precision": str(matmul.allow_bf16_reduced_precision_reduction),
    }


@cache
def cublas_version() -> str:
    """The version of the cuBLAS in this process, such as "13.1.0"; "unknown" if none is found."""
    for path in _mapped("libcublas.so"):
        library = ctypes.CDLL(path)
        parts = []
        for kind in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
            value = ctypes.c_int()
            if library.cublasGetProperty(kind, ctypes.byref(value)) != 0:
                return "unknown"
            parts.append(str(value.value))
        return ".".join(parts)
    return "unknown"


def _mapped(name: str) -> list[str]:
    """Files of this process's memory whose name begins so, in sorted order."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line and name in line}
    return sorted(path for path in paths if Path(path).name.startswith(name))
