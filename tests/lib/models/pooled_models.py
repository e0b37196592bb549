"""Tiny models that pool: score heads and sentence-transformers folders, made of text models."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from tpdet.requests.pooling_params import PoolingParams
from tpdet.requests.request import Request, SamplingParams

_CLASSES = {"gemma3_text": "Gemma3Text"}


def pooled(name, prompt, salt="", **params):
    """A request whose prompt is pooled."""
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=0, temperature=0.0),
        cache_salt=salt,
        pooling=PoolingParams(**params),
    )


def vector(run, name):
    """The answer to a pooled prompt of a run, fp32."""
    (output,) = run.outputs[name]
    return torch.frombuffer(bytearray(output.values), dtype=torch.float32)


def with_config(model, folder, **settings):
    """A copy of a model under another `config.json`; None takes a key away."""
    copy = shutil.copytree(model, folder)
    config = json.loads((copy / "config.json").read_text()) | settings
    kept = {key: value for key, value in config.items() if value is not None}
    (copy / "config.json").write_text(json.dumps(kept))
    return copy


def classifier(model, folder, labels=3, **settings):
    """The model with a random score head in the place of its output head."""
    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    name = f"{_CLASSES.get(kind, kind.capitalize())}ForSequenceClassification"
    names = {"id2label": {str(index): f"l{index}" for index in range(labels)}}
    given = {"architectures": [name], "pad_token_id": 0} | names | settings
    copy = with_config(model, folder, **given)
    tensors = load_file(copy / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(11)
    head = torch.randn(labels, config["hidden_size"], generator=generator) / 8.0
    tensors["score.weight"] = head.to(next(iter(tensors.values())).dtype)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def sentence_folder(model, folder, mode="lasttoken", dense=(), normalises=True, prompts=None):
    """The model as sentence-transformers saves one: unprefixed tensors, `modules.json`.

    dense: (outputs, activation) of each layer behind the pooling.
    """
    copy = shutil.copytree(model, folder)
    tensors = load_file(copy / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    width = json.loads((copy / "config.json").read_text())["hidden_size"]
    pooled_row = {f"pooling_mode_{mode}": True, "word_embedding_dimension": width}
    modules = [("", "Transformer", {}), ("1_Pooling", "Pooling", pooled_row)]
    generator = torch.Generator().manual_seed(12)
    for number, (outputs, activation) in enumerate(dense, 2):
        settings = {
            "in_features": width, "out_features": outputs, "bias": True,
            "activation_function": f"torch.nn.modules.{activation}",
        }  # fmt: skip
        modules.append((f"{number}_Dense", "Dense", settings))
        (copy / f"{number}_Dense").mkdir()
        weights = {
            "linear.weight": torch.randn(outputs, width, generator=generator) / width**0.5,
            "linear.bias": torch.randn(outputs, generator=generator),
        }
        save_file(weights, copy / f"{number}_Dense" / "model.safetensors")
        width = outputs
    if normalises:
        modules.append((f"{len(modules)}_Normalize", "Normalize", {}))
    for path, _, settings in modules[1:]:
        (copy / path).mkdir(exist_ok=True)
        if settings:
            (copy / path / "config.json").write_text(json.dumps(settings))
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind, _) in enumerate(modules)
    ]
    (copy / "modules.json").write_text(json.dumps(listed))
    if prompts is not None:
        settings = {"prompts": prompts, "default_prompt_name": None}
        (copy / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return copy
