"""Parses a checkpoint's `config.json` strictly: any unknown key is refused by name."""

from tpdet.checkpoint.model_config.families import FAMILIES, FAMILY_NAMES
from tpdet.checkpoint.model_config.load import load_model_config
from tpdet.checkpoint.model_config.model import HEAD_SIZES, ModelConfig

__all__ = ["FAMILIES", "FAMILY_NAMES", "HEAD_SIZES", "ModelConfig", "load_model_config"]
