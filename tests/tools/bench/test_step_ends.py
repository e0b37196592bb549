"""Rates of steady steps."""

from types import SimpleNamespace

from tpdet.requests.request import PromptOutput, TokenOutput
from tpdet.tools.bench import load
from tpdet.tools.bench.load import StepEnds


def test_only_steps_in_which_all_sequences_got_tokens_tell_the_rate(monkeypatch):
    """Each step takes a second; one of two sequences ends before the other."""
    now, steps = [0.0], []
    monkeypatch.setattr(load.time, "perf_counter", lambda: now[0])
    token = lambda choice: TokenOutput("a", choice, 5, 0.0)
    prompt = PromptOutput("a", (None,), ((),), (0,))

    def step():
        now[0] += 1.0
        return steps.pop(0)

    engine = SimpleNamespace(step=step)
    ends = StepEnds(engine)
    both = [token(0), token(1), token(1), token(1)]
    steps += [[prompt], [token(0)], *([both] * 12), *([[token(1)]] * 9)]
    while steps:
        engine.step()
    assert ends.steady(2) == 4.0
    assert ends.steady(1) == 1.0 and ends.steady(3) is None
    ends.clear()
    assert ends.steady(2) is None
