"""Checks of this machine's kernels and of all ranks' settings, before a model is loaded."""

import logging
import shlex
from collections.abc import Callable, Iterable
from dataclasses import asdict

import torch

from tpdet.checkpoint.model_config.model import LinearAttention
from tpdet.checkpoint.packing import Packing
from tpdet.comm.agreement import agree, collect_facts
from tpdet.config import EngineConfig
from tpdet.errors import DisagreementError, TpdetError, UsageError
from tpdet.kernels.cpu import threads
from tpdet.kernels.cpu.gemm.admission import check_bit_classes, check_linear_products
from tpdet.kernels.cuda.hardware import gpu_of
from tpdet.kernels.known.answers import known_answers
from tpdet.kernels.known.expert_golden import EXPERT_GOLDEN_SHA256, expert_golden_digest
from tpdet.kernels.known.golden import golden_digest
from tpdet.kernels.known.kv_golden import kv_golden_digest
from tpdet.kernels.known.linear_golden import linear_golden_digest
from tpdet.kernels.order import GOLDEN_SHA256, KV_GOLDEN_SHA256, LINEAR_GOLDEN_SHA256
from tpdet.launch.ranks.pinned import threads_per_rank
from tpdet.layers.experts import shared_form
from tpdet.layers.partition import Partition
from tpdet.models.fingerprint import architecture
from tpdet.models.products import expert_layer, expert_products, rank_products, table_products
from tpdet.runner.start.compile_ahead import CompilingAhead
from tpdet.runner.start.contracts import Contracts
from tpdet.runner.start.warming import forms_of, rehearse_checks, try_linear_forms

_LOCAL_FACTS = ("model", "tokenizer", "chat_template", "kernel_cache", "draft_model")
"""Paths may differ from host to host."""

_log = logging.getLogger("tpdet.engine")


def check_kernels(partition: Partition, device: str) -> None:
    """Golden vectors and, on the CPU, bit classes. Raises DisagreementError or TpdetError.

    Raises UsageError for row layers that cannot be cut as asked, and for fp8 pages on a GPU that
    has no kernel for them.
    """
    model = partition.config
    fp8 = partition.kv_cache_dtype == "fp8"
    if fp8 and device == "cuda" and not gpu_of(torch.device(device)).wgmma:
        raise UsageError("kv_cache_dtype fp8 needs Hopper on a GPU: leave kv_cache_dtype out")
    if device == "cpu":
        threads.configure(threads_per_rank(partition.world.local_size))
    goldens = {"": (golden_digest(), GOLDEN_SHA256)}
    if model.experts:
        goldens[" of experts"] = expert_golden_digest(torch.device("cpu")), EXPERT_GOLDEN_SHA256
    if model.linear is not None:
        goldens[" of linear layers"] = linear_golden_digest(), LINEAR_GOLDEN_SHA256
    if fp8:
        goldens[" of fp8 keys and values"] = kv_golden_digest(), KV_GOLDEN_SHA256
    for name, (digest, golden) in goldens.items():
        if digest != golden:
            raise DisagreementError(
                f"golden vectors{name} have digest {digest[:16]}, the contract's is {golden[:16]}: "
                "this build of torch breaks the arithmetic contract"
            )
    reduced = [k for product in rank_products(partition) for k in product.chains]
    if device == "cpu":
        check_chains(reduced, model.head_dim, model.linear)


def check_chains(
    reduced: Iterable[int], head_dim: int, linear: LinearAttention | None = None
) -> None:
    """`check_bit_classes` of a CPU, and `check_linear_products`; a failure is a TpdetError."""
    try:
        check_bit_classes(reduced, head_dim)
        if linear is not None:
            check_linear_products(linear.key_size, linear.value_size)
    except RuntimeError as error:
        raise TpdetError(str(error)) from error


def agree_to_start(
    config: EngineConfig, partition: Partition, contracts: Contracts, device: str
) -> None:
    """Compare settings, model and machine with the other ranks'; as `agree`.

    Before kernels are compiled, which takes the ranks together: those that differ part here.
    """
    settings = config.model_dump(exclude={*_LOCAL_FACTS})
    settings["contract"] = contracts.of(config.approximate)
    model = {f"model.{name}": str(v) for name, v in asdict(partition.config).items()}
    agree(partition.world, collect_facts(settings, device) | model)


def compare_answers(
    partition: Partition, device: torch.device, limits: dict[str, int] | None, ahead: CompilingAhead
) -> str:
    """Compare the known answers of every family of kernels, which are compiled first; as `agree`.

    Returns the name of the arithmetic that gave them, which all ranks have (`architecture`).

    limits: of `admit_products`, whose kernels are compiled at once with these; None without it.
    """
    dtype = getattr(torch, partition.config.dtype)
    ahead.compile(lambda: rehearse_checks(partition, device, limits), "checks")
    answers = known_answers(device, dtype, forms_of(partition))
    named = architecture(device.type, answers)
    facts = {f"known answer {name}": digest for name, digest in answers.items()}
    agree(partition.world, facts | {"architecture": named})
    return named


def product_limits(step_rows: int, logit_rows: int) -> dict[str, int]:
    """The most rows of each kind of product."""
    return {"column": step_rows, "head": logit_rows}


def admit_products(
    partition: Partition,
    device: torch.device,
    limits: dict[str, int],
    tune_command: str,
    end_copies: Callable[[], None] = lambda: None,
    packing: Packing | None = None,
) -> None:
    """Try what the GPU's shape table names for this rank's products: its arithmetic uses it then.

    Products that it does not hold run by estimate, and the log offers `tune_command` for them.
    limits: the most rows of each kind of product; end_copies: called before products are timed, so
    that nothing is copied to the GPU meanwhile; packing: of weights that stay packed. Raises
    TpdetError for an entry that fails, and for a tile that gives other bits than the dense product.
    """
    from tpdet.kernels.cuda.experts.admission import failing_tiles
    from tpdet.kernels.cuda.experts.lane_admission import failing_lanes
    from tpdet.kernels.cuda.experts.tiles import is_tuned
    from tpdet.kernels.cuda.gemm import admission, library_trials

    dtype = getattr(torch, partition.config.dtype)
    layer = expert_layer(partition)
    try:
        failed = failing_tiles(expert_products(partition), layer, device, dtype)
        failed += failing_lanes(shared_form(partition), device, dtype)
        admission_report = admission.check(table_products(partition), device, limits, dtype=dtype)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        raise TpdetError(f"shape table: {error}") from error
    if failed:
        raise TpdetError(
            f"{'; '.join(failed)}: other bits than the dense product on this GPU, no answer can be "
            "trusted"
        )
    if admission_report.not_in_table:
        end_copies()
    partition.arithmetic.admitted = library_trials.with_libraries(
        admission_report.admitted, admission_report.not_in_table, device
    )
    _log.info("%s", admission_report)
    if packing is not None:
        _admit_packed(packing, partition, limits["column"], device)
    untuned = layer is not None and not is_tuned(layer, dtype.itemsize, device)
    if untuned:
        _log.info("not in the table, by a static rule: %s", layer)
    if admission_report.not_in_table or untuned:
        _log.info("no table holds these shapes: %s measures them once", tune_command)


def _admit_packed(packing: Packing, partition: Partition, limit: int, device: torch.device) -> None:
    """Try the products of packed weights. Raises TpdetError for one with other bits."""
    tried, failed = try_packed(packing, partition, limit, device)
    if failed:
        raise TpdetError(
            f"packed weights: {'; '.join(failed[:3])}: other bits than the dense product on this "
            "GPU: use weights dense"
        )
    if tried:
        _log.info("%d products of packed weights admitted", tried)


def try_packed(
    packing: Packing, partition: Partition, limit: int, device: torch.device
) -> tuple[int, list[str]]:
    """How many products of packed weights were tried, and those with other bits."""
    from tpdet.kernels.cuda.experts.packed_admission import failing_experts
    from tpdet.kernels.cuda.gemm.packed.admission import failing_tiles

    tried, failed = failing_tiles(packing.forms, rank_products(partition), limit, device)
    experts, of_experts = failing_experts(packing.expert_forms, expert_products(partition), device)
    return tried + experts, failed + of_experts


def admit_linear_forms(partition: Partition, device: torch.device) -> None:
    """Have linear layers take the forms that have the general form's bytes on this GPU."""
    kept, failed = try_linear_forms(partition, device)
    for reason in failed:
        _log.warning(
            "linear attention, %s: its steps take the general form, which is slower", reason
        )
    if kept:
        _log.info("linear attention: %s admitted", ", ".join(kept))


def tune_command(config: EngineConfig, size: int) -> str:
    """What an operator types to measure this model's products for a world of `size` ranks."""
    parts = ["tpdet", "tune", config.model, "--tp", str(size), "--fold-order", config.fold_order]
    if config.row_layers != "fold":
        parts += ["--row-layers", f"fold,{config.row_layers}"]
    return shlex.join(parts)
