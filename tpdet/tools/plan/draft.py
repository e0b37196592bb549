"""Plans a draft model: what it takes of rank 0's memory, and how long its steps are."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.resolve import resolve_model, resolve_tokenizer
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.runner.start.step_tokens import LEAST_TOKENS
from tpdet.speculative.draft_model.pair import check_pair, draft_page_bytes, draft_pages
from tpdet.tools.plan.memory import rank_memory
from tpdet.tools.plan.step import PlanWorld, decode_parts, step_seconds
from tpdet.tools.worlds.shapes import find_model


@dataclass(frozen=True)
class DraftRequest:
    """A draft model: `budget` tokens in a step; `pages` of KV cache, None for what memory holds.

    compared: whether both tokenizers are here, and equal.
    """

    name: str
    config: ModelConfig
    budget: int = LEAST_TOKENS
    pages: int | None = None
    compared: bool = False


class DraftPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes by name that a draft model takes on rank 0; its KV pages; ms of a step, one draft each.

    pages_without: KV pages of the model itself if there were no draft model.
    """

    model: str
    memory: dict[str, int]
    kv_pages: int
    kv_tokens: int
    kv_sequences: int
    pages_without: int
    step_ms: float

    @property
    def bytes(self) -> int:
        """All of its memory."""
        return sum(self.memory.values())


def draft_request(
    name: str,
    model: str,
    config: ModelConfig,
    *,
    dtype: str = "auto",
    tokenizer: str | None = None,
    budget: int | None = None,
    pages: int | None = None,
) -> DraftRequest:
    """The draft model `name` for `model`, as a start takes it. Nothing is downloaded.

    Tokenizers are compared where both are files here. Raises UsageError where they differ, or the
    numbers of token ids do, and as `find_model`.
    """
    draft = find_model(name, dtype)
    here = all(Path(path).exists() for path in (name, tokenizer or model))
    directory = resolve_model(name) if here else Path(name)
    compared = check_pair(
        draft, directory, config, resolve_tokenizer(tokenizer, model) if here else None
    )
    return DraftRequest(name, draft, budget or LEAST_TOKENS, pages, compared)


def draft_plan(
    draft: DraftRequest, world: PlanWorld, batch: int, context: int, utilization: float
) -> DraftPlan:
    """A world's draft model on rank 0, for a batch and context; utilization: of the memory."""
    own = PlanWorld(
        draft.config, 1, world.constants, world.hardware, world.network, budget=draft.budget
    )
    positions = min(context, draft.config.max_position)
    memory = rank_memory(own, positions, utilization)
    free = memory.usable - memory.reserved
    pages = draft.pages
    if pages is None:
        pages = draft_pages(draft.config, batch, positions, free)
    return DraftPlan(
        model=draft.name,
        memory={
            "weights": memory.weights,
            "rotary tables": memory.tables,
            "workspaces": memory.workspaces,
            "KV pages": pages * draft_page_bytes(draft.config),
        },
        kv_pages=pages,
        kv_tokens=pages * PAGE_TOKENS,
        kv_sequences=pages // -(-positions // PAGE_TOKENS),
        pages_without=rank_memory(world, context, utilization, batch=batch).pages,
        step_ms=1e3 * step_seconds(decode_parts(own, batch, positions)),
    )
