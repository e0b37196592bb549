"""A draft model changes no bit of an answer, draws as the model does, and fails without harm."""

import json
import logging
import shutil
from functools import partial

import pytest

from tests.engine.test_drafts import PROMPT, REQUESTS, SAMPLED, assert_same
from tests.lib.engine_harness import ask, draft_anew, leave_out_freely, run, small_config
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.errors import NotFoundError, ResourceError, UsageError
from tpdet.runner import Runner
from tpdet.runner.start.compile_ahead import CompilingAhead
from tpdet.scheduler.speculator import DraftCounts
from tpdet.speculative.acceptance import AcceptanceRates
from tpdet.speculative.draft_model import start
from tpdet.speculative.draft_model.model import DraftModel
from tpdet.speculative.draft_model.pair import read_draft_model
from tpdet.speculative.draft_model.start import start_draft_model
from tpdet.speculative.draft_model.times import DraftTimes

ALIKE = [
    ask("greedy", PROMPT, max_tokens=30),
    ask("sampled", PROMPT[:33], max_tokens=30, **SAMPLED),
    ask("filtered", PROMPT[5:30], max_tokens=30, top_p=0.9, top_k=50, min_p=0.01, **SAMPLED),
    ask("choices", PROMPT[3:60], max_tokens=30, n=2, **SAMPLED),
]


def still(engine, proof=0):
    """No time passes: what pays is assumed. proof: right drafts before any is verified."""
    draft_anew(engine, clock=lambda: 1.0, rates=AcceptanceRates(proof=proof))
    leave_out_freely(engine)
    if engine.draft_model is not None:
        engine.draft_model.times.clock = lambda: 1.0


def drafting(model, other, requests, counts, change=None, proof=0, **how):
    """Run with `other` as the draft model; counts and steps go to `counts`."""

    def prepare(engine):
        still(engine, proof)
        if change is not None:
            change(engine)

    def watch(engine, step):
        if engine.draft_model is not None:
            counts.update(engine.statistics().drafters)
            counts["steps"] = step

    settings = {"drafts": "auto", "draft_model": str(other)} | how
    return run(model, requests, look=False, change=prepare, each_step=watch, **settings)


@pytest.fixture(scope="module")
def plain(tiny_model):
    """Every answer without drafts."""
    return run(tiny_model("qwen3", kv_heads=2), [*REQUESTS, *ALIKE[2:3]], look=False)


@pytest.mark.parametrize("how", [pytest.param({}, marks=pytest.mark.slow), {"ahead": True}])
def test_the_model_itself_is_always_right_at_any_temperature(tiny_model, how):
    model, counts = tiny_model("qwen3", kv_heads=2), {}
    drafting(model, model, ALIKE, counts, **how)
    found = counts["draft_model"]
    assert found.accepted_tokens == found.draft_tokens > 80
    assert counts["steps"] < 25


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"ahead": True, "preempt_every": 5},
        {"max_num_batched_tokens": 40, "kv_pages": 6, "max_num_seqs": 3},
        {"max_num_seqs": 1},
        {"tp": 2},
        {"tp": 2, "ahead": True, "max_num_batched_tokens": 30},
    ],
    ids=str,
)
def test_another_model_changes_no_bit(tiny_model, plain, how):
    model, other = tiny_model("qwen3", kv_heads=2), tiny_model("qwen3", kv_heads=2, seed=5)
    counts = {}
    found = drafting(model, other, REQUESTS, counts, **how)
    assert_same(found, plain, REQUESTS)
    assert counts["draft_model"].draft_tokens > 0


def draft_by(engine, config, fallback=None):
    """Have another draft model, which may know other token ids."""
    mine = DraftModel(Runner.start(config, SoloWorld()), engine.model_config.vocab_size)
    mine.draft = partial(mine.draft, fallback=fallback)
    engine.draft_model = mine
    still(engine)


@pytest.mark.parametrize("vocabulary", [1024, 1300])
def test_token_ids_that_only_one_of_both_models_has_are_no_drafts(tiny_model, plain, vocabulary):
    """Fewer: sequences with other ids have no drafts. More: drafts end before such an id."""
    model, other = tiny_model("qwen3", kv_heads=2), tiny_model("qwen3", vocab=vocabulary)
    requests = [REQUESTS[1], ask("few ids", PROMPT[:3], max_tokens=9)]
    answer, counts, asked = plain.tokens("sampled"), {}, set()

    def fallback(sequence, drafts):
        asked.add(sequence.request_id)
        told = answer[len(sequence.tokens) - sequence.prompt_length :][:2]
        return [*told, vocabulary - 1][: len(drafts)]

    found = drafting(
        model,
        model,
        requests,
        counts,
        lambda engine: draft_by(engine, small_config(other), fallback),
    )
    assert found.answer("sampled") == plain.answer("sampled")
    assert max(REQUESTS[1].prompt_token_ids) >= 1024 > max(PROMPT[:3])
    assert ("sampled" in asked) is (vocabulary == 1300)
    drafts = counts["draft_model"]
    assert drafts.draft_tokens > 0
    assert vocabulary == 1024 or drafts.accepted_at[0] > 0 == drafts.accepted_at[2]


def test_pages_that_few_sequences_share_change_no_bit(tiny_model, plain):
    """Two pages for three sequences: their copies push each other out, or do without drafts."""
    model, counts = tiny_model("qwen3", kv_heads=2), {}
    requests = REQUESTS[1:4]

    def short(engine):
        draft_by(engine, small_config(model, kv_pages=2))

    found = drafting(model, model, requests, counts, short)
    assert_same(found, plain, requests)
    assert counts["draft_model"].accepted_tokens > 20


class NeverDone:
    """An event of a GPU that never comes."""

    def query(self):
        return False


FAULTS = {
    "raises": "raised ZeroDivisionError: planted",
    "nan": "raised NumericalError",
    "slow": "raised TimeoutError: 8.0 s of drafting, 4.0 of the last step: over 30.0 s for all",
    "slow prompt": "raised TimeoutError: 31.0 s of drafting, 31.0 of the last step: over 30.0 s",
    "hangs": "raised TimeoutError: 0.",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_draft_model_that_fails_is_switched_off(tiny_model, plain, monkeypatch, caplog, fault):
    model, counts, calls = tiny_model("qwen3", kv_heads=2), {}, []

    def failing(engine):
        mine = engine.draft_model
        drafts, launch, now = mine.draft, mine.runner.launch, [1.0]

        def draft(wanted):
            calls.append(len(wanted))
            if fault == "raises":
                raise ZeroDivisionError("planted")
            return drafts(wanted)

        def slow_launch(plan, results):
            now[0] += 31.0 if fault == "slow prompt" else 4.0
            event = launch(plan, results)
            return NeverDone() if fault == "hangs" else event

        monkeypatch.setattr(mine, "draft", draft)
        if fault == "nan":
            mine.runner.model.layers[0].norms.before_attention.weight.fill_(float("nan"))
        if fault == "hangs":
            mine.times = DraftTimes(0.2)
        if fault.startswith("slow"):
            mine.times.clock = lambda: now[0]
        if fault not in ("nan", "raises"):
            monkeypatch.setattr(mine.runner, "launch", slow_launch)

    with caplog.at_level(logging.WARNING, logger="tpdet.engine"):
        found = drafting(model, model, REQUESTS[1:2], counts, failing)
    assert_same(found, plain, REQUESTS[1:2])
    assert len(calls) == 1
    assert counts["draft_model"] == DraftCounts(switched_off=1)
    (said,) = [it.getMessage() for it in caplog.records if "switched off" in it.getMessage()]
    assert said.startswith(f"drafter draft_model {FAULTS[fault]}")
    assert said.endswith("answers go on; its weights and KV pages stay until the end")


def test_a_gpu_without_room_for_the_model_itself_is_refused_before_the_draft_model_loads(
    tiny_model, monkeypatch
):
    def no_room(config, partition, device):
        raise ResourceError(f"no room for {config.model}")

    monkeypatch.setattr(start, "check_room", no_room)
    monkeypatch.setattr(Runner, "start", lambda *given: pytest.fail("a model is loaded"))
    model = tiny_model("qwen3")
    config = small_config(model, drafts="auto", draft_model=str(model))
    with pytest.raises(ResourceError, match=f"no room for {model}"):
        Engine(config, SoloWorld())


def test_the_start_of_the_model_itself_is_no_late_compilation(tiny_model, monkeypatch):
    closed = []
    monkeypatch.setattr(CompilingAhead, "close", lambda ahead: closed.append(ahead))
    model = tiny_model("qwen3")
    config = small_config(model, drafts="auto", draft_model=str(model))
    drafts = start_draft_model(config, SoloWorld())
    assert closed == 2 * [drafts.runner.loaded.ahead], "at the end of its start, and for good"


def test_what_a_draft_may_take_follows_what_drafts_took():
    """Seconds of an H200 first; a call's first step, with prompts, has the call's limit only."""
    now = [100.0]
    times = DraftTimes(60.0, lambda: now[0])

    def call(*short, prompt=0.0, sequences=1):
        """What `short` steps take behind the first, which computes a prompt."""
        times.begin(sequences)
        for seconds in (prompt, *short):
            now[0] += seconds
            times.end(short=seconds != prompt)
        times.finish()

    for seconds, known in ((0.003, 0.0), (0.002, 0.0), (0.001, 0.001)):
        call(seconds, seconds)
        assert times.seconds(1) == pytest.approx(known)
    times.begin(1)
    assert times.left(short=True) == pytest.approx(1.0) and times.left(short=False) == 30.0
    call(0.1, 0.1, prompt=20.0)
    call(0.004)
    assert times.seconds(1) == pytest.approx(0.001), "graphs may be captured in the others"
    call(0.004)
    assert times.seconds(1) == pytest.approx(0.0035)
    now[0] += 100.0
    assert times.seconds(1) == pytest.approx(0.001)  # asked again, in case it was an accident
    for _ in range(9):
        call(0.2)
    times.begin(1)
    assert times.left(short=True) == pytest.approx(4.0)
    with pytest.raises(TimeoutError, match=r"over 30.0 s for all, 4.0 for one"):
        call(4.1)
    with pytest.raises(TimeoutError, match=r"30.2 s of drafting, 0.2 of the last step"):
        call(0.2, prompt=30.0)
    assert times.seconds(1) < times.seconds(16) < 2 * times.seconds(1), "until it is known"
    for _ in range(3):
        call(0.25, sequences=16)
    assert times.seconds(16) == pytest.approx(0.25) and times.seconds(1) == pytest.approx(0.2)


def test_a_call_is_as_long_as_its_first_step_and_those_behind_it():
    """So many drafts are asked for as pay: a call of one draft says little of the second."""
    now = [100.0]
    times = DraftTimes(60.0, lambda: now[0])

    def call(*steps):
        times.begin(1)
        for seconds in steps:
            now[0] += seconds
            times.end(short=True)
        times.finish()

    for _ in range(3):
        call(0.0015)
    assert times.first_seconds(1) == times.seconds(1) == pytest.approx(0.0015)
    for _ in range(3):
        call(0.0015, 0.0009, 0.0011)
    assert times.seconds(1) == pytest.approx(0.001)
    assert times.first_seconds(1) == pytest.approx(0.0015)


def test_a_draft_model_that_does_not_fit_is_refused_by_name(tiny_model, tokenizer_folder, tmp_path):
    model, other = tiny_model("qwen3", kv_heads=2), tiny_model("qwen3", vocab=1200)

    def refuse(draft_model, why, error=UsageError, **settings):
        with pytest.raises(error, match=why):
            config = {"model": str(model), "draft_model": str(draft_model)} | settings
            read_draft_model(EngineConfig.from_values(**config))

    refuse(tmp_path / "nowhere", "draft_model .*nowhere does not exist", NotFoundError)
    refuse(other, "token id 1097 is 'Ġlock' there and '<|endoftext|>' in the model")
    refuse(other, "has 1200 token ids, the model has 1100", skip_tokenizer_init=True)
    refuse(tiny_model("qwen3", vocab=2200), "has 2200 token ids, the model has 1100")
    refuse(model, "draft_model and drafts off exclude", drafts="off")
    refuse(model, "draft_model and fixed_batch exclude", fixed_batch=4)
    refuse(model, "draft_model and approximate exclude", approximate=True)
    text = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    for name, files in {"padded": other, "mine": model, "theirs": model}.items():
        shutil.copytree(files, tmp_path / name)
        if name == "theirs":
            text["added_tokens"].append(text["added_tokens"][0] | {"id": 1500, "content": "<odd>"})
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(text))
    refuse(tmp_path / "theirs", "token id 1500 is '<odd>' there", model=str(tmp_path / "mine"))
    refuse(tmp_path / "padded", "has 1200 token ids", skip_tokenizer_init=True)
    for name in ("mine", "padded"):  # the same texts, and ids that have none
        same = {"model": str(tmp_path / "mine"), "draft_model": str(tmp_path / name)}
        assert read_draft_model(EngineConfig.from_values(**same))[0] == tmp_path / name
