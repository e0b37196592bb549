"""lm-eval against a server: its log-likelihoods and texts are those of transformers."""

import math

import pytest
import torch

from tests.lib.server.served import Served

completions = pytest.importorskip("lm_eval.models.openai_completions")
instances = pytest.importorskip("lm_eval.api.instance")
CASES = (
    ("The for statement is", " used to iterate"),
    ("A list", " of names and a module"),
    ("import", " os"),
    ("x = [1, 2", ", 3]"),
    ("# smile", " 😀😃🚀"),
    ("# 你好", "，世界"),
)
TEXTS = ("Modules can contain executable statements.", "def f(x):\n    return x\n" * 40)
TOLERANCE = 2e-4  # of a sum of log-probabilities in fp32, relative


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama", kv_heads=2)


@pytest.fixture(scope="module")
def harness(model, tmp_path_factory):
    served = Served(model, tmp_path_factory.mktemp("l"), 1)
    yield completions.LocalCompletionsAPI(
        base_url=f"{served.url}/completions",
        model="tiny",
        tokenizer=str(model),
        tokenizer_backend="huggingface",
        max_length=128,
        batch_size=2,
        num_concurrent=1,
    )
    assert served.end() == 0, served.log.read_text()


@pytest.fixture(scope="module")
def reference(model):
    transformers = pytest.importorskip("transformers")
    found = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return found.eval()


def ask(kind: str, *arguments) -> list:
    return [
        instances.Instance(request_type=kind, doc={}, arguments=given, idx=place)
        for place, given in enumerate(arguments)
    ]


def score(reference, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Sum of log-probabilities of `continuation`, and whether each was the likeliest."""
    with torch.no_grad():
        logits = reference(torch.tensor([context + continuation])).logits[0].double()
    rows = logits[len(context) - 1 : -1].log_softmax(-1)
    chosen = rows.gather(1, torch.tensor(continuation)[:, None])
    return float(chosen.sum()), bool((rows.argmax(-1) == torch.tensor(continuation)).all())


def test_loglikelihoods_and_the_accuracy_they_give(harness, reference):
    found = harness.loglikelihood(ask("loglikelihood", *CASES))
    expected = [
        score(reference, *harness._encode_pair(context, continuation))
        for context, continuation in CASES
    ]
    for (value, greedy), (wanted, likeliest) in zip(found, expected, strict=True):
        assert math.isclose(value, wanted, rel_tol=TOLERANCE) and greedy == likeliest
    # Which continuation of each pair of cases wins is a task's accuracy.
    winners = [found[i][0] > found[i + 1][0] for i in (0, 2)]
    assert winners == [expected[i][0] > expected[i + 1][0] for i in (0, 2)]


def test_what_the_model_would_say_is_greedy_and_what_it_would_not_is_not(harness, reference):
    context = harness.tok_encode("A list is")
    ids = torch.tensor([context])
    with torch.no_grad():
        said = reference.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    said = said[0, len(context) :].tolist()
    other = [(said[0] + 1) % 1000, *said[1:]]
    given = [(("", ""), context, said), (("", ""), context, other)]
    found = harness._loglikelihood_tokens(given, disable_tqdm=True)
    assert [greedy for _, greedy in found] == [True, False]
    for (value, _), (_, context, continuation) in zip(found, given, strict=True):
        wanted, _ = score(reference, context, continuation)
        assert math.isclose(value, wanted, rel_tol=TOLERANCE)


def test_rolling_loglikelihoods_over_several_windows(harness, reference):
    found = harness.loglikelihood_rolling(ask("loglikelihood_rolling", *((t,) for t in TEXTS)))
    utilities = pytest.importorskip("lm_eval.utils")
    for text, value in zip(TEXTS, found, strict=True):
        windows = utilities.get_rolling_token_windows(
            token_list=harness.tok_encode(text),
            prefix_token=harness.prefix_token_id,
            max_seq_len=harness.max_length - 1,
            context_len=1,
        )
        pairs = [utilities.make_disjoint_window(window) for window in windows]
        wanted = sum(score(reference, context, rest)[0] for context, rest in pairs)
        assert math.isclose(value, wanted, rel_tol=TOLERANCE)
    assert len(pairs) > 1


def test_generated_texts(harness, reference, model):
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(model)
    limits = {"until": ["\n\n\n"], "max_gen_toks": 10, "temperature": 0}
    found = harness.generate_until(ask("generate_until", *((c, dict(limits)) for c, _ in CASES)))
    for (context, _), text in zip(CASES, found, strict=True):
        ids = torch.tensor([harness.tok_encode(context)])
        with torch.no_grad():
            out = reference.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0)
        wanted = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert text == wanted.partition("\n\n\n")[0]
