"""Launchers: who a rank is under torchrun, Slurm, Open MPI and MPICH, alone and nested."""

from itertools import permutations

import pytest

from tpdet.errors import UsageError
from tpdet.launch.life.run_directory import current_session
from tpdet.launch.ranks.environment import FIRST_PORT, PORTS, RankEnvironment, read_environment
from tpdet.launch.ranks.node_list import first_host, hosts, tasks_on_node
from tpdet.launch.ranks.pinned import ENVIRONMENT, pin_environment


def torchrun(rank=5, size=8, local_rank=1, local_size=4, agents=2):
    values = (rank, size, local_rank, local_size, agents)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    found = {name: str(value) for name, value in zip(names, values, strict=True)}
    return found | {"MASTER_ADDR": "h", "MASTER_PORT": "1"}


def slurm(rank=5, size=8, local_rank=1, node=1, tasks="4(x2)", nodes="gpu[07-08]"):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_JOB_NODELIST": nodes,
    }


def open_mpi(rank=5, size=8, local_rank=1, local_size=4):
    prefix = "OMPI_COMM_WORLD_"
    return {
        prefix + "RANK": str(rank),
        prefix + "SIZE": str(size),
        prefix + "LOCAL_RANK": str(local_rank),
        prefix + "LOCAL_SIZE": str(local_size),
        "PMIX_NAMESPACE": "prterun-gpu07-1234@1",
        "PMIX_RANK": str(rank),
    }


def mpich(rank=5, size=8, local_rank=1, local_size=4):
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(local_rank),
        "MPI_LOCALNRANKS": str(local_size),
    }


BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
         "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "gpu[07-08]"}  # fmt: skip
THERE = {"MASTER_ADDR": "h", "MASTER_PORT": "9"}


def place_of(environ):
    found = read_environment(environ)
    assert found.launched
    return found.launcher, found.rank, found.size, found.local_rank, found.local_size


@pytest.mark.parametrize(
    ("name", "environ"),
    [
        ("torchrun", torchrun()),
        ("Slurm", slurm()),
        ("Open MPI", open_mpi() | THERE),
        ("MPICH", mpich() | THERE),
    ],
)
def test_each_launcher_is_read(name, environ):
    assert place_of(environ) == (name, 5, 8, 1, 4)


@pytest.mark.parametrize("make", [torchrun, slurm, open_mpi, mpich])
def test_local_ranks_are_any_permutation_on_one_host_and_on_several(make):
    """Open MPI deals ranks out to sockets or nodes in turn, Slurm cyclically, rank files anyhow."""
    for order in permutations(range(4)):
        for rank, local in enumerate(order):
            one = {"node": 0, "tasks": "4"} if make is slurm else {"local_size": 4}
            assert place_of(make(rank, 4, local_rank=local, **one) | THERE)[1:] == (
                rank,
                4,
                local,
                4,
            )
            several = {} if make is slurm else {"local_size": 4}
            found = read_environment(make(rank, 8, local_rank=local, **several) | THERE)
            assert (found.rank, found.local_rank, found.local_size) == (rank, local, 4)


@pytest.mark.parametrize("make", [torchrun, open_mpi, mpich])
@pytest.mark.parametrize(
    "numbers",
    [
        {"rank": 8}, {"local_rank": 4}, {"local_rank": 7}, {"size": 3, "rank": 1},
        {"local_size": 9},
    ],
)  # fmt: skip
def test_numbers_that_contradict_each_other_are_refused(make, numbers):
    with pytest.raises(UsageError, match=r"contradicts itself: rank . of ., local rank . of "):
        read_environment(make(**numbers) | THERE)


def test_hosts_named_task_by_task_need_an_address():
    """With --distribution=arbitrary rank 0 need not be on the first node of Slurm's list."""
    anyhow = slurm() | {"SLURM_DISTRIBUTION": "arbitrary"}
    with pytest.raises(UsageError, match="set MASTER_ADDR to the host of rank 0"):
        read_environment(anyhow)
    assert read_environment(anyhow | THERE).address == "h"
    assert read_environment(slurm() | {"SLURM_DISTRIBUTION": "cyclic"}).address == "gpu07"


def test_slurm_tells_where_to_meet_and_what_to_call_the_start():
    found = read_environment(slurm())
    assert found.address == "gpu07" and FIRST_PORT <= found.port < FIRST_PORT + PORTS
    assert found.session == "slurm-77-0-0-1" == current_session(found)
    assert read_environment(slurm(0, 8, 0, 0)).port == found.port
    other = read_environment(slurm() | {"SLURM_JOB_ID": "78"})
    assert other.port != found.port and other.session != found.session
    again = read_environment(slurm() | {"SLURM_RESTART_COUNT": "1"})
    assert again.session != found.session
    given = read_environment(slurm() | THERE)
    assert (given.address, given.port) == ("h", 9)
    assert read_environment(slurm(1, 4, 1, 0, "4", "gpu07")).address == "127.0.0.1"


def test_uneven_nodes_are_counted():
    assert place_of(slurm(8, 10, 0, 2, "4(x2),2", "a[1-3]")) == ("Slurm", 8, 10, 0, 2)


def test_ranks_of_mpi_meet_on_their_host_or_where_they_are_told():
    found = read_environment(open_mpi(1, 4, 1, 4))
    assert (
        found.address == "127.0.0.1" and found.port == read_environment(open_mpi(0, 4, 0, 4)).port
    )
    assert read_environment(mpich(1, 4, 1, 4)).address == "127.0.0.1"
    for environ in (open_mpi(), mpich()):
        with pytest.raises(UsageError, match="MASTER_ADDR to the host of rank 0 and MASTER_PORT"):
            read_environment(environ)
        assert read_environment(environ | THERE).address == "h"
        assert read_environment(environ | BATCH).address == "gpu07"
    with pytest.raises(UsageError, match="MASTER_PORT is 'x'"):
        read_environment(open_mpi() | THERE | {"MASTER_PORT": "x"})


def test_a_batch_script_is_no_rank():
    assert read_environment(BATCH) == RankEnvironment()
    with pytest.raises(UsageError, match="set but not SLURM_STEP_NUM_TASKS"):
        read_environment(BATCH | {"SLURM_STEP_ID": "0"})


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        # sbatch's script, and srun of one agent a node
        (torchrun(), BATCH),
        (torchrun(), slurm(1, 2, 0, 1, "1(x2)")),
        (torchrun(1, 4, 1, 4, agents=1), slurm(0, 1, 0, 0, "1", "a")),
        # mpirun of one agent a host
        (torchrun(), open_mpi(1, 2, 0, 1)),
        # a script that exports torchrun's names in each task
        (torchrun(), slurm()),
        # mpirun in sbatch's script: its daemons on other nodes come from srun
        (open_mpi() | THERE, BATCH),
        (open_mpi() | THERE, slurm(0, 1, 0, 0, "1", "a")),
        (mpich() | THERE, slurm(0, 2, 0, 0, "1(x2)")),
        # srun --mpi=pmix or pmi2: the same place, told twice
        (open_mpi(), slurm()),
    ],
)
def test_the_innermost_launcher_counts(inner, outer):
    alone = read_environment(inner | THERE)
    found = place_of(outer | inner)
    assert found == (alone.launcher, alone.rank, alone.size, alone.local_rank, alone.local_size)
    # Without it the outer one is read, and says something else (or it is the same place).
    without = {name: value for name, value in outer.items() if name not in inner}
    assert read_environment(without | THERE).launcher != alone.launcher


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        # `srun -n 8 torchrun --nproc-per-node 8`: eight worlds
        (torchrun(3, 8, 3, 8, agents=1) | slurm(), ("torchrun", "Slurm")),
        (torchrun() | open_mpi(2), ("torchrun", "Open MPI")),
        (open_mpi(2) | slurm(), ("Open MPI", "Slurm")),
        (mpich(0, 1, 0, 1) | slurm(), ("MPICH", "Slurm")),
        (open_mpi(2) | mpich(5), ("Open MPI", "MPICH")),
    ],
)
def test_launchers_that_disagree_are_both_named(environ, names):
    with pytest.raises(UsageError, match=f"{names[0]} says rank . of .*{names[1]} says rank"):
        read_environment(environ)


def test_pmi_of_srun_is_slurms():
    assert place_of(slurm() | {"PMI_RANK": "5", "PMI_SIZE": "8"}) == ("Slurm", 5, 8, 1, 4)
    with pytest.raises(UsageError, match="PMI_RANK, PMI_SIZE set but not MPI_LOCALRANKID"):
        read_environment({"PMI_RANK": "5", "PMI_SIZE": "8"})


@pytest.mark.parametrize("make", [slurm, open_mpi, mpich])
def test_half_set_and_wrong_numbers_are_refused_by_name(make):
    whole = make()
    for name in whole:
        if name.startswith(("OMPI", "MPI_", "PMI_", "SLURM_PROC", "SLURM_LOCAL", "SLURM_NODEID")):
            without = {key: value for key, value in whole.items() if key != name} | THERE
            with pytest.raises(UsageError, match=f"set but not {name}"):
                read_environment(without)
            with pytest.raises(UsageError, match=f"{name} is '-1', not a number"):
                read_environment(whole | THERE | {name: "-1"})


def test_a_wrapper_may_name_the_start():
    for environ in (torchrun(), open_mpi(1, 4, 1, 4)):
        first = read_environment(environ | {"TPDET_START": "job 7/a"})
        assert current_session(first) == "job_7_a"


def test_node_lists():
    assert hosts("n[1-2]") == ["n1", "n2"]
    assert hosts("gpu[08-10,12],login") == ["gpu08", "gpu09", "gpu10", "gpu12", "login"]
    assert hosts("r[1-2]c[1-2]-x") == ["r1c1-x", "r1c2-x", "r2c1-x", "r2c2-x"]
    assert first_host("a-b,c[1-3]") == "a-b" and hosts("one") == ["one"]
    for wrong in (
        "",
        "a,",
        ",a",
        "a[",
        "a]",
        "a[]",
        "a[2-1]",
        "a[1-",
        "a[x]",
        "a[1-2-3]",
        "a[0-99999999]",
        "a[1-60000]b[1-2]",
    ):
        with pytest.raises(UsageError):
            hosts(wrong)


def test_tasks_of_a_node():
    assert [tasks_on_node("8(x2),4", node) for node in range(3)] == [8, 8, 4]
    for wrong, node in (("8(x2),4", 3), ("8x2", 0), ("", 0)):
        with pytest.raises(UsageError, match="tasks per node"):
            tasks_on_node(wrong, node)


# --- the pinned environment --------------------------------------------------------------------


def test_the_table_is_set_where_unset_and_enforced():
    one, several = RankEnvironment(1, 4, 1, 4, True), RankEnvironment(1, 4, 1, 2, True)
    environ: dict[str, str] = {}
    pin_environment(one, environ)
    assert {name: environ[name] for name, _, _ in ENVIRONMENT} == {
        name: value for name, value, _ in ENVIRONMENT
    }
    assert int(environ["OMP_NUM_THREADS"]) >= 1
    environ = {"OMP_NUM_THREADS": "3"}
    pin_environment(several, environ)
    assert "GLOO_SOCKET_IFNAME" not in environ and environ["OMP_NUM_THREADS"] == "3"
    with pytest.raises(UsageError, match="NCCL_NVLS_ENABLE is '1': it must be 0"):
        pin_environment(one, {"NCCL_NVLS_ENABLE": "1"})
