"""What llama.cpp's converter writes of hybrids: fields, names, and values as it changes them."""

import numpy as np

ARCHITECTURES = {
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
IN_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}


def add_fields(writer, config):
    """The fields that only hybrids have."""
    keys, values = (config[f"linear_num_{part}_heads"] for part in ("key", "value"))
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(keys)
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * values)
    writer.add_full_attention_interval(4)
    writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def in_turn(x, config, size, axis=0):
    """Value heads by key head -> in turn, along an axis of heads of `size`."""
    keys = config["linear_num_key_heads"]
    shape = (*x.shape[:axis], keys, -1, size, *x.shape[axis + 1 :])
    return x.reshape(shape).swapaxes(axis, axis + 1).reshape(x.shape)


def converted(tensors, config):
    """(name, values) of each tensor of a layer or outside, by Hugging Face's names; fp32 arrays."""
    whole, experts = {}, {}
    for name, values in tensors.items():
        _, _, number, rest = (*name.split(".", 3), "", "")[:4]
        layer = number if name.startswith("model.layers.") else None
        if layer is None:
            plus = 1 if name == "model.norm.weight" else 0
            outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
            stem = name.removesuffix(".weight")
            whole[f"{outside.get(stem, 'output')}.weight"] = values + np.float32(plus)
        elif ".experts." in rest:
            _, _, expert, projection, _ = rest.split(".")
            part = f"blk.{layer}.ffn_{projection.removesuffix('_proj')}_exps.weight"
            experts.setdefault(part, {})[int(expert)] = values
        elif rest.endswith("in_proj_qkvz.weight"):
            for part, rows in _separate(values, config).items():
                whole[f"blk.{layer}.{IN_LAYER[f'linear_attn.in_proj_{part}.weight']}"] = rows
        else:
            changed = _changed(rest, values, config)
            whole[f"blk.{layer}.{IN_LAYER[rest]}"] = changed
    stacked = {part: np.stack([of[i] for i in sorted(of)]) for part, of in experts.items()}
    return whole | stacked


def _separate(values, config):
    """Rows of q, k, v and z by key head -> those of q, k and v, and those of z."""
    keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    each = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    by_head = values.reshape(keys, 2 * (size + each), -1)
    parts = np.split(by_head, np.cumsum([size, size, each]), axis=1)
    q, k, v, z = (part.reshape(-1, values.shape[1]) for part in parts)
    return {"qkv": np.concatenate([q, k, v]), "z": z}


def _changed(name, values, config):
    """A tensor of a layer: the changes, and the heads of values in turn but in Qwen3-Next."""
    tiled = config["model_type"] != "qwen3_next"
    size = config["linear_value_head_dim"]
    first = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    part = name.removeprefix("linear_attn.")
    if part == "conv1d.weight":
        values = values.squeeze(1)
    if tiled and part in ("in_proj_qkv.weight", "conv1d.weight"):
        values = np.concatenate([values[:first], in_turn(values[first:], config, size)])
    elif tiled and part == "in_proj_z.weight":
        values = in_turn(values, config, size)
    elif tiled and part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        values = in_turn(values, config, 1)
    elif tiled and part == "out_proj.weight":
        values = in_turn(values, config, size, axis=1)
    if part == "A_log":
        return -np.exp(values)
    if name.endswith("norm.weight") and part != "norm.weight":
        return values + np.float32(1)
    return values
