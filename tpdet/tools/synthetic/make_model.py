"""Small random checkpoints, complete Hugging Face directories: the demo's and the tests' models.

The random weights make answers worth comparing: projections keep the size of their input, norm
weights lie around 1, and logits spread over several units, neither uniform nor one-hot.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tpdet.checkpoint.model_config import FAMILIES, HEAD_SIZES, load_model_config
from tpdet.checkpoint.model_config.families import Family
from tpdet.checkpoint.model_config.fields import MAX_INTEGER, Fields
from tpdet.checkpoint.model_config.linear_layers import no_linear
from tpdet.checkpoint.model_config.load import MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from tpdet.checkpoint.model_config.model import LinearAttention, Mixture
from tpdet.errors import UsageError
from tpdet.kernels.order import CONVOLUTION_TAPS
from tpdet.launch.host.new_directory import new_directory
from tpdet.tools.synthetic.train_tokenizer import MIN_VOCAB_SIZE, train_tokenizer, write_json

_FAMILIES = {family.name: family for family in FAMILIES.values()}
_DTYPES = ("float32", "bfloat16", "float16")
_INTERMEDIATE_GROUP = 128
_LOGIT_SPREAD = 3.0
_MOST_SKEW = 16.0
_MOST_SHARDS = 1 << 16
_RANGES = {
    "hidden": (1, MAX_WIDTH), "layers": (1, MAX_LAYERS), "heads": (1, MAX_HEADS),
    "kv_heads": (1, MAX_HEADS), "intermediate": (1, MAX_WIDTH),
    "vocab": (MIN_VOCAB_SIZE, 1 << 20), "context": (1, MAX_INTEGER),
}  # fmt: skip
"""The least and the most of the sizes that a config.json holds as they are given."""
_OWN_SETTINGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("own_settings.json").read_text(encoding="utf-8")
)
"""What a made model of these families has beside the common keys."""
_ALTERNATING = ("olmo3", "gemma2", "gemma3_text", "gpt_oss")
"""Families whose made models have a window on every second layer, the first among them."""
_SHORT_WINDOW = 40
_PUSH = 16.0
"""Value of the first dimension of every embedding where the router is skewed: it stays large."""
_EXACT = ("e_score_correction_bias", ".A_log", ".linear_attn.norm.weight")
"""How names of tensors end that checkpoints hold in fp32, whatever their dtype."""
_EXPERTS_OF_HYBRIDS = {
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 128,
}  # fmt: skip
_LINEAR = {
    "rope_theta": 1000000.0, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 48, "pad_token_id": None,
}  # fmt: skip
_FULL_EVERY = 4
"""Every so many-th layer of a made hybrid has full attention; the last one has it in any case."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model to be made: its family (`like`), its sizes and its dtype.

    kv_heads: half the heads by default; intermediate: by default a multiple of 128 near 3 * hidden;
    tie (whether the output head is the embedding): only Qwen2 by default. router_skew: of a
    mixture; the odds of expert i fall about as (1 + i) ** -router_skew. Raises UsageError for
    values that tpdet could not serve.
    """

    like: str
    hidden: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int | None = None
    head_dim: int = 64
    intermediate: int | None = None
    vocab: int = 2048
    context: int = 4096
    dtype: str = "float32"
    tie: bool | None = None
    rope_scaling: dict[str, Any] | None = None
    sliding_window: int | None = None
    router_skew: float = 0.0

    def __post_init__(self) -> None:
        if self.like not in _FAMILIES:
            raise UsageError(f"like {self.like!r}: use one of {', '.join(_FAMILIES)}")
        for name, (low, high) in _RANGES.items():
            _check_range(name, getattr(self, name), low, high)
        if self.heads % self.key_heads:
            fit = [str(n) for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise UsageError(
                f"{self.key_heads} key heads do not divide {self.heads} attention heads: use one "
                f"of {', '.join(fit)}"
            )
        if self.head_dim % 2 or not 2 <= self.head_dim <= max(HEAD_SIZES):
            raise UsageError(
                f"head_dim {self.head_dim}: use an even number up to {max(HEAD_SIZES)}"
            )
        if self.dtype not in _DTYPES:
            raise UsageError(f"dtype {self.dtype!r}: use float32, bfloat16 or float16")
        if not 0.0 <= self.router_skew <= _MOST_SKEW:
            raise UsageError(f"router_skew {self.router_skew}: use 0 to {_MOST_SKEW:g}")

    @property
    def key_heads(self) -> int:
        """Key and value heads."""
        return max(1, self.heads // 2) if self.kv_heads is None else self.kv_heads

    @property
    def middle(self) -> int:
        """Columns between the two products of the MLP."""
        groups = -(-3 * self.hidden // _INTERMEDIATE_GROUP)
        return groups * _INTERMEDIATE_GROUP if self.intermediate is None else self.intermediate

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return self.like == "qwen2" if self.tie is None else self.tie


def _check_range(name: str, value: int | None, low: int, high: int) -> None:
    """Raise UsageError for a value outside; None, which stands for a default, passes."""
    if value is not None and not low <= value <= high:
        raise UsageError(f"{name} {value}: use {low} to {high}")


def make_model(directory: Path | str, *, seed: int = 0, shards: int = 1, **shape: Any) -> Path:
    """Write a checkpoint of a family: config, safetensors (in `shards` files), tokenizer.

    shape: the fields of `Shape`. The directory appears whole or not at all. Raises UsageError for
    values that tpdet could not serve and for a directory that is not empty.
    """
    directory = Path(directory)
    model = ModelShape(**shape)
    _check_range("shards", shards, 1, _MOST_SHARDS)
    _check_range("seed", seed, -(1 << 63), (1 << 64) - 1)
    with new_directory(directory) as temporary:
        config = _config(model, train_tokenizer(temporary, model.vocab))
        write_json(temporary / "config.json", config)
        write_json(
            temporary / "generation_config.json",
            {"eos_token_id": config["eos_token_id"], "bos_token_id": config["bos_token_id"]},
        )
        load_model_config(temporary)
        _write_weights(temporary, config, seed, shards, model.router_skew)
    return directory


def _config(model: ModelShape, special: dict[str, int]) -> dict[str, Any]:
    """config.json in the style that transformers 4 and 5 both read."""
    config: dict[str, Any] = {
        "architectures": [_FAMILIES[model.like].architecture],
        "model_type": model.like,
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.middle,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": model.rope_scaling,
        "tie_word_embeddings": model.tied,
        "torch_dtype": model.dtype,
        "use_cache": True,
        "bos_token_id": special["bos_token_id"],
        "eos_token_id": special["eos_token_id"],
    }
    if FAMILIES[config["architectures"][0]].linear is not no_linear:
        return config | _hybrid(model)
    if model.like in ("mistral", "ministral3", "phi3", "starcoder2", "mixtral"):
        config["sliding_window"] = model.sliding_window
    elif model.like.startswith("qwen") or model.like == "smollm3":
        config |= {
            "use_sliding_window": model.sliding_window is not None,
            "sliding_window": model.sliding_window,
            "max_window_layers": model.layers // 2,
        }
    elif model.like in _ALTERNATING:
        kinds = ("sliding_attention", "full_attention")
        config["sliding_window"] = model.sliding_window or _SHORT_WINDOW
        config["layer_types"] = [kinds[i % 2] for i in range(model.layers)]
    elif model.sliding_window is not None:
        raise UsageError(f"{model.like} has no sliding window: use mistral or a qwen")
    if model.like in ("llama", "qwen3", "olmo2", "olmo3"):
        config["attention_bias"] = False
    return config | _OWN_SETTINGS.get(model.like, {})


def _hybrid(model: ModelShape) -> dict[str, Any]:
    """What a hybrid has beside the common keys: key heads as query heads, two values for each."""
    every = min(_FULL_EVERY, model.layers)
    kinds = ["linear_attention"] * (every - 1) + ["full_attention"]
    kinds = (kinds * model.layers)[: model.layers]
    experts = _EXPERTS_OF_HYBRIDS if model.like != "qwen3_5_text" else {}
    heads = {"linear_num_key_heads": model.heads, "linear_num_value_heads": 2 * model.heads}
    return _LINEAR | heads | experts | {"layer_types": kinds}


def _write_weights(
    directory: Path, config: dict[str, Any], seed: int, shards: int, skew: float
) -> None:
    """Make every tensor and save them, in order, in `shards` files."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    tensors = {
        name: _random(name, shape, generator, _FAMILIES[config["model_type"]].norm).to(
            torch.float32 if name.endswith(_EXACT) else dtype
        )
        for name, shape in tensor_shapes(config).items()
    }
    if skew:
        _skew(tensors, config, skew)
    names = list(tensors)
    if shards > len(names):
        raise UsageError(f"{shards} shards for {len(names)} tensors: use fewer")
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    mapping: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        own = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({n: tensors[n] for n in own}, directory / file, metadata={"format": "pt"})
        mapping |= dict.fromkeys(own, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": size}, "weight_map": mapping},
    )


def _skew(tensors: dict[str, torch.Tensor], config: dict[str, Any], skew: float) -> None:
    """Make low ids likelier: routers subtract from logits by a dimension that is always large."""
    family, layers = _FAMILIES[config["model_type"]], config["num_hidden_layers"]
    mixture = family.mixture(Fields(config, "config.json"), layers)
    if mixture is None:
        raise UsageError(f"router_skew {skew:g}: {family.name} has no router, use a mixture")
    tensors["model.embed_tokens.weight"][:, 0] = _PUSH
    ids = torch.arange(1, mixture.routing.experts + 1).log()
    normed = _PUSH / (1.0 + _PUSH**2 / config["hidden_size"]) ** 0.5  # beside values of about 1
    for name, tensor in tensors.items():
        if name.endswith(f".{mixture.block}.{mixture.router}.weight"):
            tensor[:, 0] = (ids * (-skew / normed)).to(tensor.dtype)


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model under its Hugging Face name."""
    family = _FAMILIES[config["model_type"]]
    hidden, middle, vocab = (config[f"{size}_size"] for size in ("hidden", "intermediate", "vocab"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    kinds = ("weight", "bias") if family.norm == "layer" else ("weight",)
    read = Fields(config, "config.json"), config["num_hidden_layers"]
    mixture, linear = family.mixture(*read), family.linear(*read)
    fused_gate_up = "gate_up" in family.fused
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        norms = [norm for norm in family.layer_norms if norm]
        shapes |= {f"{layer}.{norm}.{kind}": (hidden,) for norm in norms for kind in kinds}
        if linear is not None and linear.layers[index]:
            shapes |= _linear_shapes(linear, f"{layer}.linear_attn", hidden, family)
        else:
            shapes |= _attention_shapes(config, family, f"{layer}.self_attn")
        if mixture is not None and index not in mixture.dense_layers:
            of_experts = _stacked_shapes if family.stacked else _expert_shapes
            shapes |= of_experts(mixture, f"{layer}.{mixture.block}", hidden)
            continue
        if not family.gated:
            for name, rows, columns in (("c_fc", middle, hidden), ("c_proj", hidden, middle)):
                shapes[f"{layer}.mlp.{name}.weight"] = (rows, columns)
                shapes[f"{layer}.mlp.{name}.bias"] = (rows,)
            continue
        gated = (("gate_up", 2 * middle),) if fused_gate_up else (("gate", middle), ("up", middle))
        for name, rows in gated:
            shapes[f"{layer}.mlp.{name}_proj.weight"] = (rows, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, middle)
    shapes |= {f"model.norm.{kind}": (hidden,) for kind in kinds}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _attention_shapes(
    config: dict[str, Any], family: Family, attention: str
) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer's attention; gates stand behind the queries of each head."""
    shapes: dict[str, tuple[int, ...]] = {}
    hidden, head = config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    columns = (("q", (1 + family.attention_gate) * query), ("k", key), ("v", key))
    for name, rows in (("qkv", query + 2 * key),) if "qkv" in family.fused else columns:
        shapes[f"{attention}.{name}_proj.weight"] = (rows, hidden)
        if config.get("attention_bias", family.attention_bias):
            shapes[f"{attention}.{name}_proj.bias"] = (rows,)
    shapes[f"{attention}.o_proj.weight"] = (hidden, query)
    if family.row_bias:
        shapes[f"{attention}.o_proj.bias"] = (hidden,)
    if config.get("use_qk_norm", family.qk_norm):
        whole = family.qk_norm_over == "row"
        shapes[f"{attention}.q_norm.weight"] = (query if whole else head,)
        shapes[f"{attention}.k_norm.weight"] = (key if whole else head,)
    if family.sinks:
        shapes[f"{attention}.sinks"] = (config["num_attention_heads"],)
    return shapes


def _linear_shapes(
    linear: LinearAttention, block: str, hidden: int, family: Family
) -> dict[str, tuple[int, ...]]:
    """Tensors of a linear layer, whose projections are two tensors in Qwen3-Next, four else."""
    keys, values = linear.key_heads * linear.key_size, linear.value_heads * linear.value_size
    heads, channels = linear.value_heads, 2 * keys + values
    projections = {"qkv": channels, "z": values, "b": heads, "a": heads}
    if "linear_qkvz" in family.fused:
        projections = {"qkvz": channels + values, "ba": 2 * heads}
    return {
        **{f"{block}.in_proj_{part}.weight": (n, hidden) for part, n in projections.items()},
        f"{block}.conv1d.weight": (channels, 1, CONVOLUTION_TAPS),
        f"{block}.A_log": (heads,),
        f"{block}.dt_bias": (heads,),
        f"{block}.norm.weight": (linear.value_size,),
        f"{block}.out_proj.weight": (hidden, values),
    }


def _expert_shapes(mixture: Mixture, block: str, hidden: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer's router and experts."""
    shapes: dict[str, tuple[int, ...]] = {f"{block}.gate.weight": (mixture.routing.experts, hidden)}
    gate, up, down = mixture.projections
    for expert in range(mixture.routing.experts):
        name = f"{block}.experts.{expert}"
        shapes[f"{name}.{gate}.weight"] = shapes[f"{name}.{up}.weight"] = (mixture.width, hidden)
        shapes[f"{name}.{down}.weight"] = (hidden, mixture.width)
    if mixture.choice_bias:
        shapes[f"{block}.gate.{mixture.choice_bias}"] = (mixture.routing.experts,)
    if mixture.shared:
        name, width = f"{block}.{mixture.shared}", mixture.shared_width
        shapes |= dict.fromkeys((f"{name}.{part}.weight" for part in (gate, up)), (width, hidden))
        shapes[f"{name}.{down}.weight"] = (hidden, width)
    if mixture.shared_gate:
        shapes[f"{block}.{mixture.shared_gate}.weight"] = (1, hidden)
    return shapes


def _stacked_shapes(mixture: Mixture, block: str, hidden: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer's router and experts, which lie together and have biases."""
    experts, width = mixture.routing.experts, mixture.width
    return {
        f"{block}.router.weight": (experts, hidden),
        f"{block}.router.bias": (experts,),
        f"{block}.experts.gate_up_proj": (experts, hidden, 2 * width),
        f"{block}.experts.gate_up_proj_bias": (experts, 2 * width),
        f"{block}.experts.down_proj": (experts, width, hidden),
        f"{block}.experts.down_proj_bias": (experts, hidden),
    }


def _random(
    name: str, shape: tuple[int, ...], generator: torch.Generator, norm: str
) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith(".A_log"):
        return values - 3.0  # states that last for tens of tokens
    if name.endswith(".dt_bias"):
        return values
    if name.endswith(".conv1d.weight"):
        return 0.5 * values
    if name.endswith("linear_attn.norm.weight"):
        return 1.0 + 0.1 * values
    if name.endswith(_EXACT):
        return 0.1 * values
    if name.endswith("norm.weight"):
        return (0.0 if norm == "rms_plus_one" else 1.0) + 0.1 * values
    if name.endswith((".bias", "_bias")):
        return 0.5 * values
    if name.endswith(".sinks"):
        return 2.0 * values
    if name.endswith(("lm_head.weight", "embed_tokens.weight")):
        return values * (_LOGIT_SPREAD / shape[1] ** 0.5)
    return values / shape[1] ** 0.5
