"""`tpdet diff --trace`: a wrong operation of one rank is located, at its size and from another."""

import json
import threading

import msgspec
import pytest
import torch

from tests.lib.engine_harness import small_config
from tests.lib.thread_world import run_threads
from tests.tools.diff.test_diff import ANSWER, write
from tpdet.comm.world.world import SoloWorld
from tpdet.engine import Engine
from tpdet.kernels.cpu.attention import attention as cpu_attention
from tpdet.kernels.cpu.gemm import gated as cpu_gated
from tpdet.kernels.cpu.pointwise import finish as cpu_finish
from tpdet.kernels.partial_sums import PartialSums
from tpdet.tools.diff.operations import OperationLog, noted
from tpdet.tools.diff.traces import locate

PROMPT = tuple(range(3, 40))
WRONG = {
    "paged_attention": (cpu_attention, "layer 1, paged_attention"),
    "gated_gemm": (cpu_gated, "layer 1, gated_gemm"),
    "fold_and_norm": (cpu_finish, "layer 1, fold_and_norm"),
}


class Fault:
    """A bit of the last row that one thread computes wrongly, in the second layer."""

    armed: str | None = None
    calls = 0

    def wrap(self, name, true):
        per_layer = 2 if name == "fold_and_norm" else 1

        def run(*args, **named):
            out = true(*args, **named)
            if self.armed == name and threading.current_thread().name == "rank 1":
                self.calls += 1
                if self.calls == per_layer + 1:
                    value = (out[0] if isinstance(out, tuple) else out)[-1:].view(torch.int32)
                    value.view(-1)[0] ^= 1
            return out

        return run


@pytest.fixture(scope="module")
def trace(tiny_model):
    """A function that traces at a size, with an operation of rank 1 wrong or none."""
    model = tiny_model("qwen3", kv_heads=2)
    config = small_config(model, enforce_eager=True, enable_prefix_caching=False)

    def run(size, fault=None, name=None):
        def one_rank(world):
            engine = Engine(config, world)
            world.barrier()
            if fault is not None:
                fault.armed, fault.calls = name, 0
            return noted(engine, PROMPT)

        return [one_rank(SoloWorld())] if size == 1 else run_threads(size, one_rank)

    return run


@pytest.fixture(scope="module")
def true_traces(trace):
    return {size: trace(size) for size in (1, 2)}


def test_true_traces_are_equal_and_tell_how_much_is_compared(true_traces, trace):
    across = locate(true_traces[1], true_traces[2])
    assert across.operation is None and across.compared > 12
    again = locate(true_traces[2], trace(2))
    assert again.operation is None and again.compared == again.operations


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_operation_on_one_rank_is_located(true_traces, trace, monkeypatch, name):
    module, place = WRONG[name]
    fault = Fault()
    monkeypatch.setattr(module, name, fault.wrap(name, getattr(module, name)))
    wrong = trace(2, fault, name)
    for size in (1, 2):
        found = locate(true_traces[size], wrong)
        assert found.operation is not None and found.operation.startswith(place), found
        assert found.ranks == (1,)


@pytest.mark.slow
def test_every_operation_that_is_wrong_on_one_rank_is_located(true_traces, trace, monkeypatch):
    """Each output of each one: a bit of its last row, from which the later ones compute on."""
    true, target = OperationLog.run, None

    def run(self, name, operation, *args, **named):
        """As the log does; the target's operation is one that gives a wrong bit."""
        place = self._step, self._stage, name
        which = target[3] - self._calls[place] if target[:3] == place else -1

        def wrong(*args, **named):
            result = operation(*args, **named)
            outputs = result if isinstance(result, tuple) else (result,)
            if 0 <= which < len(outputs) and threading.current_thread().name == "rank 1":
                flip_last_row(name, outputs[which])
            return result

        return true(self, name, wrong, *args, **named)

    monkeypatch.setattr(OperationLog, "run", run)
    across = []
    for operation in true_traces[2][1]:
        target = operation.key
        wrong = trace(2)
        found = locate(true_traces[2], wrong)
        assert (found.operation, found.ranks) == (str(operation), (1,)), found
        other = locate(true_traces[1], wrong).operation
        # What ranks exchange is of one size alone: there the sum of it is what differs.
        behind = operation.name == "fold_roots" and f"{operation.stage}, fold_and_norm" in other
        assert other == str(operation) or behind, (operation, other)
        across.append(not behind)
    assert sum(across) > 20 and across.count(False) == 4


def flip_last_row(name, output):
    """Flip a bit of the first value that the log notes of the last row, a high one of a float."""
    by_columns = name == "fold_roots" or isinstance(output, PartialSums)
    values = output.values if isinstance(output, PartialSums) else output
    row = values[0, -1] if by_columns else values[-1]
    row.view(-1).view(torch.int32)[0] ^= 1 << 16 if row.is_floating_point() else 1


@pytest.mark.slow
def test_the_command_traces_what_differs_at_two_sizes(tiny_model, tpdet, tmp_path):
    model = tiny_model("qwen3", kv_heads=2)
    small = ("--device", "cpu", "--kv-pages", "32")
    asked = ("--prompt", "The for", "--max-tokens", 6, "--json", *small)
    code, output, _ = tpdet("generate", model, *asked)
    assert code == 0
    true, false = tmp_path / "true", tmp_path / "false"
    true.write_text(output)
    line = json.loads(output)
    line["outputs"][0]["token_ids"][4] ^= 1
    false.write_text(json.dumps(line))
    flags = ("--trace", "--model", model, *small)
    code, output, said = tpdet("diff", true, false, *flags)
    assert code == 1, said
    assert "the first difference is at choice 0, position 4" in output
    assert "no operation differs: " in output
    code, output, _ = tpdet("diff", true, true, *flags, "--tp", "2,2", "--json")
    located = json.loads(output)
    assert code == 0 and located["compared"] == located["operations"] > 20
    line["weights"] = "0" * 64
    false.write_text(json.dumps(line))
    assert tpdet("diff", true, false, *flags, "--tp", "1,1")[0] == 78


def test_what_cannot_be_traced_is_refused(tpdet, tmp_path):
    file = write(tmp_path / "a", ANSWER)
    for flags, words in (
        ((), "give --model"),
        (("--model", "absent", "--tp", "1"), "two sizes"),
    ):
        code, _, said = tpdet("diff", file, file, "--trace", *flags)
        assert code == 2 and words in said
    other = write(tmp_path / "b", msgspec.structs.replace(ANSWER, prompt_token_ids=(1, 3)))
    code, _, said = tpdet("diff", file, other, "--trace", "--model", "absent")
    assert code == 2 and "other prompts" in said
