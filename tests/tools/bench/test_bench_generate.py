"""`tpdet bench generate`: the load, its rows, and another engine's figures beside them."""

import importlib.util
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch

from tests.lib.tree import ROOT
from tpdet.cli import main
from tpdet.errors import UsageError
from tpdet.tools.bench import generate, run
from tpdet.tools.bench.generate_load import Sizes, time_generate
from tpdet.tools.bench.spec import BenchResult

SMALL = Sizes(
    batches=(1, 4),
    prompt=6,
    few=2,
    many=10,
    prefill_prompts=3,
    prefill_tokens=9,
    mixed_requests=5,
    mixed_prompt=(2, 7),
    mixed_tokens=3,
    contexts=(4, 20),
    repeats=3,
    vocabulary=200,
)


class Clockwork:
    """A `generate` that takes a second, and a hundredth for each token of an answer."""

    def __init__(self):
        self.calls = []

    def __call__(self, prompts, tokens):
        self.calls.append((prompts, tokens))
        return 1.0 + 0.01 * tokens


def test_a_step_is_the_difference_of_two_calls():
    clock = Clockwork()
    found = list(time_generate(clock, SMALL))
    assert [(each.case, each.batch, each.context, each.unit) for each in found] == [
        ("LLM decode", 1, 6, "ms"),
        ("LLM decode", 4, 6, "ms"),
        ("LLM prefill", 3, 9, "tokens/s"),
        ("LLM mixed", 5, 8, "s"),
        ("LLM prefill of 4", 1, 4, "tokens/s"),
        ("LLM prefill of 20", 1, 20, "tokens/s"),
        ("LLM decode at 20", 1, 20, "ms"),
        ("LLM decode at 20", 8, 20, "ms"),
    ]
    values = [10.0, 10.0, 27 / 1.01, 1.03, 4 / 1.01, 20 / 1.01, 10.0, 10.0]
    assert [each.value for each in found] == pytest.approx(values)


def test_the_median_counts_and_the_least_and_most_are_told():
    """Calls that take 1, 2, 3, ... hundredths: prompts without a decode step."""
    calls = iter(range(1, 100))
    sizes = replace(SMALL, batches=(), contexts=())
    prefill, mixed = time_generate(lambda prompts, tokens: 0.01 * next(calls), sizes)
    assert (prefill.least, prefill.value, prefill.most) == (27 / 0.04, 27 / 0.03, 27 / 0.02)
    assert (mixed.least, mixed.value, mixed.most) == (0.05, 0.06, 0.07)


def test_no_prompt_is_sent_twice_and_the_load_follows_from_its_seed():
    loads = []
    for seed in (0, 0, 1):
        clock = Clockwork()
        sizes = Sizes(batches=(1, 4), mixed_requests=5, repeats=1, seed=seed)
        list(time_generate(clock, sizes))
        loads.append(clock.calls)
        sent = [tuple(ids) for prompts, _ in clock.calls for ids in prompts]
        assert len(sent) == len(set(sent)) > 30
        assert max(map(max, sent)) < sizes.vocabulary
        assert sizes.longest == 4097
    assert loads[0] == loads[1] != loads[2]


def peer_file(path, *rows, tp=1):
    path.write_text(json.dumps({"peer": "vLLM 9", "tp": tp, "settings": {"a": 1}, "rows": rows}))
    return path


def test_rows_stand_beside_a_peers_of_the_same_load(tiny_model, tmp_path, capsys, monkeypatch):
    """The command with its rank in this process, and with fewer tokens."""
    specs = []

    def here(tps, spec, engine):
        specs.append(spec)
        small = msgspec.structs.replace(spec, sizes=SMALL)
        (tmp_path / "spec").write_bytes(msgspec.json.encode(small))
        assert tps == (1,)
        assert run.main([str(tmp_path / "spec"), str(tmp_path / "result")]) == 0
        found = msgspec.json.decode((tmp_path / "result").read_bytes(), type=BenchResult)
        return list(found.rows), found

    monkeypatch.setattr(generate, "run_worlds", here)
    spread = {"value": 7.0, "least": 6.0, "most": 8.0}
    same = {"case": "LLM prefill", "batch": 3, "context": 9, "unit": "tokens/s"} | spread
    step = {"case": "LLM decode", "batch": 1, "context": 6, "unit": "ms"} | spread
    peers = [
        peer_file(tmp_path / "other.json", step, tp=2),
        peer_file(tmp_path / "vllm.json", same, step, {**step, "batch": 99}),
    ]
    arguments = ["bench", "generate", str(tiny_model()), "--batch", "1,4", "--max-model-len", "400",
                 "--kv-pages", "8", "--contexts", "4,20", "--repeats", "3",
                 "--output", str(tmp_path)]  # fmt: skip
    assert main([*arguments, *(word for path in peers for word in ("--peer", str(path)))]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    (kept,) = json.loads((tmp_path / "peer.cpu.json").read_text())
    assert kept == record and record["bench"] == "peer"
    first, second, prefill, mixed, *_ = record["rows"]
    assert first["peer"] == prefill["peer"] == "vLLM 9"
    assert "peer" not in second and "peer" not in mixed
    assert first["ratio"] == pytest.approx(first["value"] / 7.0)
    assert prefill["ratio"] == pytest.approx(7.0 / prefill["value"])
    told = {"peer_least": 6.0, "peer_most": 8.0, "peer_settings": {"a": 1}}
    assert told.items() <= first["metrics"].items()
    for row in record["rows"]:
        assert row["metrics"]["least"] <= row["value"] <= row["metrics"]["most"]
    assert all(row["budget"] == 2048 and row["tp"] == 1 for row in record["rows"])
    (spec,) = specs
    assert spec.sizes == replace(Sizes(), batches=(1, 4), contexts=(4, 20), repeats=3)
    given = {"max_model_len": 400, "kv_pages": 8, "skip_tokenizer_init": True}
    assert spec.settings == {"model": str(tiny_model())} | given


def test_sequences_over_the_context_are_refused():
    assert generate.sizes_for(SMALL, 100, 30).vocabulary == 100
    with pytest.raises(UsageError, match="30 tokens are over the context of 29"):
        generate.sizes_for(SMALL, 100, 29)


def test_a_file_without_figures_is_refused_before_a_model_is_looked_for(tmp_path, capsys):
    broken = tmp_path / "x.json"
    broken.write_text('{"peer": "vLLM"}')
    assert main(["bench", "generate", "/nowhere", "--peer", str(broken)]) == 2
    assert "scripts/vllm_generate.py writes them" in capsys.readouterr().err
    assert main(["bench", "generate", "/nowhere", "--peer", str(tmp_path / "none")]) == 66


def test_the_script_for_vllm_writes_what_is_read(tmp_path, monkeypatch, capsys):
    """Against a stand-in for vLLM: the one thing that this machine does not have."""

    class FakeLLM:
        def __init__(self, **settings):
            self.settings = settings
            model = SimpleNamespace(
                get_vocab_size=lambda: 500, is_hybrid=True, dtype=torch.bfloat16
            )
            cache = SimpleNamespace(mamba_cache_dtype="float16", mamba_ssm_cache_dtype="auto")
            config = SimpleNamespace(model_config=model, cache_config=cache)
            self.llm_engine = SimpleNamespace(vllm_config=config)

        def generate(self, prompts, params, use_tqdm):
            assert all(max(prompt["prompt_token_ids"]) < 500 for prompt in prompts)
            tokens = params.max_tokens - broken
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * tokens)])] * len(
                prompts
            )

        def embed(self, prompts, use_tqdm):
            assert self.settings["runner"] == "pooling"
            return [None] * (len(prompts) - broken)

    fake = SimpleNamespace(
        LLM=FakeLLM, SamplingParams=lambda **given: SimpleNamespace(**given), __version__="9"
    )
    monkeypatch.setitem(sys.modules, "vllm", fake)

    def state_dtypes(model, convolution, state):
        assert (convolution, state) == ("float16", "auto")
        return torch.float16, model

    calculator = SimpleNamespace(gated_delta_net_state_dtype=state_dtypes)
    utilities = SimpleNamespace(MambaStateDtypeCalculator=calculator)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.mamba.mamba_utils", utilities)
    place = ROOT / "scripts" / "vllm_generate.py"
    found = importlib.util.spec_from_file_location("vllm_generate", place)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    out, broken = tmp_path / "out.json", 0
    given = ["m", "2", str(out), "max_model_len=8192"]
    assert module.main([*given, "repeats=1"]) == 0
    figures = json.loads(out.read_text())
    assert (figures["peer"], figures["tp"]) == ("vLLM 9", 2)
    settings = {"max_model_len": 8192, "mamba_ssm_cache_dtype": "bfloat16"}
    assert figures["settings"] == settings and len(figures["rows"]) == 6
    broken = 1
    with pytest.raises(RuntimeError, match="does not have 8 tokens"):
        module.main(given)
    with pytest.raises(RuntimeError, match="2 of 3 prompts were answered"):
        module.main([*given, "embed=[3,4]"])
    broken = 0
    assert module.main([*given, "embed=[3,4]"]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["case"], row["batch"], row["context"]) == ("LLM embed", 3, 4)
    assert row["least"] <= row["value"] <= row["most"]
