"""Processed rows: what tokens are sampled from, after every operation before the noise.

    logits or copy  ->  temperature  ->  -inf where the bound of top-k and top-p or min-p is not met

`write_processed` writes them where few ask: log-probabilities are then those of these rows, by the
same `sum_rows` that reads logits, as rows whose token is scored. An id that is not kept adds an
exact 0 to the softmax mass. A row's largest id is always kept, so its scaled value is the maximum
on every rank, and no second scan has to find it.

    bounds     int64 [F, BOUND_FIELDS]   of `find_bounds`; any numbers where no row is filtered
    answers    fp64 [4, R]               of `answers_of`: the sampled tokens
"""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.launch.dependent import await_earlier
from tpdet.kernels.cuda.launch.sizes import next_power_of_2
from tpdet.kernels.cuda.sampling.answers import TOKEN
from tpdet.kernels.cuda.sampling.candidates import Bounds
from tpdet.kernels.cuda.sampling.noise import NOISE_BLOCK, kept_values
from tpdet.kernels.cuda.sampling.peaks import (
    LogitRows,
    RowShape,
    grid_of,
    largest_peak,
    numbers_beside,
    options,
    sampled_row,
    scaled,
)
from tpdet.kernels.cuda.sampling.table import (
    BOUND,
    BOUND_FIELDS,
    COPY,
    KEEPS_ALL,
    KIND,
    LOGITS_PEAK,
    MIN_P,
    PEAK_FIELDS,
    ROW_FIELDS,
    SAMPLED_PEAK,
    SCORED,
    SCORED_TOKEN,
    SLOT,
    TEMPERATURE,
    id_of,
    load_float,
    sort_key,
    value_of,
)
from tpdet.kernels.inputs.sampled_rows import RowAnswers
from tpdet.kernels.inputs.vocabulary_shard import Shard


@triton.jit
def store_scored_row(into, row, count, top, token, PARTS: tl.constexpr):
    """Stores the table's row, the peaks and the arrivals of a row whose maximum is `top`."""
    height, parts = count
    fields = into.table + row * ROW_FIELDS
    tl.store(fields + COPY, tl.full((), -1, tl.int64))
    tl.store(fields + KIND, tl.full((), SCORED, tl.int64))
    tl.store(fields + SCORED_TOKEN, token)
    part = tl.arange(0, PARTS)
    peaks = into.peaks + (part * height + row) * PEAK_FIELDS + LOGITS_PEAK
    tl.store(peaks, tl.zeros((PARTS,), tl.int64) + sort_key(top, row * 0), mask=part < parts)
    tl.store(into.arrivals + row, 0)


@triton.jit(do_not_specialize=["height", "peak_parts", "first_id"])
def write_processed(
    rows,
    bounds,
    answers,
    into,
    shape,
    height,
    peak_parts,
    first_id,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """into.logits[row]: the processed row, of the same shape; program (row, part) writes SPAN ids.

    Beside it part 0 writes what `sum_rows` reads of a row that is scored.
    """
    await_earlier(DEPENDENT)
    row, part = tl.program_id(0), tl.program_id(1)
    width, fields = shape.width, rows.table + row * ROW_FIELDS
    LANES: tl.constexpr = min(SPAN, NOISE_BLOCK)
    # 1. what is kept: as `best_score` has it
    count = height, peak_parts
    temperature = load_float(fields + TEMPERATURE)
    peak = largest_peak(rows.peaks + SAMPLED_PEAK, row, count, PARTS)
    top = scaled(value_of(peak), temperature)
    slot = tl.load(fields + SLOT)
    bound = tl.load(bounds + slot * BOUND_FIELDS + BOUND, mask=slot >= 0, other=KEEPS_ALL)
    least, last_id = top + load_float(fields + MIN_P), id_of(bound)
    bound = tl.where(bound == KEEPS_ALL, -float("inf"), value_of(bound))
    # 2. the columns
    start = sampled_row(rows, shape, row, tl.load(fields + COPY))
    out = into.logits + row.to(tl.int64) * shape.stride
    for first in range(0, SPAN, LANES):
        columns = part * SPAN + first + tl.arange(0, LANES)
        x, _, kept = kept_values(
            start, columns, width, first_id, temperature, bound, last_id, least
        )
        tl.store(out + columns, tl.where(kept, x, -float("inf")), mask=columns < width)
    # 3. the row beside them
    if part == 0:
        token = tl.load(answers + height * TOKEN + row).to(tl.int64)
        store_scored_row(into, row, count, top, token, PARTS)


def processed_rows(
    rows: LogitRows, filters: Bounds | None, sampled: RowAnswers, shard: Shard
) -> LogitRows:
    """The processed rows of R sampled ones, as rows whose token is scored.

    filters: of `find_bounds`, None without any.
    """
    x = rows.logits
    peak_parts, height = rows.peaks.shape[:2]
    shape = RowShape(shard.width(x.shape[1]), max(x.stride(0), x.shape[1]))
    grid, span = grid_of(height, shape.width)
    logits = numbers_beside(x, height, shape.stride, dtype=torch.float32)[:, : x.shape[1]]
    table, peaks = torch.empty_like(rows.table), torch.empty_like(rows.peaks)
    arrivals = torch.empty_like(rows.arrivals)
    into = LogitRows(logits, logits, table, peaks, table, peaks, arrivals)
    of = rows, rows.peaks if filters is None else filters.bounds, sampled.answers, into, shape
    count = height, peak_parts, shard.first_id
    forms = span, next_power_of_2(peak_parts)
    write_processed[grid](*of, *count, *forms, **options(x.device, 4))
    return into
