"""`tpdet plan`: predictions beside measured figures, what it is fitted to, memory, refusals."""

import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace as change

from scripts.fit.figures import SHAPE_TABLE, step_figures
from scripts.fit.planner import write_constants
from scripts.tables.planned_steps import compare_mixed, compare_steps, comparison_table
from tests.lib.thread_world import run_threads
from tests.lib.tree import ROOT
from tpdet.checkpoint.model_config.expert_load import fullest_rank
from tpdet.checkpoint.model_config.known_shapes import PUBLISHED, SHAPES
from tpdet.cli import main
from tpdet.comm.exchange.peer_carrier import gather_bytes
from tpdet.comm.exchange.slot_layout import SlotLayout
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.errors import NotFoundError, ResourceError, UsageError
from tpdet.kernels.cuda.cost.roofline import smooth_maximum
from tpdet.kernels.cuda.hardware import RATES
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.layers.partition import state_shape
from tpdet.speculative.draft_model import start as draft_model
from tpdet.tools.measurement.floor import decode_work
from tpdet.tools.measurement.results_file import newest_rows
from tpdet.tools.plan.command import LEGEND
from tpdet.tools.plan.constants import LayerCost, LinearCost, load_constants
from tpdet.tools.plan.draft import draft_request
from tpdet.tools.plan.exchange_time import exchange_seconds, levels_of
from tpdet.tools.plan.hardware import Network, hardware_of
from tpdet.tools.plan.kernel_time import linear_decode_work, linear_prefill_work
from tpdet.tools.plan.memory import rank_memory
from tpdet.tools.plan.plan import PlanRequest, choose_size, plan_size, plan_world
from tpdet.tools.plan.step import PlanWorld, decode_parts, prefill_parts
from tpdet.tools.worlds.shapes import cut_for, find_model, named_config

RESULTS = ROOT / "docs" / "results"
WITHIN = 0.15  # of the measured figures


@pytest.fixture(scope="module")
def constants():
    return load_constants("h200")


def wish(model="qwen3-8b", **fields):
    defaults = {"gpu": "h200", "context": 4096, "batch": 32}
    return PlanRequest(model, find_model(model), **(defaults | fields))


def test_predictions_stand_within_15_per_cent_of_what_was_measured(constants):
    found = compare_steps(constants, step_figures(RESULTS, "h200"))
    cases = {(row.case.split(",")[0], row.tp) for row in found}
    assert cases >= {(case, tp) for case in ("decode", "prefill") for tp in (1, 2, 4)}
    batches = {row.case for row in found if row.case.startswith("decode")}
    assert batches >= {f"decode, batch {batch}, context 128" for batch in (1, 16, 64, 256)}
    wrong = [row for row in found if not abs(row.error) <= WITHIN]
    assert not wrong, "measured anew? run python -m scripts.fit.planner"


def test_loads_that_nothing_was_fitted_to_are_within_15_per_cent(constants):
    found = compare_mixed(constants, RESULTS)
    assert [row.tp for row in found] == [1, 2, 4]
    assert all(abs(row.error) <= WITHIN for row in found), found


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_steps_with_experts_stand_near_what_was_measured(constants, model):
    """Through `LLM.generate`; nothing was fitted to these. One row waits for launches, too."""
    measured = [row for _, rows in newest_rows(RESULTS / "experts.h200.json") for row in rows]
    newest = [row for row in measured if row.get("model") == model]
    decode = {row["batch"]: row["value"] for row in newest if row["case"] == "LLM decode"}
    wished = {batch: wish(model, batch=batch, context=208) for batch in decode}
    errors = {batch: plan_size(wished[batch], 1).decode_ms / decode[batch] - 1 for batch in decode}
    assert errors.keys() == {1, 16, 64, 256}
    assert -0.25 < errors.pop(1) < 0 and all(abs(error) < 0.05 for error in errors.values())
    *_, prefill = (row["value"] for row in newest if row["case"] == "LLM prefill")
    planned = plan_size(wish(model, batch=16), 1).prefill_tokens / 8
    assert abs(planned / prefill - 1) < WITHIN


def test_plans_of_mixtures_know_their_floors_their_memory_and_the_fullest_rank():
    shape = "qwen3-30b-a3b"
    config, rates = find_model(shape), RATES["NVIDIA H200"]
    for batch, context, floor in ((1, 0, 1.35), (16, 0, 8.84), (64, 0, 13.2), (256, 128, 14.1)):
        assert abs(1e3 * decode_work(config, batch, context).seconds(rates) / floor - 1) < 0.005
    alone, two = (plan_size(wish(shape, batch=64), tp) for tp in (1, 2))
    assert 61.0e9 < alone.memory["weights"] < 61.1e9 and alone.memory["left for KV"] > 40e9
    assert two.decode_ms < 0.62 * alone.decode_ms
    assert "touches 125.9 of 128 a layer" in two.notes[-1] and "reads 63." in two.notes[-1]
    draw = random.Random(0)
    for rows, ranks in ((1, 2), (1, 4), (16, 4), (16, 8), (64, 2)):
        most = []
        for _ in range(400):
            touched = {each for _ in range(rows) for each in draw.sample(range(128), 8)}
            held = 128 // ranks
            most.append(max(Counter(each // held for each in touched).values()))
        assert abs(fullest_rank(128, 8, rows, ranks) / (sum(most) / len(most)) - 1) < 0.07
    mixtral = plan_size(wish("mixtral-8x7b", batch=1), 4)
    assert "experts (columns)" in mixtral.notes[-1]
    assert mixtral.decode_ms < plan_size(wish("mixtral-8x7b", batch=1), 2).decode_ms
    found = (("qwen3-235b-a22b", 470e9), ("mixtral-8x7b", 93.4e9), ("gpt-oss-120b", 234e9),
             ("glm-4.5-air", 213e9))  # fmt: skip
    for name, weights in found:
        planned = plan_size(wish(name, batch=1, context=512), 4)
        assert 0.98 < 4 * planned.memory["weights"] / weights < 1.03, name


def test_states_of_linear_attention_are_counted_as_a_start_counts_them(constants):
    """A quarter of what they leave is for snapshots; twice as many ranks halve the bytes."""
    alone, two = (plan_size(wish("qwen3.5-9b", batch=64), tp) for tp in (1, 2))
    for plan in (alone, two):
        assert "for each of 256 snapshots" in plan.notes[-1]
        room = sum(plan.memory[name] for name in ("states", "snapshots", "left for KV"))
        kept = ("weights", "rotary tables", "exchange slots", "workspaces", "reserved")
        assert room == plan.memory["usable"] - sum(plan.memory[name] for name in kept)
    for name in ("states", "snapshots"):
        assert alone.memory[name] == 2 * two.memory[name]
    assert 48 < alone.memory["snapshots"] / 256 / 2**20 < 50  # 2 MiB of 24 layers, and 3 rows
    many = plan_size(wish("qwen3.5-35b-a3b", batch=256), 1)
    assert not many.fits and many.memory["snapshots"] == 0 < many.kv_sequences < 256
    assert "states" not in plan_size(wish(), 1).memory
    linear = [plan.decode_parts["linear attention"] for plan in (alone, two)]
    assert 2 > linear[0] > 1.5 > linear[1] > linear[0] / 2
    error = constants.errors["linear attention"]
    assert error.figures == 8 and abs(error.worst) < 0.1


@pytest.mark.parametrize("model", ["qwen3.5-9b", "qwen3.5-35b-a3b"])
def test_steps_of_hybrids_stand_near_what_was_measured(constants, model):
    """Through `LLM.generate`; nothing was fitted to whole steps of hybrids."""
    measured = [row for _, rows in newest_rows(RESULTS / "hybrids.h200.json") for row in rows]
    newest = [row for row in measured if row.get("model") == model]
    decode = {row["batch"]: row["value"] for row in newest if row["case"] == "a token"}
    wished = {batch: wish(model, batch=batch, context=160) for batch in decode}
    errors = {batch: plan_size(wished[batch], 1).decode_ms / decode[batch] - 1 for batch in decode}
    assert errors.keys() == {1, 16, 64, 256}, errors
    assert all(-0.06 < error < 0.05 for error in errors.values()), errors


LINEAR = LinearCost(launch=2e-5, bytes=2.5e12, rows=1e12, chunk=5e-6)


def test_the_times_of_linear_attention_are_found_again_in_its_figures(tmp_path):
    """Fitted to figures that a formula made; of a step without the rows of TP 2."""
    pytest.importorskip("scipy")
    from scripts.fit.planner import fit_linear

    config, rows = find_model("qwen3.5-9b"), []
    for tp in (1, 2):
        shape = state_shape(cut_for(config, tp, "tree"))
        works = {("decode", batch, 40): linear_decode_work(shape, batch) for batch in (1, 16, 256)}
        for sizes in ((1, 8192), (4, 2048), (16, 512)):
            works["prefill", *sizes] = linear_prefill_work(shape, *sizes, 132)
        common = {"model": "qwen3.5-9b", "tp": tp, "unit": "us"}
        for (kind, batch, context), work in works.items():
            sizes = {"batch": batch, "context": context, "value": 1e6 * LINEAR.seconds(work)}
            rows.append({"case": f"linear {kind}: all kernels"} | common | sizes)
    for case in ("linear decode: pass_chunks", "factors, exp in fp64"):
        rows.append(rows[0] | {"case": case, "value": 1.0})
    runs = [{"commit": "a", "command": "b", "rows": rows}]
    (tmp_path / "linear.h200.json").write_text(json.dumps(runs))
    errors = {}
    found = fit_linear(tmp_path, "h200", errors)
    assert msgspec.structs.astuple(found) == pytest.approx(
        msgspec.structs.astuple(LINEAR), rel=0.01
    )
    assert errors["linear attention"].figures == 12 and errors["linear attention"].rms < 0.01
    (tmp_path / "linear.h200.json").unlink()
    assert fit_linear(tmp_path, "h200", {}) is None


def test_linear_attention_takes_its_time_in_each_kind_of_step(constants):
    """A step of states twice as many takes twice as long; long prompts pass chunk by chunk."""
    known, config = change(constants, linear=LINEAR), find_model("qwen3.5-9b")
    alone, two = (
        PlanWorld(config, tp, known, hardware_of("h200"), Network(), budget=8192) for tp in (1, 2)
    )
    few, many = (decode_parts(alone, batch, 4096)["linear attention"] for batch in (64, 256))
    assert 24 * LINEAR.launch < few < many < 4 * few
    assert many - few == pytest.approx(24 * 192 * 2.9e6 / LINEAR.bytes, rel=0.05)
    half = decode_parts(two, 256, 4096)["linear attention"] - 24 * LINEAR.launch
    assert half == pytest.approx((many - 24 * LINEAR.launch) / 2)
    one, some = (prefill_parts(alone, length)["linear attention"] for length in (8192, 2048))
    assert one > some and one > 24 * 128 * LINEAR.chunk
    without = PlanWorld(config, 1, change(known, linear=None), hardware_of("h200"), Network())
    assert decode_parts(without, 64, 4096)["linear attention"] == 0.0
    dense = PlanWorld(find_model("qwen3-8b"), 1, known, hardware_of("h200"), Network())
    bare = PlanWorld(find_model("qwen3-8b"), 1, constants, hardware_of("h200"), Network())
    assert decode_parts(dense, 64, 4096) == decode_parts(bare, 64, 4096)
    assert decode_parts(dense, 64, 4096)["linear attention"] == 0.0


def test_worse_constants_would_be_seen(constants):
    slow = change(constants, layer=LayerCost(2e-5, constants.layer.bytes))
    found = compare_steps(slow, step_figures(RESULTS, "h200"))
    assert sum(abs(row.error) > WITHIN for row in found) > 5


def test_the_constants_are_what_the_results_give(tmp_path):
    pytest.importorskip("scipy")
    from scripts.fit.planner import fit_constants

    fitted = fit_constants(RESULTS, ROOT / SHAPE_TABLE.format(gpu="h200"), "h200")
    write_constants(fitted, tmp_path / "h200.json")
    names = load_constants("h200", tmp_path), load_constants("h200")
    new, old = (_numbers(msgspec.to_builtins(change(found, errors={}))) for found in names)
    assert new.keys() == old.keys(), "run python -m scripts.fit.planner"
    wrong = {name: (new[name], old[name]) for name in new if not _close(new[name], old[name])}
    assert not wrong, "results changed: run python -m scripts.fit.planner"


def _numbers(tree, name=""):
    """Leaves of nested values by their path."""
    if isinstance(tree, dict):
        pairs = tree.items()
    elif isinstance(tree, list | tuple):
        pairs = enumerate(tree)
    else:
        return {name: tree}
    return {key: leaf for k, part in pairs for key, leaf in _numbers(part, f"{name}.{k}").items()}


def _close(one, other):
    if not isinstance(one, float):
        return one == other
    most = 1e14  # bytes a second: over it a term is nothing
    return min(one, most) == pytest.approx(min(other, most), rel=0.03) or min(one, other) > 2e14


def test_sizes_that_were_held_back_are_predicted_too(constants):
    """Fitted to TP 1 and 2 only, TP 4 comes out; but not the host's time, seen only there."""
    pytest.importorskip("scipy")
    from scripts.fit.steps import fit_steps

    figures = step_figures(RESULTS, "h200")
    bare = change(constants, layer=LayerCost(0.0, 1e30), host=0.0)
    fitted = fit_steps(bare, [figure for figure in figures if figure.tp < 4])
    held = [f for f in figures if f.tp == 4 and f.batch < 256]
    assert len(held) == 4
    assert all(abs(row.error) <= WITHIN for row in compare_steps(fitted, held))
    assert fitted.host == 0.0


def test_the_page_shows_these_predictions(constants):
    text = (ROOT / "docs" / "scaling.md").read_text()
    table = "\n".join(comparison_table(constants, RESULTS))
    assert table in text, "run: python scripts/result_tables.py"


def test_a_smooth_maximum_lies_over_both():
    assert smooth_maximum(3.0, 0.0, 4.0) == 3.0 and smooth_maximum(0.0, 0.0, 4.0) == 0.0
    assert 4.0 < smooth_maximum(3.0, 4.0, 4.0) < smooth_maximum(3.0, 4.0, 2.0) == 5.0


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("qwen3", 1), ("qwen3", 2), ("gemma3_text", 2), ("qwen3_moe", 2), ("glm4_moe", 2),
        ("qwen3_5_text", 2), ("qwen3_next", 2),
    ],
)  # fmt: skip
def test_the_weights_are_those_that_a_rank_holds(tiny_model, constants, family, ranks):
    model = tiny_model(family)
    config = find_model(model)
    world = PlanWorld(config, ranks, constants, hardware_of("h200"), Network())
    planned = rank_memory(world, 64, 0.9, batch=3)
    settings = EngineConfig.from_values(
        model=str(model),
        device="cpu",
        kv_pages=2,
        max_model_len=64,
        max_num_seqs=3,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def held(rank_world):
        engine = Engine(settings, rank_world)
        pages = engine.runner.pages
        return _tensor_bytes(engine.runner.model), _tensor_bytes(pages)

    for weights, pages in run_threads(ranks, held):
        assert weights == planned.weights + planned.tables
        assert pages == 3 * planned.page + planned.states  # one more, where pad rows write


def _tensor_bytes(thing, seen=None):
    """Bytes of all tensors that an object of ours holds, each storage once."""
    import torch

    seen = set() if seen is None else seen
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        if storage.data_ptr() in seen:
            return 0
        seen.add(storage.data_ptr())
        return storage.nbytes()
    if isinstance(thing, list | tuple):
        return sum(_tensor_bytes(part, seen) for part in thing)
    if isinstance(thing, dict):
        return sum(_tensor_bytes(part, seen) for part in thing.values())
    ours = ("tpdet.models", "tpdet.layers", "tpdet.cache", "tpdet.kernels.inputs.norm")
    if type(thing).__module__.startswith(ours):
        return sum(_tensor_bytes(part, seen) for part in vars(thing).values())
    return 0


def test_slots_are_laid_out_as_the_runtime_does():
    import torch

    world = plan_world(wish("llama-3-70b"), 8)
    layout = SlotLayout(8, 1, 8192, 8192, torch.bfloat16)
    assert rank_memory(world, 4096, 0.9).slots == layout.bytes + gather_bytes(8)
    assert rank_memory(plan_world(wish("llama-3-8b"), 1), 4096, 0.9).slots == 0


def test_ranks_that_share_key_heads_hold_no_smaller_cache():
    eight, sixteen = (plan_world(wish("llama-3-70b", nodes=2, leaves=16), tp) for tp in (8, 16))
    pages = [rank_memory(world, 4096, 0.9).page for world in (eight, sixteen)]
    assert pages[0] == pages[1] == 2 * 80 * PAGE_TOKENS * 128 * 2


def test_a_fold_over_nodes_sends_what_its_order_asks_for():
    slots = {
        order: levels_of(16, 8, 16, order, 16384, 8192).node_slots
        for order in ("tree", "pairs", "sequential")
    }
    assert slots == {"tree": 1, "pairs": 4, "sequential": 8}


def test_the_network_costs_what_it_is_said_to(constants):
    levels = levels_of(16, 8, 16, "tree", 8192, 8192)
    quick = exchange_seconds(constants, levels, 64, Network(bytes=1e15, hop=0.0))
    slow = exchange_seconds(constants, levels, 64, Network(bytes=1e15, hop=1e-4))
    assert slow[1] - quick[1] == pytest.approx(1e-4) and slow[0] == quick[0]
    alone = levels_of(8, 8, 16, "tree", 8192, 8192)
    assert exchange_seconds(constants, alone, 64, Network())[1] == 0.0


def test_the_smallest_size_that_holds_the_batch_is_found():
    choice = choose_size(wish("llama-3-70b"))
    assert choice.tp == 2 and "under TP 2 memory does not hold" in choice.reason
    assert not choice.sizes[0].fits and choice.sizes[0].memory["left for KV"] == 0
    quick = choose_size(wish("llama-3-70b", most_ms=14.0))
    assert quick.tp == 8 and "under 14 ms" in quick.reason
    assert "comes nearest" in choose_size(wish("llama-3-70b", most_ms=0.1)).reason
    none = choose_size(wish("llama-3-405b", gpus=4))
    assert none.tp == 0 and "no size holds" in none.reason


@pytest.mark.parametrize(("nodes", "gpus", "noted"), [(1, 4, False), (2, 1, False), (1, 8, True)])
def test_a_cost_of_more_gpus_than_were_measured_is_noted(nodes, gpus, noted):
    found = plan_size(wish("llama-3-70b", nodes=nodes, gpus=gpus), nodes * gpus)
    assert any("not measured: their cost is extrapolated" in note for note in found.notes) == noted


def test_more_bandwidth_would_help_a_world_over_nodes():
    asked = wish("llama-3-405b", nodes=2, leaves=16, fold_order="tree")
    usual = plan_size(asked, 16)
    quick = plan_size(replace(asked, network=Network(bytes=1e13, hop=0.0)), 16)
    assert quick.decode_ms < usual.decode_ms and quick.prefill_tokens > usual.prefill_tokens
    assert any("folds in two levels, inside each node" in note for note in usual.notes)


@pytest.mark.parametrize(("shape", "name"), [(shape, hub) for hub, shape in PUBLISHED.items()])
def test_models_are_found_without_their_weights(shape, name):
    assert find_model(name) == find_model(shape) == named_config(shape)
    assert shape in SHAPES and cut_for(find_model(shape), 2, "pairs").leaves in (4, 8)


def test_models_that_nobody_has_are_refused():
    for name in ("no-such-model", "nobody/no-such-model", "a/b/c"):
        with pytest.raises(NotFoundError, match="no directory"):
            find_model(name)


def plan(*arguments):
    return main(["plan", "--model", "llama-3-70b", "--batch", "8", *arguments])


def test_a_plan_is_printed_and_one_that_does_not_fit_ends_with_71(capsys):
    assert plan("--tp", "4") == 0
    out = capsys.readouterr().out
    assert all(line in " ".join(out.split()) for line in LEGEND)
    assert "(s)" not in out
    assert "KV cache:" in out and "recommended: TP 2" in out
    assert plan("--tp", "1", "--json") == 71
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["tp"] == 1 and not found["plan"]["fits"]
    assert found["recommended"]["tp"] == 2 and len(found["sizes"]) == 4


def test_a_draft_model_takes_from_the_cache_what_a_start_gives_it(monkeypatch):
    bare, config = wish("qwen3-8b", batch=8), find_model("qwen3-8b")
    alone = plan_size(bare, 2)
    drafted = plan_size(replace(bare, draft=draft_request("qwen3-0.6b", "qwen3-8b", config)), 2)
    draft = drafted.draft
    assert draft.pages_without == alone.kv_pages and draft.kv_pages == draft.kv_tokens // 256 == 128
    taken = (alone.kv_pages - drafted.kv_pages) * plan_page("qwen3-8b", 2)
    assert draft.bytes == pytest.approx(taken, abs=plan_page("qwen3-8b", 2))
    assert draft.memory["weights"] == pytest.approx(2 * 596e6, rel=0.01)
    assert draft.step_ms < 0.7 * alone.decode_ms == 0.7 * drafted.decode_ms
    usual = replace(bare, batch=256, draft=draft_request("qwen3-0.6b", "qwen3-8b", config))
    planned = plan_size(usual, 2)
    free = planned.memory["usable"] - planned.memory["reserved"]
    assert planned.draft.kv_pages < 256 * 4096 // 256
    started = {"model": "qwen3-8b", "draft_model": "qwen3-0.6b", "max_model_len": 4096}
    monkeypatch.setattr(draft_model, "resolve_device", lambda device: "cuda")
    monkeypatch.setattr(draft_model, "free_gpu_bytes", lambda share: free)
    found = Path("qwen3-0.6b"), find_model("qwen3-0.6b")
    monkeypatch.setattr(draft_model, "read_draft_model", lambda config: found)
    own = draft_model.draft_settings(EngineConfig.from_values(**started))
    assert own.kv_pages == planned.draft.kv_pages
    left = free - planned.draft.memory["weights"] - planned.draft.memory["KV pages"]
    assert draft_model.draft_settings(EngineConfig.from_values(**started), left) == own
    with pytest.raises(ResourceError, match=r"KV pages and the model itself \d+.\d GiB, rank 0's"):
        draft_model.draft_settings(EngineConfig.from_values(**started), left + 1)
    monkeypatch.setattr(draft_model, "free_gpu_bytes", lambda share: 1 << 30)
    with pytest.raises(ResourceError, match=r"takes 1.2 GiB with 3 KV pages, .* has 1.0 GiB left"):
        draft_model.draft_settings(EngineConfig.from_values(**started))
    assert planned.draft.memory["workspaces"] < planned.memory["workspaces"]  # of fewer tokens


def plan_page(model, tp):
    return rank_memory(plan_world(wish(model), tp), 4096, 0.9).page


def test_a_draft_model_that_does_not_fit_is_said_with_the_remedy(capsys):
    arguments = "--tp", "1", "--draft-model", "qwen3-8b"
    assert main(["plan", "--model", "qwen3-32b", *arguments, "--batch", "50"]) == 71
    out = capsys.readouterr().out
    assert "draft model qwen3-8b on rank 0, GiB: weights 15.3" in out
    assert "sequences fit, without it 53: take a smaller one, leave --draft-model out" in out
    assert main(["plan", "--model", "qwen3-32b", *arguments, "--batch", "20"]) == 0
    out = capsys.readouterr().out
    assert "take a smaller one" not in out and "the tokenizers were not compared" in out


def test_a_draft_model_is_planned_as_a_file_of_settings_starts_it(
    tiny_model, tokenizer_folder, tmp_path, capsys
):
    text = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    for name in ("mine", "theirs"):
        shutil.copytree(tiny_model("qwen3"), tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(text))
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        text["added_tokens"].append({"id": 1500, "content": "<odd>"} | flags)
    mine, theirs = (str(tmp_path / name) for name in ("mine", "theirs"))
    settings = tmp_path / "run.toml"
    settings.write_text(f'model = "{mine}"\ndraft-model = "{mine}"\nkv-pages = 7\n')
    assert main(["plan", "--config", str(settings), "--tp", "1", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["draft"]["kv_pages"] == 7
    assert not any("tokenizers" in note for note in plan["notes"])
    assert main(["plan", "--model", mine, "--draft-model", theirs]) == 2
    assert "token id 1500 is '<odd>' there" in capsys.readouterr().err
    assert main(["plan", "--model", mine, "--draft-model", "qwen3-0.6b"]) == 2
    assert "has 151936 token ids, the model has 1100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--tp", "3"), "power of two"),
        (("--tp", "16"), "16 is more than"),
        (("--tp", "16", "--nodes", "2"), "use one of 1, 2, 4, 8"),
        (
            ("--gpu", "abacus"),
            "--gpu abacus: the times that plans are made of were measured on h200 alone",
        ),
        (("--tp", "two"), "--tp: 'two' is not a whole number"),
        (("--context", "10000"), "10000"),
        (("--nodes", "0"), "--nodes 0"),
        (("--gpu-memory-utilization", "2"), "utilization"),
    ],
)
def test_a_wrong_wish_is_refused(capsys, arguments, word):
    assert plan(*arguments) == 2
    assert word in capsys.readouterr().err


def test_constants_of_another_form_are_refused(tmp_path, constants):
    (tmp_path / "x.json").write_text('{"format": 1}')
    write_constants(change(constants, format=9), tmp_path / "y.json")
    for name in "xy":
        with pytest.raises(UsageError, match="write it anew"):
            load_constants(name, tmp_path)


def test_scaling_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert plan("--plot", str(tmp_path / "scaling")) == 0
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg"}
