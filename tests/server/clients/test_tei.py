"""Hugging Face's client, unmodified, gets the numbers of `LLM`, as from TEI."""

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.lib.models.pooled_models import classifier, sentence_folder
from tests.lib.server.served import Served
from tpdet import LLM, PoolingParams

SMALL = {"layers": 1, "hidden": 128, "intermediate": 256}
TEXTS = ["The for statement", "A list is a sequence of values", "def f(x): return x"]


@pytest.mark.slow
def test_inference_client_gets_vectors_and_cosines(tiny_model, tmp_path):
    folder = sentence_folder(tiny_model("qwen3", **SMALL), tmp_path / "model", prompts={"q": "Q: "})
    with LLM(str(folder), kv_pages=24, device="cpu") as llm:
        vectors = [one.outputs.embedding for one in llm.embed(TEXTS)]
        (named,) = llm.embed(TEXTS[0], prompt_name="q")
        (raw,) = llm.embed(TEXTS[0], pooling_params=PoolingParams(use_activation=False))
        cosines = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS)]
    server = Served(folder, tmp_path, 1, "--device", "cpu")
    url = server.url.removesuffix("/v1")
    try:
        for address in (url, f"{url}/embed"):
            client = InferenceClient(address, token="none")
            found = client.feature_extraction(TEXTS)
            assert found.shape == (3, 128) and found.tolist() == vectors
            assert client.feature_extraction(TEXTS[1], normalize=True).tolist() == vectors[1:2]
        of_query = client.feature_extraction(TEXTS[0], prompt_name="q", truncate=True)
        assert of_query.tolist() == [named.outputs.embedding]
        found = client.feature_extraction(TEXTS[0], normalize=False)
        assert found.tolist() == [raw.outputs.embedding] != vectors[:1]
        assert client.feature_extraction(TEXTS[0], dimensions=7).shape == (1, 7)
        for address in (url, f"{url}/similarity"):
            client = InferenceClient(address, token="none")
            assert client.sentence_similarity(TEXTS[0], other_sentences=TEXTS) == cosines
        info = InferenceClient(url, provider="hf-inference", token="none").get_endpoint_info()
        assert info["model_type"] == {"embedding": {"pooling": "last_token"}}
        assert info["max_client_batch_size"] == 2048 and info["max_input_length"] == 4096
        with pytest.raises(HfHubHTTPError, match="a text is empty") as refused:
            InferenceClient(f"{url}/embed", token="none").feature_extraction("")
        assert refused.value.response.json()["error_type"] == "validation"
    finally:
        server.end()


@pytest.mark.slow
def test_inference_client_gets_labels(tiny_model, tmp_path):
    model = classifier(tiny_model("qwen3", **SMALL), tmp_path / "model", 3)
    with LLM(str(model), kv_pages=24, device="cpu") as llm:
        (expected,) = llm.classify(TEXTS[0])
        (raw,) = llm.reward(TEXTS[0])
    server = Served(model, tmp_path, 1, "--device", "cpu")
    url = server.url.removesuffix("/v1")
    try:
        for address in (url, f"{url}/predict"):
            client = InferenceClient(address, token="none")
            found = client.text_classification(TEXTS[0])
            by_label = {f"l{i}": score for i, score in enumerate(expected.outputs.probs)}
            assert {one.label: one.score for one in found} == by_label
            scores = [one.score for one in found]
            assert scores == sorted(scores, reverse=True)
            (best,) = client.text_classification(TEXTS[0], top_k=1)
            assert (best.label, best.score) == (found[0].label, found[0].score)
            unscaled = client.text_classification(TEXTS[0], function_to_apply="none")
            assert sorted(one.score for one in unscaled) == sorted(raw.outputs.data)
        with pytest.raises(HfHubHTTPError, match="is softmax, or none"):
            client.text_classification(TEXTS[0], function_to_apply="sigmoid")
    finally:
        server.end()
