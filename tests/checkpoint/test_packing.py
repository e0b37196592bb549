"""Packed weights as a GPU has them: known before they are read, and read into that memory."""

import json

import pytest
import torch

from tests.lib.bits import assert_same_bits
from tests.lib.kernels.ordered_numbers import ordered_numbers
from tests.lib.models.quantised_config import quantisation_config
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.model_config.known_shapes import SHAPES
from tpdet.checkpoint.source import UnreadWeights, open_weights
from tpdet.comm.world.rehearsal_world import RehearsalWorld
from tpdet.config import EngineConfig
from tpdet.errors import UsageError
from tpdet.kernels.inputs.ordered import OrderedWeight
from tpdet.layers.arithmetic import make_arithmetic
from tpdet.layers.experts import ExpertMlp
from tpdet.layers.linear import ColumnLinear, GatedLinear, RowLinear
from tpdet.layers.row_layers import row_rule
from tpdet.models.decoder import Decoder
from tpdet.runner.start.contracts import partition_of
from tpdet.tools.quantise.arguments import FORMATS

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "head_dim": 128,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 512, "eos_token_id": 1,
    "bos_token_id": 1,
}  # fmt: skip


EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}


def quantised(folder, format_name, **more):
    """The directory of a small shape whose config says that it is quantised."""
    return written(folder, SHAPES["qwen3-8b"] | SIZES | more, format_name)


def written(folder, config, format_name):
    """The same of a config."""
    config["quantization_config"] = quantisation_config(format_name)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def source_of(folder, packed=True):
    model = load_model_config(folder)
    source = open_weights(folder, model, "dummy", 3, False, CPU, 1, packed)
    source.packing.on_gpu = True
    return source


def decoder_of(folder, source):
    config = EngineConfig.from_values(model=str(folder), load_format="dummy", device="cpu")
    model, world = load_model_config(folder), RehearsalWorld(0, 1)
    partition = partition_of(config, model, world)
    exchange = row_rule(partition).open_exchange("gather", partition, 8, torch.bfloat16, CPU)
    return Decoder(source, partition.by(make_arithmetic(False, world, exchange)), 64)


def parts_of(thing, kind):
    """Every object of a kind in a decoder's members, in their order."""
    if isinstance(thing, kind):
        yield thing
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from parts_of(part, kind)
    elif type(thing).__module__.startswith(("tpdet.models", "tpdet.layers")):
        for part in vars(thing).values():
            yield from parts_of(part, kind)


@pytest.mark.parametrize("format_name", FORMATS)
def test_what_is_read_later_lies_where_nothing_was(format_name, tmp_path):
    folder = quantised(tmp_path, format_name)
    source = source_of(folder)
    decoder = decoder_of(folder, UnreadWeights(torch.bfloat16, CPU, source.packing))
    known = [*source.packing.forms]
    before = [*parts_of(decoder.layers, OrderedWeight)]
    places = [(weight.codes.data_ptr(), weight.scales.data_ptr()) for weight in before]
    decoder.load(source)
    after = [*parts_of(decoder.layers, OrderedWeight)]
    assert [(w.codes.data_ptr(), w.scales.data_ptr()) for w in after] == places
    assert len(after) == 8 and [*source.packing.forms] == known and len(known) == 4
    at_once = [*parts_of(decoder_of(folder, source_of(folder)).layers, OrderedWeight)]
    dense = decoder_of(folder, source_of(folder, packed=False))
    layers = parts_of(dense.layers, ColumnLinear | GatedLinear | RowLinear)
    products = [
        layer.weight_LNK if isinstance(layer, RowLinear) else layer.weight for layer in layers
    ]
    for weight, other, numbers in zip(after, at_once, products, strict=True):
        assert_same_bits(weight.codes, other.codes)
        assert_same_bits(ordered_numbers(weight), numbers.view(weight.shape))


@pytest.mark.parametrize("format_name", FORMATS)
def test_experts_lie_in_the_order_of_their_kernels(format_name, tmp_path):
    config = SHAPES["qwen3-30b-a3b"] | SIZES | EXPERTS
    folder = written(tmp_path, config, format_name)
    source = source_of(folder)
    decoder = decoder_of(folder, UnreadWeights(torch.bfloat16, CPU, source.packing))
    before = [layer.gate_up.codes for layer in parts_of(decoder.layers, ExpertMlp)]
    decoder.load(source)
    dense = decoder_of(folder, source_of(folder, packed=False))
    layers = (parts_of(each.layers, ExpertMlp) for each in (decoder, dense))
    assert len(source.packing.expert_forms) == 2
    for codes, packed, numbers in zip(before, *layers, strict=True):
        assert packed.gate_up.codes is codes
        assert_same_bits(ordered_numbers(packed.gate_up), numbers.gate_up)
        assert_same_bits(ordered_numbers(packed.down), numbers.down)


def test_a_matrix_that_no_kernel_reads_is_refused_by_name(tmp_path):
    folder = quantised(tmp_path, "mxfp4", intermediate_size=320)
    with pytest.raises(UsageError, match=r"no kernel of a GPU reads chains of .* columns"):
        decoder_of(folder, source_of(folder))
