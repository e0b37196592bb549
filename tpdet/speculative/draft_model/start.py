"""Loading the draft model on rank 0, beside the model that it drafts for."""

import logging

from tpdet.checkpoint.model_config import ModelConfig, load_model_config
from tpdet.checkpoint.resolve import resolve_model
from tpdet.comm.device import current_device, free_gpu_bytes, resolve_device
from tpdet.comm.world.world import SoloWorld, World
from tpdet.config import EngineConfig
from tpdet.errors import ResourceError
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, PAGE_TOKENS
from tpdet.layers.partition import make_partition
from tpdet.models.footprint import weight_bytes
from tpdet.runner import Runner
from tpdet.runner.start.contracts import partition_of
from tpdet.runner.start.load_model import LOAD_TIMEOUT
from tpdet.runner.start.memory import check_room, least_bytes
from tpdet.runner.start.step_tokens import LEAST_TOKENS
from tpdet.speculative.draft_model.model import DraftModel
from tpdet.speculative.draft_model.pair import draft_page_bytes, draft_pages, read_draft_model

_CPU_PAGES = 1024  # at most, where nothing says how many
_log = logging.getLogger("tpdet.engine")


def start_draft_model(
    config: EngineConfig, world: World, loaded: bool = False
) -> DraftModel | None:
    """Load the draft model on rank 0, if there is to be one; the other ranks wait. Collective.

    To be called before the KV pages of the model itself are counted; loaded: whether its weights
    are on the GPU already. Raises as `Runner.start` and `read_draft_model`, and ResourceError where
    a GPU has no room for it, or for the model itself beside it.
    """
    if config.draft_model is None or not config.drafters:
        return None
    world.set_timeout(max(LOAD_TIMEOUT, config.step_timeout))
    model = load_model_config(resolve_model(config.model, config.revision), config.dtype)
    beside = 0
    if not loaded:
        partition = partition_of(config, model, world)
        check_room(config, partition, current_device(resolve_device(config.device)))
        beside = least_bytes(config, partition).bytes
    draft_model = None
    if world.rank == 0:
        runner = Runner.start(draft_settings(config, beside), SoloWorld())
        runner.loaded.ahead.close()  # what the model itself compiles next is no late kernel
        draft_model = DraftModel(runner, model.vocab_size)
    world.barrier()
    world.set_timeout(config.step_timeout)
    return draft_model


def held_bytes(draft: ModelConfig, pages: int) -> int:
    """Bytes of a draft model's weights and of its KV pages: it is whole on one rank."""
    whole = make_partition(draft, SoloWorld(), DEFAULT_FOLD_ORDER, None)
    return weight_bytes(whole) + pages * draft_page_bytes(draft)


def draft_settings(config: EngineConfig, beside: int = 0) -> EngineConfig:
    """How the draft model itself is run; says how much memory its pages take.

    beside: bytes that rank 0's GPU must have left for the model itself.
    """
    directory, draft = read_draft_model(config)
    context = min(config.max_model_len or draft.max_position, draft.max_position)
    if config.max_model_len is not None and context < config.max_model_len:
        _log.warning("the draft model has a context of %s: drafts of it end there", context)
    pages = config.kv_pages or min(config.max_running * -(-context // PAGE_TOKENS), _CPU_PAGES)
    if resolve_device(config.device) == "cuda":
        free = free_gpu_bytes(config.gpu_memory_utilization)
        pages = config.kv_pages or draft_pages(draft, config.max_running, context, free)
        needed = held_bytes(draft, pages)
        most = free if config.kv_pages is None else free_gpu_bytes(1.0)
        if pages < 1 or needed > free or needed + beside > most:
            other = f" and the model itself {beside / 2**30:.1f} GiB" if beside else ""
            raise ResourceError(
                f"draft_model {directory} takes {needed / 2**30:.1f} GiB with {pages} KV pages"
                f"{other}, rank 0's GPU has {free / 2**30:.1f} GiB left: take a smaller one, raise "
                "--gpu-memory-utilization, or leave --draft-model out"
            )
    size = pages * draft_page_bytes(draft) / 2**30
    _log.info("draft model %s: %s KV pages, %.2f GiB", directory, pages, size)
    return EngineConfig.from_values(
        model=str(directory),
        skip_tokenizer_init=True,
        load_format=config.load_format,
        dtype=config.dtype,
        device=config.device,
        max_model_len=context,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or LEAST_TOKENS,
        gpu_memory_utilization=config.gpu_memory_utilization,
        enforce_eager=config.enforce_eager,
        compile_ahead=config.compile_ahead,
        drafts="off",
        kv_pages=pages,
        enable_prefix_caching=False,
        seed=config.seed,
        step_timeout=config.step_timeout,
    )
