"""Models out of directories and back into them: `load`, `from_pretrained`, `save`."""

from dataclasses import replace
from os import fspath
from pathlib import Path
from typing import TypeVar

from safetensors.torch import save_file

from tpdet.arguments.suggestions import did_you_mean
from tpdet.checkpoint.model_config.stored_form import read_stored_form
from tpdet.checkpoint.source import open_weights
from tpdet.checkpoint.weight_files import SINGLE, copy_beside_weights
from tpdet.comm.arithmetic_environment import check_environment
from tpdet.comm.device import current_device, resolve_device
from tpdet.comm.world.world import SoloWorld, World
from tpdet.config import EngineConfig
from tpdet.errors import UsageError
from tpdet.nn.model import CausalLM, Llama, Qwen3, Qwen3Moe
from tpdet.runner.start.contracts import name_contracts, partition_of
from tpdet.runner.start.kernel_checks import check_kernels
from tpdet.runner.start.loading import finish_reading, read_model

SETTINGS = ("device", "dtype", "fold_order", "leaves", "load_format", "revision", "seed")
"""Settings of an engine that `load` takes, with their defaults."""

_CLASSES = {kind.family: kind for kind in (Llama, Qwen3, Qwen3Moe)}
Kind = TypeVar("Kind", bound=CausalLM)


def load(model: str | Path, world: World | None = None, **settings: object) -> CausalLM:
    """A model's directory, or its name on the Hugging Face hub, as a trainer's model.

    world: the ranks that compute it together, each of which calls this; None for one rank.
    settings: of SETTINGS, as of `LLM`: log-probabilities are those of a server that has the same.
    Raises UsageError, NotFoundError, CheckpointError, and DisagreementError for a build of torch
    that breaks the contract.
    """
    for name in settings:
        if name not in SETTINGS:
            hint = did_you_mean(name, SETTINGS) or f": use {', '.join(SETTINGS)}"
            raise UsageError(f"unknown setting {name!r}{hint}")
    config = EngineConfig.from_values(model=fspath(model), **settings)
    kind = resolve_device(config.device)
    check_environment(kind)
    directory, shape, _ = read_model(config, kind)
    if shape.linear is not None or shape.attention_gate:
        raise UsageError(
            f"{shape.family}: gradients of linear attention and gated heads are not built, train a "
            "model of another family"
        )
    cut = partition_of(config, shape, SoloWorld() if world is None else world)
    partition = replace(cut, experts=None)  # experts lie whole on ranks, which is the same bits
    check_kernels(partition, kind)
    contract_id = name_contracts(config, partition, kind).strict
    device = current_device(kind)
    made = _CLASSES.get(shape.family, CausalLM)(directory, partition, device, contract_id)
    source = open_weights(directory, shape, config.load_format, config.seed, False, device)
    made.read(source)
    finish_reading(source, shape)
    return made


def from_pretrained(
    kind: type[Kind], model: str | Path, world: World | None = None, **settings: object
) -> Kind:
    """`load` a model of one family. Raises UsageError for one of another."""
    loaded = load(model, world, **settings)
    if not isinstance(loaded, kind):
        raise UsageError(
            f"{model} is of family {loaded.config.family}, not {kind.family}: use tpdet.nn.load"
        )
    return loaded


def save(model: CausalLM, directory: str | Path) -> None:
    """Write a model that servers load, in the dtype that it computes in; the last file is whole.

    Files beside weights are those of the model that was loaded. Raises UsageError for a model out
    of quantised weights or of a larger one, whose `config.json` would tell of other tensors.
    """
    target = Path(directory)
    form = read_stored_form(model.directory)
    if form.quantisation is not None or form.text_part or model.directory.is_file():
        raise UsageError(
            f"{model.directory} has quantised weights, or more than text: load a plain checkpoint"
        )
    target.mkdir(parents=True, exist_ok=True)
    copy_beside_weights(model.directory, target)
    tensors = {name: values.cpu() for name, values in model.named_weights()}
    part = target / f".{SINGLE}.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(target / SINGLE)
