"""The architecture's name: what libraries compute here, so equal names mean equal bits."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.lib.tree import ROOT
from tpdet.audit.fingerprint import read_fingerprint
from tpdet.kernels.known.libraries import library_digest
from tpdet.models.fingerprint import architecture, system_fingerprint

MORE = (
    *({"ATEN_CPU_CAPABILITY": value} for value in ("default", "avx2")),
    *({"MKL_CBWR": value} for value in ("SSE4_2", "AVX2", "AVX2,STRICT", "AVX512", "AUTO")),
    *({"MKL_ENABLE_INSTRUCTIONS": value} for value in ("SSE4_2", "AVX2")),
    *(
        {"MKL_DEBUG_CPU_TYPE": "5"},
        {"ONEDNN_MAX_CPU_ISA": "SSE41"},
        {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"},
    ),
    *({"OPENBLAS_CORETYPE": "Nehalem"}, {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA"}),
    *({"MKL_VML_DEBUG_CPU_TYPE": "0"}, {"OMP_NUM_THREADS": "1"}, {"MKL_NUM_THREADS": "3"}),
)
CODE = """
import hashlib, json, torch
from tpdet.audit.fingerprint import read_fingerprint
from tpdet.models.fingerprint import architecture
torch.set_num_threads(1)
draw = torch.Generator().manual_seed(5)
bits = hashlib.sha256()
for k in (48, 100, 333, 1000, 3000):  # other lengths and inputs than the name is made of
    x, w = torch.randn(64, k, generator=draw), torch.randn(256, k, generator=draw)
    functions = torch.exp(-x.abs()), torch.log(w.abs())
    for found in (torch.mm(x[:16], w.t()), torch.mm(x, w.t()), *functions):
        bits.update(found.numpy().tobytes())
print(json.dumps([architecture("cpu"), bits.hexdigest()]))
"""


def found(settings):
    """(the architecture's name, a digest of other products) of processes with these variables."""
    unset = ("MKL_CBWR", "ATEN_CPU_CAPABILITY")
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", CODE]
    running = [
        subprocess.Popen(command, env=environ | each, cwd=ROOT, stdout=subprocess.PIPE)
        for each in settings
    ]
    return [tuple(json.loads(process.communicate(timeout=300)[0])) for process in running]


def check_names_tell_bits_apart(settings):
    names = found([{}, *settings])
    bits = dict(names)
    assert all(bits[name] == digest for name, digest in names), [*zip(settings, names, strict=True)]
    return names


def test_equal_names_mean_equal_bits():
    """MKL's branch without FMA gives other bits on any processor, and so another name."""
    names = check_names_tell_bits_apart([{"MKL_CBWR": "COMPATIBLE"}])
    if torch.backends.mkl.is_available():
        (name, bits), (other, other_bits) = names[:2]
        assert bits != other_bits and name != other
        assert name.rpartition("-")[0] == other.rpartition("-")[0]  # one instruction set


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_equal_names_mean_equal_bits_under_every_known_variable():
    for first in range(0, len(MORE), 3):
        check_names_tell_bits_apart(MORE[first : first + 3])


def test_the_name_is_the_same_again_whatever_the_number_of_threads():
    name = architecture("cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert architecture("cpu") == name
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert re.fullmatch(r"cpu-[a-z0-9-]+-[0-9a-f]{8}", name)


def test_a_processor_set_to_compute_small_numbers_as_zero_has_another_name():
    plain = library_digest()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        assert library_digest() != plain
    finally:
        torch.set_flush_denormal(False)
    assert library_digest() == plain


def test_a_gpus_name_has_the_digest_of_what_its_kernels_answered(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    answers = {"column gemm": "11" * 8, "fold": "22" * 8}
    name = architecture("cuda", answers)
    assert re.fullmatch(r"sm_90-[0-9a-f]{8}", name) and architecture("cuda") == "sm_90"
    assert architecture("cuda", dict(reversed(answers.items()))) == name
    assert architecture("cuda", answers | {"fold": "33" * 8}) != name


@pytest.mark.parametrize("name", ["sm_90-01234567", "cpu-avx512-01234567", "sm_90"])
def test_a_fingerprint_ends_in_the_architecture_and_is_read_again(name):
    whole = system_fingerprint("ab" * 32, "cd" * 32, name)
    assert read_fingerprint(whole) == ("ab" * 6, "cd" * 6, name)
    assert read_fingerprint(whole + "0") != ("ab" * 6, "cd" * 6, name)


def test_a_fingerprint_names_an_approximate_contract():
    approximate = system_fingerprint("approximate-" + "ab" * 32, "cd" * 32, "x")
    assert approximate == "tpdet-approximate-abababababab-cdcdcdcdcdcd-x"
