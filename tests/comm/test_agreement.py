"""The start-up agreement: equal facts pass, a difference stops every rank naming it."""

import pytest

from tests.lib.thread_world import run_threads
from tpdet.comm.agreement import ABSENT, agree, blas_version, code_digest, collect_facts
from tpdet.comm.arithmetic_environment import VARIABLES
from tpdet.comm.world.world import SoloWorld
from tpdet.errors import DisagreementError

FACTS = {"seed": "0", "package torch": "2.13.0", "config.fold_order": "pairs"}


def messages_of(size, facts_of):
    """What each rank's agreement said; None where it passed."""

    def function(world):
        try:
            agree(world, facts_of(world.rank))
        except DisagreementError as error:
            return str(error)
        world.barrier()  # the world must still work
        return None

    return run_threads(size, function, local_size=2)


def test_equal_facts_agree_in_any_order():
    reverse = dict(reversed(FACTS.items()))
    assert messages_of(4, lambda rank: reverse if rank % 2 else FACTS) == [None] * 4


def test_a_rank_alone_agrees_with_itself():
    agree(SoloWorld(), FACTS)


@pytest.mark.parametrize("field", sorted(FACTS))
@pytest.mark.parametrize("odd", [0, 2, 3])
def test_a_difference_is_named_on_every_rank(field, odd):
    messages = messages_of(4, lambda rank: {**FACTS, field: "other"} if rank == odd else FACTS)
    assert len(set(messages)) == 1 and messages[0] is not None
    theirs = (1, "other", FACTS[field]) if odd == 0 else (odd, FACTS[field], "other")
    there = f"rank {theirs[0]} on node node{theirs[0] // 2}"
    expected = f"{field}: rank 0 on node node0 has {theirs[1]!r}, {there} has {theirs[2]!r}"
    assert expected in messages[0]


def test_a_missing_fact_is_a_difference():
    messages = messages_of(2, lambda rank: FACTS if rank == 0 else {"seed": "0"})
    assert f"rank 1 on node node0 has {ABSENT!r}" in messages[0]
    assert "(1 more fields differ)" in messages[0]


def test_an_empty_value_and_names_that_run_together_are_told_apart():
    assert messages_of(2, lambda rank: {"ab": "c"} if rank else {"a": "bc"})[0] is not None
    assert messages_of(2, lambda rank: {"a": ""} if rank else {})[0] is not None


def test_the_facts_cover_code_packages_machine_environment_and_settings(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    facts = collect_facts({"seed": 7, "fold_order": "tree"})
    assert facts["config.seed"] == "7" and facts["config.fold_order"] == "tree"
    assert facts["environment MKL_CBWR"] == "AVX2"
    assert facts["package torch"] != ABSENT and facts["code"] == code_digest()
    assert all(isinstance(value, str) for value in facts.values())
    assert {f"environment {variable.name}" for variable in VARIABLES} < {*facts}


def test_variables_not_in_the_table_are_not_compared(monkeypatch):
    before = collect_facts({})
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert collect_facts({}) == before


def test_the_blas_version_is_found():
    assert "unknown" not in blas_version() and any(c.isdigit() for c in blas_version())


def test_the_code_digest_follows_links_and_sees_content_and_names(tmp_path):
    package, linked = tmp_path / "package", tmp_path / "linked"
    package.mkdir()
    linked.mkdir()
    (package / "a.py").write_text("one = 1\n")
    (package / "kernels").symlink_to(linked)
    before = code_digest(package)
    (package / "notes.txt").write_text("not code")
    (package / "measured").mkdir()
    (package / "measured" / "gpu.json").write_text("{}")
    assert code_digest(package) == before
    (package / "table.json").write_text("{}")
    assert code_digest(package) != before
    (linked / "b.py").write_text("two = 2\n")
    with_linked = code_digest(package)
    assert with_linked != before
    (linked / "b.py").rename(linked / "c.py")
    assert code_digest(package) != with_linked
