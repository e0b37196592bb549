"""llm-comply's tests of the Responses API, unchanged, on a real engine; what fails is named."""

import json
import shutil
from importlib.resources import files

import pytest

from tests.lib.server.harness import write_tokenizer
from tests.lib.server.served import Served
from tests.lib.text.made_conversations import CHATML

comply = pytest.importorskip("llm_comply")

pytestmark = pytest.mark.slow

LETTERS = "abcdefghijklmnop"
REFUSED = {
    "image-input": "input_image",  # text is the only kind of content
    "error-handling": "HTTP 200",  # a request without a model: one is served, so it is answered
}
"""What is not passed, and what the suite says of it."""


@pytest.fixture(scope="module")
def served(tiny_model, tmp_path_factory):
    """A random model that comes to an end: many ids end an answer, or a text with its object."""
    folder = tmp_path_factory.mktemp("comply")
    model, template = folder / "model", folder / "template.jinja"
    shutil.copytree(tiny_model("qwen3", kv_heads=2), model)
    ends = [f'{one}{other}"}}' for one in LETTERS for other in LETTERS]
    write_tokenizer(folder / "tokenizer", marks=("<tool_call>", "</tool_call>", *ends))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "tokenizer" / name, model / name)
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    ids = {"eos_token_id": [*range(261 + len(ends), size)]}
    (model / "generation_config.json").write_text(json.dumps(ids))
    template.write_text(CHATML)
    flags = ("--device", "cpu", "--chat-template", str(template), "--tool-call-parser", "hermes")
    served = Served(model, folder, 1, *flags)
    yield served
    served.end()


def test_all_pass_but_images_and_a_missing_model(served):
    from llm_comply.tests.open_responses import OPEN_RESPONSES_TESTS as tests

    config = comply.ComplianceConfig(served.url, "none", "tiny", verbose=True)
    spec = files("llm_comply") / "specs" / "openresponses.json"
    suite = comply.TestRunner(config, tests, comply.SpecLoader(str(spec))).run_all()
    statuses = {result.id: str(result.status.value) for result in suite.results}
    failed = {r.id: r.errors for r in suite.results if r.status is comply.TestStatus.FAILED}
    print(f"{len(statuses)} tests: {statuses}")
    assert {*failed} == {*REFUSED}, failed
    image = next(result for result in suite.results if result.id == "image-input")
    assert REFUSED["image-input"] in json.dumps(image.response)
    assert REFUSED["error-handling"] in " ".join(failed["error-handling"])
