"""The Responses API of a real engine: llm-comply's tests, unchanged, and openai-agents."""

import json
import shutil
from importlib.resources import files

import openai
import pytest

from tests.lib.server.harness import write_tokenizer
from tests.lib.server.served import Served
from tests.lib.text.made_conversations import CHATML

comply = pytest.importorskip("llm_comply")

pytestmark = pytest.mark.slow

TOOL = {
    "type": "function",
    "name": "look",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
        "additionalProperties": False,
    },
}
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


def test_openai_agents_call_a_tool_that_a_random_model_has_to_call(served):
    agents = pytest.importorskip("agents")
    asked = []

    @agents.function_tool
    def weather(location: str) -> str:
        """Tells the weather."""
        asked.append(location)
        return "It rains."

    client = openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=120)
    agents.set_tracing_disabled(True)
    settings = agents.ModelSettings(
        tool_choice="required", parallel_tool_calls=False, extra_body={"seed": 5}
    )
    agent = agents.Agent(
        name="clerk",
        instructions="Say how the weather is.",
        model=agents.OpenAIResponsesModel("tiny", client),
        model_settings=settings,
        tools=[weather],
    )
    runs = [agents.Runner.run_sync(agent, "Is it raining?") for _ in range(2)]
    inputs = [run.to_input_list() for run in runs]
    assert asked and asked[0] == asked[-1]
    kinds = [item.get("type") for item in inputs[0]]
    assert "function_call" in kinds and "function_call_output" in kinds
    assert inputs[0] == inputs[1]  # ids of calls and items included


def test_whole_streamed_and_repeated_answers_of_an_engine_are_equal(served):
    body = {"model": "tiny", "instructions": "Be brief. " * 60, "seed": 3, "tools": [TOOL]}
    for number, choice in enumerate(("auto", "required", {"type": "function", "name": "look"})):
        fields = body | {"input": f"Look {number}", "tool_choice": choice}
        whole = served.client.responses.create(**fields_of(fields)).to_dict()
        again = served.client.responses.create(**fields_of(fields)).to_dict()
        with served.client.responses.create(**fields_of(fields), stream=True) as stream:
            *_, last = stream
        answers = (whole, again, last.response.to_dict())
        cached = []
        for answer in answers:
            answer |= {"created_at": 0, "completed_at": 0}
            cached.append(answer["usage"]["input_tokens_details"].pop("cached_tokens"))
        assert min(cached[1:]) >= 256  # a page of the preamble
        assert answers[0] == answers[1] == answers[2]
        if choice != "auto":
            call = next(item for item in whole["output"] if item["type"] == "function_call")
            assert {*json.loads(call["arguments"])} == {"path"}


def test_chats_count_the_tokens_that_were_cached_whole_and_streamed(served):
    said = [{"role": "system", "content": "Be brief. " * 60}, {"role": "user", "content": "Go on"}]
    body = {"model": "tiny", "messages": said, "seed": 3, "max_tokens": 4, "n": 2}
    first, again = (served.client.chat.completions.create(**body) for _ in range(2))
    counted = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *_, last = served.client.chat.completions.create(**counted)
    usages = [one.usage.to_dict() for one in (first, again, last)]
    cached = [usage.pop("prompt_tokens_details")["cached_tokens"] for usage in usages]
    assert cached[0] < cached[1] == cached[2] <= usages[0]["prompt_tokens"]
    assert cached[1] >= 256 and usages[0] == usages[1] == usages[2]  # a page of the preamble
    assert first.choices == again.choices and first.tpdet == again.tpdet


def fields_of(body):
    return {**{k: v for k, v in body.items() if k != "seed"}, "extra_body": {"seed": body["seed"]}}
