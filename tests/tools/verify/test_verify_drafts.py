"""The relation of drafts holds, and finds a build that accepts, counts or publishes wrongly."""

import hashlib
from types import SimpleNamespace

import msgspec
import pytest
import torch

from tests.engine.test_drafts import (
    plant_blind_acceptance,
    plant_failing_by_a_refused_position,
    plant_pages_past_the_committed_end,
    plant_penalties_of_another_prefix,
)
from tpdet.control.plan import PlanRows, Row
from tpdet.errors import IntegrityError
from tpdet.scheduler.speculator import DraftCounts
from tpdet.tools.verify import drafted, rank
from tpdet.tools.verify.cases import circumstances
from tpdet.tools.verify.compare import compare
from tpdet.tools.verify.drafted import (
    ITSELF,
    KINDS,
    NGRAMS,
    OTHER,
    counted,
    drafter,
    refused_logits,
)
from tpdet.tools.verify.logits_log import HEADER_BYTES, LogitsLog
from tpdet.tools.verify.spec import Trace, VerifySpec, WorldReport
from tpdet.tools.worlds.machine import Machine

SPEC = VerifySpec(
    model="none",
    dtypes=("float32",),
    fold_orders=("tree",),
    batches=(1, 6),
    budgets=(60,),
    prompt_lengths=(5, 252, 9),
    tokens=9,
    seed=0,
    control=False,
    device="cpu",
    relations=("alone", "drafts"),
)


def verified(
    tiny_model,
    folder,
    only=None,
    monkeypatch=None,
    relations=SPEC.relations,
    like="qwen3",
    **changes,
):
    """The relations of a world of one rank in this process; `only` the circumstances named so.

    changes: of the specification.
    """
    model = tiny_model(like, kv_heads=2, hidden=64, intermediate=128, layers=1)
    spec = msgspec.structs.replace(SPEC, model=str(model), relations=relations, **changes)
    if only is not None:
        few = [each for each in circumstances(spec) if each.name in ("alone", *only)]
        monkeypatch.setattr(rank, "circumstances", lambda spec: few)
    where = folder / "world"
    where.mkdir()
    (where / "spec.json").write_bytes(msgspec.json.encode(spec))
    assert rank.main([str(where)]) == 0
    report = msgspec.json.decode((where / "report.json").read_bytes(), type=WorldReport)
    return compare([report], folder)


@pytest.mark.slow
def test_every_kind_of_drafts_is_equal_however_steps_are_made(tiny_model, tmp_path):
    found = verified(tiny_model, tmp_path)
    assert [each.difference for each in found] == [None] * 10
    assert {f"{kind} drafts" for kind in KINDS} < {each.circumstance for each in found}


WRONG, HALF = "wrong drafts", "half right drafts"
SPOILED = f"{HALF}, NaN behind wrong ones"
FAULTS = {
    "accepting without comparing": (WRONG, plant_blind_acceptance, None),
    "penalties of another prefix": (HALF, plant_penalties_of_another_prefix, None),
    "pages past the committed end": (HALF, plant_pages_past_the_committed_end, IntegrityError),
    "NaN behind a wrong draft fails": (SPOILED, plant_failing_by_a_refused_position, ValueError),
}


def test_without_a_fault_all_is_equal(tiny_model, tmp_path, monkeypatch):
    found = verified(tiny_model, tmp_path, (WRONG, HALF, SPOILED), monkeypatch)
    assert [each.difference for each in found] == [None] * 4


@pytest.mark.parametrize("fault", list(FAULTS))
def test_planted_faults_are_found(tiny_model, tmp_path, monkeypatch, fault):
    circumstance, plant, error = FAULTS[fault]
    plant(monkeypatch)
    if error is not None:  # the world ends with it
        with pytest.raises(error):
            verified(tiny_model, tmp_path, (circumstance,), monkeypatch)
        return
    alone, drafted = verified(tiny_model, tmp_path, (circumstance,), monkeypatch)
    assert alone.equal and not drafted.equal


REPEATING = "alone", "ngrams"


@pytest.mark.parametrize("like", ["qwen3", "gemma3_text"])
def test_ngrams_of_texts_that_repeat_themselves_change_no_bit(tiny_model, tmp_path, like):
    """Greedy, the texts of the second one keep an order, and its n-grams were never wrong."""
    alone, texts, drafted = verified(tiny_model, tmp_path, relations=REPEATING, like=like)
    assert [each.difference for each in (alone, texts, drafted)] == [None] * 3
    assert drafted.circumstance == "n-gram drafts" and drafted.positions == texts.positions > 60
    assert drafted.reference == texts.digest != alone.digest


def test_ngrams_that_are_accepted_blindly_are_found(tiny_model, tmp_path, monkeypatch):
    plant_blind_acceptance(monkeypatch)
    *others, drafted = verified(tiny_model, tmp_path, relations=REPEATING)
    assert all(each.equal for each in others) and not drafted.equal


DRAFT_MODEL = "alone", "draft_model"


def test_draft_models_change_no_bit_whether_they_are_right_or_wrong(tiny_model, tmp_path):
    alone, itself, other = verified(tiny_model, tmp_path, relations=DRAFT_MODEL)
    assert [each.difference for each in (alone, itself, other)] == [None] * 3
    assert itself.circumstance == "drafts of the model itself"
    assert other.circumstance == "drafts of another model"
    assert itself.positions == other.positions == alone.positions > 250


def test_drafts_of_another_model_that_are_accepted_blindly_are_found(
    tiny_model, tmp_path, monkeypatch
):
    plant_blind_acceptance(monkeypatch)
    alone, _, other = verified(tiny_model, tmp_path, relations=DRAFT_MODEL)
    assert alone.equal and not other.equal


def test_a_draft_model_that_rank_0_has_no_room_for_is_left_out(tiny_model, tmp_path, monkeypatch):
    free = iter((5 << 30, 1 << 30))
    monkeypatch.setattr(drafted, "resolve_device", lambda device: "cuda")
    monkeypatch.setattr(drafted, "free_gpu_bytes", lambda share: next(free))
    found = verified(tiny_model, tmp_path, relations=DRAFT_MODEL)
    assert [each.circumstance for each in found] == ["alone", "drafts of the model itself"]
    report = (tmp_path / "world" / "report.json").read_bytes()
    (said,) = msgspec.json.decode(report, type=WorldReport).left_out
    assert said.startswith("TP 1, drafts of another model: a draft model of 4.0 GiB: rank 0's GPU")


@pytest.mark.parametrize(
    ("counts", "itself", "other", "ngrams"),
    [
        ((9, 4), True, True, True),
        ((9, 0), False, True, False),
        ((9, 9), True, False, False),
        ((0, 0), False, False, False),
    ],
)
def test_drafts_that_are_all_right_or_all_wrong_may_show_nothing(
    tmp_path, counts, itself, other, ngrams
):
    found = DraftCounts(draft_tokens=counts[0], accepted_tokens=counts[1])
    name = {ITSELF: "draft_model", OTHER: "draft_model", NGRAMS: "ngram"}
    what = {"dtype": "float32", "mode": "tree", "tokens": {}, "logprob_bits": {}, "logits": {}}
    for kind, shown in ((ITSELF, itself), (OTHER, other), (NGRAMS, ngrams)):
        drafted = counted(kind, {name[kind]: found}, own=True)
        traces = [
            Trace(circumstance=str(it), values="values", steps=1, drafted=it, **what)
            for it in (None, drafted)
        ]
        report = WorldReport(
            tp=1, vocab_size=8, fingerprints={}, traces=tuple(traces), machine=Machine()
        )
        _, relation = compare([report], tmp_path)
        assert relation.equal is shown
        assert shown or relation.difference == (
            f"{counts[1]} of {counts[0]} drafts were accepted: this shows nothing"
        )


def row(start, ids, admission=3):
    pages = (1,) * (-(-(start + len(ids)) // 256))
    return Row(admission, 0, 0, start, tuple(ids), pages, pages, len(ids), len(ids))


def test_logits_behind_a_wrong_draft_are_refused_and_no_others():
    rows = PlanRows.of([row(2, (7, 8, 0, 10)), row(2, (1, 2), 4), row(5, (10,)), row(3, (8, 9))])
    known, names = {"probe-0": (5, 6, 7, 8, 9, 10)}, {3: "probe-0"}
    assert refused_logits(rows, names, known) == [2, 3]


def test_logits_of_refused_positions_are_no_part_of_the_log(tmp_path):
    log = LogitsLog(tmp_path / "values")
    log.names[3] = "probe-0"
    values = torch.arange(32, dtype=torch.float32).view(4, 8)
    log.tap(row(2, (7, 8, 0, 10)), 2, values)
    log.tap(row(4, (9, 10, 11)), 4, values[1:])
    log.close({"probe-0": (5, 6, 7, 8, 9, 10)})
    wanted = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in values]
    assert log.digests["probe-0"] == {2: wanted[0], 3: wanted[1], 4: wanted[1]}
    body = (tmp_path / "values").read_bytes()
    size = HEADER_BYTES + 32
    headers = [body[at : at + HEADER_BYTES].decode().strip() for at in range(0, len(body), size)]
    assert headers == [
        "probe-0@2",
        "probe-0@3",
        "refused",
        "refused",
        "probe-0@4",
        *["refused"] * 2,
    ]


def test_drafts_are_right_as_far_as_their_kind_says():
    sequence = SimpleNamespace(request_id="probe-0", tokens=[1, 2, 3, 40], prompt_length=3)
    answers = {"probe-0": tuple(range(40, 70))}
    told = list(answers["probe-0"][1:])
    right = {kind: set() for kind in KINDS}
    for kind, counts in right.items():
        propose = drafter(kind, answers, 100, 1)
        for _ in range(300):
            drafts = propose(sequence, 9)
            assert 1 <= len(drafts) <= 9
            same = [a == b for a, b in zip(drafts, told, strict=False)]
            counts.add(same.index(False) if False in same else len(drafts))
    assert right["right"] == {*range(1, 10)} and right["wrong"] == {0}
    assert right["half right"] >= set(range(9)) and max(right["random"]) < 3
    unknown = SimpleNamespace(request_id="neighbour", tokens=[1], prompt_length=1)
    assert drafter("right", answers, 100, 1)(unknown, 5)
