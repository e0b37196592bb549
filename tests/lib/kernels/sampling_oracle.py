"""What the GPU's sampler must answer, by the CPU's path; shards of a row in one process.

Tokens are the CPU's row by row, with one thing of the device's: the softmax mass of each id, since
`exp2` rounds otherwise on each device. So the comparison is exact, under top-p as well.
"""

import threading
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

from tpdet.kernels.cpu.sampling import tokens as cpu_tokens
from tpdet.kernels.cpu.sampling.ranks import top_ids
from tpdet.kernels.cuda.sampling import noise
from tpdet.kernels.exact.thresholds import log_probabilities
from tpdet.kernels.inputs.sampled_rows import SampledRows
from tpdet.kernels.inputs.vocabulary_shard import Shard


@triton.jit
def store_masses(x, maximum, masses, width, BLOCK: tl.constexpr):
    """masses[row, id]: an id's fixed-point mass; program (row, part)."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here, start = at < width, row.to(tl.int64) * width
    value = tl.load(x + start + at, mask=here, other=-float("inf"))
    mass = noise.fixed_point(value, tl.load(maximum + row))
    tl.store(masses + start + at, mass, mask=here)


def masses_of(x, maximum):
    """int64 [R, V] of fp32 rows [R, V] against their maxima [R], by the device they are on."""
    rows, width = x.shape
    masses = torch.empty(rows, width, dtype=torch.int64, device=x.device)
    grid = rows, triton.cdiv(width, 1024)
    store_masses[grid](x.contiguous(), maximum.contiguous(), masses, width, 1024)
    return masses


@contextmanager
def masses_by(device):
    """Meanwhile the CPU's filters take the masses of ids from a device."""
    own = cpu_tokens.fixed_point_mass

    def of(values, maximum):
        return masses_of(values[None].to(device), maximum[None].to(device))[0].cpu()

    cpu_tokens.fixed_point_mass = of
    try:
        yield
    finally:
        cpu_tokens.fixed_point_mass = own


def reference(logits, params):
    """`SampledRows` (without `packed`) of whole rows."""
    logits, maximum, fit = prepare(logits)
    with masses_by(logits.device):
        tokens = [
            cpu_tokens.choose_token(row, how) for row, how in zip(logits.cpu(), params, strict=True)
        ]
    return answers(logits, maximum, fit, torch.tensor(tokens).to(logits.device))


def prepare(logits):
    maximum = logits.amax(-1)
    fit = torch.isfinite(maximum)
    return torch.where(fit[:, None], logits + 0.0, 0.0), torch.where(fit, maximum, 0.0), fit


def answers(logits, maximum, fit, tokens):
    """`SampledRows` (without `packed`) of given tokens."""
    log_masses = torch.log(masses_of(logits, maximum).sum(-1).double() * 2.0**-40)
    chosen = logits.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    logprobs = log_probabilities(chosen, maximum, log_masses)
    return SampledRows(tokens, logprobs, fit, maximum, log_masses, None)


def tops(logits, rows, count):
    """The likeliest ids of some rows and their logits."""
    wanted = prepare(logits)[0][rows]
    ids = top_ids(wanted.cpu(), count).to(logits.device)
    return ids, wanted.gather(1, ids)


def same_answers(found, expected, what):
    """Tokens, fitness and log-probabilities in every bit, where a row is fit."""
    assert torch.equal(found.fit, expected.fit), f"{what}: fit"
    fit = expected.fit
    for name in ("tokens", "maximum"):  # a maximum's zero has either sign: no answer shows it
        left, right = getattr(found, name)[fit], getattr(expected, name)[fit]
        assert torch.equal(left, right), f"{what}: {name} {left} {right}"
    left, right = found.logprobs, expected.logprobs
    chosen = fit & (expected.tokens >= 0)
    assert torch.equal(left[chosen].view(torch.int32), right[chosen].view(torch.int32)), what
    packed = torch.stack([found.fit.double(), found.tokens.double(), left.double()], -1)
    assert torch.equal(found.packed.nan_to_num(), packed.nan_to_num()), f"{what}: packed"


class ThreadGather:
    """An all-gather between threads that each run one rank's part."""

    def __init__(self, ranks):
        self.barrier = threading.Barrier(ranks, timeout=300)
        self.shown = [None] * ranks

    def of(self, rank):
        def gather(x):
            assert x.is_contiguous()
            self.shown[rank] = x.clone()
            self.barrier.wait()
            everyone = torch.stack(self.shown)
            self.barrier.wait()
            return everyone

        return gather


def over_shards(logits, ranks, width, work):
    """`work(shard logits, shard)` on every rank, padding poisoned; results by rank."""
    rows, vocabulary = logits.shape
    padded = torch.full((rows, ranks * width), float("nan"), device=logits.device)
    padded[:, :vocabulary] = logits
    gather, results = ThreadGather(ranks), [None] * ranks
    turn = threading.Lock()  # the interpreter holds one grid at a time

    def rank_work(rank):
        shard = Shard(rank * width, vocabulary, unlocked(gather.of(rank), turn))
        piece = padded[:, rank * width : (rank + 1) * width].contiguous()
        try:
            with turn:
                results[rank] = work(piece, shard)
        except Exception as error:
            results[rank] = error
            gather.barrier.abort()

    threads = [threading.Thread(target=rank_work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    return results


def unlocked(gather, turn):
    def call(x):
        turn.release()
        try:
            return gather(x)
        finally:
            turn.acquire()

    return call
