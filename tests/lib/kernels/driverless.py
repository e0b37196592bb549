"""Triton's compiler for Hopper and the GPU's kernels on a machine without a GPU: nothing launches.

With `recording`, what the model would launch can be listed and compiled; a launch raises.
"""

import json
from importlib import import_module
from types import SimpleNamespace

import torch
import triton.runtime
from triton.backends.compiler import GPUTarget

from tpdet.kernels import ops
from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.compile.cache import looking_up, missing_key
from tpdet.kernels.cuda.compile.plain_form import from_plain, to_plain

HOPPER = SimpleNamespace(
    major=9, minor=0, multi_processor_count=132, name="NVIDIA H200", total_memory=140 << 30
)


class Driver:
    """As much of a driver as compiling takes."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def compile_for_hopper(monkeypatch, folder, driver=None):
    """Compile with an empty cache in `folder`; by the driver, if one is given."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver or Driver())


def take_gpu_kernels(monkeypatch):
    """Operations on CPU tensors go to the GPU's kernels, by the GPU's choices."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: HOPPER)
    monkeypatch.setattr(hardware, "gpu_of", lambda device: hardware.H200)
    monkeypatch.setattr(
        ops, "_kernels", lambda _, name: import_module(f"tpdet.kernels.cuda.{name}")
    )


def changed_by_a_journey(asked):
    """Names of kernels that another process, to which they are sent, would compile as others."""
    with looking_up():
        return [
            each.name
            for each in asked
            if missing_key(each) != missing_key(from_plain(json.loads(json.dumps(to_plain(each)))))
        ]
