"""The decoder layer of families whose feed-forward block has no gates (Starcoder2)."""

from tpdet.layers.mlp import PlainMlp
from tpdet.models.layer import DecoderLayer


class PlainLayer(DecoderLayer):
    """Attention, then c_proj(act(c_fc(x)))."""

    feed_forward = PlainMlp
