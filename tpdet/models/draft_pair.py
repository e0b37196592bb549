"""Whether a draft model fits the model that it drafts for: the same ids for the same texts."""

import json
from collections.abc import Iterator
from pathlib import Path

from tpdet.config import EngineConfig
from tpdet.errors import NotFoundError, UsageError
from tpdet.model_config import ModelConfig, load_model_config
from tpdet.text.tokenizer import read_files
from tpdet.weights.resolve import resolve_model, resolve_tokenizer


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
    if draft.vocab_size != model.vocab_size:
        raise UsageError(
            f"draft_model {directory} has {draft.vocab_size} token ids, the model has "
            f"{model.vocab_size}: give a model with the same tokenizer"
        )
    if not config.skip_tokenizer_init:
        names = config.tokenizer, config.model, config.revision
        _compare(resolve_tokenizer(*names), directory)
    return directory, draft


def _compare(target: Path, directory: Path) -> None:
    """Refuse (UsageError) a tokenizer in which an id stands for another text."""
    if not target.is_file() and not (target / "tokenizer.json").exists():
        return  # refused, or not needed, for the model itself
    mine, other = dict(_texts(target)), dict(_texts(directory))
    for id_ in sorted(mine.keys() | other.keys()):
        if mine.get(id_) != other.get(id_):
            raise UsageError(
                f"draft_model {directory}: token id {id_} is {other.get(id_)!r} there and "
                f"{mine.get(id_)!r} in the model: give a model with the same tokenizer"
            )


def _texts(directory: Path) -> Iterator[tuple[int, str]]:
    """Each id of a tokenizer with its text."""
    described = json.loads(read_files(directory).text)
    vocabulary = described["model"].get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: [text, score] in the order of ids
        yield from ((id_, entry[0]) for id_, entry in enumerate(vocabulary))
    else:
        yield from ((id_, text) for text, id_ in vocabulary.items())
    yield from ((token["id"], token["content"]) for token in described.get("added_tokens") or ())
