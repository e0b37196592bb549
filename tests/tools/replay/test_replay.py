"""`tpdet replay`: true receipts are equal; each lie is named, with its exit code and its author."""

import json
import shutil
import struct
from collections import Counter
from dataclasses import replace

import msgspec
import pytest
import torch

from tests.lib.receipts import BEGAN, Audited, new_audited
from tpdet import LLM, SamplingParams
from tpdet.audit.receipts.bundle import make_bundle
from tpdet.audit.receipts.directory import AuditDirectory
from tpdet.audit.receipts.statement import EndedAnswer, EndedChoice, SignedSpan
from tpdet.audit.recorded import tokens_of
from tpdet.audit.replay import DigestOrigin, replay_digest
from tpdet.audit.replayed import read_replay
from tpdet.errors import ResourceError
from tpdet.kernels.cpu.pointwise import norm as cpu_norm
from tpdet.llm.recorded import choices_of
from tpdet.requests.request import Request
from tpdet.tools.check.by_model import ModelCheck
from tpdet.tools.replay import fault
from tpdet.tools.replay.run import ReceiptReplay

SMALL = ("--device", "cpu", "--kv-pages", "32", "--max-model-len", "512")
ASKED = (
    (((5, 6, 7),), SamplingParams(temperature=0, max_tokens=6)),
    (((8, 9), (10, 11, 12)), SamplingParams(n=2, temperature=0.9, top_p=0.9, max_tokens=5)),
    (((3,) * 40,), SamplingParams(temperature=1, max_tokens=9, min_tokens=8, seed=3)),
)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3", kv_heads=2)


@pytest.fixture(scope="module")
def answers(model):
    """True answers, as a server has them at their end."""
    with LLM(model=model, device="cpu", kv_pages=32, max_model_len=512) as llm:
        return [answer_of(llm, number, *asked) for number, asked in enumerate(ASKED)]


def answer_of(llm, number, prompts, params):
    facts = ModelCheck(llm).facts
    requests = tuple(
        Request(
            request_id=f"r-{number}",
            prompt_token_ids=ids,
            params=params if index == 0 else msgspec.structs.replace(params, seed=50 + index),
            eos_token_ids=facts.eos_token_ids,
        )
        for index, ids in enumerate(prompts)
    )
    asked = [{"prompt_token_ids": [*ids]} for ids in prompts]
    outputs = llm.generate(asked, [one.params for one in requests], use_tqdm=False)
    requests = tuple(
        msgspec.structs.replace(one, params=msgspec.structs.replace(one.params, seed=output.seed))
        for one, output in zip(requests, outputs, strict=True)
    )
    choices = tuple(
        tuple(
            EndedChoice(tokens_of(choice), one.finish_reason)
            for choice, one in zip(choices_of(output), output.outputs, strict=True)
        )
        for output in outputs
    )
    tokens = [[choice.tokens for choice in one] for one in choices]
    seed = outputs[0].seed
    return EndedAnswer(
        id=f"{number:032x}",
        owner="",
        outcome="completed",
        reason=None,
        route="/v1/completions",
        facts=facts,
        seed=seed,
        requests=requests,
        choices=choices,
        spans=(),
        approximate=False,
        replay_version=2,
        replay_digest=replay_digest(
            requests, tokens, DigestOrigin(seed, facts.contract, facts.model_digest)
        ),
        began=BEGAN,
        ended=BEGAN + number,
    )


def said(answer, number, choices, **changes):
    """Another receipt of an answer, with these choices; its digests are those of what it says."""
    tokens = [[choice.tokens for choice in one] for one in choices]
    facts = changes.get("facts", answer.facts)
    names = answer.seed, facts.contract, facts.model_digest
    digest = replay_digest(answer.requests, tokens, DigestOrigin(*names))
    fields = {"id": f"{number:032x}", "choices": choices, "replay_digest": digest}
    return replace(answer, **(fields | changes))


def with_token(choices, index, **changes):
    """Choices whose last one has another token at a position."""
    *others, last = choices[-1]
    tokens = [*last.tokens]
    tokens[index] = msgspec.structs.replace(tokens[index], **changes)
    return (*choices[:-1], (*others, last._replace(tokens=tokens)))


def cut(choices, *counts):
    """The first tokens of each choice of the only prompt."""
    pairs = zip(choices[0], counts, strict=True)
    return (tuple(one._replace(tokens=one.tokens[:n], finish_reason=None) for one, n in pairs),)


@pytest.fixture
def replay(model, tpdet):
    """A function that runs the command: its exit code, its lines of JSON, and what it says."""

    def run(path, audited, *flags, model=model):
        names = "--model", model, "--keys", audited.keys
        code, output, error = tpdet("replay", path, *names, "--json", *SMALL, *flags)
        lines = [line for line in output.splitlines() if line[:1] == "{"]
        if lines:  # `tpdet audit report` reads them again
            different = read_replay("\n".join(lines), "here").summary.different
            assert (different > 0) == (code == 1)
        return code, [json.loads(line) for line in lines], error

    return run


@pytest.fixture
def one_size(monkeypatch):
    """There is no room for another number of ranks: its processes would take seconds to start."""

    def refuse(options, mode):
        raise ResourceError(f"no room for {options.tp} ranks: free some")

    monkeypatch.setattr(fault, "open_model", refuse)


@pytest.fixture(scope="module")
def whole(answers, tmp_path_factory):
    """A directory of true receipts: of whole answers, and of beginnings."""
    audited = new_audited(tmp_path_factory.mktemp("whole"))
    left = {"outcome": "client_gone", "replay_digest": None}
    gone = said(answers[0], 3, cut(answers[0].choices, 4), **left)
    empty = said(answers[0], 4, cut(answers[0].choices, 0), **left)
    early = said(answers[2], 5, cut(answers[2].choices, 5), **left | {"outcome": "failed"})
    audited.write([*answers, gone, empty, early])
    return audited


@pytest.fixture
def audited(whole, tmp_path):
    """A copy of it, to be changed."""
    shutil.copytree(whole.path, tmp_path / "audit")
    return Audited(tmp_path / "audit", whole.key, whole.keys)


def bundle_of(audited, number, path):
    with AuditDirectory(audited.path).reading(audited.trusted) as (log, store):
        leaf, content = AuditDirectory.locate(log, store, f"{number:032x}")
        path.write_bytes(make_bundle(log, leaf, content).encode())
    return path


def test_true_receipts_are_equal(whole, replay, tmp_path):
    code, (summary,), _ = replay(whole.path, whole)
    assert code == 0 and (summary["receipts"], summary["different"]) == (6, 0)
    assert summary["tokens"] == 6 + 20 + 9 + 4 + 0 + 5
    code, (summary,), _ = replay(whole.path, whole, "--sample", 2)
    assert code == 0 and summary["receipts"] == 2
    code, (summary,), _ = replay(bundle_of(whole, 1, tmp_path / "b"), whole)
    assert code == 0 and (summary["receipts"], summary["tokens"]) == (1, 20)


def test_what_a_server_signed_falsely_is_named(answers, one_size, replay, tmp_path):
    audited = new_audited(tmp_path)
    first, second, third = answers
    true = third.choices[0][0].tokens
    lies = {
        "token": with_token(third.choices, 4, token_id=true[4].token_id ^ 1),
        "no token": with_token(third.choices, 4, token_id=2**31),
        "bit": with_token(second.choices, 2, logprob=_next(second.choices[1][1].tokens[2])),
        "end": ((first.choices[0][0]._replace(finish_reason="stop"),),),
        "longer": ((EndedChoice([*true, true[0]], "length"),),),
    }
    of = {"bit": second, "end": first}
    made = [said(of.get(n, third), i, lies[n]) for i, n in enumerate(lies)]
    other = msgspec.structs.replace(first.facts, model_digest="d1" * 32)
    spans = (SignedSpan(0, 0, 2, "d1" * 32, "a"), SignedSpan(0, 2, 6, "d2" * 32, "b"))
    contract = msgspec.structs.replace(first.facts, contract="c1" * 32)
    incomparable = [
        said(first, 5, first.choices, facts=other),
        said(first, 6, first.choices, spans=spans, replay_digest=None),
        said(first, 7, first.choices, approximate=True, replay_digest=None),
        said(first, 8, first.choices, facts=contract),
    ]
    audited.write([*made, *incomparable])
    code, lines, _ = replay(audited.path, audited)
    assert code == 1
    *told, summary = lines
    counts = Counter(line["object"] for line in told)
    assert counts == {"difference": 5, "not_replayed": 4}
    assert (summary["different"], summary["incomparable"]) == (5, 4)
    by_leaf = {line["leaf"]: line for line in told}
    first_of = {n: by_leaf[i]["differences"][0] for i, n in enumerate(lies) if n != "end"}
    positions = [(one["choice"], one["position"]) for one in first_of.values()]
    assert positions == [(0, 4), (0, 4), (3, 2), (0, 9)]
    assert first_of["token"]["recorded"]["id"] ^ 1 == first_of["token"]["computed"]["id"]
    assert first_of["bit"]["recorded"]["id"] == first_of["bit"]["computed"]["id"]
    assert first_of["longer"]["computed"] is None
    (end,) = by_leaf[3]["differences"]
    assert (end["part"], end["recorded"], end["computed"]) == (
        "finish_reasons",
        ["stop"],
        ["length"],
    )
    sides = [by_leaf[i].get("fault", {}).get("side") for i in range(5)]
    assert sides == ["receipt"] * 4 + [None]  # so many are examined
    whys = [by_leaf[i]["why"] for i in (5, 6, 7, 8)]
    said_why = "model digest d1d1", "several weights", "approx", "contract c1c1"
    assert all(words in why for why, words in zip(whys, said_why, strict=True))


def test_every_token_and_log_probability_that_was_signed_falsely_is_named(
    answers, one_size, replay, tmp_path
):
    audited, lies, places = new_audited(tmp_path), [], []
    for answer in answers:
        for position, token in enumerate(answer.choices[-1][-1].tokens):
            last = sum(map(len, answer.choices)) - 1
            for changes in ({"token_id": token.token_id ^ 1}, {"logprob": _next(token)}):
                changed = with_token(answer.choices, position, **changes)
                lies.append(said(answer, len(lies), changed))
                places.append((last, position))
    audited.write(lies)
    code, lines, _ = replay(audited.path, audited)
    assert code == 1 and lines[-1]["different"] == len(lies) == 2 * (6 + 5 + 9)
    found = {line["leaf"]: line["differences"][0] for line in lines[:-1]}
    named = [(found[leaf]["choice"], found[leaf]["position"]) for leaf in range(len(lies))]
    assert named == places


def test_a_machine_that_is_wrong_accuses_itself(whole, model, one_size, tpdet, monkeypatch):
    true = cpu_norm.rms_norm

    def wrong(x, *others):
        """As of a unit that only some layouts use: with several rows, one has one bit flipped."""
        out = true(x, *others)
        if len(out) > 3:
            out.view(torch.int32)[2, 0] ^= 1 << 20
        return out

    monkeypatch.setattr(cpu_norm, "rms_norm", wrong)
    names = "--model", model, "--keys", whole.keys
    code, output, _ = tpdet("replay", whole.path, *names, *SMALL)
    assert code == 1 and "this machine is at fault" in output
    assert "TP 2 was not tried: no room for 2 ranks" in output
    monkeypatch.setattr(cpu_norm, "rms_norm", lambda x, *others: true(x, *others) * float("nan"))
    assert tpdet("replay", whole.path, *names, *SMALL)[0] == 70


def flip_weight(llm):
    """Flip a bit of a weight in memory, behind the model's digest."""
    llm.engine.runner.model.layers[0].norms[0].weight.view(torch.int32)[7] ^= 1 << 12


def test_a_weight_that_changed_in_the_server_s_memory_is_named(model, one_size, replay, tmp_path):
    with LLM(model=model, device="cpu", kv_pages=32, max_model_len=512) as llm:
        flip_weight(llm)
        wrong = [answer_of(llm, number, *asked) for number, asked in enumerate(ASKED)]
    audited = new_audited(tmp_path)
    audited.write(wrong)
    code, lines, _ = replay(audited.path, audited)
    assert code == 1 and lines[-1]["different"] == len(wrong)
    places = [line["differences"][0]["position"] for line in lines[:-1]]
    assert places == [0] * len(wrong)
    assert [line["fault"]["side"] for line in lines[:-1]] == ["receipt"] * len(wrong)


def test_a_weight_that_changed_in_this_machine_s_memory_accuses_it(
    whole, replay, tmp_path, monkeypatch
):
    """The other number of ranks reads the weights anew; here it is as many."""
    true = fault.open_model

    def anew(options, mode):
        options.tp = 1
        return true(options, mode)

    def flipped(self, llm, examination):
        flip_weight(llm)
        begin(self, llm, examination)

    begin = ReceiptReplay.__init__
    monkeypatch.setattr(ReceiptReplay, "__init__", flipped)
    monkeypatch.setattr(fault, "open_model", anew)
    code, (line, _), _ = replay(bundle_of(whole, 1, tmp_path / "b"), whole)
    assert code == 1 and line["fault"]["side"] == "this machine"
    assert line["fault"]["between"][1] == "TP 1 generated"


def test_changed_bundles_and_logs_are_65_before_a_model_is_loaded(audited, replay, tmp_path):
    bundle = json.loads(bundle_of(audited, 0, tmp_path / "b").read_text())
    bundle["content"]["answers"][0]["outputs"][0]["token_ids"][2] ^= 1
    (tmp_path / "b").write_text(json.dumps(bundle))
    code, lines, error = replay(tmp_path / "b", audited, model="absent")
    assert code == 65 and not lines and "its ids differs" in error
    (entries,) = (file for file in (audited.path / "log/tile/entries").rglob("*") if file.is_file())
    data = bytearray(entries.read_bytes())
    data[len(data) // 2] ^= 1
    entries.chmod(0o600)
    entries.write_bytes(data)
    code, lines, error = replay(audited.path, audited, model="absent")
    assert code == 65 and not lines and "leaf" in error


def test_erased_content_is_66(audited, replay, tpdet, tmp_path):
    names = [f"{number:032x}" for number in range(6)]
    assert tpdet("audit", "erase", audited.path, names[1])[0] == 0
    code, (summary,), _ = replay(audited.path, audited)
    assert code == 0 and (summary["receipts"], summary["erased"]) == (5, 1)
    bundle = bundle_of(audited, 1, tmp_path / "b")
    assert replay(bundle, audited, model="absent")[0] == 66
    assert tpdet("audit", "erase", audited.path, *names)[0] == 0
    assert replay(audited.path, audited, model="absent")[0] == 66


def test_a_flipped_bit_of_a_weight_is_78(whole, model, replay, tmp_path):
    shutil.copytree(model, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    code, lines, _ = replay(whole.path, whole, model=tmp_path / "m")
    assert code == 78 and lines[-1]["incomparable"] == 6
    assert "this model" in lines[0]["why"] and "model digest" in lines[0]["why"]


@pytest.mark.parametrize(
    ("flags", "words"), [(("--sample", 0), "1 or more"), (("--sample", 1), "is a bundle")]
)
def test_a_wrong_sample_is_refused(whole, replay, tmp_path, flags, words):
    bundle = bundle_of(whole, 1, tmp_path / "b")
    code, _, error = replay(bundle, whole, *flags, model="absent")
    assert code == 2 and words in error


@pytest.mark.slow
def test_what_differs_is_computed_by_another_number_of_ranks(answers, model, tpdet, tmp_path):
    audited = new_audited(tmp_path)
    third = answers[2]
    token = third.choices[0][0].tokens[4].token_id
    audited.write([said(third, 0, with_token(third.choices, 4, token_id=token ^ 1))])
    names = "--model", model, "--keys", audited.keys
    for ranks, other in ((1, 2), (2, 1)):
        code, output, _ = tpdet("replay", audited.path, *names, *SMALL, "--tp", ranks)
        assert code == 1 and f"TP {other} generated" in output, output
        assert "the receipt is at fault" in output


def _next(token):
    """The next log-probability."""
    (bits,) = struct.unpack("<I", struct.pack("<f", token.logprob))
    return struct.unpack("<f", struct.pack("<I", bits ^ 1))[0]
