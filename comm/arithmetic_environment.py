"""Environment variables by which a library or a compiler changes arithmetic: one table, two uses.

All of them are compared between ranks (`comm.agreement`). Those that put other code in a kernel's
place, or round its operands, are refused at start. The rest are no danger to the promise: what they
do shows in the bits of known answers, which the architecture's name in `system_fingerprint` digests
(`audit.receipt`), or the admission tests of libraries refuse it.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from tpdet.errors import UsageError

_OFF = ("", "0", "false", "off", "no", "n")
"""Values, in lower case, by which a variable asks for nothing."""


class Variable(NamedTuple):
    """A variable, and what it does. refused_on: the device on which only `_OFF` is taken."""

    name: str
    effect: str
    refused_on: str = ""


VARIABLES = (
    Variable("ATEN_CPU_CAPABILITY", "picks the vector code of torch's CPU operations"),
    Variable("MKL_CBWR", "picks MKL's code branch, so the order inside a matrix product"),
    Variable("MKL_ENABLE_INSTRUCTIONS", "caps the instruction set MKL uses"),
    Variable("MKL_DEBUG_CPU_TYPE", "overrides the CPU that MKL believes in"),
    Variable("MKL_VML_DEBUG_CPU_TYPE", "overrides the CPU that MKL's vector functions believe in"),
    Variable("ONEDNN_MAX_CPU_ISA", "caps the instruction set oneDNN uses for bf16"),
    Variable("DNNL_MAX_CPU_ISA", "the older name of ONEDNN_MAX_CPU_ISA"),
    Variable("ONEDNN_DEFAULT_FPMATH_MODE", "lets oneDNN round fp32 operands"),
    Variable("DNNL_DEFAULT_FPMATH_MODE", "the older name of ONEDNN_DEFAULT_FPMATH_MODE"),
    Variable("OPENBLAS_CORETYPE", "picks OpenBLAS's kernels"),
    Variable("GLIBC_TUNABLES", "picks the variants of the C library's mathematical functions"),
    Variable("NCCL_NVLS_ENABLE", "NVLink multicast adds inside the switch; it must stay off"),
    Variable("CUBLAS_WORKSPACE_CONFIG", "changes which kernel cuBLAS chooses"),
    Variable("CUBLASLT_WORKSPACE_SIZE", "changes which kernel cuBLASLt chooses"),
    Variable("TORCH_BLAS_PREFER_CUBLASLT", "has torch choose another library for products"),
    Variable("TRITON_F32_DEFAULT", "picks how Triton multiplies fp32 where a kernel does not say"),
    Variable("TRITON_DEFAULT_FP_FUSION", "lets Triton contract where a kernel does not say"),
    Variable("TRITON_PTXAS_PATH", "assembles kernels by another assembler"),
    Variable("TRITON_PTXAS_BLACKWELL_PATH", "assembles kernels by another assembler"),
    Variable("CUDA_FORCE_PTX_JIT", "has the driver compile the kernels of torch anew"),
    Variable("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "turns fp32 products into TF32", "cuda"),
    Variable("NVIDIA_TF32_OVERRIDE", "turns fp32 products into TF32, below every library", "cuda"),
    Variable("TRITON_KERNEL_OVERRIDE", "runs kernels from files instead of the source", "cuda"),
    Variable("TRITON_INTERPRET", "runs kernels in Triton's interpreter", "cuda"),
    Variable("TRITON_OVERRIDE_ARCH", "compiles kernels for another GPU", "cuda"),
    Variable("TRITON_DEFAULT_BACKEND", "compiles kernels by another backend", "cuda"),
    Variable("TRITON_LIBDEVICE_PATH", "takes mathematical functions from another file", "cuda"),
    Variable("TRITON_MOCK_PTX_VERSION", "compiles kernels to another version of PTX", "cuda"),
    Variable("TRITON_FORCE_DISABLE_FP_FUSION", "keeps the compiler from contracting", "cuda"),
    Variable("TRITON_PLUGIN_PATHS", "loads other code into Triton's compiler", "cuda"),
    Variable("TRITON_PASS_PLUGIN_PATH", "loads other code into Triton's compiler", "cuda"),
    Variable("LLVM_PASS_PLUGIN_PATH", "loads other code into the compiler", "cuda"),
    Variable("TRITON_CACHE_MANAGER", "takes compiled kernels from another program", "cuda"),
    Variable("TRITON_REMOTE_CACHE_BACKEND", "takes compiled kernels from elsewhere", "cuda"),
    Variable("TRITON_INSTRUMENTATION_MODE", "puts other code into kernels", "cuda"),
    Variable("TRITON_ENABLE_ASAN", "puts other code into kernels", "cuda"),
    Variable("TRITON_ENABLE_EXPERIMENTAL_CONSAN", "puts other code into kernels", "cuda"),
    Variable("TRITON_FPSAN_HOMOMORPHIC_CASTS", "computes with other numbers", "cuda"),
    Variable("PTXAS_OPTIONS", "gives the assembler other options", "cuda"),
    Variable("DISABLE_PTXAS_OPT", "switches the assembler's optimisation off", "cuda"),
    Variable("DISABLE_LLVM_OPT", "switches passes of the compiler off", "cuda"),
    Variable("DISABLE_MMA_V3", "compiles products to other instructions", "cuda"),
    Variable("DISABLE_MMA_V5", "compiles products to other instructions", "cuda"),
)


def check_environment(device: str, environ: Mapping[str, str] | None = None) -> None:
    """Raise UsageError for a variable that is refused on `device`, "cpu" or "cuda"."""
    environ = os.environ if environ is None else environ
    for name, effect, refused_on in VARIABLES:
        value = environ.get(name, "")
        if refused_on == device and value.strip().lower() not in _OFF:
            raise UsageError(
                f"{name} is {value!r}, which {effect}: answers would have bits that no fingerprint "
                "names; unset it"
            )
