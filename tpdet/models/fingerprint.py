"""The system fingerprint: contract, weights and architecture of an answer in one short string.

`system_fingerprint` holds what may change bits and nothing that may not: not the tensor-parallel
size, the load, the host or the transport.
"""

import dataclasses
import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import blake3
import torch

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.model_config.model import NEUTRAL_VALUES
from tpdet.comm.agreement import blas_version
from tpdet.kernels.exact.rotary_frequencies import (
    RotarySpec,
    attention_scaling,
    inverse_frequencies,
)
from tpdet.kernels.exact.rotary_tables import TABLE_VERSION
from tpdet.kernels.known.libraries import library_digest

_SHOWN = 12
_ARCHITECTURE_SHOWN = 8
_COMPARED_ROWS = 4096
_CONTEXT = "max_position"
"""The one field of a configuration that fixes no bit: it only says how long a text may be."""


def architecture(device: str, answers: Mapping[str, str] | None = None) -> str:
    """The processor as far as it decides bits: "cpu-avx512-1f0c93ab" or "sm_90-7be2d051".

    The digits name what is in force, however it came about (a maker's processor, an environment
    variable, a setting of torch's). On a CPU they digest the libraries' versions, and what they
    make of fixed inputs; on a GPU the `answers` of a model's kernels, without which they are left
    out.
    """
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        named, said = f"sm_{major}{minor}", sorted((answers or {}).items())
    else:
        level = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")
        named = f"cpu-{level}"
        said = [(f"{torch.__version__} {blas_version()}", library_digest())]
    digits = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:_ARCHITECTURE_SHOWN]
    return f"{named}-{digits}" if said else named


def model_digest(config: ModelConfig, weights: str) -> str:
    """BLAKE3 (hex) over the weights' digest, the configuration and what rotary tables come from.

    A table's entry is a function of its position, the inverse frequencies and the factor; how long
    a context is served, or the checkpoint states, changes no entry and is left out.
    """
    values = dataclasses.asdict(config, dict_factory=_that_fix_bits)
    fields = json.dumps(values, sort_keys=True, separators=(",", ":"))
    digest = blake3.blake3(f"{weights}\n{fields}\n{TABLE_VERSION}\n".encode())
    for spec in (config.rotary, config.window_rotary):
        if spec is not None:
            digest.update(_rotary_numbers(spec))
    return digest.hexdigest()


def _that_fix_bits(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """A configuration's fields without its context and those that are neutral."""
    return {
        name: value
        for name, value in fields
        if name != _CONTEXT and not (name in NEUTRAL_VALUES and value == NEUTRAL_VALUES[name])
    }


def table_digest(tables: tuple[torch.Tensor, ...]) -> str:
    """BLAKE3 (hex) over the tables' first 4,096 rows, for ranks to compare: equally long ones."""
    digest = blake3.blake3()
    for table in tables:
        rows = table[:_COMPARED_ROWS].contiguous().cpu()
        digest.update(rows.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _rotary_numbers(spec: RotarySpec) -> bytes:
    """The inverse frequencies and the factor, as little-endian fp32: the bits that are used."""
    numbers = (*inverse_frequencies(spec), attention_scaling(spec))
    return struct.pack(f"<{len(numbers)}f", *numbers)


def system_fingerprint(contract: str, model: str, architecture: str) -> str:
    """`tpdet-<contract>-<model>-<architecture>`, both digests cut to 12 hex digits.

    A word before the contract's digest stays: `tpdet-approximate-<contract>-...`.
    """
    word, dash, digest = contract.rpartition("-")
    shown = f"{word}{dash}{digest[:_SHOWN]}"
    return f"tpdet-{shown}-{model[:_SHOWN]}-{architecture}"
