"""`tpdet diff`: the first token or bit that differs is named, and what was asked otherwise."""

import json
import subprocess
import sys

import msgspec
import pytest

from tests.lib.receipts import ended_answer, new_audited
from tests.lib.tree import ROOT
from tpdet import SamplingParams
from tpdet.audit.receipts.bundle import make_bundle
from tpdet.audit.receipts.directory import AuditDirectory
from tpdet.audit.recorded import RecordedAnswer, RecordedChoice

ANSWER = RecordedAnswer(
    contract="c0" * 32,
    weights="d1" * 32,
    seed=3,
    prompt_token_ids=(1, 2),
    params=SamplingParams(n=2, max_tokens=3, temperature=0.5),
    outputs=(
        RecordedChoice((7, 8, 9), ("bf800000", "bf000000", "be800000")),
        RecordedChoice((7, 8), ("bf800000", "bf000000")),
    ),
)
REQUEST = {"url": "/v1/completions", "body": {"prompt": [1, 2], "return_token_ids": True}}


def write(path, *answers):
    path.write_text("".join(msgspec.json.encode(one).decode() + "\n" for one in answers))
    return path


def over_http(answer):
    origin = {name: getattr(answer, name) for name in ("contract", "weights", "seed")}
    choices = [msgspec.to_builtins(choice) for choice in answer.outputs]
    body = {"tpdet": origin, "choices": choices}
    return {"request": REQUEST, "response": {"status_code": 200, "body": body}}


def with_choice(index, ids, bits):
    outputs = [*ANSWER.outputs]
    outputs[index] = RecordedChoice(ids, bits)
    return msgspec.structs.replace(ANSWER, outputs=tuple(outputs))


CHANGES = {
    "token": (with_choice(1, (7, 6), ("bf800000", "bf000000")), 1, 1, [8, 6]),
    "bit": (with_choice(0, (7, 8, 9), ("bf800000", "bf000000", "be800001")), 0, 2, [9, 9]),
    "shorter": (with_choice(0, (7, 8), ("bf800000", "bf000000")), 0, 2, [9, None]),
    "a choice less": (msgspec.structs.replace(ANSWER, outputs=ANSWER.outputs[:1]), 1, 0, [7, None]),
}


@pytest.mark.parametrize("form", [lambda answer: answer, over_http])
@pytest.mark.parametrize("name", CHANGES)
def test_the_first_difference_is_named(tpdet, tmp_path, name, form):
    other, choice, position, ids = CHANGES[name]
    first = write(tmp_path / "a", form(ANSWER), form(ANSWER))
    second = write(tmp_path / "b", form(ANSWER), form(other))
    assert tpdet("diff", first, first)[:2] == (0, "2 pairs, 10 tokens: 0 differ\n")
    code, output, _ = tpdet("diff", first, second, "--json")
    place = json.loads(output)["difference"]
    assert (code, place["choice"], place["position"]) == (1, choice, position)
    sides = place["recorded"], place["computed"]
    assert [side and side["id"] for side in sides] == ids


def test_both_tokens_log_probabilities_and_requests_are_shown(tpdet, tmp_path):
    other = msgspec.structs.replace(
        CHANGES["bit"][0],
        seed=4,
        params=msgspec.structs.replace(ANSWER.params, temperature=0.75),
    )
    flags = write(tmp_path / "a", ANSWER), write(tmp_path / "b", other)
    code, output, _ = tpdet("diff", *flags)
    assert code == 1 and output.splitlines() == [
        "pair 1: the first difference is at choice 0, position 2",
        "  A, line 1: token 9, log-probability -0.25 (bits be800000)",
        "  B, line 1: token 9, log-probability -0.25000003 (bits be800001)",
        "  asked otherwise: seed: A has 3, B 4",
        "  asked otherwise: params.temperature: A has 0.5, B 0.75",
        "1 pairs, 5 tokens: 1 differ",
    ]


def test_bundles_are_compared_without_torch_and_erased_ones_refused(tpdet, tmp_path):
    audited = new_audited(tmp_path, 2)
    with AuditDirectory(audited.path).reading(audited.trusted) as (log, store):
        for number in range(2):
            leaf, content = AuditDirectory.locate(log, store, ended_answer(number).id)
            (tmp_path / f"b{number}").write_bytes(make_bundle(log, leaf, content).encode())
        (tmp_path / "erased").write_bytes(make_bundle(log, 0, None).encode())
    script = (
        "import sys; sys.modules['torch'] = None; from tpdet.cli import main; "
        f"sys.exit(main(['diff', {str(tmp_path / 'b0')!r}, {str(tmp_path / 'b1')!r}]))"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    assert "A, prompt 1: token 0, log-probability -0 (bits 80000000)" in run.stdout
    assert "asked otherwise: prompt_token_ids[2]: A has 0, B 1" in run.stdout
    code, _, said = tpdet("diff", tmp_path / "b0", tmp_path / "erased")
    assert code == 66 and "was erased" in said


def test_what_cannot_be_compared_is_refused(tpdet, tmp_path):
    one, two = write(tmp_path / "a", ANSWER), write(tmp_path / "b", ANSWER, ANSWER)
    code, _, said = tpdet("diff", one, two)
    assert code == 2 and "has 1 answers and" in said
    assert tpdet("diff", one, tmp_path / "absent")[0] == 66
    (tmp_path / "c").write_text('{"bundle": "urn:tpdet:receipt-bundle:v1"}')
    assert tpdet("diff", one, tmp_path / "c")[0] == 65
