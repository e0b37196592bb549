"""Runs a loaded model over every size of step before it serves.

On a GPU this compiles and loads the kernels of each size, so that no step does it later; one layer
of each kind launches them all. The largest steps run whole: the allocator takes their memory, so
that the rest may become KV pages. Every rank runs the same steps, so their collectives meet. The
results are not used.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from tpdet.cache.kv import KeyValuePages
from tpdet.kernels import ops
from tpdet.kernels.inputs.linear_state import StateMove
from tpdet.kernels.inputs.paged_batch import PagedSequence
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.order import CHUNK_TOKENS, PAGE_TOKENS
from tpdet.models.decoder import Decoder
from tpdet.models.micro_batches import micro_batches
from tpdet.sampling.sampler import sample

_CONTEXT = PAGE_TOKENS + 40  # decoded rows read two pages: a merge of splits is among the kernels
Kind = tuple[RowParams, int | None]
"""How a row is sampled, and how many of the likeliest ids it returns."""
_LIKELIEST: Kind = RowParams(0.0, 1, 3), 5
_PLAIN: Kind = RowParams(1.0, 1, 3, frequency_penalty=0.1, bias={0: 1.0}, output_ids=(3,)), 0
_FILTERED: Kind = (
    RowParams(
        temperature=0.8,
        seed=1,
        position=3,
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        prompt_ids=(1, 2),
        output_ids=(3,),
    ),
    None,
)
_ALL = _LIKELIEST, _FILTERED, _PLAIN
_ALONE = (_LIKELIEST,), (_PLAIN,), (_FILTERED,)
"""Rows of one kind alone: their kernels leave out what none of them needs."""


def pages_needed(max_tokens: int, context: int) -> int:
    """Pages that `warm_up` writes to (its sequences share them)."""
    return max(2, -(-min(max_tokens, context) // PAGE_TOKENS))


def warm_up(
    model: Decoder,
    first: Decoder,
    pages: KeyValuePages,
    device: torch.device,
    max_seqs: int,
    max_tokens: int,
    context: int,
    logit_rows: int,
    processed: bool = False,
) -> None:
    """Prefill and decode at every power of two up to the limits, one row more, and the limits.

    first: launches what the model does, below the limits. processed: as `sample_in_one_step`.
    """
    sampled: set[int] = set()
    for sequences, whole in _steps(min(max_seqs, max_tokens), max_tokens, context):
        of = model if whole else first
        _step(of, pages, device, sequences, logit_rows, sampled, whole, processed)
    if pages.states is not None:
        ops.advance_states(pages.states.layers[:1], (StateMove(0, pages.states.pad_slot, 0),))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _steps(
    most: int, max_tokens: int, context: int
) -> Iterator[tuple[tuple[PagedSequence, ...], bool]]:
    """Prefills of up to `max_tokens`, decodes of `most` sequences; whether the largest."""
    for rows in sizes(max_tokens):
        firsts = range(0, rows, context)
        counts = [min(context, rows - first) for first in firsts]
        sequences = tuple(
            PagedSequence(first, count, 0, tuple(range(-(-count // PAGE_TOKENS))), 0)
            for first, count in zip(firsts, counts, strict=True)
        )
        yield sequences, rows == max_tokens
    start = min(_CONTEXT, context) - 1
    for rows in sizes(most):
        decoded = PagedSequence(0, 1, start, (0, 1), 0, start // CHUNK_TOKENS)
        yield tuple(replace(decoded, first_row=i) for i in range(rows)), rows == most


def sizes(limit: int) -> Iterator[int]:
    """1, 2, 3, 4, 5, 8, 9, 16, 17, ... up to and with `limit`: both kinds of divisibility."""
    found = {limit}
    power = 1
    while power <= limit:
        found |= {power, min(power + 1, limit)}
        power *= 2
    yield from sorted(found)


def _step(
    model: Decoder,
    pages: KeyValuePages,
    device: torch.device,
    sequences: tuple[PagedSequence, ...],
    logit_rows: int,
    sampled: set[int],
    whole: bool,
    processed: bool,
) -> None:
    """sampled: numbers of rows that were sampled in every way, to which this step's is added.

    The steps of the whole model are sampled again: theirs is the memory that counts.
    """
    rows = sum(sequence.count for sequence in sequences)
    ids = torch.arange(rows, device=device) % 7
    batches = micro_batches(sequences, device, model.overlaps_exchanges)
    hidden_MH = model.hidden(ids, pages, *batches)
    model.exchange.stream_rows(hidden_MH[:1].float(), ids[:1] * 0, (1,))  # as in `Decoder.finish`
    logits = model.whole_logits(model.local_logits(hidden_MH[-logit_rows:]))
    if not model.gives_logits:
        return
    if whole or len(logits) not in sampled:
        sample_in_one_step(logits, processed=processed)
    if len(logits) not in sampled:
        sample_every_kind_alone(logits, processed)
        sampled.add(len(logits))


def sample_every_kind_alone(logits: torch.Tensor, processed: bool = False) -> None:
    """Sample rows fp32 [R, V], R > 0, of each kind in turn, and forget what came."""
    for kind in _ALONE:
        sample_in_one_step(logits, kind, processed)


def sample_in_one_step(
    logits: torch.Tensor, kinds: tuple[Kind, ...] = _ALL, processed: bool = False
) -> None:
    """Sample rows fp32 [R, V], R > 0, of these kinds in turn, and forget what came.

    processed: log-probabilities are of what is sampled from; rows that need no such are tried too.
    """
    rows = [kinds[i % len(kinds)] for i in range(len(logits))]
    for mode in (False, True) if processed else (False,):
        sample(logits, [params for params, _ in rows], [count for _, count in rows], mode)
