"""Bounds of rows with top-k or top-p in Triton's interpreter, by each method that finds them."""

import pytest
import torch

from tests.kernels.interpreted.sampling_rows import KINDS, QUICK, V, rows, slow
from tests.lib.kernels.sampling_oracle import masses_by
from tpdet.kernels.cpu.sampling import tokens as cpu_tokens
from tpdet.kernels.cpu.sampling.noise import fixed_point_mass
from tpdet.kernels.cuda.sampling import peaks, search
from tpdet.kernels.cuda.sampling.ranks import ids_of_keys
from tpdet.kernels.cuda.sampling.table import ABOVE_ALL, row_table
from tpdet.kernels.exact.thresholds import top_p_numerator
from tpdet.kernels.inputs.plain_rows import PlainRows
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard

NO_BOUND = ABOVE_ALL.value
PLAIN = ("random", "tied", "zeros")  # none of their rows may need the search by digits
METHODS = ("list",), ("window",), ("digits",), ("list", "window")


def last_kept(x, how):
    """The last id that top-k and top-p keep of a row fp32 [V] in the order of sort keys."""
    kept, ids = x + 0.0, torch.arange(len(x))
    with masses_by(x.device):
        if 0 < how.top_k < len(x):
            mask = cpu_tokens.keep_top_k(kept, how.top_k)
            kept, ids = kept[mask], ids[mask]
        if how.top_p < 1.0:
            mask = cpu_tokens.keep_top_p(kept, top_p_numerator(how.top_p))
            kept, ids = kept[mask], ids[mask]
    return int(ids[kept == kept.amin()].amax())


@pytest.mark.parametrize("kinds", [(QUICK,), slow(KINDS)], ids=" ".join)
def test_bounds_are_the_cpus_by_each_method(kinds):
    fell = {}
    for kind in kinds:
        x = rows(kind, 1)
        for way in (
            {"top_k": 1},
            {"top_k": 40},
            {"top_k": 4000},
            {"top_p": 0.9},
            {"top_p": 1e-9},
            {"top_k": 40, "top_p": 0.5},
            {"top_k": 6000, "top_p": 0.5},
            {"top_p": 0.9999},
            {"top_k": V - 1},
        ):
            last = last_kept(x[0], RowParams(1.0, 1, 1, **way))
            given = given_of(x, way)
            for methods in METHODS:
                by = bounds_by(methods, given, V)
                fell[methods] = fell.get(methods, 0) + (by == NO_BOUND)
                no_digits = methods == ("list", "window")
                assert by != NO_BOUND or not no_digits or kind not in PLAIN, (kind, way)
                assert by == NO_BOUND or ids_of_keys(by) == last, (kind, way, methods, by, last)
    tried = 9 * len(kinds)
    assert 0 < fell[("list",)] < tried, fell  # each method has rows to answer for
    assert fell[("window",)] < tried / 4, fell
    assert fell[("digits",)] == 0, fell
    assert fell[("list", "window")] < tried / 6, fell


def test_long_runs_of_ties_need_no_search():
    """Values with more ids than a window lists, under shares that end in each of their runs."""
    vocabulary, ended = 30_000, set()
    x = torch.randint(0, 3, (1, vocabulary), generator=torch.Generator().manual_seed(3)) * 0.7
    x[0, ::4000] = 1.9
    masses = torch.exp(x[0].double())
    for share in (0.5555, 0.7, 0.95):
        keys = torch.sort(x[0], descending=True, stable=True)
        upto = torch.cumsum(masses[keys.indices], 0) / masses.sum()
        last = int((upto < share).sum())
        found = int(bound_of(x, {"top_p": share}, ("list", "window")))
        assert ids_of_keys(found) == int(keys.indices[last]), (share, found)
        ended.add(float(x[0, keys.indices[last]]))
    assert len(ended) == 3, ended
    for k in (9000, 29_000):
        found = int(bound_of(x, {"top_k": k}, ("list", "window")))
        assert ids_of_keys(found) == int(keys.indices[k - 1]), k


def test_a_few_heavy_ids_do_not_mislead_the_window():
    """A third of the mass on one id, which counts four times or not when a quarter of them are."""
    vocabulary = 151_936  # of which a window is a small part
    x = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(4)) * 3
    x[0, 5] = float(x.logsumexp(1)) - 0.85
    masses = fixed_point_mass(x[0], x[0].amax())
    keys = torch.sort(x[0], descending=True, stable=True)
    last = int((torch.cumsum(masses[keys.indices], 0) < 0.95 * masses.sum()).sum())
    found = int(bound_of(x, {"top_p": 0.95}, ("list", "window")))
    assert last > 6144 and ids_of_keys(found) == int(keys.indices[last])


def test_values_in_one_bucket_are_found_by_digits():
    """Ten thousand values near each other, which neither lists nor runs can tell apart."""
    vocabulary = 12_000
    x = torch.rand(1, vocabulary, generator=torch.Generator().manual_seed(5)) * 1e-3
    x[0, 77] = 7.0
    keys = torch.sort(x[0], descending=True, stable=True)
    for way, k in (
        ({"top_p": 0.9}, None),
        ({"top_k": 9000}, 9000),
        ({"top_k": 9000, "top_p": 0.5}, None),
    ):
        assert int(bound_of(x, way, ("list", "window"))) == NO_BOUND, way
        found = int(bound_of(x, way, ("digits",)))
        masses = fixed_point_mass(x[0], x[0].amax())[keys.indices][: way.get("top_k")]
        if k is None:
            k = int((torch.cumsum(masses, 0) < way["top_p"] * masses.sum()).sum()) + 1
        assert ids_of_keys(found) == int(keys.indices[k - 1]), way


def bound_of(x, way, names):
    return bounds_by(names, given_of(x, way), x.shape[1])


def given_of(x, way):
    """What `find_bounds` takes of one row: the scanned row."""
    vocabulary = x.shape[1]
    numbers, filtered, _ = row_table(PlainRows.of([RowParams(1.0, 1, 1, **way)]), [], vocabulary)
    assert filtered.tolist() == [0]
    table = torch.from_numpy(numbers)
    slots = torch.zeros(1, dtype=torch.int64)
    return peaks.scan_rows(x, x, table, slots, Shard(0, vocabulary))


def bounds_by(methods, given, vocabulary):
    """The bound of one row by the methods that are named; NO_BOUND where they found none."""
    found = search.find_bounds(given, vocabulary, False, methods)
    return int(found.bounds[0, 0])
