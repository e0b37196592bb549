"""Whether a draft model fits the model that it drafts for: the same ids for the same texts.

And how many KV pages it gets, which a start and `tpdet plan` reckon alike.
"""

from dataclasses import replace
from pathlib import Path

from tpdet.checkpoint.model_config import ModelConfig, load_model_config
from tpdet.checkpoint.resolve import resolve_model, resolve_tokenizer
from tpdet.config import EngineConfig
from tpdet.errors import NotFoundError, UsageError
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.text.tokenizer import Tokenizer, read_files

_SHARE = 0.1  # of a GPU's free memory, for its pages
_PADDING = 1024
"""Token ids without a text by which models of one tokenizer may differ: they pad their tables."""


def read_draft_model(config: EngineConfig) -> tuple[Path, ModelConfig]:
    """Directory and configuration of `draft_model`; reads no weights.

    Raises NotFoundError and CheckpointError, and UsageError where it has another vocabulary.
    """
    assert config.draft_model is not None
    if not Path(config.draft_model).exists():
        raise NotFoundError(
            f"draft_model {config.draft_model} does not exist: give a model's directory"
        )
    directory = resolve_model(config.draft_model, what="draft_model")
    draft = load_model_config(directory, config.dtype)
    target = resolve_model(config.model, config.revision)
    model = load_model_config(target, config.dtype)
    tokenizer = None
    if not config.skip_tokenizer_init:
        tokenizer = resolve_tokenizer(config.tokenizer, config.model, config.revision)
    check_pair(draft, directory, model, tokenizer)
    return directory, draft


def draft_page_bytes(draft: ModelConfig) -> int:
    """Bytes of one of its KV pages: it is whole on one rank."""
    import torch  # seconds, which `tpdet serve --help` does not need

    from tpdet.cache.kv import page_bytes

    dtype: torch.dtype = getattr(torch, draft.dtype)
    return page_bytes(draft.num_layers, draft.num_kv_heads, draft.head_dim, dtype)


def draft_pages(draft: ModelConfig, running: int, context: int, free: int) -> int:
    """KV pages for `running` sequences of `context` tokens, as far as a share of memory holds them.

    free: bytes that a GPU has before anything is loaded.
    """
    most = int(_SHARE * free) // draft_page_bytes(draft)
    return min(running * -(-context // PAGE_TOKENS), most)


def check_pair(
    draft: ModelConfig, directory: Path, model: ModelConfig, tokenizer: Path | None
) -> bool:
    """Refuse (UsageError) the draft model of `directory` if it has another vocabulary.

    tokenizer: of the model; None if it is not here. Returns whether tokenizers were compared. The
    number of token ids may differ a little then.
    """
    if draft.linear is not None:
        raise UsageError(
            f"draft_model {directory} has linear attention, which a draft model does not keep "
            "states for: give a model without"
        )
    differ = abs(draft.vocab_size - model.vocab_size)
    compared = differ <= _PADDING and tokenizer is not None and _compare(tokenizer, directory)
    if differ and not compared:
        raise UsageError(
            f"draft_model {directory} has {draft.vocab_size} token ids, the model has "
            f"{model.vocab_size}: give a model with the same tokenizer"
        )
    return compared


def _compare(target: Path, directory: Path) -> bool:
    """Refuse (UsageError) a tokenizer in which an id stands for another text.

    False where there is none to compare with.
    """
    if not target.is_file() and not (target / "tokenizer.json").exists():
        return False  # refused, or not needed, for the model itself
    model, draft = _texts(target), _texts(directory)
    for id_ in sorted(model.keys() | draft.keys()):
        if model.get(id_) != draft.get(id_):
            raise UsageError(
                f"draft_model {directory}: token id {id_} is {draft.get(id_)!r} there and "
                f"{model.get(id_)!r} in the model: give a model with the same tokenizer"
            )
    return True


def _texts(directory: Path) -> dict[int, str | None]:
    """Each id of a tokenizer with its text."""
    tokenizer = Tokenizer.from_files(replace(read_files(directory), template=None))
    return {id_: tokenizer.token(id_) for id_ in range(tokenizer.vocab_size)}
