"""The deployment examples: their flags are this command's, and they wait out a drain."""

import configparser
import json
import shlex
from pathlib import Path

import pytest
import yaml

from tests.lib.tree import ROOT
from tpdet import errors
from tpdet.cli import command_parser
from tpdet.errors import UsageError
from tpdet.launch.start import supervise
from tpdet.server.settings.settings import ServerConfig, load_settings
from tpdet.server.wire import limits

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
def commands(unit, pod, container):
    """The arguments of `tpdet serve` in each example."""
    program, name, *rest = shlex.split(unit["ExecStart"])
    assert program.endswith("/tpdet") and name == "serve"
    (server,) = pod["containers"]
    assert server["command"] == json.loads(container["ENTRYPOINT"]) == ["tpdet", "serve"]
    return {
        "systemd": rest,
        "kubernetes": server["args"],
        "container": json.loads(container["CMD"]),
    }


def settings_of(arguments):
    return load_settings(arguments, "tpdet serve", {}).server


def needed(settings):
    """Seconds that a stop takes at worst: the drain, then the ranks' and the launcher's end."""
    return settings.drain_timeout + 2 * supervise.GRACE_SECONDS


@pytest.mark.parametrize("where", ["systemd", "kubernetes", "container"])
def test_every_flag_is_one_that_the_server_takes(commands, where):
    found = settings_of(commands[where])
    assert found.run_dir is not None and found.api_key_file is not None
    assert found.drain_timeout == ServerConfig.model_fields["drain_timeout"].default
    with pytest.raises(UsageError):
        settings_of([*commands[where], "--no-such-flag"])


def test_nobody_is_killed_before_the_drain_is_over(commands, unit, pod):
    (server,) = pod["containers"]
    pause = float(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pause > 0
    waits = {
        "systemd": float(unit["TimeoutStopSec"]),
        "kubernetes": pod["terminationGracePeriodSeconds"] - pause,
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
