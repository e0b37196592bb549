"""Graphs of alike layers hold the launches of all layers, made by the Python of two of them."""

import json

import pytest
import torch

pytest.importorskip("triton")

from tests.lib.kernels.symbolic_launches import symbolic_launches
from tpdet.cache.kv import LayerPages, allocate_pages
from tpdet.cache.states import allocate_states
from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.source import UnreadWeights
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.kernels.cuda.hardware import H200
from tpdet.kernels.cuda.linear.forms import ALONE, WHOLE, trying
from tpdet.kernels.order import CHUNK_TOKENS
from tpdet.layers.partition import state_shape
from tpdet.models.decoder import Decoder
from tpdet.runner.graphs.packed_step import BatchShape, StepShape, packed_batches
from tpdet.runner.start.contracts import partition_of
from tpdet.tools.compile.asked import on_gpu

CPU, ROWS = torch.device("cpu"), 4


@pytest.fixture
def memory():
    with on_gpu(H200), symbolic_launches() as made:
        yield made


def parts_of(layer):
    """The tensors of a layer's pages, or of its states."""
    return (layer.keys, layer.values) if isinstance(layer, LayerPages) else layer


class Steps:
    """A model whose steps are launched over memory of names."""

    def __init__(self, folder, memory, prompts=False):
        model = load_model_config(folder, "bfloat16")
        config = EngineConfig.from_values(model=str(folder), dtype="bfloat16", device="cuda")
        partition = partition_of(config, model, SoloWorld())
        self.memory = memory
        self.model = Decoder(UnreadWeights(torch.bfloat16, CPU), partition, 2048)
        heads = len(partition.key_heads)
        layers, linear = model.attention_layers, model.linear
        self.pages = allocate_pages(layers, 3, heads, model.head_dim, torch.bfloat16, CPU)
        if linear is not None:
            states = allocate_states(state_shape(partition), ROWS, 0, torch.bfloat16, CPU)
            self.pages = self.pages.beside(states, linear.layers)
        rows, blocks = (4 * CHUNK_TOKENS, 2) if prompts else (ROWS, 0)
        batch = BatchShape(rows, ROWS, blocks, 2 * ROWS, 8, linear=linear is not None)
        self.shape = StepShape((batch,))
        self.packed = torch.zeros(self.shape.words, dtype=torch.int32)

    def run(self, alike=None, but_last=False):
        """Names of the rows and of every page, and how many launches made them."""
        self.memory.clear()
        ids, batches = packed_batches(self.shape, self.packed, 2)
        if but_last:
            (unfinished,) = self.model.begin(ids, self.pages, *batches, alike=alike)
            rows = unfinished.hidden_MH, *unfinished.projected
        else:
            rows = (self.model.hidden(ids, self.pages, *batches, alike=alike),)
        pages = [part for layer in self.pages.layers for part in parts_of(layer)]
        names = [self.memory.name(each.data_ptr()) for each in (*rows, *pages)]
        return names, len(self.memory.launches)


@pytest.mark.parametrize(
    ("like", "more", "noted"),
    [
        ("qwen3", {"layers": 7}, 4),
        ("smollm3", {"layers": 8}, 6),  # every second layer without rotation: another table
        ("qwen3_moe", {"layers": 7}, 4),  # experts behind a dense layer
        ("mixtral", {"layers": 6}, 4),
        ("mistral", {"layers": 9, "sliding_window": 300}, 6),
        ("qwen3", {"layers": 3}, 0),
        ("qwen3_5_text", {"layers": 17}, 8),  # three of four layers have states
        ("qwen3_next", {"layers": 16}, 8),
    ],
)
def test_steps_are_those_of_all_layers(tiny_model, memory, like, more, noted):
    steps = Steps(tiny_model(like, **more), memory)
    alike = steps.model.alike(steps.pages)
    assert alike.noted == noted
    steps.run()
    plain = steps.run()
    assert steps.run() == plain
    assert steps.run(alike) == plain


@pytest.mark.parametrize("prompts", [False, True])
def test_steps_of_hybrids_by_all_forms_are_those_of_all_layers(
    tiny_model, memory, tmp_path, prompts
):
    config = json.loads((tiny_model("qwen3_5_text", layers=16) / "config.json").read_text())
    sizes = {f"linear_{part}_head_dim": 128 for part in ("key", "value")}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    heads = config["linear_num_key_heads"], config["linear_num_value_heads"], *sizes.values()
    steps = Steps(tmp_path, memory, prompts)
    with trying(CPU, heads, frozenset((ALONE, WHOLE))):
        steps.run()
        plain = steps.run()
        assert "decode_rows" in memory.kernels
        assert ("pass_whole_chunks" in memory.kernels) == prompts
        alike = steps.model.alike(steps.pages)
        assert alike.noted == 8 and steps.run(alike) == plain


@pytest.mark.parametrize(
    ("like", "layers", "noted"),
    [("qwen3", 7, 4), ("qwen3", 8, 4), ("mixtral", 9, 6), ("qwen3_5_text", 17, 8)],
)
def test_steps_that_leave_the_last_layer_out_are_those_of_all_others(
    tiny_model, memory, like, layers, noted
):
    steps = Steps(tiny_model(like, layers=layers), memory)
    alike = steps.model.alike(steps.pages, but_last=True)
    assert alike.noted == noted
    plain = steps.run(but_last=True)
    assert steps.run(alike, but_last=True) == plain != steps.run()


def test_a_layer_that_differs_in_a_number_follows_from_none(tiny_model, memory):
    steps = Steps(tiny_model("qwen3", layers=7), memory)
    object.__setattr__(steps.model.layers[4].norms.before_attention, "eps", 0.5)
    plain = steps.run()
    alike = steps.model.alike(steps.pages)
    assert alike.noted == 0 and steps.run(alike) == plain
