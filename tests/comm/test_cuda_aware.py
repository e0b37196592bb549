"""A CUDA-aware MPI is given GPU memory, after the stream, and only if every rank's is one.

Tensors "on a GPU" are torch's fakes, which have a device and no memory.
"""

import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tpdet.comm.world import group_world, mpi_carrier
from tpdet.comm.world.group_world import GroupWorld
from tpdet.comm.world.mpi_carrier import MpiCarrier, is_cuda_aware, open_mpi

AWARE, STAGED = "mpi, CUDA-aware", "mpi, staged"
QUERY = "int MPIX_Query_cuda_support(void) { return %d; }\n"
SWITCH = """
static char marker;
int MPI_T_init_thread(int required, int *provided) { return 0; }
int MPI_T_cvar_get_index(const char *name, int *index) { *index = 7; return %d; }
int MPI_T_cvar_handle_alloc(int index, void *object, void **handle, int *count) {
    *handle = &marker; *count = 1; return index != 7 || object;
}
int MPI_T_cvar_read(void *handle, char *value) { *value = %d; return handle != &marker; }
int MPI_T_cvar_handle_free(void **handle) { return *handle != &marker; }
int MPI_T_finalize(void) { return 0; }
"""


def library(folder, source):
    """An MPI of these functions, as mpi4py's module names its file."""
    path = folder / "libmpi.so"
    command = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", path]
    subprocess.run(command, input=source, text=True, check=True)
    return SimpleNamespace(__file__=str(path))


@pytest.mark.skipif(
    shutil.which("cc") is None, reason="no C compiler for the library that is asked"
)
@pytest.mark.parametrize(
    ("source", "aware"),
    [
        (QUERY % 1 + SWITCH % (0, 1), True),
        (QUERY % 1 + SWITCH % (5, 0), True),  # MPICH, Open MPI 5: there is no such switch
        (QUERY % 1 + SWITCH % (0, 0), False),  # Open MPI 4 built so, but off, or without a driver
        (QUERY % 0 + SWITCH % (0, 1), False),
        (SWITCH % (0, 1), False),  # an MPI without the function
    ],
)
def test_the_library_is_asked(tmp_path, source, aware):
    assert is_cuda_aware(library(tmp_path, source)) is aware


def test_what_is_no_library_takes_nothing(tmp_path):
    assert not is_cuda_aware(SimpleNamespace(__file__=str(tmp_path / "missing.so")))


# --- ranks agree ---------------------------------------------------------------------------------


class Communicator:
    """Of ranks whose answers are given; notes what happens."""

    def __init__(self, events, answers=(1, 1)):
        self.events, self.answers = events, answers

    def Get_rank(self):
        return 0

    def Get_size(self):
        return len(self.answers)

    def Dup(self):
        return self

    def Split(self, color, key):
        return Communicator(self.events)

    def Iallgather(self, sent, received):
        self.events.append(("Iallgather", sent, received))
        if not isinstance(sent, list):
            received[:] = self.answers
            received[0] = sent[0]
        return SimpleNamespace(Test=lambda: True)

    def Ialltoall(self, sent, received):
        self.events.append(("Ialltoall", sent, received))
        return SimpleNamespace(Test=lambda: True)


@pytest.mark.parametrize(
    ("mine", "answers", "name"),
    [(True, (9, 1, 1), AWARE), (True, (9, 1, 0), STAGED), (False, (9, 1, 1), STAGED)],
)
def test_one_rank_that_is_not_aware_stages_all(monkeypatch, caplog, mine, answers, name):
    events = []
    module = SimpleNamespace(COMM_WORLD=Communicator(events, answers), __file__="")

    def started():
        events.append("MPI_Init")
        return module

    monkeypatch.setattr(mpi_carrier, "_started", started)
    monkeypatch.setattr(mpi_carrier, "is_cuda_aware", lambda mpi: mpi is module and mine)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("context"))
    caplog.set_level("INFO", "tpdet")
    carrier = open_mpi(0, 3, 1.0, cuda=True)
    carrier.leave()
    assert events[:2] == ["context", "MPI_Init"] and len(events) == 3
    assert carrier.name == name and f"tensors travel by {name}" in caplog.text
    assert carrier.takes("cuda") is carrier.part([range(3)]).takes("cuda") is (name == AWARE)
    assert carrier.takes("cpu")
    unaware = [rank for rank, said in enumerate((mine, *answers[1:])) if not said]
    assert [r.levelname for r in caplog.records] == ["WARNING" if unaware else "INFO"]
    assert not unaware or f"ranks {unaware[0]} have" in caplog.text


def test_ranks_without_gpus_are_not_asked(monkeypatch, caplog):
    events = []
    module = SimpleNamespace(COMM_WORLD=Communicator(events))
    monkeypatch.setattr(mpi_carrier, "_started", lambda: module)
    carrier = open_mpi(0, 2, 1.0)
    carrier.leave()
    assert (carrier.name, events, carrier.takes("cuda"), caplog.text) == ("mpi", [], False, "")


# --- what MPI is given ---------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["all_gather", "all_to_all"])
def test_gpu_memory_is_given_once_the_stream_is_done(monkeypatch, operation):
    events = []
    stream = SimpleNamespace(synchronize=lambda: events.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    with FakeTensorMode():
        sent, received = (torch.empty(n, dtype=torch.uint8, device="cuda:0") for n in (3, 6))
        getattr(MpiCarrier(Communicator(events), cuda=True), operation)(received, sent, 1.0)
    first, (name, *given) = events
    assert first == "synchronize" and name == "I" + operation.replace("_", "")
    assert given[0][0] is sent and given[1][0] is received  # themselves, in place
    assert given[0][1] == given[1][1] == "B"


def test_host_memory_waits_for_no_stream(monkeypatch):
    monkeypatch.delattr(torch.cuda, "current_stream")
    received = torch.zeros(2, dtype=torch.uint8)
    carrier = MpiCarrier(Communicator([], (0, 4)), cuda=True)
    carrier.all_gather(received, torch.tensor([3], dtype=torch.uint8), 1.0)
    assert received.tolist() == [3, 4]


class Noting(MpiCarrier):
    """Notes which memory it is given."""

    def __init__(self, cuda):
        super().__init__(None, cuda)
        self.given = []

    def all_gather(self, received, sent, timeout):
        assert received.numel() == 2 * sent.numel() and sent.dtype == torch.uint8
        self.given.append((sent.device.type, received.device.type))

    def all_to_all(self, received, sent, timeout):
        assert received.numel() == sent.numel() and sent.dtype == torch.uint8
        self.given.append((sent.device.type, received.device.type))


@pytest.mark.parametrize(("cuda", "kind"), [(True, "cuda"), (False, "cpu")])
def test_a_world_leaves_tensors_where_its_mpi_takes_them(monkeypatch, cuda, kind):
    summed = []
    monkeypatch.setattr(group_world, "library_sum", lambda x, group: summed.append(x.device.type))
    world = GroupWorld((0, 2), (0, 2), "cpu", 1.0)
    world._carrier = Noting(cuda)
    with FakeTensorMode():
        x = torch.empty(4, 3, dtype=torch.bfloat16, device="cuda")
        found = [world.all_gather(x), world.all_to_all(x), world.add_in_any_order(x)]
        nothing = torch.empty(0, 3, device="cuda")
        assert world.all_gather(nothing).shape == (2, 0, 3)
        assert [tuple(y.shape) for y in found] == [(2, 4, 3), (4, 3), (4, 3)]
        assert all(y.is_cuda and y.dtype == x.dtype for y in found)
    assert world._carrier.given == [(kind, kind)] * 2
    assert summed == ["cpu"]  # a library's sum is gloo's
    assert world.by_mpi == (AWARE if cuda else STAGED) and not world.carries_cuda
    world.all_gather(torch.zeros(2))
    assert world._carrier.given[2] == ("cpu", "cpu")


def test_no_carrier_is_no_mpi():
    assert GroupWorld((0, 2), (0, 2), "cpu", 1.0).by_mpi == ""
