import msgspec
import numpy as np
import pytest

from tpdet.control import plan as plan_module
from tpdet.control.plan import (
    ALLOCATE,
    EVENT_NAMES,
    EVICT,
    PLAN_VERSION,
    ByColumns,
    ByShares,
    LikeliestByColumns,
    PageEvent,
    PlanRows,
    Row,
    RowSampling,
    StepPlan,
    WholeRows,
    decode_plan,
    encode_plan,
)
from tpdet.errors import IntegrityError
from tpdet.kernels.inputs.row_params import PlainParams

PLAN = StepPlan(
    PLAN_VERSION,
    12,
    (PageEvent(ALLOCATE, 3, 2**64 - 1), PageEvent(EVICT, 0, 5)),
    PlanRows.of([Row(4, 1, 2**64 - 1, 250, (9, 8, 7), (3, 0), (1, 2), 1)]),
    bytes(range(32)),
)


def test_a_plan_survives_its_bytes_and_the_bytes_are_canonical():
    data = encode_plan(PLAN)
    assert decode_plan(data) == PLAN
    assert encode_plan(decode_plan(data)) == data
    assert decode_plan(encode_plan(msgspec.structs.replace(PLAN, stop=True))).stop


ROWS = (
    RowSampling(2**64 - 1, PlainParams(0.1, -1, 1 / 3, 5e-324), 20),
    RowSampling(0, PlainParams(0.0, 0, 1.0, 0.0), None),
)


@pytest.mark.parametrize(
    "sampling", [WholeRows(), LikeliestByColumns(), ByColumns(ROWS), ByShares(ROWS)]
)
def test_how_a_step_samples_survives_in_every_bit(sampling):
    data = encode_plan(msgspec.structs.replace(PLAN, sampling=sampling))
    found = decode_plan(data)
    assert type(found.sampling) is type(sampling) and found.sampling == sampling
    assert encode_plan(found) == data
    assert len(data) - len(encode_plan(PLAN)) < 100


@pytest.mark.parametrize("wrong", [4, [], [4], [0, 1], [2], [3, [[1, 0.5]]], ["0"], True])
def test_another_way_of_sampling_is_refused(wrong):
    body = msgspec.msgpack.decode(encode_plan(PLAN))
    assert body[7] == [0]
    body[7] = wrong
    with pytest.raises(IntegrityError, match="schema"):
        decode_plan(msgspec.msgpack.encode(body))


def test_events_have_numbers_for_good():
    assert EVENT_NAMES == {0: "allocate", 1: "evict", 3: "nan", 4: "reload", 5: "share"}


def test_any_truncation_or_extension_is_refused():
    data = encode_plan(PLAN)
    for length in range(len(data)):
        with pytest.raises(IntegrityError, match="schema"):
            decode_plan(data[:length])
    with pytest.raises(IntegrityError, match="schema"):
        decode_plan(data + b"\0")


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [PLAN_VERSION, 0, [], [b"", b"", b"", b""]],
        [PLAN_VERSION, "0", [], [b"", b"", b"", b""], b""],
        [PLAN_VERSION, 0, [[0, 1]], [b"", b"", b"", b""], b""],
        [PLAN_VERSION, 0, [[0, 1.5, 2]], [b"", b"", b"", b""], b""],
        [PLAN_VERSION, 0, [], [], b""],
        [PLAN_VERSION, 0, [], [b"", "x", b"", b""], b""],
        [PLAN_VERSION, 0, [], [b"12345678", b"", b"", b""], b""],
    ],
)
def test_what_does_not_fit_the_schema_is_refused(value):
    with pytest.raises(IntegrityError, match="schema"):
        decode_plan(msgspec.msgpack.encode(value))


def test_rows_survive_as_columns_and_columns_that_differ_in_length_are_refused():
    rows = [
        Row(4, 1, 2**64 - 1, 250, (9, -8, 7), (3, 0), (1, 2), 2),
        Row(5, 0, 7, 0, (1,), (2,), (2**40,), 1, True),
    ]
    columns = PlanRows.of(rows)
    assert list(columns) == rows and len(columns) == 2 and not columns.decodes
    assert PlanRows.of(rows[1:]).decodes and not PlanRows.of([]).decodes
    for name in ("numbers", "token_ids", "pages", "versions"):
        for change in (lambda data: data[:-8], lambda data: data + bytes(8)):
            spoiled = {name: change(getattr(columns, name))}
            plan = msgspec.structs.replace(PLAN, rows=msgspec.structs.replace(columns, **spoiled))
            with pytest.raises(IntegrityError, match="schema"):
                decode_plan(encode_plan(plan))


def test_snapshots_of_rows_survive_and_those_of_none_are_refused():
    ids, state = tuple(range(700)), {"slot": 1, "standing": 0}
    rows = [
        Row(4, 0, 9, 0, ids, (3, 0, 1), (1, 2, 3), 1, 1, **state, snapshots=((4, 8), (8, 7))),
        Row(5, 0, 7, 0, (1,), (2,), (6,), 1, 1, 0, 0),
        Row(6, 0, 8, 0, ids, (4, 5, 6), (1, 2, 3), 1, 1, 2, 0, snapshots=((8, 6),)),
    ]
    columns = PlanRows.of(rows)
    assert list(columns) == rows
    wrong = [
        columns.snapshots[:-8],
        np.array([[3], [8], [6]]).tobytes(),
        np.array([[-1], [8], [6]]).tobytes(),
    ]
    changes = [{"snapshots": each} for each in wrong] + [{"states": b""}]
    for change in changes:
        plan = msgspec.structs.replace(PLAN, rows=msgspec.structs.replace(columns, **change))
        with pytest.raises(IntegrityError, match="schema"):
            decode_plan(encode_plan(plan))


BEHIND = (-1, 3, 4), (0,), (1,), 3, 3, -1, 0


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (Row(0, 0, 7, 5, *BEHIND, 2, (8, 9, 1, 3, 4)), None),
        (Row(0, 0, 7, 5, *BEHIND, 2, (8, 9, 1, 3)), "schema"),
        (Row(0, 0, 7, 5, *BEHIND, 0, (8,)), "schema"),
        (Row(0, 0, 7, 5, *BEHIND, 16, (8,) * 19), "up to 15"),
        (Row(0, 0, 7, 5, *BEHIND, -1, (8, 9)), "up to 15"),
        (Row(0, 0, 7, 5, (2, 3, 4), *BEHIND[1:], 2, (8, 9, 1, 3, 4)), "begins with"),
        (Row(0, 0, 7, 5, (-1, -2, 4), *BEHIND[1:], 2, (8, 9, 1, 3, 4)), "one token and"),
        (Row(0, 0, 7, 5, *BEHIND[:3], 3, 1, -1, 0, 2, (8, 9, 1, 3, 4)), "one token and"),
        (Row(0, 0, 7, 5, *BEHIND[:5], 2, 0, 2, (8, 9, 1, 3, 4)), "schema"),
    ],
)
def test_rows_behind_unverified_drafts_are_sound_or_refused(row, says):
    plan = msgspec.structs.replace(PLAN, rows=PlanRows.of([row]))
    if says is None:
        assert list(decode_plan(encode_plan(plan)).rows) == [row]
        return
    with pytest.raises(IntegrityError, match=says):
        decode_plan(encode_plan(plan))


def test_another_plan_version_is_refused():
    other = msgspec.structs.replace(PLAN, version=PLAN_VERSION + 1)
    with pytest.raises(IntegrityError, match=f"version {PLAN_VERSION + 1}"):
        decode_plan(encode_plan(other))


def test_a_plan_over_the_cap_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(plan_module, "MAX_PLAN_BYTES", 50)
    with pytest.raises(IntegrityError, match="--max-num-batched-tokens"):
        encode_plan(PLAN)
    with pytest.raises(IntegrityError, match="cap of 50"):
        decode_plan(bytes(51))
