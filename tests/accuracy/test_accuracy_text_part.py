"""The text part of small checkpoints with images: its logits are those of transformers' model."""

import pytest
import torch
import transformers

from tests.lib.engine_harness import ask, run

LENGTH = 40
IMAGE = 1099  # no prompt has this id
TEXT = {
    "vocab_size": 1100, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
VISION = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
PATCHES = {"depth": 1, "num_heads": 2, "out_hidden_size": 256}
CHECKPOINTS = {
    "Llava": ("llama", {}, VISION | {"num_attention_heads": 2, "projection_dim": 64}, False),
    "LlavaOnevision": ("qwen2", {}, VISION | {"num_attention_heads": 2}, True),
    "Mistral3": ("mistral", {"head_dim": 64}, VISION | {"num_attention_heads": 2}, False),
    "Idefics3": ("llama", {}, VISION | {"num_attention_heads": 2}, False),
    "Qwen2_5_VL": (
        "qwen2_5_vl_text",
        {"rope_parameters": SECTIONS},
        PATCHES | {"hidden_size": 64, "intermediate_size": 64, "fullatt_block_indexes": [0]},
        True,
    ),
    "Qwen3VL": (
        "qwen3_vl_text",
        {"rope_parameters": SECTIONS, "head_dim": 64},
        PATCHES | {"hidden_size": 64, "intermediate_size": 64, "deepstack_visual_indexes": [0]},
        False,
    ),
    "Gemma3": (
        "gemma3_text",
        {"head_dim": 64, "sliding_window": 16, "query_pre_attn_scalar": 100,
         "layer_types": ["sliding_attention", "full_attention"]},
        VISION | {"num_attention_heads": 2},
        True,
    ),
}  # fmt: skip
"""Its name: the text part's type and more of its settings, settings of images, tied or not."""


def made(name, folder):
    """transformers' model of random weights, and `folder` as it saves it."""
    text, more, vision, tied = CHECKPOINTS[name]
    kind = getattr(transformers, f"{name}Config")
    images = kind().vision_config.to_dict() | vision
    inner = TEXT | more | {"model_type": text}
    config = kind(text_config=inner, vision_config=images, tie_word_embeddings=tied)
    return saved(name, config, folder)


def saved(name, config, folder):
    """transformers' model of random weights, saved."""
    for key in ("image_token_id", "image_token_index", "video_token_id", "video_token_index"):
        if hasattr(config, key):
            setattr(config, key, IMAGE)
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    for tensor_name, tensor in model.named_parameters():
        if tensor.ndim == 2 and "vis" not in tensor_name:
            torch.nn.init.normal_(tensor, std=0.05)
    model.tie_weights()
    model.config.dtype = torch.float32
    model.save_pretrained(folder)
    return model


HYBRID = {
    "head_dim": 64, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": SECTIONS | {"mrope_section": [3, 3, 2], "partial_rotary_factor": 0.25},
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "depth": 1, "num_heads": 2, "embed_dim": 64, "out_hidden_size": 256,
    "projection_dim": 64, "image_size": 28, "patch_size": 14, "num_global_layers": 0,
}  # fmt: skip
MORE = {
    "Idefics2": "mistral", "SmolVLM": "llama", "LlavaNext": "mistral", "LlavaNextVideo": "llama",
    "VideoLlava": "llama", "VipLlava": "llama", "Qwen2VL": "qwen2_vl_text", "InternVL": "qwen3",
    "GotOcr2": "qwen2", "LightOnOcr": "qwen3", "VideoLlama3": "qwen2", "DeepseekVL": "llama",
    "Mistral3": "ministral3", "Qwen3_5": "qwen3_5_text", "Qwen3_5Moe": "qwen3_5_moe_text",
}  # fmt: skip
"""Others, by name: the text part's type."""


def also_made(name, folder, tied):
    """As `made`, of MORE."""
    kind = getattr(transformers, f"{name}Config")
    inner = TEXT | {"model_type": MORE[name]}
    if MORE[name] == "qwen2_vl_text":
        inner["rope_parameters"] = SECTIONS
    elif MORE[name].startswith("qwen3_5"):
        inner |= HYBRID | (EXPERTS if "moe" in MORE[name] else {})
    elif MORE[name] in ("qwen3", "ministral3"):
        inner["head_dim"] = 64
    parts = {key: getattr(kind(), key).to_dict() for key in kind.sub_configs if "text" not in key}
    small = {k: part | {a: b for a, b in SMALL.items() if a in part} for k, part in parts.items()}
    config = kind(text_config=inner, tie_word_embeddings=tied, **small)
    return saved(name, config, folder)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MORE)
def test_other_text_parts_have_transformers_logits(name, tied, tmp_path):
    same_logits(also_made(name, tmp_path, tied), tmp_path)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_text_part_has_transformers_logits(name, tmp_path):
    same_logits(made(name, tmp_path), tmp_path)


def same_logits(model, tmp_path):
    """Every position of a prompt has transformers' logits."""
    ids = torch.randint(3, 800, (LENGTH,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        theirs = model(input_ids=ids[None], attention_mask=torch.ones(1, LENGTH, dtype=torch.long))
    theirs = theirs.logits[0].double()
    request = ask("a", ids.tolist(), max_tokens=1, prompt_logprobs=0)
    found = run(tmp_path, [request], dtype="float32")
    ours = torch.stack([found.logits["a", 0, place] for place in range(LENGTH)]).double()
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
