"""Writes a checkpoint of ours as llama.cpp's converter would: its names, its order of rows."""

import json

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.checkpoint.gguf import gguf_hybrids
from tpdet.checkpoint.gguf.config import REORDERING

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    **gguf_hybrids.ARCHITECTURES,
}  # fmt: skip
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q",
    "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
}  # fmt: skip

_LEAST_ROW = 32  # values; of fewer no block is made


def write_gguf(model, path, kind="F32", change=lambda writer: None, tokenizer=True):
    """The file, whose matrices have the type `kind`; `change` adds fields before it is written."""
    config = json.loads((model / "config.json").read_text())
    name = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(0)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    hybrid = config["model_type"] in gguf_hybrids.ARCHITECTURES
    if hybrid:
        gguf_hybrids.add_fields(writer, config)
    if tokenizer:
        _write_tokenizer(writer, model)
    change(writer)
    tensors = load_file(model / "model.safetensors")
    if hybrid:
        arrays = {name_of: tensor.float().numpy() for name_of, tensor in tensors.items()}
        for stored, values in gguf_hybrids.converted(arrays, config).items():
            _add(writer, stored, values, kind)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name_of, tensor in {} if hybrid else tensors.items():
        parts = name_of.split(".")
        stored = NAMES[parts[-2]]
        values = tensor.float().numpy()
        if stored in heads and name in REORDERING:
            size = len(values) // heads[stored]
            order = [
                h * size + j + t * size // 2
                for h in range(heads[stored])
                for j in range(size // 2)
                for t in range(2)
            ]
            values = values[order]
        layer = f"blk.{parts[2]}." if parts[1] == "layers" else ""
        _add(writer, f"{layer}{stored}.{parts[-1]}", values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer, name, values, kind):
    if kind == "F32" or values.ndim == 1 or values.shape[-1] < _LEAST_ROW:
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    else:
        quantised = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(values, quantised), raw_dtype=quantised)


def _write_tokenizer(writer, model):
    description = json.loads((model / "tokenizer.json").read_text())
    ids = dict(description["model"]["vocab"])
    special = {token["content"] for token in description["added_tokens"]}
    ids |= {token["content"]: token["id"] for token in description["added_tokens"]}
    tokens = sorted(ids, key=ids.get)
    config = json.loads((model / "tokenizer_config.json").read_text())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in description["model"]["merges"]])
    writer.add_bos_token_id(ids[config["bos_token"]])
    writer.add_eos_token_id(ids[config["eos_token"]])
    writer.add_pad_token_id(ids[config["pad_token"]])
    writer.add_add_bos_token(True)
    writer.add_chat_template(config["chat_template"])


def q4_1(rows):
    """Dequantised by hand from the bytes of rows: blocks of scale, minimum (fp16), 32 nibbles."""
    blocks = torch.from_numpy(rows.copy()).reshape(len(rows), -1, 20)
    scale, low = (blocks[..., i : i + 2].contiguous().view(torch.float16).float() for i in (0, 2))
    nibbles = torch.cat([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1).float()
    return (nibbles * scale + low).reshape(len(rows), -1)
