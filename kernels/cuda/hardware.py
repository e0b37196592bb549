"""What a GPU is: its capability, its multiprocessors, its memory and its rates.

No other file names a number of a chip. Static choices (tiles, programs, estimates) were measured on
an H200; the bits are the same on every GPU of one matrix instruction. The planner reads it too, so
nothing heavy is imported before a GPU is asked for.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Gpu:
    """name: as the driver reports it; shared_bytes: shared memory that one program may take."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int

    @property
    def descriptors(self) -> bool:
        """Whether kernels load and store by descriptors.

        It has the tensor memory accelerator, and the room for the stages that hide its way.
        """
        return self.capability >= (9, 0) and self.shared_bytes >= _DESCRIPTOR_BYTES

    @property
    def descriptor_programs(self) -> int:
        """Programs that fill it where each loops over tiles by descriptors; 0 without those."""
        return self.multiprocessors if self.descriptors else 0

    @property
    def dependent_launches(self) -> bool:
        """Whether a kernel's programs may come while the kernel before it goes."""
        return self.capability >= (9, 0)

    @property
    def wgmma(self) -> bool:
        """Whether it has the matrix instruction of a warpgroup: no other generation has it."""
        return self.capability[0] == 9

    @property
    def product_rate(self) -> float:
        """Operations a second of bf16 products over thousands of rows, about."""
        return self.multiprocessors * (HOPPER_PRODUCT_RATE if self.wgmma else OTHER_PRODUCT_RATE)

    @property
    def read_rate(self) -> float:
        """Bytes a second that it reads of its memory, about; of an unknown one, the measured's."""
        return READ_RATES.get(self.name, READ_RATES[MEASURED.name])

    @property
    def attention_rate(self) -> float:
        """Operations a second of the attention of long prompts, about."""
        return ATTENTION_SHARE * self.product_rate


KIB = 1024
_DESCRIPTOR_BYTES = 200 * KIB
"""Tiles by descriptors want so much shared memory: they were made for 227 KiB, and an RTX 5090 has
99."""
HOPPER_PRODUCT_RATE = 4.7e12
"""Operations a second of a multiprocessor: all of a prompt's step but attention, on an H200."""
OTHER_PRODUCT_RATE = 1.8e12
"""An A100's by its data sheet, at the share of it that the H200 reaches; never measured."""
ATTENTION_SHARE = 0.62
"""386 of 620 TFLOP/s, on an H200 too."""
A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 * KIB)
RTX_3090 = Gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 99 * KIB)
L40S = Gpu("NVIDIA L40S", (8, 9), 142, 99 * KIB)
RTX_4090 = Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 99 * KIB)
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 * KIB)
H200 = Gpu("NVIDIA H200", (9, 0), 132, 227 * KIB)
B200 = Gpu("NVIDIA B200", (10, 0), 148, 227 * KIB)
RTX_5090 = Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 99 * KIB)
BY_CAPABILITY = (A100, RTX_3090, L40S, H200, B200, RTX_5090)
"""A GPU of each capability that kernels are compiled for in tests."""
KNOWN = {"h100": H100, "h200": H200}
"""GPUs that need not be there for kernels to be compiled, by their short names."""
MEASURED = H200
"""The GPU whose tile costs and most programs count for one that was not measured."""
READ_RATES = {
    A100.name: 1.9e12, RTX_3090.name: 0.85e12, L40S.name: 0.8e12, RTX_4090.name: 1.0e12,
    H100.name: 3.1e12, H200.name: 4.5e12, B200.name: 8e12, RTX_5090.name: 1.8e12,
}  # fmt: skip
"""By GPU; measured of an H100 and an H200, by the data sheet of the others."""
MEMORY = {H100: int(79.1 * (1 << 30)), H200: int(139.8 * (1 << 30))}
"""Bytes of their memory, about as the driver reports them."""
SOLD_MEMORY = {H200: 141_000_000_000}
"""Bytes of their memory by the data sheet, of GPUs whose steps can be planned."""


class Rates(NamedTuple):
    """Bytes a second read, bf16 operations a second, bytes a second sent to peers, of one GPU."""

    bytes: float
    flops: float
    link: float


RATES = {H200.name: Rates(4.5e12, 989e12, 450e9)}
"""By GPU: measured read-only bandwidth, data-sheet peak and NVLink; other GPUs have no floor."""

NO_GPU = Gpu("", (0, 0), 0, 1 << 40)
"""Another device: Triton's interpreter on the CPU, whose programs take what memory they ask for."""

_pretended = NO_GPU


@contextmanager
def pretending(gpu: Gpu) -> Iterator[None]:
    """Tensors of the CPU are taken for this GPU's: for kernels that are recorded, never launched.

    For the whole process.
    """
    global _pretended
    before, _pretended = _pretended, gpu
    try:
        yield
    finally:
        _pretended = before


def room_of(kind: str) -> str:
    """The kernels that a kind of device runs: `cpu`, `cuda`, or the kind itself."""
    return "cuda" if kind == "cpu" and _pretended is not NO_GPU else kind


def file_name(gpu: str) -> str:
    """A GPU's name in names of files: "NVIDIA H200" -> "nvidia-h200"."""
    return "-".join(re.findall(r"[a-z0-9]+", gpu.lower()))


def gpu_of(device: "torch.device") -> Gpu:
    """The GPU of a device, as the driver reports it; NO_GPU for another device."""
    return _gpu_of(device) if device.type == "cuda" else _pretended


@cache
def _gpu_of(device: "torch.device") -> Gpu:
    import torch

    found = torch.cuda.get_device_properties(device)
    shared = found.shared_memory_per_multiprocessor - KIB  # which the driver keeps of a program's
    return Gpu(found.name, (found.major, found.minor), found.multi_processor_count, shared)
