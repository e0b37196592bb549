"""Pauses and changes of weights on a GPU, over graphs and overlapping steps: bits, and times."""

import time

from tests.engine.test_interventions import (
    REQUESTS,
    Driver,
    all_bits,
    compared_spans,
    disturbed_bits,
)
from tests.gpu.lib.suite import Check
from tests.lib.engine_harness import ask
from tpdet.tools.synthetic.make_model import make_model

SETTINGS = {"device": "cuda", "dtype": "bfloat16", "kv_pages": 96}
SLACK = 0.010  # seconds, beside one step, that a pause may take


def models(folder, name):
    """Two of the same shapes."""
    shape = {"layers": 4, "kv_heads": 2, "dtype": "bfloat16"}
    return [
        make_model(folder / f"{name}-{seed}", like="qwen3", seed=seed, **shape) for seed in (1, 2)
    ]


def driver(model, requests):
    """An engine with graphs, whose steps overlap."""
    return Driver(model, requests, ahead=True, **SETTINGS)


def check_recompute(folder):
    """Requests that are computed again, at any time, go on with the same bits."""
    model, _ = models(folder, "recompute")
    undisturbed = all_bits(driver(model, REQUESTS).finish())
    for rounds in ((1, 2, 3), (4, 1), (2, 2, 2, 2)):
        assert disturbed_bits(driver(model, REQUESTS), rounds) == undisturbed, rounds
    return {"choices": len(undisturbed)}


def check_other_weights(folder):
    """Graphs stay valid, and each span's tokens are those of a fresh engine with its weights."""
    first, second = models(folder, "turned")
    engine = driver(first, REQUESTS[:3])
    fresh = {model: driver(model, ()) for model in (first, second)}
    weights = [first, second, first]
    for model in weights[1:]:
        engine.step(3)
        engine.turn_to(model)
    engine.finish()
    tokens, spans = compared_spans(engine, REQUESTS[:3], [fresh[model] for model in weights])
    return {"tokens": tokens, "spans": spans}


def check_pause(folder):
    """From a pause to a quiet engine it takes no longer than a step, and 10 ms."""
    model, _ = models(folder, "paused")
    crowd = [ask(f"n{i}", [7 * i + 1, 5, 9], max_tokens=400) for i in range(8)]
    engine = driver(model, crowd)
    engine.step(20)
    steps, pauses = [], []
    for _ in range(20):
        began = time.perf_counter()
        engine.step(1)
        stepped = time.perf_counter()
        engine.engine.interventions.freeze(True)
        engine.settle()
        steps.append(stepped - began)
        pauses.append(time.perf_counter() - stepped)
        engine.engine.interventions.freeze(False)
        engine.step(2)
    assert max(pauses) <= max(steps) + SLACK, (max(pauses), max(steps))
    return {"pause_ms": 1e3 * max(pauses), "step_ms": 1e3 * max(steps)}


def intervention_checks(folder):
    """All of them."""
    return [
        Check("computed again", check_recompute, (folder,)),
        Check("other weights", check_other_weights, (folder,)),
        Check("pause", check_pause, (folder,)),
    ]
