"""Pooled answers have one set of bits, whatever the ranks, the batch, the chunks and the cache."""

import itertools
import json
import random

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.lib.bits import assert_same_bits
from tests.lib.engine_harness import ask, run
from tests.lib.models.pooled_models import (
    classifier,
    pooled,
    sentence_folder,
    vector,
    with_config,
)
from tests.lib.models.reranked import asked, changed, pairs, rankings, stock_scores
from tests.lib.some_slow import some_slow
from tpdet.checkpoint.model_config.pooling import load_for_task
from tpdet.errors import CheckpointError, NumericalError, RequestError, UsageError
from tpdet.kernels.exact import pooling as exact

_random = random.Random(7)
SHARED = [_random.randrange(1, 1024) for _ in range(280)]
PROMPTS = [
    [*(SHARED if number % 6 == 0 else SHARED[:5]), *(_random.randrange(1, 1024) for _ in range(40))]
    for number in range(16)
]
SMALL = {"layers": 1, "hidden": 128, "intermediate": 256, "dtype": "bfloat16"}
SHORT = [prompt[-30 - number :] for number, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory):
    """By what they answer, of bf16 weights."""
    plain, folder = tiny_model("qwen3", **SMALL), tmp_path_factory.mktemp("pooled")
    layers = ((64, "activation.Tanh"),)
    return {
        "last": sentence_folder(plain, folder / "last"),
        "mean": sentence_folder(plain, folder / "mean", "mean_tokens", layers),
        "labels": classifier(plain, folder / "labels"),
    }


def answers(model, prompts, waves=False, **settings):
    """The answers to prompts, all at once or one after the other."""
    asked = [pooled(f"p{number}", prompt) for number, prompt in enumerate(prompts)]
    first, later = (asked[:1], [[each] for each in asked[1:]]) if waves else (asked, [])
    found = run(model, first, waves=later, look=False, **settings)
    return torch.stack([vector(found, each.request_id) for each in asked]), found


@pytest.mark.parametrize("kind", ["last", "mean", "labels"])
def test_bits_do_not_depend_on_batch_chunks_order_and_cache(models, kind):
    alone, _ = answers(models[kind], PROMPTS, waves=True, enable_prefix_caching=False)
    assert len({row.numpy().tobytes() for row in alone}) == len(PROMPTS)
    together, _ = answers(models[kind], PROMPTS, ahead=True)
    assert_same_bits(together, alone)
    hot, found = answers(models[kind], PROMPTS, waves=True, max_num_batched_tokens=100)
    assert_same_bits(hot, alone)
    assert (sum(found.hits) > 0) == (kind != "mean"), "a mean reads every row"
    few = {"max_num_seqs": 3, "preempt_every": 2, "kv_pages": 5}
    turned, _ = answers(models[kind], PROMPTS[::-1], ahead=True, **few)
    assert_same_bits(turned.flip(0), alone)


@pytest.mark.parametrize(
    ("kind", "tp"),
    some_slow(
        {("mean", 2), ("mean", 8), ("labels", 4), ("last", 2)},
        itertools.product(("last", "mean", "labels"), (2, 4, 8)),
    ),
)
def test_bits_do_not_depend_on_the_ranks(models, kind, tp):
    alone, _ = answers(models[kind], SHORT[:3])
    several, _ = answers(models[kind], SHORT[:3], tp=tp)
    assert_same_bits(several, alone)


@pytest.mark.slow
def test_stock_pooling_of_a_batch_has_other_bits_than_alone(models):
    """The control: what the tests above compare differs in stock fp16; to import that is slow."""
    network = transformers.AutoModel.from_pretrained(models["last"], dtype=torch.float16)
    rows = [torch.tensor(prompt) for prompt in SHORT]
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True)
    with torch.no_grad():
        every = network(batch, attention_mask=mask).last_hidden_state * mask[..., None]
        together = every.sum(1) / mask.sum(1, keepdim=True)
        alone = torch.cat([network(row[None]).last_hidden_state.mean(1) for row in rows])
    assert not torch.equal(together, alone)


@pytest.mark.slow
def test_no_ranking_changes_with_batch_and_ranks_and_stock_ones_do(tiny_model):
    model, prompts, ranked = tiny_model("qwen3", **SMALL), pairs(20, 20), []
    settings = {"task": "score", "max_queue": 500, "kv_pages": 300, "look": False}
    for tp, batch in ((1, 1), (1, 256), (2, 1), (2, 256)):
        found = run(model, asked(prompts), tp=tp, max_num_seqs=batch, **settings)
        scores = torch.cat([vector(found, f"s{number}") for number in range(len(prompts))])
        ranked.append(rankings(scores, 20))
    assert [changed(ranked[0], other) for other in ranked[1:]] == [0, 0, 0]
    stock = [rankings(stock_scores(model, prompts, batch), 20) for batch in (1, 256)]
    assert changed(*stock) > 0


def test_an_engine_answers_by_its_task_alone(models, tiny_model):
    with pytest.raises(RequestError, match="--task generate"):
        run(models["last"], [ask("a", SHORT[0])])
    with pytest.raises(RequestError, match="--task embed"):
        run(tiny_model("qwen3", **SMALL), [pooled("a", SHORT[0])])
    with pytest.raises(RequestError, match="over the vector's width of 128"):
        run(models["last"], [pooled("a", SHORT[0], dimensions=129)])
    with pytest.raises(RequestError, match="dimensions are of vectors"):
        run(models["labels"], [pooled("a", SHORT[0], dimensions=1)])


@pytest.mark.parametrize(
    ("change", "settings", "error", "words"),
    [
        ({"is_causal": False}, {}, CheckpointError, "is_causal is False: tokens see those before"),
        ({"use_bidirectional_attention": True}, {}, CheckpointError, "use_bidirectional"),
        ({}, {"task": "classify"}, UsageError, "no score head"),
        ({}, {"task": "embed", "approximate": True}, UsageError, "no approximate mode"),
    ],
)
def test_what_cannot_be_pooled_is_refused(tiny_model, tmp_path, change, settings, error, words):
    model = with_config(tiny_model("qwen3", **SMALL), tmp_path / "changed", **change)
    with pytest.raises(error, match=words):
        run(model, [], **settings)


def test_a_score_head_without_a_padding_token_is_refused(models, tmp_path):
    model = with_config(models["labels"], tmp_path / "without", pad_token_id=None)
    with pytest.raises(CheckpointError, match="pad_token_id is None: a score head"):
        run(model, [])


def test_settings_of_another_kind_are_refused_in_words(models, tiny_model, tmp_path):
    scored = with_config(models["labels"], tmp_path / "scored", problem_type=["regression"])
    with pytest.raises(CheckpointError, match="problem_type"):
        load_for_task(scored, "auto", "auto")
    folder = sentence_folder(tiny_model("qwen3", **SMALL), tmp_path / "folder")
    settings = folder / "config_sentence_transformers.json"
    settings.write_text('{"prompts": {}, "default_prompt_name": []}')
    with pytest.raises(CheckpointError, match="default_prompt_name"):
        load_for_task(folder, "auto", "auto")
    (folder / "modules.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"modules\.json is not valid JSON"):
        load_for_task(folder, "auto", "auto")
    for module, path in ((0, "0_T"), (0, 5), (1, "a\0b"), (1, "\ud800"), (1, "../a"), (1, "/a")):
        modules = [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "1_Pooling"}]
        modules[module]["path"] = path
        (folder / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(CheckpointError, match=rf"\[{module}\]\.path is ") as refused:
            load_for_task(folder, "auto", "auto")
        str(refused.value).encode()


@pytest.mark.parametrize("flag", ["pooling_mode_max_tokens", "pooling_mode_weightedmean_tokens"])
def test_an_unknown_pooling_is_refused(tiny_model, tmp_path, flag):
    mode = flag.removeprefix("pooling_mode_")
    folder = sentence_folder(tiny_model("qwen3", **SMALL), tmp_path / "folder", mode)
    with pytest.raises(CheckpointError, match=flag):
        run(folder, [])


def test_a_mean_is_a_sum_of_integers():
    rows = torch.randn(1000, 8, generator=torch.Generator().manual_seed(1)) * 50.0
    total, largest = exact.mean_terms(rows)
    parts = [exact.mean_terms(part)[0] for part in rows.flip(0).split(37)]
    assert_same_bits(sum(parts), total)
    assert float(largest) == float(rows.abs().max())
    assert_same_bits(exact.mean_of(total, 1000), rows.double().mean(0).float())
    assert exact.activated(torch.tensor([-800.0, 0.0, 800.0]), "sigmoid").tolist() == [0, 0.5, 1]


def test_a_row_past_a_means_limit_fails_its_request_alone(models, tmp_path):
    folder = tmp_path / "large"
    folder.mkdir()
    model = with_config(models["mean"], folder / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["norm.weight"] *= 1e6
    save_file(tensors, model / "model.safetensors")
    found = run(model, [pooled("a", SHORT[0])], look=False)
    (failed,) = found.outputs["a"]
    assert failed.code == NumericalError.code and "means are of values below" in failed.message
