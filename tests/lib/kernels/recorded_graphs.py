"""Graphs on the CPU: what would be captured is called again, over buffers that a graph would read.

The kernels of the CPU read a batch's `sequences`, which a graph has none of; here they read what
the GPU's do: positions, slots, tables and work lists. What no list names holds NaN, as memory may.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tpdet.kernels.cpu.attention import attention
from tpdet.kernels.cpu.linear import convolution, delta_rule
from tpdet.kernels.cpu.pointwise import rotate_and_store
from tpdet.kernels.cpu.pointwise.embedding import write_rows
from tpdet.kernels.inputs.paged_batch import BLOCK_TOKENS, PagedBatch, PagedSequence
from tpdet.kernels.order import CHUNK_TOKENS, PAGE_TOKENS
from tpdet.models import micro_batches
from tpdet.models.decoder import Decoder
from tpdet.runner import runner
from tpdet.runner.graphs import engine_graphs
from tpdet.runner.graphs.graph_room import GraphRoom

SEQUENCES_OPERATIONS = (
    (attention, "paged_attention"),
    (convolution, "short_convolution"),
    (delta_rule, "gated_delta"),
)


class Recorded:
    """A step that is run again."""

    def __init__(self, step, room):
        self.step, self.room = step, room

    def replay(self):
        self.room.replays.append(self.step.args[1])
        self.step()


def listed(batch):
    """The sequences that the work lists name, in the order of their rows."""
    tables, rows, found = batch.tables.tolist(), batch.rows.tolist(), {}
    for sequence, first in batch.blocks.tolist():
        if first < rows[sequence][1]:
            found.setdefault(sequence, []).append(first)
    for sequence, first in found.items():
        wanted = list(range(0, rows[sequence][1], BLOCK_TOKENS))
        assert sorted(first) == wanted, f"sequence {sequence} has blocks {first}"
    splits = batch.splits.tolist()
    for sequence, begin in batch.short.tolist():
        _, count, start = rows[sequence]
        if count:
            assert sequence not in found and count <= batch.short_rows
            wanted = [[sequence, split] for split in range(-(-(start + count) // PAGE_TOKENS))]
            assert splits[begin : begin + len(wanted)] == wanted, f"splits of {sequence}"
            found[sequence] = wanted
    made, states = [], batch.states.tolist()
    for sequence in found:
        first, count, start = rows[sequence]
        pages = tables[sequence][: -(-(start + count) // PAGE_TOKENS)]
        slot, standing, drafts, piece = states[sequence] if states else (-1, 0, 0, 0)
        kept = []
        if states:
            chunks = range(start // CHUNK_TOKENS, -(-(start + count) // CHUNK_TOKENS))
            named = batch.pieces[piece : piece + len(chunks)].tolist()
            assert [fields[:2] for fields in named] == [[sequence, chunk] for chunk in chunks]
            kept = [(chunk, place) for _, chunk, place in named if place >= 0]
        state = slot, standing, bool(drafts), tuple(kept)
        made.append(PagedSequence(first, count, start, tuple(pages), *state))
    runs = [sequence for sequence in batch.runs.tolist() if rows[sequence][1]]
    assert not states or sorted(runs) == [i for i, (_, count, _) in enumerate(rows) if count > 1]
    named = sum(count for _, count, _ in rows)
    assert not states or sum(each.count for each in made) == named, "rows that no list names"
    return tuple(sorted(made, key=lambda each: each.first_row))


def store_by_slots(k, v, k_pages, v_pages, batch):
    pages, places = batch.slots // PAGE_TOKENS, batch.slots % PAGE_TOKENS
    write_rows(k, v, k_pages, v_pages, pages, places)


def by_lists(plain):
    """An operation of sequences' rows that reads the lists of its batch."""

    def run(*given):
        sequences = listed(next(each for each in given if isinstance(each, PagedBatch)))
        lists = [
            replace(each, sequences=sequences) if isinstance(each, PagedBatch) else each
            for each in given
        ]
        out = plain(*lists)
        unnamed = torch.ones(len(out), dtype=torch.bool)
        for sequence in sequences:
            unnamed[sequence.first_row : sequence.first_row + sequence.count] = False
        out[unnamed] = torch.nan
        return out

    return run


@contextmanager
def recorded_graphs(cut_from=None):
    """Engines made inside replay such graphs; yields the shapes of all steps that did.

    cut_from: steps of this many rows run as two micro-batches, as where exchanges overlap.
    """
    replays = []

    class Room(GraphRoom):
        def __init__(self, device, words):
            super().__init__(device, words)
            self.replays = replays

        def capture(self, step, first):
            first()
            return Recorded(step, self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_graphs, "GraphRoom", Room)
        patch.setattr(runner, "captures_graphs", lambda config, device: True)
        patch.setattr(rotate_and_store, "store_kv", store_by_slots)
        for module, name in SEQUENCES_OPERATIONS:
            patch.setattr(module, name, by_lists(getattr(module, name)))
        if cut_from is not None:
            patch.setattr(micro_batches, "MICRO_BATCH_ROWS", cut_from)
            patch.setattr(Decoder, "overlaps_exchanges", property(lambda self: True))
        yield replays
