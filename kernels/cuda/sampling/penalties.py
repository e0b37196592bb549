"""Bias and penalties on the rows that have them, all rows at once; formulas in the CPU's file.

Counts are integers, and every other operation is one IEEE operation an element, so a row's bits do
not depend on the rows beside it. A row without one of the penalties has its neutral value, which
changes nothing (x / 1, x - 0), and only ids that occur are touched, by select.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tpdet.kernels.exact.allowed_ids import unpack_bits
from tpdet.kernels.exact.thresholds import held_repetition, hold_finite
from tpdet.kernels.inputs.row_params import RowParams, TokenIds


def to_device(
    values: Sequence[float] | Sequence[int] | np.ndarray, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A list, or an array of `dtype`, as a tensor [n] there, without waiting for the device."""
    pin = device.type == "cuda"
    if not isinstance(values, np.ndarray):
        numbers = torch.tensor(values, dtype=dtype, pin_memory=pin)
    elif pin:  # `pin_memory` of a tensor asks the driver first what it is
        numbers = torch.empty(len(values), dtype=dtype, pin_memory=True)
        numbers.numpy()[:] = values
    else:
        numbers = torch.from_numpy(values)
    return numbers.to(device, non_blocking=True)


def penalise(logits: torch.Tensor, params: Sequence[RowParams], first_id: int = 0) -> None:
    """Bias, penalties, forbidden and allowed ids in place: fp32 [D, W] contiguous, D params.

    Columns are the ids from `first_id`; ids elsewhere are another rank's.
    """
    _put(logits, params, lambda how: how.bias, first_id, add=True)
    rows = [index for index, how in enumerate(params) if _penalised(how)]
    if rows:
        at = to_device(rows, torch.int64, logits.device)
        logits[at] = _penalised_rows(logits[at], [params[row] for row in rows], first_id)
    _put(logits, params, lambda how: dict.fromkeys(how.forbidden, -torch.inf), first_id, add=False)
    _keep_allowed(logits, params, first_id)


def _keep_allowed(logits: torch.Tensor, params: Sequence[RowParams], first_id: int) -> None:
    masks = {row: how.allowed for row, how in enumerate(params) if how.allowed is not None}
    if not masks:
        return
    at = to_device(list(masks), torch.int64, logits.device)
    kept = unpack_bits(list(masks.values()), logits.device)
    kept = kept[:, first_id : first_id + logits.shape[1]]
    logits[at] = torch.where(kept, logits[at], -torch.inf)


def _penalised(how: RowParams) -> bool:
    return how.repetition_penalty != 1.0 or bool(how.frequency_penalty or how.presence_penalty)


def _penalised_rows(x: torch.Tensor, params: list[RowParams], first_id: int) -> torch.Tensor:
    """Repetition, frequency and presence penalties of x [P, W]."""
    output = _counts(x, [how.output_ids for how in params], first_id)
    anywhere = (output + _counts(x, [how.prompt_ids for how in params], first_id)) > 0
    numbers = [
        number
        for how in params
        for number in (
            held_repetition(how.repetition_penalty),
            how.frequency_penalty,
            how.presence_penalty,
        )
    ]
    columns = to_device(numbers, torch.float32, x.device).view(-1, 3)
    factor, frequency, presence = (columns[:, i : i + 1].contiguous() for i in range(3))
    repeated = hold_finite(torch.where(x > 0, x / factor, x * factor), x)
    # Prompt ids count for a repetition penalty only; rows without one have the factor 1.
    x = torch.where(anywhere, repeated, x)
    lowered = x - frequency * output.to(torch.float32)
    return torch.where(output > 0, lowered - presence, x)


def _counts(x: torch.Tensor, ids: Sequence[TokenIds], first_id: int) -> torch.Tensor:
    """How often each id occurs in each list: int64 [P, W]."""
    width, last = x.shape[1], first_id + x.shape[1]
    counts = torch.zeros(x.numel(), dtype=torch.int64, device=x.device)
    tokens = np.concatenate([np.asarray(row, np.int64) for row in ids])
    rows = np.repeat(np.arange(len(ids)) * width - first_id, [len(row) for row in ids])
    flat = (rows + tokens)[(tokens >= first_id) & (tokens < last)]
    if len(flat):
        at = to_device(flat, torch.int64, x.device)
        counts.scatter_add_(0, at, torch.ones_like(at))
    return counts.view(x.shape)


def _put(
    logits: torch.Tensor,
    params: Sequence[RowParams],
    values: Callable[[RowParams], dict[int, float]],
    first_id: int,
    add: bool,
) -> None:
    """Set (or add to) single ids of rows; an id stands at most once in a row's values."""
    width = logits.shape[1]
    flat: dict[int, float] = {}
    for row, how in enumerate(params):
        for token, value in values(how).items():
            if first_id <= token < first_id + width:
                flat[row * width + token - first_id] = value
    if not flat:
        return
    at = to_device(list(flat), torch.int64, logits.device)
    numbers = to_device(list(flat.values()), torch.float32, logits.device)
    view = logits.view(-1)
    view[at] = view[at] + numbers if add else numbers
