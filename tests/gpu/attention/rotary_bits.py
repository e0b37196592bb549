"""Bits of rotary embedding, of stored keys and of the embedding on a GPU, against the CPU's."""

import torch

from tests.gpu.attention.case import PAGE, draw
from tests.gpu.lib.checks import same
from tpdet.kernels.cpu.pointwise import embedding as cpu_embedding
from tpdet.kernels.cpu.pointwise import rotary as cpu_rotary
from tpdet.kernels.cuda.pointwise import embedding, rotary
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch


def rotary_bits():
    count = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head in (64, 96, 128, 256):
            for kind in ("normal", "heavy", "tiny"):
                wide = draw(37, 7 * head + 16, dtype=dtype, kind=kind, seed=head)
                x = wide[:, : 7 * head].view(37, 7, head)
                x[3, 2] = 0
                if dtype != torch.float16:
                    x[4] *= 1e-38
                    x[5, :, 0] = 1e30
                angle = draw(37, head // 2, dtype=torch.float32, seed=5)
                cos, sin = angle.cos(), angle.sin()
                for weight in (None, draw(head, dtype=dtype, seed=6)):
                    ours = rotary.rotate_heads(x, cos, sin, weight, 1e-6)
                    host = None if weight is None else weight.cpu()
                    theirs = cpu_rotary.rotate_heads(x.cpu(), cos.cpu(), sin.cpu(), host, 1e-6)
                    same(ours.cpu(), theirs, f"{dtype} {head} {kind} {host is not None}")
                    one = rotary.rotate_heads(x[:, 4:5].contiguous(), cos, sin, weight, 1e-6)
                    same(one, ours[:, 4:5], "one head")
                    count += 1
    return f"{count} cases equal to the CPU's bits"


def stored_bits():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for heads, head in ((8, 128), (3, 96), (1, 256)):
            k, v = (draw(900, heads, head, dtype=dtype, kind="heavy", seed=s) for s in (1, 2))
            sequences = (
                PagedSequence(0, 600, 100, (7, 2, 5)),
                PagedSequence(600, 1, 255, (3,)),
                PagedSequence(601, 1, 256, (0, 6)),
                PagedSequence(602, 290, 3, (1, 4)),
            )
            shape = (9, heads, PAGE, head)
            ours = [torch.full(shape, torch.nan, dtype=dtype, device="cuda") for _ in "kv"]
            theirs = [x.cpu() for x in ours]
            embedding.store_kv(k, v, *ours, make_batch(sequences, "cuda"))
            cpu_embedding.store_kv(k.cpu(), v.cpu(), *theirs, make_batch(sequences))
            for left, right in zip(ours, theirs, strict=True):
                same(left.cpu(), right, f"{dtype} {heads}x{head}")
    ids = torch.randint(0, 999, (77,), device="cuda")
    table = draw(999, 96, dtype=torch.bfloat16)
    same(embedding.embed(ids, table).cpu(), table.cpu()[ids.cpu()].float(), "embed")
