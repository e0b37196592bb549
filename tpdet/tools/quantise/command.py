"""`tpdet quantise`: checks the model, writes it in other words, and says how large it became."""

import argparse
from pathlib import Path
from typing import Any

from tpdet.checkpoint.checkpoint import stored_tensors
from tpdet.checkpoint.gguf.header import is_gguf
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.model_config.json_file import read_json_object
from tpdet.checkpoint.model_config.stored_form import read_stored_form
from tpdet.checkpoint.resolve import resolve_model
from tpdet.checkpoint.weight_files import INDEX, SINGLE, copy_beside_weights
from tpdet.errors import UsageError
from tpdet.launch.host.new_directory import new_directory
from tpdet.tools.quantise.encodings import ENCODINGS, WeightFormat
from tpdet.tools.quantise.products import Sorted, sort_tensors
from tpdet.tools.quantise.rewrite import write_shard
from tpdet.tools.synthetic.train_tokenizer import write_json


def quantise_command(options: argparse.Namespace) -> int:
    """Write the checkpoint. Raises UsageError, NotFoundError and CheckpointError."""
    directory, encoding = resolve_model(options.model), ENCODINGS[options.format]
    _check(directory)
    tensors, files = stored_tensors(directory)
    contents = sort_tensors(tensors, load_model_config(directory), encoding)
    with new_directory(options.output) as target:
        copy_beside_weights(directory, target)
        config = read_json_object(directory / "config.json")
        config["quantization_config"] = _quantization_config(encoding, contents)
        write_json(target / "config.json", config)
        weight_map: dict[str, str] = {}
        for file in files:
            names = write_shard(target / file, file, tensors, contents.products, encoding)
            weight_map |= dict.fromkeys(names, file)
        size = sum((target / file).stat().st_size for file in files)
        if files != [SINGLE]:
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            write_json(target / INDEX, index)
    before = sum((directory / file).stat().st_size for file in files)
    print(
        f"{options.output}: {len(contents.products)} matrices in {options.format}, "
        f"{size / 1e9:.3g} GB of {before / 1e9:.3g}"
    )
    return 0


def _check(directory: Path) -> None:
    """Refuse (UsageError) a model whose tensors cannot be written again under their names."""
    if is_gguf(directory):
        raise UsageError(f"{directory} is a GGUF file: quantise a directory of safetensors")
    form = read_stored_form(directory)
    if form.quantisation is not None:
        raise UsageError(f"{directory} is quantised already: quantise the checkpoint it came from")
    if form.text_part:
        raise UsageError(f"{directory} also reads images: quantise a checkpoint of text alone")


def _quantization_config(encoding: WeightFormat, contents: Sorted) -> dict[str, Any]:
    """What compressed-tensors says of such a checkpoint."""
    group = {
        "format": encoding.format,
        "targets": ["Linear"],
        "weights": dict(encoding.weights),
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": encoding.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": contents.ignored,
        "kv_cache_scheme": None,
    }
