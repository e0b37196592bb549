"""Attention with sinks against fp64, at lengths around the splits' ends."""

import pytest
import torch

from tests.kernels.cpu.test_kernels_cpu import attention_case
from tpdet.kernels import ops
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch

SINKS = torch.tensor([1.5, -4.0, 0.0, 9.0])


def exact(q, keys, values, window, sinks):
    """fp64 [Hq, D] of the last of the queries, whose softmax has one more term: the sink."""
    group, first = len(sinks) // keys.shape[1], 0 if window is None else max(0, len(keys) - window)
    keys, values = (x[first:].double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("hd,shd->hs", q.double(), keys) / q.shape[-1] ** 0.5
    weights = torch.cat([scores, sinks.double()[:, None]], 1).softmax(1)[:, :-1]
    return torch.einsum("hs,shd->hd", weights, values)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("length", [1, 128, 256, 257, 5000])
def test_a_sink_is_one_more_term_of_the_softmax(length, window):
    q, pages, batch = attention_case(torch.float32, 64, 4, 2, length)
    order = torch.tensor(batch.sequences[0].pages)
    keys, values = (x[order].transpose(1, 2).flatten(0, 1)[:length] for x in pages)
    last = make_batch((PagedSequence(0, 1, length - 1, batch.sequences[0].pages),))
    found = ops.paged_attention(q[-1:], *pages, last, window, 0.0, SINKS)[0]
    wanted = exact(q[-1], keys, values, window, SINKS)
    assert (found - wanted).abs().max() <= 2e-6 * wanted.abs().max()
    without = ops.paged_attention(q[-1:], *pages, last, window)[0]
    assert (without - wanted).abs().max() > 1e-3 * wanted.abs().max()
