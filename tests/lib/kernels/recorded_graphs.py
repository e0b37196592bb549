"""Graphs on the CPU: what would be captured is called again, over buffers that a graph would read.

The kernels of the CPU read a batch's `sequences`, which a graph has none of; here they read what
the GPU's do: positions, slots, tables and work lists. What no list names holds NaN, as memory may.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tpdet.kernels.cpu.attention import attention
from tpdet.kernels.cpu.pointwise import rotate_and_store
from tpdet.kernels.inputs.paged_batch import BLOCK_TOKENS, PagedSequence
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.models import micro_batches
from tpdet.models.decoder import Decoder
from tpdet.runner import runner
from tpdet.runner.graphs import engine_graphs
from tpdet.runner.graphs.graph_room import GraphRoom


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
    made = []
    for sequence in found:
        first, count, start = rows[sequence]
        pages = tables[sequence][: -(-(start + count) // PAGE_TOKENS)]
        made.append(PagedSequence(first, count, start, tuple(pages)))
    return tuple(sorted(made, key=lambda each: each.first_row))


def store_by_slots(k, v, k_pages, v_pages, batch):
    pages, places = batch.slots // PAGE_TOKENS, batch.slots % PAGE_TOKENS
    k_pages[pages, :, places] = k
    v_pages[pages, :, places] = v


def attend_by_lists(plain):
    def attend(q, k_pages, v_pages, batch, window, *more):
        sequences = listed(batch)
        out = torch.zeros_like(q)
        if sequences:
            out = plain(q, k_pages, v_pages, replace(batch, sequences=sequences), window, *more)
        unnamed = torch.ones(len(q), dtype=torch.bool)
        for sequence in sequences:
            unnamed[sequence.first_row : sequence.first_row + sequence.count] = False
        out[unnamed] = torch.nan
        return out

    return attend


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
        patch.setattr(attention, "paged_attention", attend_by_lists(attention.paged_attention))
        if cut_from is not None:
            patch.setattr(micro_batches, "MICRO_BATCH_ROWS", cut_from)
            patch.setattr(Decoder, "overlaps_exchanges", property(lambda self: True))
        yield replays
