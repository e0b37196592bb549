"""The one door to the kernels: each operation of the contract, chosen by its tensors' device.

Shapes: M rows of the step, N outputs, K reduced, L this rank's leaves, H hidden, D head size,
P pages. Formulas, orders and roundings are in `docs/numerics.md` and in the kernels' own files.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch

from tpdet.kernels.cuda import hardware
from tpdet.kernels.exact import thresholds
from tpdet.kernels.inputs.experts import Lanes, Routing
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.inputs.plain_rows import PlainRows
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.sampled_rows import PackedRows, RowAnswers, SampledRows
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.kernels.order import Expression, FinalExpression
from tpdet.kernels.partial_sums import PartialSums


def column_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    admitted: object = None,
) -> torch.Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N]: one chain over K, bias in fp32, one rounding.

    admitted: what a GPU's start-up check found (`admit_products`); it shows in time only.
    """
    choices = {} if admitted is None else {"admitted": admitted}
    return _on(x, "gemm.column").column_gemm(x, weight, bias, out_dtype or x.dtype, **choices)


def leaf_sums(
    x: torch.Tensor,
    weight: torch.Tensor,
    roots: tuple[Expression, ...],
    admitted: object = None,
    widths: tuple[int, ...] = (),
) -> PartialSums:
    """x [M, L * K], weight [L, N, K] -> sums [C, M, N] of leaves or of larger subtrees of `roots`.

    `roots` are over this rank's leaves, counted from 0. How much of them is folded here is free.
    admitted: as of `column_gemm`. widths: of leaves of unequal K, which lie side by side in x and
    in a weight [1, N, sum of widths].
    """
    choices = {} if admitted is None else {"admitted": admitted}
    unequal = {"widths": widths} if widths else {}
    return _on(x, "gemm.leaf").leaf_sums(x, weight, roots, **choices, **unequal)


def fold_roots(sums: PartialSums, slots: int) -> torch.Tensor:
    """Fold sums into the subtree roots a rank sends [slots, M, N] fp32; unused slots are zero."""
    return _on(sums.values, "pointwise.fold").fold_roots(sums.values, 0, sums.roots, slots)


def fold_final(gathered: torch.Tensor, final: FinalExpression) -> torch.Tensor:
    """Everyone's roots [ranks, slots, M, N] fp32 -> [M, N] fp32."""
    return _on(gathered, "pointwise.fold").fold_final(gathered, final)


def fold_and_norm(sums: PartialSums, finish: Finish) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums [C, M, H] of one root -> h fp32 and y [M, H], both as `Finish` says.

    A total that is one rounded product may stand in the model's dtype; it is added in fp32.
    """
    return _on(finish.residual, "pointwise.finish").fold_and_norm(sums, finish)


def rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """x [M, H] fp32, norm [H] -> round((x * r) * w) [M, H] in the norm's dtype."""
    return _on(x, "pointwise.norm").rms_norm(x, norm)


def row_largest(x: torch.Tensor) -> torch.Tensor:
    """x [M, N], a part of each row -> the largest |x| [M] fp32; NaN where there is one."""
    return _on(x, "pointwise.norm").row_largest(x)


def row_mass(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """x [M, N], largest |x| of whole rows [M] fp32 -> integer sums of squares [M] int64."""
    return _on(x, "pointwise.norm").row_mass(x, largest)


def norm_by_mass(
    x: torch.Tensor, largest: torch.Tensor, mass: torch.Tensor, count: int, norm: Norm
) -> torch.Tensor:
    """`rms_norm` of a part x [M, N] of rows of `count` values; largest and mass of whole rows."""
    return _on(x, "pointwise.norm").norm_by_mass(x, largest, mass, count, norm)


def rotate_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: float,
    pages: tuple[torch.Tensor, torch.Tensor],
    batch: PagedBatch,
) -> torch.Tensor:
    """`rotate_heads` of q and k at each row's position and `store_kv`, in one: -> q [M, Hq, D].

    Tables of cos and sin [positions, D / 2] fp32; norms [D] of q and k, both there or neither;
    pages of keys and values.
    """
    return _on(q, "pointwise.rotate_and_store").rotate_and_store(
        q, k, v, tables, norms, eps, pages, batch
    )


def gated_gemm(
    x: torch.Tensor, weight: torch.Tensor, admitted: object = None, activation: str = "silu"
) -> torch.Tensor:
    """x [M, K], interleaved weight [2 * I, K] -> round(act(gate) * up) [M, I] in x's dtype.

    activation: of `kernels/inputs/activations.py`. gate and up are `column_gemm` in fp32,
    unrounded. The weight is that of `interleaved` (`kernels/inputs/gated.py`). admitted: as of
    `column_gemm`.
    """
    choices = {} if admitted is None else {"admitted": admitted}
    return _on(x, "gemm.gated").gated_gemm(x, weight, activation=activation, **choices)


def activate_and_multiply(
    gate_up: torch.Tensor, dtype: torch.dtype | None = None, activation: str = "silu"
) -> torch.Tensor:
    """Interleaved gate_up [M, 2 * I] -> round(act(gate) * up) [M, I] in dtype (gate_up's)."""
    module = _on(gate_up, "pointwise.activation")
    return module.activate_and_multiply(gate_up, dtype or gate_up.dtype, activation)


def activate_alone(x: torch.Tensor, activation: str) -> torch.Tensor:
    """x [M, I] -> round(act(x)) [M, I] in x's dtype, for a block without gates."""
    return _on(x, "pointwise.activation").activate_alone(x, activation)


def choose_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    batch: PagedBatch,
    routing: Routing,
    held: range | None = None,
) -> tuple[torch.Tensor, torch.Tensor, object]:
    """logits [M, E] fp32, bias [E] or None -> ids int32 (ascending), weights fp32 [M, k], and the
    tokens sorted by expert where the router did that too.

    The batch tells which rows are padding: they choose no expert. held: this rank's experts, by
    which a GPU sorts few rows at once; that spares `expert_sums` the work.
    """
    found: tuple[torch.Tensor, torch.Tensor, object] = _on(logits, "experts.router").route(
        logits, bias, batch.rows, routing, held
    )
    return found


def expert_sums(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    lanes: Lanes,
    shared: torch.Tensor | None = None,
    activation: str = "silu",
    sorted_tokens: object = None,
) -> PartialSums:
    """x [M, H], what `choose_experts` gives for it -> the roots of this rank's lanes.

    gate_up [E, 2 * I, H], interleaved, and down [E, H, I]: of this rank's experts; biases
    [E, 2 * I] and [E, H] or None. shared fp32 [lanes, M, H] is added to each lane last.
    """
    of = x, ids, weights, gate_up, down, biases, lanes, shared, activation
    found = {} if sorted_tokens is None else {"sorted_tokens": sorted_tokens}
    return cast(PartialSums, _on(x, "experts.sums").expert_sums(*of, **found))


def expert_rows(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    bias: torch.Tensor | None,
    experts: range,
    total: int,
    activation: str = "silu",
) -> torch.Tensor:
    """x [M, H], ids [M, k] -> [M, k, I']: what each choice's expert makes of gate and up.

    gate_up [E, 2 * I', H], interleaved: some outputs of `experts` of `total`, or all.
    """
    of = x, ids, gate_up, bias, experts, total, activation
    return cast(torch.Tensor, _on(x, "experts.sums").expert_rows(*of))


def sums_of_rows(
    mixed: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    down: torch.Tensor,
    bias: torch.Tensor | None,
    lanes: Lanes,
    shared: torch.Tensor | None = None,
) -> PartialSums:
    """mixed [M, k, I] of all outputs, ids, weights [M, k] -> the roots of lanes [R, M, N].

    down [E, N, I]: some outputs of the experts of `lanes`, or all. shared: as of `expert_sums`.
    """
    of = mixed, ids, weights, down, bias, lanes, shared
    return cast(PartialSums, _on(mixed, "experts.sums").sums_of_rows(*of))


def embed(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """ids [M] int64, table [V, H] -> fp32 rows [M, H].

    An id beyond the table, of a row that sampled nothing, takes the nearest row.
    """
    return _on(table, "pointwise.embedding").embed(ids, table)


def resolve_sampled(ids: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """ids [M] int64, where -1 - i stands for sampled[i] -> ids [M], none of them negative."""
    return _on(ids, "pointwise.embedding").resolve_sampled(ids, sampled)


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: PagedBatch,
    window: int | None = None,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [M, Hq, D] over pages [P, Hkv, 256, D] -> [M, Hq, D]: prefill, chunk and decode alike.

    cap: of scores, as `soft_cap`; 0 for none. sinks: fp32 [Hq], logits of no key, or None.
    """
    of = q, k_pages, v_pages, batch, window, cap, sinks
    return cast(torch.Tensor, _on(q, "attention.attention").paged_attention(*of))


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """x fp32 -> cap * tanh(x / cap), in fp32; x may be overwritten."""
    return _on(x, "pointwise.soft_cap").soft_cap(x, cap)


def log_probabilities(
    values: torch.Tensor, maximum: torch.Tensor, log_masses: torch.Tensor
) -> torch.Tensor:
    """Picked logits [..] fp32, their rows' maxima and log masses -> log-probabilities [..] fp32."""
    return thresholds.log_probabilities(values, maximum, log_masses)


def sample_rows(logits: torch.Tensor, params: Sequence[RowParams], shard: Shard) -> SampledRows:
    """logits [R, W] fp32 of a shard, R params -> tokens and log-probabilities, without waiting."""
    return cast(SampledRows, _on(logits, "sampling.launch").sample_rows(logits, params, shard))


def sample_answers(logits: torch.Tensor, params: Sequence[RowParams], shard: Shard) -> RowAnswers:
    """`sample_rows` before its last step, for ranks that show each other theirs in between."""
    return cast(RowAnswers, _on(logits, "sampling.launch").sample_answers(logits, params, shard))


def pack_answers(answers: torch.Tensor, share: int, places: torch.Tensor) -> PackedRows:
    """That last step: fp64 [ranks, >= 4 * share], places int64 [R] among all ranks' shares."""
    return cast(PackedRows, _on(answers, "sampling.launch").pack_answers(answers, share, places))


def write_rows(logits: torch.Tensor, rows: PlainRows, vocabulary: int, numbers: np.ndarray) -> bool:
    """Write what rows of logits are sampled by to host int64 [R * WORDS]; R or fewer rows.

    Returns whether any row has top-k or top-p, which `sample_written` takes as `filtered`.
    """
    module = _on(logits, "sampling.launch")
    return cast(bool, module.write_rows(rows, vocabulary, numbers))


def sample_written(
    logits: torch.Tensor, numbers: torch.Tensor, filtered: bool, shard: Shard
) -> SampledRows:
    """`sample_rows` of whole rows by what `write_rows` wrote, on the device; pads get any token."""
    module = _on(logits, "sampling.launch")
    return cast(SampledRows, module.sample_written(logits, numbers, filtered, shard))


def move_on(numbers: torch.Tensor, by: torch.Tensor) -> None:
    """Add int64 [R] to the positions of written rows, on their device."""
    _on(numbers, "sampling.launch").move_on(numbers, by)


def score_tokens(logits: torch.Tensor, tokens: Sequence[int], shard: Shard) -> SampledRows:
    """logits [T, W] fp32 of a shard and T ids -> the ids' log-probabilities."""
    return cast(SampledRows, _on(logits, "sampling.launch").score_tokens(logits, tokens, shard))


def top_of_rows(
    logits: torch.Tensor, rows: Sequence[int], count: int, shard: Shard
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest of some rows: ids int64 and logits fp32 [len(rows), count], best first."""
    best: tuple[torch.Tensor, torch.Tensor]
    best = _on(logits, "sampling.launch").top_of_rows(logits, rows, count, shard)
    return best


def count_ahead(
    logits: torch.Tensor, chosen: torch.Tensor, at: torch.Tensor, width: int
) -> torch.Tensor:
    """logits [R, W] fp32, a logit and a column for each row -> int64 [R]: how many columns come
    before it among the first `width`, larger ones and equal ones further left."""
    ahead: torch.Tensor = _on(logits, "sampling.ranks").count_ahead(logits, chosen, at, width)
    return ahead


def leaving_multiprocessors(count: int, device: torch.device) -> AbstractContextManager[None]:
    """While inside, products leave `count` multiprocessors of a GPU to what runs beside them."""
    room = hardware.room_of(device.type)
    if not count or room == "cpu":
        return nullcontext()
    held: AbstractContextManager[None] = _kernels(room, "launch.multiprocessors").leaving(count)
    return held


def can_tape(device: torch.device) -> bool:
    """Whether `taping` sees what a device's kernels launch."""
    return hardware.room_of(device.type) == "cuda"


def taping(
    given: tuple[torch.Tensor, ...], places: Mapping[int, torch.Tensor]
) -> AbstractContextManager[Any]:
    """While inside, a GPU's launches are noted on a `Tape` (`cuda/launch/tape.py`)."""
    noted: AbstractContextManager[Any] = _on(given[0], "launch.tape").taping(given, places)
    return noted


def repeated(
    first: Any, second: Any, weights: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> Any | None:
    """The `Pattern` of two tapes that differ in their weights alone; None of others."""
    return _on(weights[0][0], "launch.tape").Pattern.of(first, second, weights)


def _on(x: torch.Tensor, name: str) -> ModuleType:
    """The module of an operation, as `room.module`, for x's device; refuses other devices."""
    return _kernels(hardware.room_of(x.device.type), name)


@cache
def _kernels(device: str, name: str) -> ModuleType:
    """Imported on first use: the CPU path must run where there is no Triton."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"no kernels for device {device!r}: use --device cpu")
    return import_module(f"tpdet.kernels.{device}.{name}")
