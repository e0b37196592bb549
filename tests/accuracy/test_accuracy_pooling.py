"""Pooled answers beside transformers in fp32, of each family and head."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.lib.engine_harness import run
from tests.lib.models.pooled_models import classifier, pooled, sentence_folder, vector
from tests.lib.some_slow import some_slow
from tpdet import LLM
from tpdet.requests.request import RequestFailed

IDS = torch.randint(1, 1024, (70,), generator=torch.Generator().manual_seed(5)).tolist()
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
SMALL = {"layers": 1, "hidden": 128, "intermediate": 256}


def hidden(model):
    """transformers' rows [T, H] behind the last norm."""
    network = transformers.AutoModel.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return network(torch.tensor([IDS])).last_hidden_state[0]


def ours(model, task="auto", **params):
    return vector(run(model, [pooled("a", IDS, **params)], look=False, task=task), "a")


def error(found, expected):
    """Absolute for numbers up to 1, else relative to the largest."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


@pytest.mark.parametrize("family", some_slow({"llama", "gemma3_text"}, FAMILIES))
def test_rows_means_and_labels_are_those_of_transformers(tiny_model, tmp_path, family):
    model = tiny_model(family, **SMALL)
    rows = hidden(model)
    row, mean = rows[-1], rows.mean(0)
    assert error(ours(model, "embed", use_activation=False), row) <= 1e-5
    assert error(ours(model, "embed"), row / row.norm()) <= 1e-5
    means = sentence_folder(model, tmp_path / "means", "mean_tokens")
    assert error(ours(means, use_activation=False), mean) <= 1e-5
    assert error(ours(means), mean / mean.norm()) <= 1e-5
    scored = classifier(model, tmp_path / "scored")
    network = transformers.AutoModelForSequenceClassification.from_pretrained(
        scored, dtype=torch.float32
    )
    with torch.no_grad():
        logits = network(torch.tensor([IDS])).logits[0]
    assert error(ours(scored, use_activation=False), logits) <= 1e-5
    assert error(ours(scored), logits.softmax(0)) <= 1e-5


@pytest.mark.parametrize(
    "mode", some_slow({"mean_tokens"}, ("lasttoken", "mean_tokens", "cls_token"))
)
def test_a_folder_of_sentence_transformers_pools_by_its_modules(tiny_model, tmp_path, mode):
    model = tiny_model("qwen3", **SMALL)
    layers = ((96, "activation.Tanh"), (48, "linear.Identity"))
    folder = sentence_folder(model, tmp_path / "folder", mode, layers)
    rows = hidden(model)
    row = {"lasttoken": rows[-1], "mean_tokens": rows.mean(0), "cls_token": rows[0]}[mode]
    for number, act in ((2, torch.tanh), (3, lambda x: x)):
        tensors = load_file(folder / f"{number}_Dense" / "model.safetensors")
        row = act(row @ tensors["linear.weight"].T + tensors["linear.bias"])
    assert error(ours(folder), row / row.norm()) <= 1e-5
    cut = row[:20]
    assert error(ours(folder, dimensions=20), cut / cut.norm()) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens", "cls_token"])
def test_vectors_are_those_of_sentence_transformers(tiny_model, tmp_path, mode):
    library = pytest.importorskip("sentence_transformers", reason="pip install .[evaluation]")
    layers, texts = ((96, "activation.Tanh"),), ["The for statement", "A list of values"]
    model, prompts = tiny_model("qwen3", **SMALL), {"query": "Query: "}
    folder = sentence_folder(model, tmp_path / "folder", mode, layers, prompts=prompts)
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    theirs.save_pretrained(str(tmp_path / "saved"))
    with LLM(str(tmp_path / "saved"), kv_pages=24, device="cpu") as llm:
        for name in (None, "query"):
            found = [one.outputs.embedding for one in llm.embed(texts, prompt_name=name)]
            expected = theirs.encode(texts, prompt_name=name, convert_to_tensor=True)
            assert error(torch.tensor(found), expected) <= 1e-5


@pytest.mark.parametrize("kind", ["vector", "labels"])
def test_what_is_not_finite_fails_its_request(tiny_model, tmp_path, kind):
    model = tiny_model("qwen3", **SMALL)
    make = {"vector": sentence_folder, "labels": classifier}[kind]
    folder = make(model, tmp_path / "folder")
    tensors = load_file(folder / "model.safetensors")
    name = {"vector": "norm.weight", "labels": "score.weight"}[kind]
    tensors[name].fill_(3e38)
    save_file(tensors, folder / "model.safetensors")
    (failed,) = run(folder, [pooled("a", IDS)], look=False).outputs["a"]
    assert isinstance(failed, RequestFailed) and "NaN or infinity" in failed.message


def test_a_score_is_the_sigmoid_of_two_logits(tiny_model):
    model = tiny_model("qwen3", **SMALL)
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = network(torch.tensor([IDS])).logits[0, -1]
    yes, no = 17, 900
    expected = logits[[no, yes]].log_softmax(0).exp()[1:]
    assert error(ours(model, "score", token_ids=(yes, no)), expected) <= 1e-5


def test_a_zero_vector_has_no_direction(tiny_model, tmp_path):
    model = tiny_model("qwen3", **SMALL)
    folder = sentence_folder(model, tmp_path / "folder")
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"] *= 0.0
    save_file(tensors, folder / "model.safetensors")
    found = run(folder, [pooled("a", IDS), pooled("b", IDS, use_activation=False)], look=False)
    (failed,) = found.outputs["a"]
    assert isinstance(failed, RequestFailed) and "zeros" in failed.message
    assert not vector(found, "b").any()
