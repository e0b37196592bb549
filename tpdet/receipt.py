"""What names the bits of an answer: contract, weights and architecture, in one short string.

`system_fingerprint` holds what may change bits and nothing that may not: not the tensor-parallel
size, the load, the host or the transport.
"""

import dataclasses
import hashlib
import json

import blake3
import torch

from tpdet.comm.agreement import blas_version
from tpdet.model_config import ModelConfig

_SHOWN = 12
_TABLE_POSITIONS = 4096


def architecture(device: str) -> str:
    """The processor as far as it decides bits: "cpu-avx512-<BLAS digest>" or "sm_90"."""
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return f"sm_{major}{minor}"
    libraries = f"{torch.__version__} {blas_version()}"
    level = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")
    return f"cpu-{level}-{hashlib.sha256(libraries.encode()).hexdigest()[:8]}"


def model_digest(config: ModelConfig, weights: str, rotary: tuple[torch.Tensor, ...]) -> str:
    """BLAKE3 (hex) over the weights' digest, every field of the configuration and rotary tables."""
    fields = json.dumps(dataclasses.asdict(config), sort_keys=True, separators=(",", ":"))
    digest = blake3.blake3(f"{weights}\n{fields}\n".encode())
    for table in rotary:
        rows = table[:_TABLE_POSITIONS].contiguous().cpu()
        digest.update(rows.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def system_fingerprint(contract: str, model: str, device: str) -> str:
    """`tpdet-<contract>-<model>-<architecture>`, both digests cut to 12 hex digits.

    A word before the contract's digest stays: `tpdet-approximate-<contract>-...`.
    """
    word, dash, digest = contract.rpartition("-")
    shown = f"{word}{dash}{digest[:_SHOWN]}"
    return f"tpdet-{shown}-{model[:_SHOWN]}-{architecture(device)}"
