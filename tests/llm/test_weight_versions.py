"""Results of `LLM` and `AsyncLLM` say which weights computed which tokens."""

import pytest

from tests.engine.test_interventions import Driver
from tests.lib.engine_harness import ask
from tpdet.errors import RequestError
from tpdet.llm.predictions import read_resume
from tpdet.llm.results import ResultWriter, WeightVersionSpan
from tpdet.requests.engine_facts import AnswerOrigin
from tpdet.text.outputs import RequestAssembler

REQUEST = ask("a", range(40), max_tokens=8, seed=3, temperature=1.0)


@pytest.fixture(scope="module")
def models(tiny_model):
    """Two of the same shapes."""
    shape = {"kv_heads": 2, "hidden": 64, "intermediate": 128, "layers": 1, "vocab": 1024}
    return [tiny_model("qwen3", seed=seed, **shape) for seed in (1, 2)]


def written(driver):
    """The result of the one request."""
    assembler = RequestAssembler(REQUEST, None)
    for output in driver.heard["a", 0]:
        assembler.push(output)
    return ResultWriter(driver.engine, None).write("a", None, assembler.answer(), 3)


def test_an_answer_of_one_version_names_it_and_has_its_digests(models):
    driver = Driver(models[0], [REQUEST])
    driver.finish()
    first = driver.engine.versions.digest
    before = written(driver)
    assert before.outputs[0].weight_versions == (WeightVersionSpan("default", 0, 8, first),)
    assert before.replay_digest is not None
    driver.turn_to(models[1])  # what was computed before keeps its names
    assert written(driver) == before


def test_an_answer_over_several_has_a_span_for_each_and_no_digest(models):
    driver = Driver(models[0], [REQUEST])
    driver.step(3)
    first = driver.engine.versions.digest
    driver.turn_to(models[1])
    driver.engine.versions.rename("step-1")
    driver.finish()
    result, second = written(driver), driver.engine.versions.digest
    assert first != second
    assert result.outputs[0].weight_versions == (
        WeightVersionSpan("default", 0, 3, first),
        WeightVersionSpan("step-1", 3, 8, second),
    )
    assert result.replay_digest is None and result.system_fingerprint is None
    with pytest.raises(RequestError, match="several weights cannot be resumed"):
        read_resume(result, REQUEST.params, False, AnswerOrigin("c" * 64, second))


def test_tokens_over_old_keys_say_so(models):
    driver = Driver(models[0], [REQUEST])
    driver.step(3)
    driver.engine.interventions.freeze(True, keep_keys=True)
    driver.turn_to(models[1])
    driver.engine.interventions.freeze(False)
    driver.finish()
    result = written(driver)
    assert [span.old_keys for span in result.outputs[0].weight_versions] == [False, True]
    assert result.replay_digest is None
