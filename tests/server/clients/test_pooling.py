"""Cohere's and LangChain's clients, unmodified, get the numbers of `LLM`."""

import pytest

from tests.lib.models.pooled_models import classifier, sentence_folder
from tests.lib.server.served import Served
from tpdet import LLM

SMALL = {"layers": 1, "hidden": 128, "intermediate": 256}
TEXTS = ["The for statement", "A list is a sequence of values", "def f(x): return x"]
QUERY = "How is a loop written?"


@pytest.mark.slow
def test_coheres_client_reranks_by_both_of_its_versions(tiny_model, tmp_path):
    cohere = pytest.importorskip("cohere", reason="pip install .[test]")
    model = classifier(tiny_model("qwen3", **SMALL), tmp_path / "model", 1)
    with LLM(str(model), kv_pages=24, device="cpu") as llm:
        scores = [one.outputs.score for one in llm.score(QUERY, TEXTS)]
    order = sorted(range(3), key=lambda index: -scores[index])
    server = Served(model, tmp_path, 1, "--device", "cpu")
    address = {"api_key": "none", "base_url": server.url.removesuffix("/v1"), "max_retries": 0}
    try:
        asked = {"model": "tiny", "query": QUERY, "documents": TEXTS}
        second = cohere.ClientV2(**address).rerank(**asked, top_n=2)
        assert [one.index for one in second.results] == order[:2]
        assert [one.relevance_score for one in second.results] == [scores[i] for i in order[:2]]
        client = cohere.Client(**address)
        first = client.rerank(**asked, return_documents=True)
        assert [one.index for one in first.results] == order
        assert [one.document.text for one in first.results] == [TEXTS[i] for i in order]
        turned = client.rerank(model="tiny", query=QUERY, documents=TEXTS[::-1])
        assert {2 - one.index: one.relevance_score for one in turned.results} == dict(
            enumerate(scores)
        )
        with pytest.raises(cohere.errors.BadRequestError) as refused:
            client.rerank(model="tiny", query="", documents=TEXTS)
        assert "a query is empty" in str(refused.value.body)
    finally:
        server.end()


@pytest.mark.slow
def test_langchains_embeddings_are_those_of_llm(tiny_model, tmp_path):
    langchain = pytest.importorskip("langchain_openai", reason="pip install .[agents]")
    model = sentence_folder(tiny_model("qwen3", **SMALL), tmp_path / "model")
    with LLM(str(model), kv_pages=24, device="cpu") as llm:
        vectors = [one.outputs.embedding for one in llm.embed([*TEXTS, QUERY])]
    server = Served(model, tmp_path, 1, "--device", "cpu")
    try:
        embeddings = langchain.OpenAIEmbeddings(
            model="tiny",
            base_url=server.url,
            api_key="none",
            check_embedding_ctx_length=False,  # else it sends ids of OpenAI's tokenizer
        )
        assert embeddings.embed_documents(TEXTS) == vectors[:3]
        assert embeddings.embed_query(QUERY) == vectors[3]
    finally:
        server.end()


@pytest.mark.slow
def test_langchains_reranker_has_the_scores_of_llm(tiny_model, tmp_path):
    reason = "pip install langchain-cohere, which wants cohere 5"
    langchain = pytest.importorskip("langchain_cohere", reason=reason)
    model = classifier(tiny_model("qwen3", **SMALL), tmp_path / "model", 1)
    with LLM(str(model), kv_pages=24, device="cpu") as llm:
        scores = [one.outputs.score for one in llm.score(QUERY, TEXTS)]
    server = Served(model, tmp_path, 1, "--device", "cpu")
    address = {"cohere_api_key": "none", "base_url": server.url.removesuffix("/v1")}
    try:
        reranker = langchain.CohereRerank(model="tiny", top_n=3, **address)
        found = reranker.rerank(documents=TEXTS, query=QUERY)
        assert [one["index"] for one in found] == sorted(range(3), key=lambda i: -scores[i])
        assert all(one["relevance_score"] == scores[one["index"]] for one in found)
    finally:
        server.end()
