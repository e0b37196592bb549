"""`tpdet verify` over real torchrun worlds: all families are equal, and the control is not."""

import json

import pytest

from tests.conftest import DATA_FAMILIES, FAMILIES, HYBRIDS
from tests.lib.forked import run_forked
from tests.lib.some_slow import some_slow
from tpdet.kernels.order import DEFAULT_FOLD_ORDER
from tpdet.tools.verify.compare import compare
from tpdet.tools.verify.spec import Trace, WorldReport
from tpdet.tools.worlds.machine import Machine

pytestmark = pytest.mark.long

STEPS = "alone,batch,chunks,whole,preempted,prefill"  # drafts: see test_verify_drafts
FEW_STEPS = "alone,batch,preempted"


def verify(*arguments, worlds=()):
    """worlds: the sizes of those that are forks, as this command is."""
    children = [((),) * size if size > 1 else () for size in worlds]
    return run_forked("tpdet", "verify", *arguments, children=tuple(children))


def sizes_of_families():
    """All are slow: the fold orders are verified below, and `test_engine` has ranks as threads."""
    yield pytest.param("qwen3", (1, 2, 4), marks=pytest.mark.slow)
    for family in (*FAMILIES, *DATA_FAMILIES, *HYBRIDS):
        yield pytest.param(family, (1, 2, 4, 8), marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("format_name", ["fp8-block", "mxfp4"])
def test_packed_weights_are_equal_to_dense_ones(format_name, tiny_model, tpdet, tmp_path):
    model = tiny_model("qwen3_moe", dtype="bfloat16")
    assert tpdet("quantise", model, "--format", format_name, "--output", tmp_path / "q")[0] == 0
    asked = ["--tp", "1,2,4", "--batch", "4", "--tokens", "3", "--relations", "batch,packed"]
    done = verify(tmp_path / "q", *asked, "--dtype", "bfloat16", "--fold-order", DEFAULT_FOLD_ORDER)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "packed weights" in done.stdout and "9 relations, all equal" in done.stdout


@pytest.mark.parametrize(("family", "sizes"), list(sizes_of_families()))
def test_a_family_is_equal_at_every_size_and_circumstance(tiny_model, tmp_path, family, sizes):
    output = tmp_path / "verify.json"
    short = [
        "--relations",
        "alone,batch,chunks,whole,preempted,prefill",
        "--batch",
        "1,16",
        "--budget",
        "100",
        "--tokens",
        "6",
    ]
    dtype = "bfloat16" if family in ("llama", "qwen3") else "float32"
    done = verify(
        tiny_model(family),
        "--tp",
        ",".join(map(str, sizes)),
        "--dtype",
        dtype,
        "--fold-order",
        DEFAULT_FOLD_ORDER,
        "--output",
        output,
        *short,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all equal" in done.stdout
    (run,) = json.loads(output.read_text())
    assert sorted({row["tp"] for row in run["rows"]}) == list(sizes)
    assert {row["relation"] for row in run["rows"]} == {
        "alone",
        "batch 16",
        "chunks of 100",
        "not chunked",
        "preempted",
        "prefill of decode",
    }
    assert all(row["equal"] for row in run["rows"])
    assert len({row["digest"] for row in run["rows"]}) == 1


@pytest.mark.parametrize(
    ("ranks", "batch", "dtype", "orders", "steps", "fresh"),
    some_slow(
        [(2, 8, "bfloat16", ("sequential", "tree"), FEW_STEPS, False)],
        [
            (2, 8, "bfloat16", ("sequential", "tree"), FEW_STEPS, False),
            (2, 8, "bfloat16", ("sequential", "tree"), STEPS, False),
            (4, 64, "float32", ("sequential", "pairs", "tree"), STEPS, True),
        ],
    ),
)
def test_every_fold_order_is_equal_and_a_contract_of_its_own(
    tiny_model, tmp_path, ranks, batch, dtype, orders, steps, fresh
):
    """`test_engine` has every order and circumstance at every size, by ranks that are threads.

    `server/end_to_end/test_mpirun.py` compares fresh processes in the quick tests.
    """
    output = tmp_path / "verify.json"
    done = verify(
        tiny_model("qwen3", layers=1),
        "--tp",
        f"1,{ranks}",
        "--dtype",
        dtype,
        "--fold-order",
        ",".join(orders),
        "--batch",
        f"1,{batch}",
        "--budget",
        "100",
        "--relations",
        f"{steps},cache,eager" + ",fresh" * fresh,
        "--tokens",
        "4",
        "--output",
        output,
        "--html",
        tmp_path / "page.html",
        worlds=() if fresh else (1, ranks),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every bit is equal" in (tmp_path / "page.html").read_text()
    (run,) = json.loads(output.read_text())
    assert [world["tp"] for world in run["worlds"]] == [1, ranks] * (1 + fresh)
    assert all(world["seconds"] > 0 for world in run["worlds"]) and run["fingerprints"]
    digests = {row["mode"]: row["digest"] for row in run["rows"]}
    assert {*digests} == {*orders} and len({*digests.values()}) == len(orders)
    other = [row for row in run["rows"] if row["relation"] == "fresh process"]
    if fresh:
        assert {row["mode"] for row in other} == {DEFAULT_FOLD_ORDER}
        assert {row["digest"] for row in other} == {digests[DEFAULT_FOLD_ORDER]}
    assert [row["tp"] for row in other] == [1, ranks] * fresh
    relations = {row["relation"] for row in run["rows"]}
    wanted = {"alone", f"batch {batch}", "preempted"}
    more = {"chunks of 100", "not chunked", "prefill of decode"}
    assert relations >= wanted | (more if steps == STEPS else set())
    assert all(row["equal"] for row in run["rows"])
    graphs_and_caches = {"without graphs", "empty kernel cache"}  # of GPUs
    assert not graphs_and_caches & relations


def test_the_control_fails_and_names_the_first_difference(tiny_model, tmp_path):
    output = tmp_path / "control.json"
    done = verify(
        tiny_model("qwen3", layers=1),
        "--control",
        "--relations",
        "alone,batch",
        "--tp",
        "1,2",
        "--dtype",
        "float32",
        "--fold-order",
        "pairs",
        "--batch",
        "1,4",
        "--budget",
        "100",
        "--tokens",
        "4",
        "--output",
        output,
        "--html",
        tmp_path / "control.html",
        worlds=(1, 2),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    page = (tmp_path / "control.html").read_text()
    assert "The control differs, as it must" in page and 'class="flipped"' in page
    assert "DIFFERENT" in done.stdout
    flat = " ".join(done.stdout.split())
    assert "position" in flat and "the reference has" in flat and "logit of token" in flat
    (run,) = json.loads(output.read_text())
    assert all(row["control"] for row in run["rows"])
    assert not any(row["equal"] for row in run["rows"] if row["tp"] == 2)


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_with_its_reason():
    """`test_verify_room` has what a rank refuses."""
    done = verify("./nowhere", "--tp", "1")
    assert done.returncode == 66
    assert "is not a directory" in done.stderr + done.stdout


def trace(digests, tokens=(1, 2)):
    return Trace(
        dtype="float32",
        mode="pairs",
        circumstance="alone",
        tokens={"p": tokens},
        logprob_bits={"p": ("00000000",) * len(tokens)},
        logits={"p": digests},
        values="none",
        steps=1,
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (trace({0: "a"}), "missing on one side"),
        (trace({0: "a", 1: "b", 2: "c"}), "missing on one side"),
        (trace({0: "a", 1: "x"}), "logits differ"),
        (trace({0: "a", 1: "b"}, tokens=(1, 3)), "tokens"),
        (trace({0: "a", 1: "recomputed: b then c"}), "recomputed"),
    ],
)
def test_any_difference_is_found(tmp_path, other, message):
    (tmp_path / "none").write_bytes(b"")
    reference = WorldReport(
        tp=1, vocab_size=4, fingerprints={}, traces=(trace({0: "a", 1: "b"}),), machine=Machine()
    )
    changed = WorldReport(tp=2, vocab_size=4, fingerprints={}, traces=(other,), machine=Machine())
    first, second = compare([reference, changed], tmp_path)
    assert first.equal and not second.equal
    assert message in second.difference
