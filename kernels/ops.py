"""The one door to the kernels: each operation of the contract, chosen by its tensors' device.

An operation is declared by the function of the CPU that computes it: its parameters, shapes,
formula and docstring are those. The GPU's function of this name, in the module of this name, takes
the same (and may take more, for tuning). Orders and roundings are in `docs/numerics.md`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, wraps
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import torch

from tpdet.kernels.cpu.attention import attention as cpu_attention
from tpdet.kernels.cpu.experts import sums as cpu_sums
from tpdet.kernels.cpu.gemm import column as cpu_column
from tpdet.kernels.cpu.gemm import gated as cpu_gated
from tpdet.kernels.cpu.gemm import leaf as cpu_leaf
from tpdet.kernels.cpu.linear import convolution as cpu_convolution
from tpdet.kernels.cpu.linear import delta_rule as cpu_delta_rule
from tpdet.kernels.cpu.linear import gated_norm as cpu_gated_norm
from tpdet.kernels.cpu.pointwise import activation as cpu_activation
from tpdet.kernels.cpu.pointwise import drafts as cpu_drafts
from tpdet.kernels.cpu.pointwise import embedding as cpu_embedding
from tpdet.kernels.cpu.pointwise import finish as cpu_finish
from tpdet.kernels.cpu.pointwise import fold as cpu_fold
from tpdet.kernels.cpu.pointwise import gate as cpu_gate
from tpdet.kernels.cpu.pointwise import norm as cpu_norm
from tpdet.kernels.cpu.pointwise import rotary as cpu_rotary
from tpdet.kernels.cpu.pointwise import rotate_and_store as cpu_rotate_and_store
from tpdet.kernels.cpu.pointwise import soft_cap as cpu_soft_cap
from tpdet.kernels.cpu.sampling import launch as cpu_sampling
from tpdet.kernels.cpu.sampling import ranks as cpu_ranks
from tpdet.kernels.cuda import hardware
from tpdet.kernels.exact import thresholds
from tpdet.kernels.inputs.experts import Routing
from tpdet.kernels.inputs.linear_state import LinearState, StateMove
from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.inputs.plain_rows import PlainRows
from tpdet.kernels.partial_sums import PartialSums

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_Operations = Mapping[str, Callable[..., Any]]
_PLAIN: _Operations = MappingProxyType({})
_recorded: ContextVar[_Operations] = ContextVar("recorded", default=_PLAIN)


@contextmanager
def recorded(operations: _Operations = _PLAIN) -> Iterator[None]:
    """While inside, in this thread, operations of these names are those of the table.

    So `tpdet.nn` has them recorded for gradients. Without a table they are the kernels again.
    """
    token = _recorded.set(operations)
    try:
        yield
    finally:
        _recorded.reset(token)


def _recordable(operation: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """The operation, or what `recorded` has for its name."""
    name = operation.__name__

    @wraps(operation)
    def run(*args: Any, **named: Any) -> Any:
        return _recorded.get().get(name, operation)(*args, **named)

    return cast(Callable[_Parameters, _Result], run)


def _by_device(reference: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """The operation that a function of the CPU declares, where its first argument lies."""
    name = reference.__name__
    room = reference.__module__.removeprefix("tpdet.kernels.cpu.")

    @wraps(reference)
    def run(*args: Any, **named: Any) -> Any:
        record = _recorded.get().get(name)
        if record is not None:
            return record(*args, **named)
        module = _kernels(hardware.room_of(args[0].device.type), room)
        return getattr(module, name)(*args, **named)

    return cast(Callable[_Parameters, _Result], run)


column_gemm = _by_device(cpu_column.column_gemm)
gated_gemm = _by_device(cpu_gated.gated_gemm)
leaf_sums = _by_device(cpu_leaf.leaf_sums)
fold_final = _by_device(cpu_fold.fold_final)
fold_and_norm = _by_device(cpu_finish.fold_and_norm)
rms_norm = _by_device(cpu_norm.rms_norm)
row_largest = _by_device(cpu_norm.row_largest)
row_mass = _by_device(cpu_norm.row_mass)
norm_by_mass = _by_device(cpu_norm.norm_by_mass)
activate_and_multiply = _by_device(cpu_activation.activate_and_multiply)
activate_alone = _by_device(cpu_activation.activate_alone)
soft_cap = _by_device(cpu_soft_cap.soft_cap)
gate_heads = _by_device(cpu_gate.gate_heads)
gate_lanes = _by_device(cpu_gate.gate_lanes)
rotate_heads = _by_device(cpu_rotary.rotate_heads)
store_kv = _by_device(cpu_embedding.store_kv)
rotate_and_store = _by_device(cpu_rotate_and_store.rotate_and_store)
paged_attention = _by_device(cpu_attention.paged_attention)
expert_sums = _by_device(cpu_sums.expert_sums)
expert_rows = _by_device(cpu_sums.expert_rows)
sums_of_rows = _by_device(cpu_sums.sums_of_rows)
short_convolution = _by_device(cpu_convolution.short_convolution)
gated_delta = _by_device(cpu_delta_rule.gated_delta)
gated_norm = _by_device(cpu_gated_norm.gated_norm)
embed = _by_device(cpu_embedding.embed)
resolve_sampled = _by_device(cpu_embedding.resolve_sampled)
follow_drafts = _by_device(cpu_drafts.follow_drafts)
sample_rows = _by_device(cpu_sampling.sample_rows)
sample_answers = _by_device(cpu_sampling.sample_answers)
sample_processed = _by_device(cpu_sampling.sample_processed)
pack_answers = _by_device(cpu_sampling.pack_answers)
score_tokens = _by_device(cpu_sampling.score_tokens)
top_of_rows = _by_device(cpu_sampling.top_of_rows)
sample_written = _by_device(cpu_sampling.sample_written)
move_on = _by_device(cpu_sampling.move_on)
count_ahead = _by_device(cpu_ranks.count_ahead)


@_recordable
def fold_roots(sums: PartialSums, slots: int) -> torch.Tensor:
    """Fold sums into the subtree roots a rank sends [slots, M, N] fp32; unused slots are zero."""
    return _on(sums.values, "pointwise.fold").fold_roots(sums.values, 0, sums.roots, slots)


@_recordable
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


def advance_states(states: Sequence[LinearState], moves: Sequence[StateMove]) -> None:
    """Write boundary[target] of each move: the state of its source behind all rows of the chunk.

    states: of all layers.
    """
    _on(states[0].boundary, "linear.delta_rule").advance_states(states, moves)


def log_probabilities(
    values: torch.Tensor, maximum: torch.Tensor, log_masses: torch.Tensor
) -> torch.Tensor:
    """Picked logits [..] fp32, their rows' maxima and log masses -> log-probabilities [..] fp32."""
    return thresholds.log_probabilities(values, maximum, log_masses)


def write_rows(logits: torch.Tensor, rows: PlainRows, vocabulary: int, numbers: np.ndarray) -> bool:
    """Write what rows of logits are sampled by to host int64 [R * WORDS]; R or fewer rows.

    Returns whether any row has top-k or top-p, which `sample_written` takes as `filtered`.
    """
    module = _on(logits, "sampling.launch")
    return cast(bool, module.write_rows(rows, vocabulary, numbers))


def leaving_multiprocessors(count: int, device: torch.device) -> AbstractContextManager[None]:
    """While inside, products leave `count` multiprocessors of a GPU to what runs beside them."""
    room = hardware.room_of(device.type)
    if not count or room == "cpu":
        return nullcontext()
    held: AbstractContextManager[None] = _kernels(room, "launch.multiprocessors").leaving(count)
    return held


def pair_of_launches(device: torch.device) -> AbstractContextManager[None]:
    """While inside, the two kernels of a pair are launched, and nothing between them.

    They are products of the same rows, a small one first; or `short_convolution` and the first
    kernel of `gated_delta`. Neither writes what the other touches: on a GPU the second comes while
    the first one runs.
    """
    room = hardware.room_of(device.type)
    if room == "cpu" or _recorded.get():  # what is recorded launches more
        return nullcontext()
    pair: AbstractContextManager[None] = _kernels(room, "launch.dependent").pair_of_launches()
    return pair


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
