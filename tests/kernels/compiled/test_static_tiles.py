"""Static tiles fit each GPU: compiled for its capability without one, against its shared memory."""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.nvidia.compiler import CUDABackend

from tests.lib.some_slow import some_slow
from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.attention import attention
from tpdet.kernels.cuda.compile.recording import recording
from tpdet.kernels.cuda.experts.admission import differs
from tpdet.kernels.cuda.experts.tiles import product_tiles, weights_of
from tpdet.kernels.cuda.gemm import column, gated, leaf
from tpdet.kernels.cuda.hardware import BY_CAPABILITY, H100, RTX_4090
from tpdet.kernels.inputs.experts import ExpertLayer
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.order import fold_tree
from tpdet.tools.compile.asked import on_gpu

CPU = torch.device("cpu")
ROWS = (1, 20, 40, 100, 2000)
LAYER = ExpertLayer(256, 128, 4, 4, 2)


def columns(dtype, out=None):
    """Products of few and of many columns; the static choice goes by rows and columns."""
    for n in (512, 16384):
        weight = torch.empty(n, 256, dtype=dtype)
        for m in ROWS:
            column.column_gemm(torch.empty(m, 256, dtype=dtype), weight, None, out or dtype)


def gates():
    for n in (512, 16384):
        weight = torch.empty(n, 256, dtype=torch.bfloat16)
        for m in ROWS:
            gated.gated_gemm(torch.empty(m, 256, dtype=torch.bfloat16), weight)


def leaves(widths=()):
    weight = torch.empty(1 if widths else 4, 512, sum(widths) or 256, dtype=torch.bfloat16)
    roots = (fold_tree("pairs", 4),)
    for m in ROWS:
        x = torch.empty(m, sum(widths) or 4 * 256, dtype=torch.bfloat16)
        leaf.leaf_sums(x, weight, roots, widths=widths)


def experts():
    for weight in weights_of(LAYER, 2):
        for tile, by_token in product_tiles(weight, hardware.gpu_of(CPU)):
            differs(weight, tile, by_token, CPU, torch.bfloat16)


def attention_of(dtype, heads):
    """Prompts, one row of long and of short sequences, and of many short ones."""
    for head in heads:
        for sequences, count, start in ((1, 300, 0), (1, 1, 200), (1, 1, 9000), (64, 1, 200)):
            each = (start + count + 255) // 256
            pages = [torch.empty(sequences * each, 2, 256, head, dtype=dtype) for _ in "kv"]
            held = [tuple(range(i * each, (i + 1) * each)) for i in range(sequences)]
            batch = make_batch(
                tuple(PagedSequence(i * count, count, start, mine) for i, mine in enumerate(held))
            )
            q = torch.empty(sequences * count, 8, head, dtype=dtype)
            attention.paged_attention(q, *pages, batch)


KINDS = {
    "column": lambda: columns(torch.bfloat16),
    "head": lambda: columns(torch.bfloat16, torch.float32),
    "float32": lambda: columns(torch.float32),
    "gated": gates,
    "leaves": leaves,
    "unequal leaves": lambda: leaves((256, 128, 256, 128)),
    "experts": experts,
    "attention": lambda: attention_of(torch.bfloat16, (64, 128, 256)),
    "attention of float32": lambda: attention_of(torch.float32, (64, 128)),
}
QUICK = "column", "float32"
NEWEST_FIRST = BY_CAPABILITY[::-1]
"""So a kernel that was compiled for one GPU and is taken for the next does not fit."""
SMALLEST = ((8, 6), (9, 0))
"""Those with the least shared memory, and those that we measure on."""


@pytest.mark.parametrize("kind", some_slow(QUICK, KINDS))
@pytest.mark.parametrize(
    "gpu",
    some_slow([gpu for gpu in NEWEST_FIRST if gpu.capability in SMALLEST], NEWEST_FIRST),
    ids=lambda gpu: "{}.{}".format(*gpu.capability),
)
def test_static_tiles_fit(gpu, kind):
    used = shared_bytes(gpu, KINDS[kind])
    assert used
    for name, held in used.items():
        assert held <= gpu.shared_bytes, f"{gpu.name}: {name} takes {held} bytes"


def test_a_gpu_of_a_capability_has_the_room_of_the_one_that_is_tried():
    tried = {gpu.capability: gpu for gpu in BY_CAPABILITY}
    for gpu in (H100, RTX_4090):
        assert gpu.shared_bytes >= tried[gpu.capability].shared_bytes


def named_alone(backend, source, metadata, *_):
    metadata["name"] = "of no code"
    return ""


def shared_bytes(gpu, launch):
    """Bytes of shared memory of each kernel that is launched; nothing is assembled."""
    with on_gpu(gpu), recording() as asked:
        launch()
    held = {}
    uncoded = mock.patch.multiple(CUDABackend, make_ptx=named_alone, make_cubin=lambda *_: b"")
    with on_gpu(gpu), triton.knobs.cache.scope(), uncoded:
        triton.knobs.cache.dir = f"{triton.knobs.cache.dir}-without-ptx"
        for each in asked.values():
            done = each.function._do_compile(*each.arguments, warmup=True)
            held[f"{each.name} {each.arguments[0]}"] = done.metadata.shared
    for each in asked.values():
        each.function.device_caches.clear()  # they have no code: no later recording takes them
    return held
