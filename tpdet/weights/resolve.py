"""Finds the directory of a model: a path, or a hub name, which is downloaded."""

from pathlib import Path

from tpdet.errors import NotFoundError

# No file that could contain code is downloaded.
_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]


def resolve_tokenizer(tokenizer: str | None, model: str, revision: str | None = None) -> Path:
    """The directory of the tokenizer's files; the model's if `tokenizer` is None."""
    if tokenizer is None:
        return resolve_model(model, revision)
    return resolve_model(tokenizer, revision, "tokenizer")


def resolve_model(name: str, revision: str | None = None, what: str = "model") -> Path:
    """The directory of a model. Raises NotFoundError, with the remedy, when there is none.

    what: its name in messages.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists():
        raise NotFoundError(f"{what} {name!r} is not a directory: give a Hugging Face directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise NotFoundError(
            f"{what} {name!r} is neither a directory nor could it be downloaded "
            f"({type(error).__name__}): check the name and the network, or give a directory"
        ) from error
