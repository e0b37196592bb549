"""The ways in which verification starts its ranks: which there are, their nodes, the report."""

import io
import subprocess
import sys
from dataclasses import asdict

import pytest
from rich.console import Console

from tpdet.cli import main
from tpdet.errors import UsageError
from tpdet.launch.ranks.environment import read_environment
from tpdet.launch.ranks.node_name import check_places, node_names, this_node
from tpdet.tools.verify.compare import Relation
from tpdet.tools.verify.parts import Part, otherwise, parts_of
from tpdet.tools.verify.report import print_matrix, result_rows
from tpdet.tools.verify.spec import Seen, VerifySpec, WorldReport
from tpdet.tools.worlds import launchers
from tpdet.tools.worlds.machine import Machine
from tpdet.tools.worlds.pretended_nodes import pretend_nodes
from tpdet.tools.worlds.ways import LaunchWay, Ways, choose

SPEC = VerifySpec(
    model="none",
    dtypes=("float32",),
    fold_orders=("pairs",),
    batches=(1,),
    budgets=(100,),
    prompt_lengths=(5,),
    tokens=4,
    seed=0,
    control=False,
    device="cpu",
    relations=("alone", "fresh"),
)
THREE = ("torchrun", "slurm", "mpi")


# --- which worlds ------------------------------------------------------------------------------


def test_every_launcher_and_transport_that_fit_are_run_and_the_others_are_told():
    chosen = choose(Ways(THREE, ("gather", "mpi"), (1,)), (1, 2, 4, 8), "cpu", False)
    gathered = [(tp, LaunchWay(name, "gather")) for name in THREE for tp in (1, 2, 4, 8)]
    assert chosen.worlds == gathered + [(tp, LaunchWay("mpi", "mpi")) for tp in (2, 4, 8)]
    assert sorted(chosen.left_out.values()) == [1, 4, 4]
    assert any("launcher slurm: MPI carries" in reason for reason in chosen.left_out)


def test_nodes_share_out_the_ranks_and_nobody_else():
    chosen = choose(Ways(nodes=(1, 2, 4)), (1, 2, 4, 8), "cpu", False)
    assert [(way.nodes, tp // way.nodes) for tp, way in chosen.worlds if way.nodes > 1] == [
        (2, 1),
        (2, 2),
        (2, 4),
        (4, 1),
        (4, 2),
    ]
    assert choose(Ways(), (1, 2), "cpu", False).worlds == [(1, LaunchWay()), (2, LaunchWay())]


@pytest.mark.parametrize(
    ("ways", "tps", "control", "message"),
    [
        (
            Ways(("torchrun", "slurm"), ("gather", "mpi")),
            (2,),
            False,
            "--transport mpi: .*--launch",
        ),
        (Ways(transports=("auto", "peer")), (2,), False, "--transport peer: .*no peer memory"),
        (Ways(nodes=(1, 3)), (1, 2, 4), False, "--nodes 3: "),
        (Ways(nodes=(2,)), (1, 2), False, "--tp 1: --nodes 2 with --tp 1"),
        (Ways(("mpi",), ("gather", "mpi")), (1,), False, "--transport mpi: .*sends nothing"),
        (Ways(nodes=(1, 2)), (4,), True, "--control replaces one gather"),
        (Ways(("mpi",), ("mpi",)), (4,), True, "--control replaces one gather"),
    ],
)
def test_what_would_be_left_out_everywhere_is_refused(ways, tps, control, message):
    with pytest.raises(UsageError, match=message):
        choose(ways, tps, "cpu", control)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--launcher", "torchrun,ssh"], "launcher 'ssh': use some of self, torchrun, slurm, mpi"),
        (["--transport", "tcp"], "transport 'tcp': use some of auto, gather"),
        (["--transport", "mpi"], "--launcher mpi"),
        (["--nodes", "x"], "not a list of numbers"),
        (["--nodes", "3"], "nodes have as many ranks each"),
        (["--leaves", "12"], "not a power of two"),
        (["--launcher", "torchrn"], "did you mean 'torchrun'?"),
        (["--relations", "alon"], "did you mean 'alone'?"),
        (["--row-layers", "gathr"], "did you mean 'gather'?"),
        (["--fold-order", "tree,pair"], "--fold-order: 'pair' is none of"),
        (["--dtype", "bf16,float3"], "--dtype: 'float3' is none of"),
    ],
)
def test_mistakes_are_refused_before_any_work(capsys, monkeypatch, flags, message):
    monkeypatch.setattr(launchers, "which_mpi", lambda: pytest.fail("looked for mpirun"))
    assert main(["verify", "/nowhere", "--device", "cpu", *flags]) == 2
    assert message in capsys.readouterr().err


def test_processes_are_renewed_in_the_first_way_only():
    found = [(1, LaunchWay("mpi")), (2, LaunchWay("mpi")), (2, LaunchWay("slurm"))]
    assert parts_of(SPEC, found) == [
        *(Part(tp, "steps", way) for tp, way in found),
        Part(1, "fresh", LaunchWay("mpi")),
        Part(2, "fresh", LaunchWay("mpi")),
    ]
    assert len({part.folder for part in parts_of(SPEC, found)}) == 5


# --- nodes -------------------------------------------------------------------------------------


def open_mpi(rank, size):
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


def slurm(rank, size, nodes):
    each = size // nodes
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_JOB_ID": "7",
        "SLURM_LOCALID": str(rank % each),
        "SLURM_NODEID": str(rank // each),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})",
        "SLURM_STEP_NODELIST": "n[1-2]",
    }


def pretended(environ, nodes):
    pretend_nodes(nodes, environ)
    place = read_environment(environ)
    return place.rank, place.size, place.local_rank, place.local_size


def own(rank, size):
    """As a rank that a command of ours started."""
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in values.items()} | {"TPDET_STORE": "/no/such/store"}


@pytest.mark.parametrize("make", [own, open_mpi, lambda rank, size: slurm(rank, size, 1)])
def test_pretended_nodes_are_nodes_where_ranks_meet(make):
    nodes, places = [], []
    for rank in range(8):
        environ = make(rank, 8)
        pretend_nodes(4, environ)
        place = read_environment(environ)
        nodes.append(this_node(place, environ))
        places.append((place.local_rank, place.local_size))
    check_places(node_names(nodes), places)
    assert len(set(node_names(nodes))) == 4


def test_a_host_pretends_to_be_several_nodes_under_every_launcher():
    assert pretended(open_mpi(5, 8), 2) == (5, 8, 1, 4)
    assert pretended(open_mpi(5, 8), 1) == (5, 8, 5, 8)
    for nodes in (2, 4):  # two hosts of Slurm, each cut in two for four nodes
        local = 5 % (8 // nodes)
        environ = slurm(5, 8, 2) | {"MASTER_ADDR": "127.0.0.1"}
        assert pretended(environ, nodes) == (5, 8, local, 8 // nodes)
    in_turn = open_mpi(1, 4) | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}  # dealt out to two sockets
    assert pretended(in_turn, 2) == (1, 4, 1, 2)
    before = read_environment(open_mpi(3, 4))
    environ = open_mpi(3, 4)
    pretend_nodes(2, environ)
    after = read_environment(environ)
    assert environ["MASTER_ADDR"] == before.address == "127.0.0.1"
    assert environ["MASTER_PORT"] == str(before.port) and after.launcher == "torchrun"


def gpus_of_pretended(ranks, nodes, visible):
    """CUDA_VISIBLE_DEVICES of every rank of a host of `ranks` ranks, and NCCL's names of hosts."""
    places = [open_mpi(rank, ranks) | {"CUDA_VISIBLE_DEVICES": visible} for rank in range(ranks)]
    for environ in places:
        pretend_nodes(nodes, environ)
    hosts = [environ["NCCL_HOSTID"][-2:] for environ in places]
    return [environ["CUDA_VISIBLE_DEVICES"] for environ in places], hosts


def test_pretended_nodes_share_the_gpus():
    gpus, hosts = gpus_of_pretended(4, 2, "4,5,6,7")
    assert gpus == ["4,5", "4,5", "6,7", "6,7"] and hosts == ["-0", "-0", "-1", "-1"]
    assert gpus_of_pretended(2, 2, "4,5,6,7")[0] == ["4,5", "6,7"]


def test_pretended_nodes_sit_on_the_same_gpus_where_there_are_too_few():
    """Ranks of one node still have GPUs of their own, and so peer memory."""
    assert gpus_of_pretended(4, 2, "4,5")[0] == ["4,5"] * 4
    assert gpus_of_pretended(4, 2, "4,5,6")[0] == ["4,5"] * 4
    assert gpus_of_pretended(4, 4, "4,5")[0] == ["4", "5", "4", "5"]
    assert gpus_of_pretended(8, 2, "4,5")[0] == ["4,5"] * 8  # ranks of a node share them too
    assert gpus_of_pretended(4, 2, "2")[0] == ["2"] * 4


@pytest.mark.parametrize(("environ", "nodes"), [(open_mpi(0, 4), 3), (slurm(0, 4, 2), 1)])
def test_hosts_that_cannot_be_cut_so_are_refused(environ, nodes):
    with pytest.raises(UsageError, match=f"are not cut into {nodes} nodes"):
        pretend_nodes(nodes, environ | {"MASTER_ADDR": "127.0.0.1"})


# --- what is reported --------------------------------------------------------------------------


WAY = LaunchWay("mpi", "mpi", 2)
SEEN = {"launcher": "Open MPI", "nodes": 2, "by_mpi": "mpi", "node_folds": 9}


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        ({}, None),
        ({"launcher": "torchrun"}, "its ranks were started by torchrun"),
        ({"launcher": ""}, "its ranks were started by nobody"),
        ({"nodes": 1}, "its ranks lie on 1 nodes"),
        ({"by_mpi": ""}, "tensors were not carried by MPI"),
        ({"node_folds": 0}, "0 sums were folded in two levels"),
    ],
)
def test_a_world_that_ran_otherwise_shows_nothing(seen, message):
    report = WorldReport(
        tp=4,
        way=WAY,
        seen=Seen(**SEEN | seen),
        vocab_size=1,
        fingerprints={},
        traces=(),
        machine=Machine(),
    )
    assert otherwise(Part(4, "steps", WAY), SPEC, report) == message
    assert "reported in its place" in (otherwise(Part(8, "steps", WAY), SPEC, report) or "")
    one_a_node = WorldReport(
        tp=2,
        way=WAY,
        seen=Seen(**SEEN),
        vocab_size=1,
        fingerprints={},
        traces=(),
        machine=Machine(),
    )
    assert "9 sums" in (otherwise(Part(2, "steps", WAY), SPEC, one_a_node) or "")


def test_rows_and_the_matrix_carry_the_way():
    def relation(tp, way, equal=True):
        digest = ("a" if equal else "b") * 64
        named = {"dtype": "float32", "mode": "pairs", "circumstance": "alone", **asdict(way)}
        digests = {"digest": digest, "reference": "a" * 64}
        return Relation(**named, **digests, tp=tp, equal=equal, positions=1)

    found = [relation(1, LaunchWay()), relation(4, LaunchWay()), relation(4, WAY, equal=False)]
    rows = result_rows("m", found, control=False)
    assert [(row["launcher"], row["transport"], row["nodes"]) for row in rows] == [
        ("self", "auto", 1),
        ("self", "auto", 1),
        ("mpi", "mpi", 2),
    ]
    console = Console(record=True, width=120, file=io.StringIO())
    print_matrix("m", found, [1, 4], console)
    (line,) = (line for line in console.export_text().splitlines() if "mpi, mpi, 2 nodes" in line)
    assert "bbbbbbbbbb ≠" in line and "-" in line


def test_help_names_every_launcher():
    done = subprocess.run(
        [sys.executable, "-m", "tpdet", "verify", "--help"], capture_output=True, text=True
    )
    flat = " ".join(done.stdout.split())
    assert all(f"{name}: " in flat for name in ("self", *THREE)) and "--nodes" in flat
