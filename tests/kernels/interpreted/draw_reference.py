"""A step's draws as they were made before the kernels that take many rows at once: whole rows,
one operation after another. Shards of a row in one process, with the gather they would have."""

import threading

import torch

from tpdet.kernels.cuda.sampling import log_softmax, sampling
from tpdet.kernels.cuda.sampling import sort_keys as order_select
from tpdet.kernels.inputs.sampled_rows import RowDraws
from tpdet.kernels.inputs.vocabulary_shard import Shard


def reference(logits, draws):
    """`RowDraws` (without `packed`) of whole rows by the one-program-a-row kernels."""
    logits, maximum, fit = prepare(logits)
    tokens = torch.argmax(logits, -1)
    wanted = {i: d for i, d in enumerate(draws) if d.temperature != 0.0 or d.changes_logits}
    if wanted:
        chosen = sampling.choose_tokens(logits, wanted)
        tokens[list(chosen)] = torch.tensor(list(chosen.values())).to(tokens.device)
    return answers(logits, maximum, fit, tokens)


def prepare(logits):
    maximum = logits.amax(-1)
    fit = torch.isfinite(maximum)
    return torch.where(fit[:, None], logits + 0.0, 0.0), torch.where(fit, maximum, 0.0), fit


def answers(logits, maximum, fit, tokens):
    log_masses = log_softmax.log_mass(logits, maximum)
    chosen = logits.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    logprobs = log_softmax.log_probabilities(chosen, maximum, log_masses)
    return RowDraws(tokens, logprobs, fit, maximum, log_masses, None)


def tops(logits, rows, count):
    wanted = prepare(logits)[0][rows]
    ids = order_select.top_ids(wanted, count)
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
