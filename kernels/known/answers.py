"""Known-answer digests: every family of kernels run on fixed inputs, on the device that serves.

A digest says nothing about right or wrong; it says whether two ranks compute the same bits. The
inputs come from Philox words and exact operations, so they are equal everywhere.
"""

import hashlib
from typing import NamedTuple

import torch

from tpdet.kernels import ops
from tpdet.kernels.exact.fp8_rows import fp8_page_bytes
from tpdet.kernels.inputs.linear_state import BLOCK_ROWS, TAPS, DeltaGates, LinearState
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.kernels.known.fixed_inputs import fixed_values, raw_bytes
from tpdet.kernels.order import CHUNK_TOKENS, DEFAULT_FOLD_ORDER, PAGE_TOKENS, fold_plan
from tpdet.kernels.partial_sums import gathered_sums, relative_roots

_SEED = 0x616E7377  # "answ"
_ROWS, _WIDTH, _LEAVES, _HEAD = 24, 256, 8, 64
_LENGTH = 300  # keys of the attention case: two splits
_VOCABULARY = 4096
_LINEAR_STEPS = (0, 70, False), (70, 71, False), (71, 74, True)
"""First position, end, and whether rows are drafts."""


class Forms(NamedTuple):
    """The forms of kernels that a model takes: fields of its configuration (`ModelConfig`)."""

    activation: str = "silu"
    norm: str = "rms"
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    sinks: bool = False
    linear: bool = False
    """Whether some layers have linear attention."""
    fp8_pages: bool = False
    """Whether keys and values are kept in fp8."""


PLAIN = Forms()


def known_answers(device: torch.device, dtype: torch.dtype, forms: Forms = PLAIN) -> dict[str, str]:
    """SHA-256 (hex, cut to 16 digits) of each family's answer, by the family's name."""
    return {
        family: hashlib.sha256(raw_bytes(answer)).hexdigest()[:16]
        for family, answer in _answers(device, dtype, forms).items()
    }


def _answers(device: torch.device, dtype: torch.dtype, forms: Forms) -> dict[str, torch.Tensor]:
    x = fixed_values(_SEED, 1, (_ROWS, _WIDTH), device).to(dtype)
    weight = fixed_values(_SEED, 2, (2 * _WIDTH, _WIDTH), device).to(dtype)
    gate_up = ops.column_gemm(x, weight)
    leaves = weight.view(2 * _WIDTH, _LEAVES, -1).permute(1, 0, 2).contiguous()
    plan = fold_plan(DEFAULT_FOLD_ORDER, _LEAVES, 2)
    half = _LEAVES // 2
    roots = [
        ops.fold_roots(
            ops.leaf_sums(
                x[:, part].contiguous(),
                leaves[cut].contiguous(),
                relative_roots(plan.roots[rank]),
            ),
            plan.slots,
        )
        for rank, (part, cut, first) in enumerate(
            [
                (slice(0, _WIDTH // 2), slice(0, half), 0),
                (slice(_WIDTH // 2, _WIDTH), slice(half, _LEAVES), half),
            ]
        )
    ]
    total = ops.fold_final(torch.stack(roots), plan.final)
    residual = fixed_values(_SEED, 3, tuple(total.shape), device)
    everyone = gathered_sums(torch.stack(roots), plan.final)
    factors = residual[:2] if forms.norm == "layer" else residual[0]
    norm = Norm(factors.to(dtype), 1e-6, forms.norm)
    hidden, normed = ops.fold_and_norm(everyone, Finish(residual, norm))
    logits = fixed_values(_SEED, 4, (3, _VOCABULARY), device) * 4.0
    if forms.logit_cap:
        logits = ops.soft_cap(logits, forms.logit_cap)
    sampled = ops.sample_rows(logits, _params(), Shard(0, _VOCABULARY))
    linear = {"linear attention": _linear(device, dtype)} if forms.linear else {}
    return linear | {
        "column gemm": gate_up,
        "leaf gemm": torch.stack(roots),
        "fold": total,
        "norm": torch.stack([hidden, normed.float()]),
        "gated gemm": ops.gated_gemm(x, weight, activation=forms.activation),
        "activation": ops.activate_and_multiply(gate_up, activation=forms.activation),
        "attention": _attention(device, dtype, forms),
        "log softmax": sampled.log_masses,
        "sampler": sampled.packed,
    }


def _attention(device: torch.device, dtype: torch.dtype, forms: Forms) -> torch.Tensor:
    """Head norm, rotary embedding, stored keys, a prefill and a decode of one sequence."""
    heads, key_heads, cap = 4, 2, forms.attention_cap
    q = fixed_values(_SEED, 5, (_LENGTH, heads, _HEAD), device).to(dtype)
    k, v = (fixed_values(_SEED, n, (_LENGTH, key_heads, _HEAD), device).to(dtype) for n in (6, 7))
    angle = fixed_values(_SEED, 8, (2, _LENGTH, _HEAD // 2), device)
    shape: tuple[int, ...] = (2, 2, key_heads, PAGE_TOKENS, _HEAD)
    stored = dtype
    if forms.fp8_pages:
        shape, stored = (2, 2, key_heads, fp8_page_bytes(_HEAD)), torch.uint8
    pages = torch.zeros(shape, dtype=stored, device=device)
    whole = make_batch((PagedSequence(0, _LENGTH, 0, (1, 0)),), device)
    q = ops.rotate_and_store(
        q, k, v, (angle[0], angle[1]), (q[0, 0], k[0, 0]), 1e-6, (pages[0], pages[1]), whole
    )
    last = make_batch((PagedSequence(0, 1, _LENGTH - 1, (1, 0)),), device)
    sink = fixed_values(_SEED, 9, (heads,), device) if forms.sinks else None
    parts = [
        ops.paged_attention(q, pages[0], pages[1], whole, None, cap, sink),
        ops.paged_attention(q[-1:].contiguous(), pages[0], pages[1], last, 100, cap, sink),
    ]
    return torch.cat(parts)


def _linear(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A linear layer's rows of a prompt, of a decode step and of drafts; then gates of heads."""
    key_heads, heads, size = 1, 2, 128
    widths = [key_heads * size, key_heads * size, heads * size]
    x = fixed_values(_SEED, 10, (_LINEAR_STEPS[-1][1], sum(widths)), device).to(dtype)
    weight = fixed_values(_SEED, 11, (sum(widths), TAPS), device).to(dtype)
    a, b = (fixed_values(_SEED, n, (len(x), heads), device) for n in (12, 13))
    gates = DeltaGates(*(fixed_values(_SEED, n, (heads,), device) for n in (14, 15)))
    norm, rings = fixed_values(_SEED, 16, (size,), device), (1, 2 * CHUNK_TOKENS)
    state = LinearState(
        torch.zeros(1, heads, size, size, device=device),
        torch.zeros(*rings, key_heads, size, dtype=dtype, device=device),
        torch.zeros(*rings, heads, size, device=device),
        torch.zeros(*rings, heads, BLOCK_ROWS, device=device),
        torch.zeros(*rings, heads, dtype=torch.int64, device=device),
        torch.zeros(*rings, sum(widths), dtype=dtype, device=device),
        torch.zeros(0, TAPS - 1, sum(widths), dtype=dtype, device=device),
    )
    parts = []
    for first, end, drafts in _LINEAR_STEPS:
        standing = max(first - 1, 0) // CHUNK_TOKENS
        sequence = PagedSequence(0, end - first, first, (0,), 0, standing, drafts)
        batch, rows = make_batch((sequence,), device), slice(first, end)
        y = ops.short_convolution(x[rows], weight, state, batch)
        q, k, v = (part.unflatten(1, (-1, size)) for part in y.split(widths, dim=1))
        o = ops.gated_delta(q, k, v, a[rows], b[rows], gates, state, batch)
        normed = ops.gated_norm(o, v, norm, 1e-6)
        parts.append(ops.gate_heads(normed, v).float())
    whole = torch.cat(parts).flatten(1)
    return ops.gate_lanes(whole[None].contiguous(), a[:, :1].contiguous())


def _params() -> list[RowParams]:
    return [
        RowParams(0.7, 11, 5, top_k=50, top_p=0.9),
        RowParams(
            1.0, 12, 6, min_p=0.02, repetition_penalty=1.2, prompt_ids=(3, 4), output_ids=(5,)
        ),
        RowParams(0.0, 13, 7, bias={9: 50.0}, forbidden=(1, 2)),
    ]
