"""The deployment examples: their flags are this command's, and they wait out a drain."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.lib.tree import ROOT
from tpdet import __version__, errors
from tpdet.cli import command_parser
from tpdet.config import EngineConfig
from tpdet.errors import UsageError
from tpdet.launch.start import supervise
from tpdet.requests.body import limits
from tpdet.server.settings.settings import ServerConfig, load_settings

DEPLOY = ROOT / "deploy"


class Unit(configparser.ConfigParser):
    """A systemd unit; of keys that occur again the last counts."""

    def __init__(self):
        super().__init__(strict=False, interpolation=None, delimiters=("=",))
        self.optionxform = str


@pytest.fixture(scope="module")
def unit():
    found = Unit()
    found.read(DEPLOY / "tpdet.service")
    return found["Service"]


@pytest.fixture(scope="module")
def pod():
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    assert (deployment["kind"], service["kind"]) == ("Deployment", "Service")
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    return deployment["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container():
    """Instructions of the Containerfile, the last of each kind."""
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and line[0] != "#"]
    return dict(lines)


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def filled_in(text):
    """A compose file's text with its variables' defaults, "1" for those without."""
    return re.sub(r"\$\{\w+(?::-([^}]*)|:\?[^}]*)?\}", lambda found: found[1] or "1", text)


@pytest.fixture(scope="module")
def commands(unit, pod, container, compose):
    """The arguments of `tpdet serve` in each example."""
    program, name, *rest = shlex.split(unit["ExecStart"])
    assert program.endswith("/tpdet") and name == "serve"
    (server,) = pod["containers"]
    assert server["command"] == json.loads(container["ENTRYPOINT"]) == ["tpdet", "serve"]
    return {
        "systemd": rest,
        "kubernetes": server["args"],
        "container": json.loads(container["CMD"]),
        "compose": [*map(filled_in, compose["services"]["tpdet"]["command"])],
    }


def settings_of(arguments):
    named = any(argument.startswith("--api-key-file") for argument in arguments)
    return load_settings(arguments, "tpdet serve", {} if named else {"TPDET_API_KEY": "k"}).server


def needed(settings):
    """Seconds that a stop takes at worst: the drain, then the ranks' and the launcher's end."""
    return settings.drain_timeout + 2 * supervise.GRACE_SECONDS


@pytest.mark.parametrize("where", ["systemd", "kubernetes", "container", "compose"])
def test_every_flag_is_one_that_the_server_takes(commands, compose, where):
    found = settings_of(commands[where])
    assert found.run_dir is not None
    if where == "compose":
        assert "TPDET_API_KEY" in compose["services"]["tpdet"]["environment"]
    else:
        assert found.api_key_file is not None
    assert found.drain_timeout == ServerConfig.model_fields["drain_timeout"].default
    with pytest.raises(UsageError):
        settings_of([*commands[where], "--no-such-flag"])


def test_nobody_is_killed_before_the_drain_is_over(commands, unit, pod, compose):
    (server,) = pod["containers"]
    pause = float(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pause > 0
    waits = {
        "systemd": float(unit["TimeoutStopSec"]),
        "kubernetes": pod["terminationGracePeriodSeconds"] - pause,
        "compose": float(compose["services"]["tpdet"]["stop_grace_period"].removesuffix("s")),
    }
    for where, seconds in waits.items():
        least = needed(settings_of(commands[where]))
        assert least < seconds <= least + 30, where
        longer = settings_of([*commands[where], f"--drain-timeout={seconds}"])
        assert needed(longer) > seconds  # a longer drain would be noticed here
    assert "--time 60" in (DEPLOY / "Containerfile").read_text()
    assert needed(settings_of(commands["container"])) < 60
    text = (ROOT / "docs" / "deploy.md").read_text()
    assert "terminationGracePeriodSeconds: 60" in text and "TimeoutStopSec=60" in text
    assert f"{ServerConfig().drain_timeout:g} s that is {needed(ServerConfig()):g} s" in text


def test_systemd_signals_the_supervisor_alone_and_knows_the_exit_codes(unit):
    assert unit["KillMode"] == "mixed"
    assert int(unit["SuccessExitStatus"]) == errors.DrainTimeoutError.exit_code
    useless = {
        kind.exit_code
        for kind in (
            errors.UsageError,
            errors.CheckpointError,
            errors.NotFoundError,
            errors.NotPermittedError,
            errors.DisagreementError,
        )
    }
    assert {*map(int, unit["RestartPreventExitStatus"].split())} == useless
    assert errors.PeerLostError.exit_code not in useless


def test_systemds_reload_is_ours_and_gets_its_time(unit, commands):
    program, *arguments = shlex.split(unit["ExecReload"])
    options = command_parser().parse_args(arguments)
    assert program == shlex.split(unit["ExecStart"])[0]
    assert str(options.run_dir) == settings_of(commands["systemd"]).run_dir
    assert options.patience < float(unit["TimeoutStartSec"])


def test_the_run_directory_is_made_by_the_server_inside_what_it_is_given(commands, unit, pod):
    """A directory that others may write is refused, and a mounted one is anybody's."""
    (server,) = pod["containers"]
    mounts = [mount["mountPath"] for mount in server["volumeMounts"]]
    run = Path(settings_of(commands["kubernetes"]).run_dir)
    assert str(run.parent) in mounts and str(run) not in mounts
    assert unit["RuntimeDirectory"] == "tpdet" and unit["RuntimeDirectoryMode"] == "0700"
    assert Path(settings_of(commands["systemd"]).run_dir).parent == Path("/run/tpdet")


def test_ports_and_probes_are_the_servers(commands, pod, container):
    (server,) = pod["containers"]
    port = settings_of(commands["kubernetes"]).port
    assert server["ports"][0]["containerPort"] == port == int(container["EXPOSE"])
    assert port == settings_of(commands["systemd"]).port == ServerConfig().port
    probes = {kind: server[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
    paths = {kind: probe["httpGet"]["path"] for kind, probe in probes.items()}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 1800


def test_the_pod_runs_as_the_images_user_and_every_volume_is_there(pod, container):
    assert pod["securityContext"]["runAsUser"] == int(container["USER"])
    volumes = [volume["name"] for volume in pod["volumes"]]
    for box in (*pod["containers"], *pod["initContainers"]):
        assert {mount["name"] for mount in box["volumeMounts"]} <= {*volumes}
    assert pod["initContainers"][0]["command"][:3] == ["install", "-m", "600"]


def test_the_guide_names_every_public_path_and_the_codes():
    text = (ROOT / "docs" / "deploy.md").read_text()
    for word in ("/health", "/ready", "/metrics", "tpdet reload", "tpdet stop", "143", "75"):
        assert word in text, word
    assert f"every {limits.STATISTICS_SECONDS:g} seconds" in text


def documented_metrics():
    text = (ROOT / "docs" / "server.md").read_text()
    return {*re.findall(r"^\| `((?:tpdet_|vllm:)\w+)` \|", text, re.MULTILINE)}


def named_metrics(expression):
    found = re.findall(r"\b(?:tpdet_|vllm:)\w+", expression)
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


@pytest.fixture(scope="module")
def alerts():
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    return group["rules"]


def test_alerts_and_board_read_metrics_that_there_are(alerts):
    known = documented_metrics()
    board = json.loads((DEPLOY / "grafana.json").read_text())
    drawn = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for expression in (*drawn, *(rule["expr"] for rule in alerts)):
        names = named_metrics(expression)
        assert names <= known and (names or "up{" in expression), expression
    assert named_metrics("rate(tpdet_no_such_total[5m])") - known  # negative control


def test_every_alert_says_what_to_do_with_flags_that_there_are(alerts):
    for rule in alerts:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert {*rule["annotations"]} == {"summary", "remedy"}
        for flag in re.findall(r"--[a-z-]+", rule["annotations"]["remedy"]):
            assert flag.removeprefix("--").replace("-", "_") in {
                *ServerConfig.model_fields,
                *EngineConfig.model_fields,
            }, flag


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_prometheus_reads_the_alerts():
    done = subprocess.run(["promtool", "check", "rules", DEPLOY / "alerts.yaml"])
    assert done.returncode == 0


def test_panels_do_not_overlap():
    board = json.loads((DEPLOY / "grafana.json").read_text())
    taken = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and all(x < 24 for x, _ in cells), panel["title"]
        taken |= cells


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_finds_little_exposed(tmp_path):
    def exposed(path):
        command = ["systemd-analyze", "security", "--offline=true", "--threshold=40", path]
        return subprocess.run(command, capture_output=True, text=True).returncode

    assert exposed(DEPLOY / "tpdet.service") == 0
    bare = tmp_path / "tpdet.service"
    kept = ("SystemCallFilter", "CapabilityBoundingSet", "Restrict", "Protect", "Device")
    lines = (DEPLOY / "tpdet.service").read_text().splitlines(keepends=True)
    bare.write_text("".join(line for line in lines if not line.startswith(kept)))
    assert exposed(bare) != 0  # negative control


def test_images_are_named_by_the_version_and_run_without_privileges(pod, compose):
    for box in (*pod["containers"], *pod["initContainers"]):
        assert box["image"] == f"tpdet:{__version__}"
        assert box["securityContext"]["allowPrivilegeEscalation"] is False
        assert box["resources"]["requests"]
    assert compose["services"]["tpdet"]["image"] == f"tpdet:{__version__}"
    assert f"tpdet:{__version__}" in (DEPLOY / "Containerfile").read_text()


def test_a_new_volume_of_kernels_belongs_to_the_server_s_user(container, compose):
    """Docker gives a named volume the owner of the image's folder; without one it is root's."""
    places = [volume.split(":")[:2] for volume in compose["services"]["tpdet"]["volumes"]]
    (folder,) = (target for name, target in places if name in compose["volumes"])
    assert container["ENV"] == f"TRITON_CACHE_DIR={folder}"
    text = (DEPLOY / "Containerfile").read_text()
    made = f"install -d -o tpdet -g tpdet -m 700 {folder}"
    assert made in text and text.index(made) < text.index(f"USER {container['USER']}")


def test_the_builder_gets_what_a_wheel_is_made_of_and_nothing_else():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines and lines.index("*") < min(lines.index(f"!{name}") for name in kept)
    wanted = {"pyproject.toml", "README.md", "LICENSE", "tpdet", "kernels", "comm", "launch"}
    assert kept == wanted
    assert {
        path.readlink().parts[-1] for path in (ROOT / "tpdet").iterdir() if path.is_symlink()
    } <= kept
