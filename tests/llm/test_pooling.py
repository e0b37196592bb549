"""`LLM.embed`, `score`, `classify` and `reward`, and the ids that texts become."""

import asyncio

import pytest
import torch

from tests.lib.models.pooled_models import classifier, sentence_folder
from tests.lib.server.harness import write_tokenizer
from tpdet import LLM, AsyncLLM, PoolingParams
from tpdet.errors import RequestError, UsageError
from tpdet.kernels.exact.pooling import activated, similarity
from tpdet.text.pooled_prompts import INSTRUCTION, PooledPrompts, answering_tokens
from tpdet.text.tokenizer import Tokenizer

SMALL = {"layers": 1, "hidden": 128, "intermediate": 256}
TEXTS = ["The for statement", "A list is a sequence of values", "def f(x): return x"]


@pytest.fixture(scope="module")
def plain(tiny_model):
    return tiny_model("qwen3", **SMALL)


def opened(model, **settings):
    return LLM(str(model), kv_pages=24, max_model_len=512, device="cpu", **settings)


def test_vectors_have_vllms_shape_and_one_set_of_bits(plain, tmp_path):
    folder = sentence_folder(plain, tmp_path / "folder", prompts={"query": "Query: "})
    with opened(folder) as llm:
        found = llm.embed(TEXTS)
        assert [each.outputs.hidden_size for each in found] == [128] * 3
        assert all(each.finished and len(each.digest) == 64 for each in found)
        ids = [*found[1].prompt_token_ids]
        for same in (TEXTS[1], {"prompt": TEXTS[1]}, {"prompt_token_ids": ids}, ids):
            (alone,) = llm.embed(same)
            assert alone.outputs == found[1].outputs and alone.digest == found[1].digest
        (named,) = llm.embed(TEXTS[1], prompt_name="query")
        assert named.outputs == llm.embed("Query: " + TEXTS[1])[0].outputs != found[1].outputs
        (cut,) = llm.embed(TEXTS[1], pooling_params=PoolingParams(dimensions=16))
        assert len(cut.outputs.embedding) == 16 and cut.digest != found[1].digest
        scores = llm.score(TEXTS[0], TEXTS)
        assert [each.outputs for each in llm.score(TEXTS[0], TEXTS[::-1])[::-1]] == [
            each.outputs for each in scores
        ]
        rows = [torch.tensor(each.outputs.embedding) for each in found]
        assert scores[2].outputs.score == float(similarity(rows[0], rows[2]))
        with pytest.raises(RequestError, match="prompt_name 'other': the model has query"):
            llm.embed("a", prompt_name="other")
        with pytest.raises(RequestError, match="truncate_prompt_tokens '9' must be -1, or from 1"):
            llm.embed("a", truncate_prompt_tokens="9")
        with pytest.raises(RequestError, match="a text is empty"):
            llm.embed([""])
        with pytest.raises(RequestError, match=r"\d{4} tokens, over the model's context of 512"):
            llm.embed("a b, c. " * 205)
        (kept,) = llm.embed("a b, c. " * 205, truncate_prompt_tokens=-1)
        assert len(kept.prompt_token_ids) == 512
        assert len(llm.embed([[5] * 600], truncate_prompt_tokens=-1)[0].prompt_token_ids) == 512
        assert llm.embed([5, 6, 7], truncate_prompt_tokens=2)[0].prompt_token_ids == (5, 6)
        short = PoolingParams(dimensions=16)
        (score,) = llm.score(TEXTS[0], TEXTS[1], pooling_params=short)
        rows = [
            torch.tensor(each.outputs.embedding) for each in llm.embed(TEXTS, pooling_params=short)
        ]
        assert score.outputs.score == float(similarity(rows[0], rows[1])) != scores[1].outputs.score
        for prompt in ("a", [5, 6, 7]):
            for size in (0, -2, 513, True, 1.5, "2"):
                with pytest.raises(RequestError, match=f"truncate_prompt_tokens {size!r} must"):
                    llm.embed(prompt, truncate_prompt_tokens=size)
        for other in (5, "x", [None], {"dimensions": 1}):
            with pytest.raises(UsageError, match=r"pooling_params is .*: give PoolingParams"):
                llm.embed("a", pooling_params=other)
            with pytest.raises(UsageError, match=r"pooling_params is .*: give PoolingParams"):
                llm.score("a", "b", pooling_params=other)
        with pytest.raises(RequestError, match=r"prompt_name \['query'\]: the model has query"):
            llm.embed("a", prompt_name=["query"])
        with pytest.raises(RequestError, match="reads no instruction"):
            llm.score("a", "b", instruction="c")
        for data in (None, 5, b"a", {"a": 1}):
            with pytest.raises(RequestError, match=r"data_2 is .*: give a text or a list"):
                llm.score("a", data)
        with pytest.raises(UsageError, match=r"classify is not for this model .* embed or score"):
            llm.classify("a")
        with pytest.raises(RequestError, match="--task generate"):
            llm.generate("a")
        with pytest.raises(RequestError, match="are not recorded: keep their digests"):
            llm.record(found)
        assert llm.embed(TEXTS)[1].digest == found[1].digest, "a refused call leaves it as it was"


def test_labels_rewards_and_scores_of_a_head(plain, tmp_path):
    with opened(classifier(plain, tmp_path / "three", 3)) as llm:
        found, raw = llm.classify(TEXTS), llm.reward(TEXTS)
        assert [each.outputs.num_classes for each in found] == [3, 3, 3]
        for each, row in zip(found, raw, strict=True):
            assert each.outputs.probs == activated(row.outputs.data, "softmax").tolist()
        ids = list(found[0].prompt_token_ids)
        assert llm.classify([[*ids, 0, 0]])[0].outputs == found[0].outputs, "padding is not read"
        with pytest.raises(RequestError, match="padding alone"):
            llm.classify([[0, 0]])
        with pytest.raises(UsageError, match="a head of one label, this model has 3"):
            llm.score("a", "b")
    with opened(classifier(plain, tmp_path / "one", 1)) as llm:
        scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS)]
        assert scores == [llm.score(TEXTS[0], each)[0].outputs.score for each in TEXTS]
        assert all(0.0 < score < 1.0 for score in scores) and len({*scores}) == 3


def test_a_reranker_answers_yes_or_no_and_cuts_the_document_alone(plain, monkeypatch):
    monkeypatch.setattr(PooledPrompts, "answering_tokens", lambda self: (17, 900))
    with opened(plain, task="score") as llm:
        scores = llm.score(TEXTS[0], TEXTS)
        assert [each.outputs for each in llm.score(TEXTS[0], TEXTS[::-1])[::-1]] == [
            each.outputs for each in scores
        ]
        whole = llm.get_tokenizer().decode(scores[1].prompt_token_ids)
        asked = f"<Instruct>: {INSTRUCTION}\n<Query>: {TEXTS[0]}\n<Document>: {TEXTS[1]}<|im_end|>"
        assert asked in whole and whole.endswith("<think>\n\n</think>\n\n")
        ids = scores[1].prompt_token_ids
        (cut,) = llm.score(TEXTS[0], TEXTS[1], truncate_prompt_tokens=len(ids) - 2)
        shown = llm.get_tokenizer().decode(cut.prompt_token_ids)
        assert len(cut.prompt_token_ids) == len(ids) - 2 and shown.endswith("</think>\n\n")
        assert f"<Query>: {TEXTS[0]}\n<Document>: A" in shown
        with pytest.raises(RequestError, match="the query has"):
            llm.score(TEXTS[0], TEXTS[1], truncate_prompt_tokens=40)
        with pytest.raises(RequestError, match="a document is empty"):
            llm.score("a", ["b", ""])
        with pytest.raises(RequestError, match="3 texts against 2"):
            llm.score(TEXTS, TEXTS[:2])


def test_an_async_model_answers_many_calls_at_a_time(plain, tmp_path):
    settings = {"kv_pages": 24, "max_model_len": 512, "device": "cpu"}
    folder = sentence_folder(plain, tmp_path / "folder", prompts={"query": "Query: "})
    with LLM(str(folder), **settings) as llm:
        expected, scores = llm.embed(TEXTS, prompt_name="query"), llm.score(TEXTS[0], TEXTS)

    async def run():
        async with AsyncLLM(str(folder), **settings) as llm:
            calls = [llm.embed(text, prompt_name="query") for text in TEXTS]
            found = await asyncio.gather(*calls, llm.score(TEXTS[0], TEXTS))
            assert [one.digest for (one,) in found[:3]] == [one.digest for one in expected]
            assert [one.outputs for one in found[3]] == [one.outputs for one in scores]
            with pytest.raises(RequestError, match="a text is empty"):
                await llm.embed(["a", ""])
            with pytest.raises(UsageError, match="classify is not for this model"):
                await llm.classify("a")
            with pytest.raises(RequestError, match="--task generate"):
                await anext(llm.generate("a"))
            stopped = asyncio.create_task(llm.embed([[1] * 500] * 50))
            await asyncio.sleep(0)
            stopped.cancel()
            (again,) = await llm.embed(TEXTS[1], prompt_name="query")
            assert again.digest == expected[1].digest
        with pytest.raises(UsageError, match="closed"):
            await llm.embed("a")

    asyncio.run(run())


def test_labels_and_rewards_of_an_async_model(plain, tmp_path):
    settings = {"kv_pages": 24, "max_model_len": 512, "device": "cpu"}
    model = classifier(plain, tmp_path / "three", 3)
    with LLM(str(model), **settings) as llm:
        expected, raw = llm.classify(TEXTS), llm.reward(TEXTS)

    async def run():
        async with AsyncLLM(str(model), **settings) as llm:
            found = await llm.classify(TEXTS)
            assert [one.outputs for one in found] == [one.outputs for one in expected]
            rewards = await llm.reward(TEXTS)
            assert [one.digest for one in rewards] == [one.digest for one in raw]
            assert torch.equal(rewards[0].outputs.data, raw[0].outputs.data)

    asyncio.run(run())


def test_a_model_that_is_no_reranker_is_refused_when_it_starts(plain):
    with pytest.raises(UsageError, match="task score: 'yes' is 2 tokens of this model's vocab"):
        opened(plain, task="score")


def test_yes_and_no_are_read_in_the_vocabulary(tmp_path):
    write_tokenizer(tmp_path, marks=["no", "yes"])
    assert answering_tokens(Tokenizer.load(tmp_path)) == (260, 259)


def test_a_model_that_generates_says_how_it_would_pool(plain):
    with opened(plain) as llm:
        for call in (llm.embed, llm.classify, llm.reward):
            with pytest.raises(UsageError, match="start it with --task embed"):
                call("a")
        with pytest.raises(UsageError, match="--task score"):
            llm.score("a", "b")
