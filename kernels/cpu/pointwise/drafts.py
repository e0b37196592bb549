"""Rows behind drafts: where the step before, which verifies them, says that they begin."""

import torch

from tpdet.kernels.order import PAGE_TOKENS


def follow_drafts(
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    spans: torch.Tensor,
    tables: torch.Tensor,
    numbers: torch.Tensor,
    sampled: torch.Tensor,
    moved: torch.Tensor,
) -> None:
    """Move the first M rows of a packed step by the drafts before them that are right.

    ids, positions, slots int64 [>= M], spans int32 [B, 3] and tables int32 [B, widest] are a packed
    step's; moved int64 [M] becomes by how many positions each row moves. sampled int64: tokens of
    the step before. numbers int64 has five of each row, [5, M], then the expected ids: its sequence
    in the step, unverified drafts, their first token in `sampled`, the first of its expected ids,
    and its index among its sequence's rows.
    """
    count = len(moved)
    of_rows, expected = numbers[: 5 * count].view(5, count).T.tolist(), numbers[5 * count :]
    for row, (sequence, unverified, token, known, index) in enumerate(of_rows):
        tokens, ids_behind = sampled[token : token + unverified + 1], expected[known:]
        same = (tokens[:unverified] == ids_behind[:unverified]).long()
        accepted = int(same.cumprod(0).sum())
        moved[row] = accepted
        if not unverified:
            continue
        ids[row] = ids_behind[accepted + index] if index else tokens[accepted]
        positions[row] += accepted
        page, offset = divmod(int(positions[row]), PAGE_TOKENS)
        slots[row] = int(tables[sequence, page]) * PAGE_TOKENS + offset
        if not index:
            spans[sequence, 2] += accepted
