"""`tpdet launch`: the scripts and commands it prints, without a model, and what they would run."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tpdet.cli import main
from tpdet.errors import NotFoundError, ResourceError, UsageError
from tpdet.launch import mpirun, slurm
from tpdet.launch.signals import STOP_SIGNALS
from tpdet.server import launch_command
from tpdet.server.settings import ServerConfig, load_settings

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["--model", "/no/such/model", "--port", "8001", "--served-model-name", "a b'c"]
SECRET = ["--run-secret-file", "/no/such/secret"]
ENDS = {"scontrol": "printf 'n1\\nn2\\n'"}
"""How the fakes of `run_script` end; all others with exit code 7."""
NODES = ["torchrun", "--nodes", "2", "--ranks-per-node", "8", *SECRET]


def printed(capsys, *arguments):
    assert main(["launch", *arguments]) == 0
    return capsys.readouterr().out


def directives(text):
    found = [line[8:] for line in text.splitlines() if line.startswith("#SBATCH ")]
    return dict(line.lstrip("-").partition("=")[::2] for line in found)


def run_script(text, folder, arguments=()):
    """What a script's `srun` (and apptainer, mpirun) would be given, with fakes on the PATH."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name in ("srun", "scontrol", "python3"):
        fake = bin_folder / name
        lines = ["#!/bin/bash", f'printf "%s\\0" {name} "$@" >>{folder}/called-{name}']
        fake.write_text("\n".join([*lines, ENDS.get(name, "exit 7"), ""]))
        fake.chmod(0o755)
    (folder / "script").write_text(text)
    environment = {
        "PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(folder), "SLURM_JOB_ID": "12",
        "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "2", "TPDET_IMAGE": "x.sif",
        "TMPDIR": str(folder),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(folder / "script"), *arguments], env=environment, capture_output=True,
        text=True, timeout=20, cwd=folder,
    )  # fmt: skip
    return done, was_called(folder, "srun" if "srun --" in text else "python3")


def was_called(folder, name):
    """The arguments that a fake of `run_script` was given."""
    return (folder / f"called-{name}").read_text().split("\0")[:-1]


@pytest.mark.parametrize("name", sorted(slurm.TEMPLATES))
def test_a_template_is_a_script_that_honours_the_warning_and_ends_together(name, tmp_path):
    text = slurm.template_text(name)
    found = directives(text)
    assert found["signal"] in (f"TERM@{slurm.WARNING_SECONDS}", f"B:TERM@{slurm.WARNING_SECONDS}")
    assert ServerConfig().drain_timeout < slurm.WARNING_SECONDS
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    if name != "mpirun":
        assert "--kill-on-bad-exit=1" in text
    done, called = run_script(text, tmp_path, FLAGS)
    assert done.returncode == 7, done.stderr  # the code of what it starts
    assert called[-len(FLAGS) :] == FLAGS
    assert not list(tmp_path.glob(".tpdet-secret*"))
    if name != "one-node":
        assert "--run-secret-file" in called


def test_the_secret_is_made_private_and_whole(tmp_path):
    text = slurm.template_text("srun").replace("trap 'rm", "cat $secret; stat -c %a $secret; : 'rm")
    done, _ = run_script(text, tmp_path)
    assert re.fullmatch(r"[0-9a-f]{64}600\n", done.stdout)


@pytest.mark.parametrize(("name", "drained"), [("srun", 7), ("container", 7), ("torchrun", 0)])
def test_a_rank_lost_gives_the_decided_code(tmp_path, name, drained):
    """A drain's too with torchrun, whose agents end with 1 after a SIGTERM."""
    folder = subprocess.run(["id", "-u"], capture_output=True, text=True).stdout.strip()
    run = tmp_path / f"tpdet-{folder}" / "slurm-12-0-0-0"
    run.mkdir(parents=True)
    ends = ('{"code":"engine_dead","exit":75,"rank":0}', 75), ('{"exit":0}', drained)
    for decided, code in ends:
        (run / "exit.json").write_text(decided)
        assert run_script(slurm.template_text(name), tmp_path)[0].returncode == code


@pytest.mark.parametrize("node", [0, 1])
def test_torchruns_agents_meet_once_by_their_nodes_numbers(tmp_path, node):
    """With the c10d rendezvous an agent that is cut off would outlive its ranks."""
    _, called = run_script(slurm.template_text("torchrun"), tmp_path, FLAGS)
    assert called[called.index("bash") + 1] == "-c"  # what each task of srun runs
    found = subprocess.run(
        called[called.index("bash") :], capture_output=True, text=True,
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "SLURM_NODEID": str(node)},
    )  # fmt: skip
    assert found.returncode == 7, found.stderr
    agent = was_called(tmp_path, "python3")
    assert agent[:3] == ["python3", "-m", "torch.distributed.run"] and agent[-len(FLAGS) :] == FLAGS
    place = {"--nnodes=2", f"--node-rank={node}", "--master-addr=n1", "--master-port=16396"}
    assert place <= set(agent[: agent.index("tpdet.serve")])
    assert {word for word in agent if "rdzv" in word} == {"--rdzv-id=12"}


def test_slurm_prints_the_template_filled_in(capsys, tmp_path):
    text = printed(
        capsys, "slurm", "--nodes", "2", "--gpus-per-node", "8", "--time", "1:00:00",
        "--partition", "gpu", *FLAGS,
    )  # fmt: skip
    template = slurm.template_text("srun")
    left = [line for line in template.splitlines() if line not in text.splitlines()]
    assert left == ["#SBATCH --time=24:00:00"]
    changed = {"time": "1:00:00", "partition": "gpu"}
    assert directives(text) == directives(template) | changed
    done, called = run_script(text.replace(sys.executable, "python3"), tmp_path)
    assert done.returncode == 7 and called[-len(FLAGS) :] == FLAGS


def test_sizes_reach_the_script(capsys):
    small = printed(capsys, "slurm", "--nodes", "2", "--gpus-per-node", "0", *FLAGS)
    assert "gpus-per-node" not in directives(small) and directives(small)["ntasks-per-node"] == "1"
    agents = printed(capsys, "slurm", "--nodes", "3", "--template", "torchrun", *FLAGS)
    assert directives(agents)["nodes"] == "3" and directives(agents)["ntasks-per-node"] == "1"
    assert "TPDET_RANKS_PER_NODE=8" in agents
    one = printed(capsys, "slurm", "--gpus-per-node", "4", *FLAGS)
    assert "tpdet serve --tp" in one and "TPDET_RANKS_PER_NODE=4" in one
    boxed = printed(
        capsys, "slurm", "--nodes", "2", "--template", "container", "--image", "t.sif", *FLAGS
    )
    assert "TPDET_IMAGE=t.sif" in boxed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slurm", "--nodes", "0", *FLAGS], "--nodes 0"),
        (["slurm", "--gpus-per-node", "2", "--ranks-per-node", "4", *FLAGS], "a GPU of its own"),
        (["slurm", "--nodes", "2", "--template", "one-node", *FLAGS], "one-node with --nodes 2"),
        (["slurm", "--template", "container", *FLAGS], "give both"),
        (["slurm", "--partition", "a b", *FLAGS], "without blanks"),
        (["slurm", "--drain-timeout", "60", *FLAGS], "60 s before its time"),
        (["slurm", "--no-such-flag", *FLAGS], "no-such-flag"),
        (["slurm"], "no model is given"),
        (["torchrun", *FLAGS], "--ranks-per-node"),
        (["torchrun", "--nodes", "2", "--ranks-per-node", "8", *FLAGS], "one secret"),
        (["torchrun", "--nodes", "2", "--ranks-per-node", "8", *SECRET, *FLAGS], "HOST:PORT"),
        ([*NODES, "--rdzv-endpoint", "a:1", "--node-rank", "2", *FLAGS], "--node-rank 2 of 2"),
        ([*NODES, "--rdzv-endpoint", "a", "--node-rank", "0", *FLAGS], "'a' is not HOST:PORT"),
        (["mpirun", "--ranks", "0", "--mpi", "openmpi", *FLAGS], "--ranks 0"),
        (["mpirun", "--ranks", "2", "--hosts", "a:1,b:1", "--mpi", "mpich", *FLAGS], "one secret"),
    ],
)
def test_what_makes_no_job_is_refused(arguments, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        launch_command.launch_command(arguments)


def test_torchruns_command(capsys):
    alone = shlex.split(printed(capsys, "torchrun", "--ranks-per-node", "4", *FLAGS))
    assert "--standalone" in alone and alone[-len(FLAGS) :] == FLAGS
    several = shlex.split(
        printed(capsys, "torchrun", "--nodes", "2", "--ranks-per-node", "8", "--rdzv-endpoint",
                "a:29400", *SECRET, *FLAGS)
    )  # fmt: skip
    assert {"--nnodes=2", "--nproc-per-node=8", "--rdzv-endpoint=a:29400"} <= set(several)
    second = shlex.split(
        printed(capsys, "torchrun", "--nodes", "2", "--ranks-per-node", "8", "--rdzv-endpoint",
                "a:29400", "--node-rank", "1", *SECRET, *FLAGS)
    )  # fmt: skip
    place = {"--nnodes=2", "--node-rank=1", "--master-addr=a", "--master-port=29400"}
    assert place <= set(second) and not any("rdzv" in word for word in second)
    assert second[second.index("-m", 3) :] == several[several.index("-m", 3) :]
    assert load_settings(several[several.index("tpdet.serve") + 1 :], "x").server.port == 8001


def test_mpiruns_command_of_either_kind(capsys):
    hosts = ["--hosts", "a:2,b:2", "--ranks-per-node", "2"]
    common = ["mpirun", "--ranks", "4", *hosts, *SECRET, *FLAGS]
    ours = shlex.split(printed(capsys, *common, "--mpi", "openmpi"))
    theirs = shlex.split(printed(capsys, *common, "--mpi", "mpich"))
    assert ours[:3] == theirs[:3] == ["mpirun", "-n", "4"]
    assert "MASTER_ADDR=a" in ours and theirs[theirs.index("MASTER_ADDR") + 1] == "a"
    assert ours[-len(FLAGS) :] == theirs[-len(FLAGS) :] == FLAGS
    assert mpirun.meeting_point("a:4") == mpirun.meeting_point(None) == {}


def test_in_a_slurm_job_open_mpis_daemons_are_kept_from_stop_signals(monkeypatch):
    assert mpirun.shielded({"A": "b"}) == {"A": "b"}
    own = {"SLURM_JOB_ID": "1", mpirun.AGENT_VARIABLE: "mine"}
    assert mpirun.shielded(own) == own
    agent = mpirun.shielded({"SLURM_JOB_ID": "1"})[mpirun.AGENT_VARIABLE].split()
    assert agent[-1] == "prted"
    done = subprocess.run([*agent[:-1], "cat", "/proc/self/status"], capture_output=True, text=True)
    blocked = int(re.search(r"SigBlk:\t(\S+)", done.stdout)[1], 16)
    assert all(blocked >> number - 1 & 1 for number in STOP_SIGNALS)
    monkeypatch.setattr(sys, "executable", "/a b/python")
    with pytest.raises(UsageError, match="holds a blank"):
        mpirun.shielded({"SLURM_JOB_ID": "1"})


def test_without_sbatch_a_job_is_not_submitted(tmp_path):
    with pytest.raises(NotFoundError, match="sbatch is not installed"):
        slurm.submit("#!/bin/bash\n", {"PATH": str(tmp_path)})
    refusing = tmp_path / "sbatch"
    refusing.write_text("#!/bin/bash\necho no such partition >&2; exit 1\n")
    refusing.chmod(0o755)
    with pytest.raises(ResourceError, match="no such partition"):
        slurm.submit("#!/bin/bash\n", {"PATH": f"{tmp_path}:/bin"})


def test_templates_are_shipped():
    listed = {path.name for path in (ROOT / "launch" / "templates").iterdir()}
    assert listed == set(slurm.TEMPLATES.values())
    assert '"tpdet.launch" = ["templates/*.sbatch"]' in (ROOT / "pyproject.toml").read_text()
    if checker := shutil.which("shellcheck"):
        folder = ROOT / "launch" / "templates"
        assert subprocess.run([checker, *map(str, folder.iterdir())]).returncode == 0
