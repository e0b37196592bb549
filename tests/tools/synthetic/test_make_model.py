"""Small random checkpoints: whole directories that transformers loads, logits worth comparing."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.lib.bits import assert_same_bits
from tpdet.checkpoint.model_config import load_model_config
from tpdet.errors import CheckpointError, UsageError
from tpdet.text.tokenizer import Tokenizer
from tpdet.tools.synthetic.make_model import make_model

pytestmark = pytest.mark.long

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SMALL = {"hidden": 128, "layers": 2, "heads": 2, "intermediate": 256, "vocab": 1031}


@pytest.fixture(scope="module", params=FAMILIES)
def made(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param) / "model"
    return make_model(directory, like=request.param, **SMALL)


def load_with_transformers(directory):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype="float32", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def test_transformers_loads_it_whole_with_the_same_configuration(made):
    model = load_with_transformers(made)
    ours = load_model_config(made)
    theirs = model.config
    assert ours.family == theirs.model_type
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert (ours.vocab_size, ours.max_position) == (1031, 4096)
    assert ours.eos_token_ids == (model.generation_config.eos_token_id,)


def test_transformers_reads_the_same_ids(made):
    ours = Tokenizer.load(made)
    theirs = transformers.AutoTokenizer.from_pretrained(made)
    for text in ("Hello world", " a  b\n", "naïve 日本語 🎉", "def f(x):\n    return x + 1"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    messages = [{"role": "user", "content": "Hello"}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True)
    assert ours.apply_chat_template(messages) == rendered["input_ids"]
    assert max(ours.encode("Hello")) < ours.vocab_size <= 1031


def test_logits_are_neither_flat_nor_decided(made):
    model = load_with_transformers(made)
    ids = torch.arange(3, 67)[None]
    with torch.no_grad():
        logits = model(ids).logits[0]
    best = logits.softmax(-1).max(-1).values
    assert 1.0 < logits.std(-1).mean() < 6.0
    assert 0.01 < best.median() < 0.95
    assert len(logits.argmax(-1).unique()) > 8


@pytest.mark.parametrize(
    ("like", "skew", "said"),
    [
        ("qwen3", 1.0, "qwen3 has no router"),
        ("mixtral", -1.0, "use 0 to"),
        ("mixtral", 99.0, "use"),
    ],
)
def test_a_router_that_cannot_be_skewed_is_refused(tmp_path, like, skew, said):
    with pytest.raises(UsageError, match=rf"router_skew .*{said}"):
        make_model(tmp_path / "model", like=like, router_skew=skew, **SMALL)
    assert not [*tmp_path.iterdir()]


def test_a_seed_names_the_weights(tmp_path):
    """The same seed gives the same bytes, sharded or not; another seed does not."""
    one = make_model(tmp_path / "a", like="qwen3", seed=5, **SMALL)
    again = make_model(tmp_path / "b", like="qwen3", seed=5, shards=3, **SMALL)
    other = make_model(tmp_path / "c", like="qwen3", seed=6, **SMALL)
    whole = load_file(one / "model.safetensors")
    index = json.loads((again / "model.safetensors.index.json").read_text())["weight_map"]
    assert {*index} == {*whole} and len({*index.values()}) == 3
    for name in sorted(whole):
        assert_same_bits(whole[name], load_file(again / index[name])[name], name)
    different = load_file(other / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(whole[name], different[name])


def test_another_process_makes_the_same_bytes(tmp_path):
    make_model(tmp_path / "a", like="llama", **SMALL)
    code = (
        "import sys; from tpdet.tools.synthetic.make_model import make_model\n"
        f"make_model(sys.argv[1], like='llama', **{SMALL!r})"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], check=True, env=environment)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("like", "options"),
    [
        ("mistral", {"sliding_window": 64}),
        ("qwen2", {"sliding_window": 64, "tie": False}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "tie": True}),
        ("llama", {"dtype": "bfloat16", "shards": 2, "kv_heads": 1}),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0,
                                    "original_max_position_embeddings": 2048}}),
    ],
)  # fmt: skip
def test_options_are_written_as_transformers_reads_them(tmp_path, like, options):
    directory = make_model(tmp_path / "model", like=like, **SMALL, **options)
    theirs = load_with_transformers(directory).config
    ours = load_model_config(directory)
    if "sliding_window" in options:
        assert 64 in ours.windows and theirs.sliding_window == 64
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rotary.kind == theirs.rope_parameters["rope_type"]
    assert ours.dtype == options.get("dtype", "float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"like": "gpt2"}, "gpt2.*use one of llama"),
        ({"heads": 6, "kv_heads": 4}, "4 key heads do not divide 6 .*: use one of 1, 2, 3, 6"),
        ({"kv_heads": 0}, "kv_heads 0: use 1 to"),
        ({"layers": 0}, "layers 0: use 1 to 4096"),
        ({"seed": 1 << 64}, "seed 18446744073709551616: use -"),
        ({"head_dim": 81}, "head_dim 81: use an even number up to 256"),
        ({"head_dim": 512}, "head_dim 512: use an even number up to 256"),
        ({"vocab": 1000}, "vocab 1000: use 1024 to 1048576"),
        ({"vocab": 1 << 40}, "use 1024 to 1048576"),
        ({"shards": 0}, "shards 0"),
        ({"shards": 1000}, "use fewer"),
        ({"dtype": "int8"}, "int8"),
        ({"sliding_window": 64}, "llama has no sliding window"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_what_cannot_be_served_is_refused_and_leaves_nothing(tmp_path, options, message):
    with pytest.raises((UsageError, CheckpointError), match=message):
        make_model(tmp_path / "model", **{"like": "llama", **SMALL, **options})
    assert not [*tmp_path.iterdir()]


def test_a_directory_that_is_not_empty_is_refused_and_kept(tmp_path):
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(UsageError, match="not empty"):
        make_model(tmp_path, like="llama", **SMALL)
    assert (tmp_path / "mine").read_text() == "keep"


def test_an_empty_directory_is_filled(tmp_path):
    make_model(tmp_path / "model", like="llama", **SMALL)
    (tmp_path / "empty").mkdir()
    assert (make_model(tmp_path / "empty", like="llama", **SMALL) / "config.json").exists()
