"""Operands for the GEMM kernels, and their products as one chain a leaf."""

import torch

from tpdet.kernels.cuda.gemm.choice.variants import variant_of
from tpdet.kernels.cuda.gemm.variants.variant import Operands


def draw(*shape, dtype=torch.float32, seed=0, spread=False):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (x * (2.0 * x).exp() if spread else x).to(dtype)


def chain(x, w, variant, bias=None, dtype=torch.float32):
    y = torch.empty(w.shape[0], x.shape[0], w.shape[1], dtype=dtype)
    variant_of(variant).run(Operands(x, w, bias, y), variant, 3)
    return y
