"""How the tensors of a directory are stored: the text part of more, quantised, or neither."""

from dataclasses import dataclass
from pathlib import Path

from tpdet.model_config.fields import Fields
from tpdet.model_config.json_file import read_json_object
from tpdet.model_config.quantisation import Quantisation, parse_quantisation


@dataclass(frozen=True)
class StoredForm:
    """text_part: whether there are tensors of images, too; quantisation: None if there is none."""

    text_part: bool = False
    quantisation: Quantisation | None = None


def read_stored_form(directory: Path) -> StoredForm:
    """What `config.json` says of it; neither without such a file. Raises CheckpointError."""
    path = directory / "config.json"
    if not path.exists():
        return StoredForm()
    values = read_json_object(path)
    outside = Fields(values, str(path))
    inner = outside.inner("text_config")
    found = parse_quantisation(outside)
    if inner is not None:
        found = found or parse_quantisation(inner)
    return StoredForm(inner is not None, found)
