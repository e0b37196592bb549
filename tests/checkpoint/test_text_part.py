"""A checkpoint that can also read images is served as the text model in it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tpdet.checkpoint.checkpoint import open_checkpoint
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.pieces import Pieces
from tpdet.checkpoint.source import WeightSource
from tpdet.comm.weight_digests import merge_digests
from tpdet.comm.world.world import SoloWorld
from tpdet.errors import CheckpointError

OUTSIDE = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "vision_config": {"model_type": "clip_vision_model"},
    "image_token_index": 9,
}
NAMES = {
    "transformers 4": ("language_model.model.", "language_model.lm_head.", "vision_tower."),
    "transformers 5": ("model.language_model.", "lm_head.", "model.visual."),
    "Idefics": ("model.text_model.", "lm_head.", "model.connector."),
    "flat": ("model.", "lm_head.", "visual."),
}


def digest(folder, shapes):
    source = WeightSource(open_checkpoint(folder), torch.float32, 0, False)
    for name, shape in shapes.items():
        source.read(name, shape, Pieces.whole())
    return merge_digests(SoloWorld(), source.finish()).whole


def with_images(model, folder, names, inside=None, **outside):
    """A checkpoint whose text part is `model`, with a tensor of images beside it."""
    layers, head, images = names
    tensors = {f"{images}patch.weight": torch.ones(3, 4)}
    for name, tensor in load_file(model / "model.safetensors").items():
        prefix = head if name.startswith("lm_head.") else layers
        tensors[prefix + name.removeprefix("lm_head.").removeprefix("model.")] = tensor
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((model / "config.json").read_text()) | (inside or {})
    (folder / "config.json").write_text(json.dumps(OUTSIDE | {"text_config": config} | outside))
    return folder


@pytest.mark.parametrize("names", NAMES)
def test_the_text_part_is_the_text_model(names, tiny_model, tmp_path):
    model = tiny_model("qwen3")
    shapes = {k: tuple(v.shape) for k, v in load_file(model / "model.safetensors").items()}
    folder = with_images(model, tmp_path, NAMES[names])
    assert load_model_config(folder) == load_model_config(model)
    assert digest(folder, shapes) == digest(model, shapes)


def test_sections_of_the_rotary_embedding_do_not_count_for_a_text(tiny_model, tmp_path):
    model = tiny_model("qwen2")
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
    inside = {"model_type": "qwen2_5_vl_text"} | rope
    folder = with_images(model, tmp_path, NAMES["transformers 4"], inside)
    assert load_model_config(folder) == load_model_config(model)


@pytest.mark.parametrize(
    ("inside", "outside", "message"),
    [
        ({"model_type": "opt"}, {}, r"text_config\.model_type is 'opt'"),
        ({}, {"projector_scale": 2}, "unknown key 'projector_scale'"),
        ({}, {"architectures": ["LlamaForCausalLM"]}, "architectures is"),
        ({}, {"model_type": "paligemma"}, "model_type is 'paligemma': beside a text_config"),
        ({}, {"text_config": None}, "text_config is None: a complete config.json of llava has it"),
        ({"hidden_size": 0}, {}, r"text_config\.hidden_size is 0"),
    ],
)
def test_what_is_not_known_is_refused_by_name(inside, outside, message, tiny_model, tmp_path):
    names = NAMES["transformers 5"]
    folder = with_images(tiny_model(), tmp_path, names, inside, **outside)
    with pytest.raises(CheckpointError, match=message):
        load_model_config(folder)


def test_a_tensor_of_neither_part_is_refused(tiny_model, tmp_path):
    folder = with_images(tiny_model(), tmp_path, ("language_model.model.", "lm_head.", "audio."))
    shapes = {k: tuple(v.shape) for k, v in load_file(tiny_model() / "model.safetensors").items()}
    with pytest.raises(CheckpointError, match=r"tensor audio\.patch\.weight has no place"):
        digest(folder, shapes)
