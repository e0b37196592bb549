"""mteb gives a model one score, whatever the batch: a small task of its own (`.[evaluation]`)."""

import random

import pytest
import torch

from tests.lib.models.pooled_models import sentence_folder
from tpdet import LLM

WORDS = "a the for list loop value text reads writes holds every other first last of in is".split()


def texts(count, seed):
    """Texts of 3 to 30 words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, 30))) for _ in range(count)]


def task():
    """Pairs of texts, of which a score says how many words they share; nothing is downloaded."""
    from datasets import Dataset
    from mteb.abstasks.sts import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    class SharedWords(AbsTaskSTS):
        metadata = TaskMetadata(
            name="SharedWords",
            description="Pairs of texts by the words that they share.",
            dataset={"path": "none", "revision": "1"},
            type="STS",
            eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
        )
        max_score = 1

        def load_data(self, **_):
            first, second = texts(40, 1), texts(40, 2)
            words = [[set(text.split()) for text in some] for some in (first, second)]
            score = [len(a & b) / len(a | b) for a, b in zip(*words, strict=True)]
            pairs = {"sentence1": first, "sentence2": second, "score": score}
            self.dataset, self.data_loaded = {"test": Dataset.from_dict(pairs)}, True

    return SharedWords()


def encoder(llm, batches):
    """An encoder of mteb over `LLM.embed`, which notes the sizes of its batches."""
    from mteb.models.abs_encoder import AbsEncoder

    class Encoder(AbsEncoder):
        def __init__(self):
            pass

        def encode(self, inputs, **_):
            rows = []
            for batch in inputs:
                batches.add(len(batch["text"]))
                found = llm.embed(list(batch["text"]), use_tqdm=False)
                rows += [one.outputs.embedding for one in found]
            return torch.tensor(rows).numpy()

    return Encoder()


@pytest.mark.slow
def test_a_task_of_mteb_has_one_score_for_any_batch(tiny_model, tmp_path):
    mteb = pytest.importorskip("mteb", reason="pip install .[evaluation]")
    shape = {"layers": 1, "hidden": 128, "intermediate": 256, "dtype": "bfloat16"}
    model, scores, batches = (
        sentence_folder(tiny_model("qwen3", **shape), tmp_path / "m"),
        [],
        set(),
    )
    with LLM(str(model), kv_pages=64, device="cpu") as llm:
        for size in (1, 7, 40):
            settings = {"encode_kwargs": {"batch_size": size}, "cache": None, "co2_tracker": False}
            found = mteb.evaluate(
                encoder(llm, batches), task(), show_progress_bar=False, **settings
            )
            scores.append(found.task_results[0].scores["test"][0])
    assert {1, 7, 40} <= batches
    numbers = [{k: v for k, v in score.items() if isinstance(v, float)} for score in scores]
    assert len(numbers[0]) > 4 and numbers[0] == numbers[1] == numbers[2]
