"""Which decoder layer a family of `checkpoint/model_config/families.py` has, by its name.

A new family is a line here, an entry there and, if its layer is another, a file beside this one.
"""

from tpdet.models.layer import DecoderLayer
from tpdet.models.plain_layer import PlainLayer

LAYERS: dict[str, type[DecoderLayer]] = {
    "llama": DecoderLayer,
    "mistral": DecoderLayer,
    "qwen2": DecoderLayer,
    "qwen3": DecoderLayer,
    "ministral3": DecoderLayer,
    "smollm3": DecoderLayer,
    "granite": DecoderLayer,
    "seed_oss": DecoderLayer,
    "phi3": DecoderLayer,
    "olmo2": DecoderLayer,
    "olmo3": DecoderLayer,
    "glm": DecoderLayer,
    "glm4": DecoderLayer,
    "gemma2": DecoderLayer,
    "gemma3_text": DecoderLayer,
    "starcoder2": PlainLayer,
    "qwen3_moe": DecoderLayer,
    "mixtral": DecoderLayer,
    "gpt_oss": DecoderLayer,
    "glm4_moe": DecoderLayer,
}
