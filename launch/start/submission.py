"""Starts a server from Python with submitit, on Slurm or on this host.

submitit (the extra `slurm`) sends `serve_task` to the tasks, each of which starts one rank. The
files in its folder are pickles of submitit: keep the folder private.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tpdet.errors import NotFoundError
from tpdet.launch.host.interpreter import guard, python_command, python_environment
from tpdet.launch.ranks.environment import START_VARIABLE

_SIGNAL = "TERM@60"


def submit(
    arguments: Sequence[str],
    *,
    nodes: int = 1,
    ranks_per_node: int = 1,
    gpus_per_node: int = 0,
    minutes: int = 1440,
    folder: str | Path = "submitit",
    cluster: str | None = None,
    **options: Any,
) -> Any:
    """Submit a server with the flags `arguments`; submitit's Job, whose result is an exit code.

    There is one task for each rank. cluster: "slurm" or "local", as submitit names them; None lets
    submitit find out. options: more parameters of submitit's AutoExecutor ("slurm_partition").
    Several nodes need `--run-secret-file`. Raises NotFoundError without submitit.
    """
    try:
        import submitit
    except ImportError as error:
        raise NotFoundError("submitit is not installed: pip install 'tpdet[slurm]'") from error
    executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
    parameters: dict[str, Any] = {
        "name": "tpdet",
        "nodes": nodes,
        "tasks_per_node": ranks_per_node,
        "gpus_per_node": gpus_per_node,
        "timeout_min": minutes,
    }
    if executor.cluster == "slurm":
        more = {"signal": _SIGNAL} | options.pop("slurm_additional_parameters", {})
        parameters["slurm_additional_parameters"] = more
        parameters["slurm_srun_args"] = ["--kill-on-bad-exit=1", "--cpu-bind=none"]
    executor.update_parameters(**(parameters | options))
    with _guarded():
        return executor.submit(serve_task, list(arguments))


@contextmanager
def _guarded() -> Iterator[None]:
    """While a job is submitted, its tasks inherit an environment without the working directory."""
    before = dict(os.environ)
    guard(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def serve_task(arguments: Sequence[str]) -> int:
    """What a task runs: one rank, until it ends; 0. Raises RuntimeError for any other code.

    The rank and the sizes that submitit knows are passed on in torchrun's variables.
    """
    import submitit

    world = submitit.helpers.TorchDistributedEnvironment().export(
        set_cuda_visible_devices=False, overwrite=True
    )
    environment = python_environment()
    job = submitit.JobEnvironment()
    environment[START_VARIABLE] = f"submitit-{job.job_id}-{job.node}"
    if job.num_nodes == 1:
        environment["MASTER_ADDR"] = "127.0.0.1"
    rank = subprocess.Popen(
        python_command("-m", "tpdet.serve", *arguments), env=environment, stdin=subprocess.DEVNULL
    )
    signal.signal(signal.SIGTERM, lambda number, frame: rank.send_signal(number))
    code = rank.wait()
    if code != 0:
        raise RuntimeError(f"rank {world.rank} of the server ended with {code}")
    return 0
