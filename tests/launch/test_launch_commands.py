"""`tpdet launch`: the scripts and commands it prints, without a model, and what they would run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.lib.ports import free_port
from tests.lib.server.harness import eventually
from tests.lib.tree import ROOT
from tpdet.cli import main
from tpdet.errors import NotFoundError, NotPermittedError, ResourceError, UsageError
from tpdet.launch.host.listeners import listeners
from tpdet.launch.life.signals import STOP_SIGNALS
from tpdet.launch.ranks.environment import FIRST_PORT, PORTS
from tpdet.launch.start import mpirun, slurm, torchrun
from tpdet.server.commands import launch as launch_command
from tpdet.server.settings.settings import ServerConfig, load_settings

FLAGS = ["--model", "/no/such/model", "--port", "8001", "--served-model-name", "a b'c"]
SECRET = ["--run-secret-file", "/no/such/secret"]
ENDS = {"scontrol": "printf 'n1\\nn2\\n'"}
"""How the fakes of `run_script` end; all others with exit code 7."""
THERE = ["--model-on-nodes"]
C10D = ["--rdzv-backend", "c10d"]
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
        ["bash", str(folder / "script"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=20,
        cwd=folder,
    )
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
        called[called.index("bash") :],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "SLURM_NODEID": str(node)},
    )
    assert found.returncode == 7, found.stderr
    agent = was_called(tmp_path, "python3")
    assert (
        agent[:4] == ["python3", "-P", "-m", "torch.distributed.run"]
        and agent[-len(FLAGS) :] == FLAGS
    )
    place = {"--nnodes=2", f"--node-rank={node}", "--master-addr=n1", "--master-port=16396"}
    assert place <= set(agent[: agent.index("tpdet.serve")])
    assert {word for word in agent if "rdzv" in word} == {"--rdzv-backend=static"}


def test_slurm_prints_the_template_filled_in(capsys, tmp_path):
    text = printed(
        capsys,
        "slurm",
        "--nodes",
        "2",
        "--gpus-per-node",
        "8",
        "--time",
        "1:00:00",
        "--partition",
        "gpu",
        *FLAGS,
    )
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
        ([*NODES, "--rdzv-endpoint", "a:0", *FLAGS], "'a:0' is not HOST:PORT"),
        ([*NODES, "--rdzv-endpoint", "a:1", "--run", *THERE, *FLAGS], "give --node-rank"),
        ([*NODES, *C10D, "--rdzv-endpoint", "a:1", "--node-rank", "0", *FLAGS], "leave one of"),
        (["mpirun", "--ranks", "0", "--mpi", "openmpi", *FLAGS], "--ranks 0"),
        (["mpirun", "--ranks", "2", "--hosts", "a:1,b:1", "--mpi", "mpich", *FLAGS], "one secret"),
    ],
)
def test_what_makes_no_job_is_refused(arguments, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        launch_command.launch_command(arguments)


def test_torchruns_commands_unpickle_nothing(capsys):
    """Static rendezvous, on one host too: --standalone is c10d."""
    alone = shlex.split(printed(capsys, "torchrun", "--ranks-per-node", "4", *FLAGS))
    assert {"--rdzv-backend=static", "--master-addr=127.0.0.1", "--nnodes=1"} <= set(alone)
    assert alone[-len(FLAGS) :] == FLAGS
    (port,) = (word for word in alone if word.startswith("--master-port="))
    assert FIRST_PORT <= int(port.partition("=")[2]) < FIRST_PORT + PORTS
    common = ["torchrun", "--nodes", "2", "--ranks-per-node", "8", "--rdzv-endpoint", "a:29400"]
    second = shlex.split(printed(capsys, *common, "--node-rank", "1", *SECRET, *FLAGS))
    place = {"--nnodes=2", "--nproc-per-node=8", "--node-rank=1", "--master-addr=a",
             "--master-port=29400", "--rdzv-backend=static"}  # fmt: skip
    assert place <= set(second) and "--standalone" not in second
    flags = second[second.index("tpdet.serve") + 1 :]
    assert load_settings(flags, "x").server.port == 8001
    lines = printed(capsys, *common, *SECRET, *FLAGS).splitlines()
    assert lines[0] == "# on node 0 (a)" and lines[2] == "# on node 1"
    assert shlex.split(lines[3]) == second and "--node-rank=0" in shlex.split(lines[1])


def test_the_c10d_rendezvous_is_asked_for_by_name_and_warned_of(capsys):
    common = ["torchrun", "--nodes", "2", "--ranks-per-node", "8", "--rdzv-endpoint", "a:29400"]
    assert main(["launch", *common, *C10D, *SECRET, *FLAGS]) == 0
    told = capsys.readouterr()
    command = shlex.split(told.out)
    assert {"--rdzv-backend=c10d", "--rdzv-endpoint=a:29400"} <= set(command)
    assert not any(word.startswith("--node-rank") for word in command)
    assert "whoever reaches its port runs code as you" in told.err
    assert main(["launch", *common, "--node-rank", "0", *SECRET, *FLAGS]) == 0
    assert "runs code" not in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_what_the_printed_command_runs_unpickles_nothing_unless_it_is_c10d(tmp_path, backend):
    """A real agent, whose ranks say what its store holds and what it listens on."""
    (tmp_path / "rank.py").write_text(
        "import os, sys, time; open(sys.argv[1] + os.environ['RANK'], 'w').write('here'); "
        "time.sleep(60)"
    )
    port = free_port()
    command = torchrun.cluster_command(1, 1, f"127.0.0.1:{port}", [], None, backend)
    at = command.index("tpdet.serve") - 1
    command[at:] = [f"--log-dir={tmp_path}", str(tmp_path / "rank.py"), str(tmp_path / "came")]
    agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually((tmp_path / "came0").exists, 60)
        opened = [each for each in listeners(agent.pid) if each.port == port]
        store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10))
        keys = store.list_keys()
        # Both listen everywhere, which our documents say; only one holds a pickle.
        assert all(each.everywhere for each in opened) and len(opened) == 1
        assert any("torch.rendezvous." in key for key in keys) == (backend == "c10d"), keys
    finally:
        agent.terminate()
        try:
            agent.wait(20)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


# --- paths and models --------------------------------------------------------------------------


def test_relative_paths_are_made_absolute_and_the_model_keeps_its_name(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for folder in ("models/demo", "tokens"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "models/demo/config.json").write_text("{}")
    (tmp_path / "keys").write_text("x")
    (tmp_path / "a.toml").write_text("port = 8002\n")
    there = str(tmp_path)
    kept = ["--served-model-name=models/demo"]

    def found(*flags):
        script = printed(capsys, "slurm", "--gpus-per-node", "0", *flags)
        (line,) = (line for line in script.splitlines() if line.startswith("set -- "))
        return shlex.split(line)[2:]

    assert found("--model", "models/demo") == ["--model", f"{there}/models/demo", *kept]
    assert found("--model=./models/demo") == [
        f"--model={there}/models/demo",
        "--served-model-name=./models/demo",
    ]
    assert found("models/demo", "--port", "1") == [f"{there}/models/demo", "--port", "1", *kept]
    named = ["--served-model-name", "models/demo"]
    assert found("--model", "models/demo", *named) == ["--model", f"{there}/models/demo", *named]
    flags = [
        "--tokenizer",
        "tokens",
        "--api_key_file=keys",
        "--run-dir",
        "run",
        "--config",
        "a.toml",
    ]
    assert found("--model", f"{there}/models/demo", *flags) == [
        "--model",
        f"{there}/models/demo",
        "--tokenizer",
        f"{there}/tokens",
        f"--api-key-file={there}/keys",
        "--run-dir",
        f"{there}/run",
        "--config",
        f"{there}/a.toml",
    ]
    (tmp_path / "a.toml").write_text('model = "models/demo"\n')
    assert found("--config", "a.toml") == [
        "--config",
        f"{there}/a.toml",
        f"--model={there}/models/demo",
        *kept,
    ]
    monkeypatch.setenv("TPDET_MODEL", "models/demo")
    assert found() == [f"--model={there}/models/demo", *kept]


def test_the_scripts_flags_start_the_same_server(tmp_path, monkeypatch):
    """What was made absolute is read back as it was."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    for flags in (["--model", "m"], ["m", "--port", "1"], ["--model=m", "--run_dir=r"]):
        before = load_settings(flags, "x")
        after = load_settings(launch_command.absolute_paths(flags, before), "x")
        assert after.served_name == before.served_name == "m"
        assert after.engine.model == str(tmp_path / "m")
        assert after.server.port == before.server.port


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("/no/such/model", "model '/no/such/model' is no directory here: give a Hugging Face"),
        ("DIR", "model 'DIR' is no directory here: give a Hugging Face directory, or --model-on"),
        ("./a/b", "is no directory here: give"),
        (".", "is a directory without config.json"),
        ("some/model", "is no directory here: the ranks would download it from the hub"),
    ],
)
def test_a_model_that_is_not_here_is_said_and_nothing_is_started_with_it(
    capsys, tmp_path, monkeypatch, model, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no sbatch
    assert main(["launch", "slurm", "--gpus-per-node", "0", "--model", model]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tpdet launch: model ") and said in line
    kind = "sbatch is not installed" if "hub" in said else re.escape(said)
    with pytest.raises(NotFoundError, match=kind):
        launch_command.launch_command(["slurm", "--submit", "--model", model])
    with pytest.raises(NotFoundError, match="sbatch is not installed"):
        launch_command.launch_command(["slurm", "--submit", "--model-on-nodes", "--model", model])
    assert main(["launch", "slurm", "--model-on-nodes", "--model", model]) == 0
    assert (
        main(["launch", "slurm", "--template", "container", "--image", "x", "--model", "/m"]) == 0
    )
    assert "is no directory here: give" not in capsys.readouterr().err


def test_root_is_told_in_a_line_what_open_mpi_wants(capsys, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.delenv(name, raising=False)
    common = ["mpirun", "--ranks", "2", *THERE, "--mpi"]
    said = "mpirun refuses to run as root.*--allow-run-as-root or OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_"
    with pytest.raises(NotPermittedError, match=said):
        launch_command.launch_command([*common, "openmpi", "--run", *FLAGS])
    assert main(["launch", *common, "openmpi", *FLAGS]) == 0
    told = capsys.readouterr()
    assert re.search(said, told.err) and "--allow-run-as-root" not in told.out
    command = shlex.split(printed(capsys, *common, "openmpi", "--allow-run-as-root", *FLAGS))
    assert command[3] == "--allow-run-as-root"
    printed(capsys, *common, "mpich", *FLAGS)
    for prefix in ("OMPI", "PRTE"):
        both = {f"{prefix}_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")}
        assert mpirun.refusal_of_root(mpirun.OPEN_MPI, both) is None
        assert mpirun.refusal_of_root(mpirun.OPEN_MPI, dict([both.popitem()])) is not None
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert mpirun.refusal_of_root(mpirun.OPEN_MPI, {}) is None


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
    listed = {path.name for path in (ROOT / "launch" / "start" / "templates").iterdir()}
    assert listed == set(slurm.TEMPLATES.values())
    assert '"tpdet.launch.start" = ["templates/*.sbatch"]' in (ROOT / "pyproject.toml").read_text()
    if checker := shutil.which("shellcheck"):
        folder = ROOT / "launch" / "start" / "templates"
        assert subprocess.run([checker, *map(str, folder.iterdir())]).returncode == 0


def test_help_tells_what_a_job_has_unless_asked(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "slurm", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    script = (ROOT / "launch/start/templates/one_node.sbatch").read_text()
    for flag, value in (("time", "24:00:00"), ("job-name", "tpdet"), ("output", "tpdet-%j.log")):
        assert f"#SBATCH --{flag}={value}\n" in script
        assert f"as sbatch takes it (default: {value})" in said
    assert "0 for a job without GPUs (default 8)" in said
