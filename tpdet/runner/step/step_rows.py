"""A plan's rows as the model's input: one after another, with pad rows where the batch is fixed.

A pad row is token 0 at position 0 of a sequence whose one page is the scratch page, which no
sequence owns; its slot of states is nobody's, either. All pads write the same values there, and
only they read it. A row's bits do not depend on which rows it is computed with (docs/numerics.md,
section 8).
"""

from dataclasses import dataclass, replace

from tpdet.cache.states import boundary_of
from tpdet.control.plan import PlanRows
from tpdet.kernels.inputs.paged_batch import PagedSequence


@dataclass(frozen=True)
class StepRows:
    """`token_ids[i]` is row i's; `wanted` are the rows whose logits are, pads' the last.

    `ends`: the wanted rows as sequences, whose rows follow each other.
    """

    sequences: tuple[PagedSequence, ...]
    token_ids: list[int]
    wanted: list[int]
    ends: tuple[PagedSequence, ...]


def gather_rows(
    rows: PlanRows, fixed_batch: int, scratch_page: int, scratch_slot: int = -1
) -> StepRows:
    """The rows of a plan; a decode step (one token a row) is padded to `fixed_batch` rows.

    With `fixed_batch` 0 nothing is padded. scratch_slot: of pads' states, -1 where there are none.
    """
    ids: list[int] = []
    wanted: list[int] = []
    sequences, ends = [], []
    for row in rows:
        count = len(row.token_ids)
        kept = tuple((chunk, boundary_of(slot)) for chunk, slot in row.snapshots)
        state = row.slot, row.standing, row.samples > 1, kept
        sequences.append(PagedSequence(len(ids), count, row.start, row.pages, *state))
        if row.logits:
            before = count - row.logits
            end = PagedSequence(len(wanted), row.logits, row.start + before, row.pages)
            ends.append(end)
        ids += row.token_ids
        wanted += range(len(ids) - row.logits, len(ids))
    if len(ids) == len(rows):
        for row_number in range(len(rows), fixed_batch):
            pad = PagedSequence(row_number, 1, 0, (scratch_page,), scratch_slot)
            sequences.append(pad)
            ends.append(replace(pad, first_row=len(wanted)))
            ids.append(0)
            wanted.append(row_number)
    return StepRows(tuple(sequences), ids, wanted, tuple(ends))
