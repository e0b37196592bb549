"""Finds the directory or the GGUF file of a model: a path, or a hub name, which is downloaded."""

from pathlib import Path

from tpdet.checkpoint.gguf.header import SUFFIX, is_gguf
from tpdet.checkpoint.model_config.known_shapes import SHAPES
from tpdet.errors import CheckpointError, NotFoundError

# No file that could contain code is downloaded.
_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]
_OTHER_FORMS = ["original/*", "metal/*"]  # the same weights once more, for other programs (gpt-oss)


def resolve_tokenizer(tokenizer: str | None, model: str, revision: str | None = None) -> Path:
    """The directory of the tokenizer's files; the model's if `tokenizer` is None."""
    if tokenizer is None:
        return resolve_model(model, revision)
    return resolve_model(tokenizer, revision, "tokenizer")


def resolve_model(name: str | Path, revision: str | None = None, what: str = "model") -> Path:
    """The directory of a model, or its GGUF file, also where that is alone in a directory.

    what: its name in messages. Raises NotFoundError, with the remedy, when there is none, and
    CheckpointError for a directory of several GGUF files.
    """
    name = str(name)
    if not name.strip():  # an unset variable of a script, say: Path("") is the working directory
        raise NotFoundError(
            f"{what} {name!r} names nothing: give a Hugging Face directory or a GGUF file"
        )
    path = Path(name)
    if path.is_dir():
        return _only_file(path) or path
    if path.is_file() and is_gguf(path):
        return path
    is_file = name.endswith(SUFFIX)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists() or is_file:
        raise NotFoundError(
            f"{what} {name!r} is not a directory: give a Hugging Face directory or a GGUF file"
        )
    if name in SHAPES:
        raise NotFoundError(
            f"{what} {name!r} is no directory, but a shape without weights: tpdet make-model DIR "
            f"--like-config {name} writes its config.json, for --load-format dummy"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=_PATTERNS, ignore_patterns=_OTHER_FORMS
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise NotFoundError(
            f"{what} {name!r} is neither a directory nor could it be downloaded "
            f"({type(error).__name__}): check the name and the network, or give a directory"
        ) from error


def is_model(name: str) -> bool:
    """Whether there is a model of this path: a GGUF file, or a directory with one or a config."""
    path = Path(name)
    if not name.strip():
        return False
    if path.is_dir():
        return (path / "config.json").is_file() or any(path.glob(f"*{SUFFIX}"))
    return path.is_file() and is_gguf(path)


def _only_file(directory: Path) -> Path | None:
    """The GGUF file of a directory that has no `config.json`; None if there is none."""
    if (directory / "config.json").exists():
        return None
    files = sorted(path for path in directory.glob(f"*{SUFFIX}") if path.is_file())
    if len(files) > 1:
        raise CheckpointError(
            f"{directory} holds {len(files)} GGUF files: name one, such as {files[0]}"
        )
    return files[0] if files else None
