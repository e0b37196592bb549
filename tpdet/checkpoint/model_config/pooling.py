"""What a model makes of a prompt in place of text: a vector, labels, or a score of two tokens.

A `config.json` names the head; a sentence-transformers folder (`modules.json`) names the row that
is taken, dense layers behind it and the prompts that are put before a text. Needs no torch.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tpdet.checkpoint.gguf.header import is_gguf
from tpdet.checkpoint.model_config.fields import Fields
from tpdet.checkpoint.model_config.json_file import read_json_object, read_text_file
from tpdet.checkpoint.model_config.load import load_model_config
from tpdet.checkpoint.model_config.model import ModelConfig
from tpdet.errors import CheckpointError, UsageError

Task = Literal["auto", "generate", "embed", "classify", "score", "reward"]
PoolingRow = Literal["last", "mean", "cls"]
Answers = Literal["vector", "labels", "tokens"]
"""What a pooled answer is of: the pooled row, a score head's labels, or two tokens' logits."""

_MODULES, _SETTINGS = "modules.json", "config_sentence_transformers.json"
_MODES: dict[str, PoolingRow] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_MODE_FLAGS: dict[str, PoolingRow] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
}
_OTHER_TASKS: dict[str, tuple[Task, ...]] = {
    "labels": ("classify", "score", "reward"),
    "none": ("embed",),
}


@dataclass(frozen=True)
class DenseLayer:
    """y = activation(W x + b), its tensors `linear.weight` [outputs, inputs] and `linear.bias`."""

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class Pooling:
    """How a prompt's answer is made of its rows behind the last norm.

    width: values of an answer before a request cuts it. row: which one is pooled (docs/numerics.md,
    section 7a). normalises: whether a vector has the length 1 where a request does not say. dense:
    layers behind the pooled row. prompts: by name, put before a text; default_prompt: the name of
    the one that texts have which name none. activation: of labels and scores, unless a request
    wants none: "sigmoid", "softmax" or "identity". padding: the id behind a prompt's last token
    that a score head does not read. labels: their names.
    """

    task: Task
    answers: Answers
    width: int
    row: PoolingRow = "last"
    normalises: bool = True
    dense: tuple[DenseLayer, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    activation: str = "identity"
    padding: int | None = None
    labels: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        """What changes bits of an answer, but for tensors, as JSON."""
        dense = [
            (layer.inputs, layer.outputs, layer.bias, layer.activation) for layer in self.dense
        ]
        return json.dumps([self.answers, self.row, self.width, dense, self.activation])


def read_pooling(
    directory: Path, model: ModelConfig, task: Task
) -> tuple[ModelConfig, Pooling | None]:
    """The model by its task, and how it pools; None where it generates text.

    Raises UsageError for a task that the model does not have, CheckpointError naming file, key and
    value for a sentence-transformers folder that is not supported.
    """
    folder = not is_gguf(directory) and (directory / _MODULES).exists()
    chosen = _task_of(model, task, folder)
    if chosen == "generate":
        return model, None
    if model.head == "labels":
        return model, _of_labels(directory, model, chosen)
    if chosen == "score":
        return model, Pooling(chosen, "tokens", 1, activation="sigmoid")
    pooling = Pooling("embed", "vector", model.hidden_size)
    if folder:
        pooling = _of_folder(directory, pooling)
    return replace(model, head="none"), pooling


def _task_of(model: ModelConfig, task: Task, folder: bool) -> Task:
    """The task that is meant by "auto", or the one that is asked for if the model has it."""
    others = _OTHER_TASKS.get(model.head)
    if others is None:
        if task in ("classify", "reward"):
            raise UsageError(
                f"task {task}: the checkpoint has no score head: it can generate, embed and score "
                "(by its tokens yes and no)"
            )
        return ("embed" if folder else "generate") if task == "auto" else task
    if task not in ("auto", *others):
        raise UsageError(f"task {task}: the checkpoint's head is for {', '.join(others)}")
    if task == "score" and model.labels != 1:
        raise UsageError(f"task score: a score head of 1 label is needed, it has {model.labels}")
    return others[0] if task == "auto" else task


def _of_labels(directory: Path, model: ModelConfig, task: Task) -> Pooling:
    path = directory / "config.json"
    config = Fields(read_json_object(path), str(path))
    problem = config.raw("problem_type")
    known = {
        None: "sigmoid" if model.labels == 1 else "softmax",
        "single_label_classification": "sigmoid" if model.labels == 1 else "softmax",
        "multi_label_classification": "sigmoid",
        "regression": "identity",
    }
    if not isinstance(problem, str | None) or problem not in known:
        config.refuse("problem_type", f"use one of {', '.join(str(key) for key in known if key)}")
    named = config.raw("id2label")
    names = named if isinstance(named, dict) else {}
    return Pooling(
        task,
        "labels",
        model.labels,
        activation=known[problem],
        padding=model.pad_token_id,
        labels=tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(model.labels)),
    )


def _of_folder(directory: Path, pooling: Pooling) -> Pooling:
    """By the modules behind the transformer: Pooling, then Dense layers, then Normalize."""
    path = directory / _MODULES
    modules = _modules(path)
    kinds = [str(module.raw("type")).rpartition(".")[2] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise CheckpointError(f"{path}: modules {kinds}: Transformer and Pooling must come first")
    if modules[0].raw("path") not in (None, ""):
        modules[0].refuse("path", "the transformer must lie in the directory itself")
    row, width, dense = _pooled_row(directory, modules[1]), pooling.width, []
    for module, kind in zip(modules[2:], kinds[2:], strict=True):
        last = module is modules[-1]
        if kind not in ("Dense", "Normalize") or (kind == "Normalize" and not last):
            module.refuse("type", "only Dense, and Normalize as the last one, are supported here")
        if kind == "Dense":
            dense.append(_dense_layer(directory, module, width))
            width = dense[-1].outputs
    prompts, default = _prompts(directory)
    return replace(
        pooling,
        row=row,
        width=width,
        normalises=kinds[-1] == "Normalize",
        dense=tuple(dense),
        prompts=prompts,
        default_prompt=default,
    )


def _modules(path: Path) -> list[Fields]:
    try:
        listed = json.loads(read_text_file(path, 1 << 20))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): download it again") from None
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise CheckpointError(f"{path} is no list of objects: download it again")
    return [Fields(module, str(path), f"[{index}]") for index, module in enumerate(listed)]


def _folder_of(directory: Path, module: Fields) -> Path:
    name = module.text("path")
    if Path(name).name != name or name in ("", ".", "..") or not name.isprintable():
        module.refuse("path", "it must name a folder of this directory")
    return directory / name


def _pooled_row(directory: Path, module: Fields) -> PoolingRow:
    path = _folder_of(directory, module) / "config.json"
    config = Fields(read_json_object(path), str(path))
    if not config.boolean("include_prompt", True):
        config.refuse("include_prompt", "pooling without the prompt's tokens is not supported")
    if "pooling_mode" in config:
        modes = [str(config.raw("pooling_mode"))]
    else:
        flags = [key for key, value in read_json_object(path).items() if value is True]
        modes = [key for key in flags if key.startswith("pooling_mode_")]
    rows = [_MODES.get(mode) or _MODE_FLAGS.get(mode) for mode in modes]
    if len(rows) != 1 or rows[0] is None:
        raise CheckpointError(f"{path}: pooling {modes}: use one of {', '.join(_MODE_FLAGS)}")
    return rows[0]


def _dense_layer(directory: Path, module: Fields, width: int) -> DenseLayer:
    path = _folder_of(directory, module) / "config.json"
    config = Fields(read_json_object(path), str(path))
    activation = config.text("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in _ACTIVATIONS:
        config.refuse("activation_function", f"use one of {', '.join(_ACTIVATIONS)}")
    if config.integer("in_features") != width:
        config.refuse("in_features", f"the row before it has {width} values")
    outputs, bias = config.integer("out_features", high=1 << 20), config.boolean("bias", True)
    return DenseLayer(module.text("path"), width, outputs, bias, _ACTIVATIONS[activation])


def _prompts(directory: Path) -> tuple[dict[str, str], str | None]:
    path = directory / _SETTINGS
    if not path.exists():
        return {}, None
    config = Fields(read_json_object(path), str(path))
    prompts: Any = config.raw("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        config.refuse("prompts", "it must hold texts by name")
    default = config.raw("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        config.refuse("default_prompt_name", f"prompts has {', '.join(prompts) or 'none'}")
    return prompts, default


def check_pooling(pooling: Pooling, approximate: bool) -> None:
    """Raises UsageError for settings under which nothing is pooled."""
    if approximate:
        raise UsageError(
            f"task {pooling.task} has no approximate mode: leave --approximate and --on-slowdown "
            "out"
        )


def load_for_task(
    directory: str | Path, dtype: str, task: Task
) -> tuple[ModelConfig, Pooling | None]:
    """The configuration of a model by its task, and how it pools. Raises as both that it calls."""
    return read_pooling(Path(directory), load_model_config(directory, dtype), task)
