"""What a checkpoint's `config.json` says, parsed strictly: anything unknown is refused by name."""

from tpdet.model_config.load import load_model_config
from tpdet.model_config.model import FAMILIES, HEAD_SIZES, ModelConfig

__all__ = ["FAMILIES", "HEAD_SIZES", "ModelConfig", "load_model_config"]
