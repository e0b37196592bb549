"""`tpdet compile`: a directory of compiled kernels for `--kernel-cache`."""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from tpdet.arguments.suggestions import did_you_mean
from tpdet.checkpoint.load_progress import LoadProgress
from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.model_config.fit import check_ranks, check_widths, context_length
from tpdet.checkpoint.model_config.pooling import load_for_task
from tpdet.checkpoint.resolve import resolve_model
from tpdet.client.engine_settings import engine_config
from tpdet.comm.arithmetic_environment import check_environment
from tpdet.config import EngineConfig
from tpdet.errors import TpdetError, UsageError
from tpdet.kernels.cuda.hardware import KNOWN, Gpu
from tpdet.launch.host.kernel_directory import (
    MANIFEST,
    Facts,
    sources_digest,
    triton_version,
    write_manifest,
)
from tpdet.runner.start.compile_ahead import helping

_CACHE = "TRITON_CACHE_DIR"
_UNFINISHED = ".compiling-"
_KEPT = (".cubin", ".json")


def compile_command(options: argparse.Namespace) -> int:
    """Check the arguments, compile, write. Raises UsageError, NotFoundError, CheckpointError."""
    gpu, sizes = named_gpu(options.gpu), tensor_parallel_sizes(options.tp)
    _check_output(options.output)
    config = engine_config(options, os.environ)
    if triton_version() == "none":
        raise UsageError("tpdet compile needs Triton: install it")
    check_environment("cuda")
    directory = resolve_model(config.model, config.revision)
    model, _ = load_for_task(directory, config.dtype, config.task)
    context = context_length(config.max_model_len, model)
    check_widths(model, "cuda")
    for size in sizes:
        check_ranks(model, size, config.leaves)
    compile_to(options.output, config, model, context, gpu, sizes)
    return 0


def compile_to(
    output: Path, config: EngineConfig, model: ModelConfig, context: int, gpu: Gpu, sizes: list[int]
) -> int:
    """Compile what starts at `sizes` ask for, and write it to `output`; how many kernels.

    Raises TpdetError, and writes nothing, if one cannot be compiled.
    """
    from tpdet.kernels.cuda.compile.helpers import Helpers
    from tpdet.kernels.cuda.compile.pool import compile_all
    from tpdet.kernels.cuda.compile.recording import Recorded
    from tpdet.tools.compile.asked import contract_of, kernels_of, on_gpu

    began = time.monotonic()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    asked: Recorded = {}
    with (
        _compiling_into_a_new_cache(output) as cache,
        on_gpu(gpu),
        closing(Helpers(*helping(cores, 1))) as helpers,
    ):
        helpers.start()
        for size in sizes:
            for rank in range(size):
                asked |= kernels_of(config, model, context, rank, size)
            _say(f"TP {size}: {len(asked)} kernels so far")
        progress = LoadProgress(len(asked), True, doing="compiling", unit="kernel")
        failed = compile_all(asked.values(), cores, progress.step, helpers)
        progress.close()
        if failed:
            raise TpdetError(f"{len(failed)} of {len(asked)} kernels do not compile: {failed[0]}")
        major, minor = gpu.capability
        contracts = {str(size): contract_of(config, model, size) for size in sizes}
        facts = Facts(triton_version(), f"{major}.{minor}", sources_digest(), contracts)
        keep_kernels(cache, output, facts)
    seconds = time.monotonic() - began
    _say(f"{len(asked)} kernels for {gpu.name} in {output} after {seconds:.0f} s")
    return len(asked)


def named_gpu(name: str) -> Gpu:
    """The GPU of a short name. Raises UsageError for one that is not known."""
    gpu = KNOWN.get(name.lower())
    if gpu is None:
        raise UsageError(
            f"--gpu {name!r} is not known: use one of {', '.join(KNOWN)}{did_you_mean(name, KNOWN)}"
        )
    return gpu


def tensor_parallel_sizes(text: str) -> list[int]:
    """Sizes of a text such as "1,2,4". Raises UsageError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 64 for part in parts):
        raise UsageError(f"--tp {text!r} is no list of tensor-parallel sizes: write 1,2,4")
    return sorted({int(part) for part in parts})


def _check_output(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output} is there and not empty: name a new or empty folder")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=output.parent):
            pass
    except OSError as error:
        raise UsageError(
            f"--output {output} cannot be made ({error.strerror}): name another folder"
        ) from None


@contextmanager
def _compiling_into_a_new_cache(output: Path) -> Iterator[Path]:
    """A new cache of Triton beside the output; gone, as the setting is, afterwards."""
    before = os.environ.get(_CACHE)
    with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=output.parent) as name:
        os.environ[_CACHE] = name
        try:
            yield Path(name)
        finally:
            os.environ.pop(_CACHE)
            if before is not None:
                os.environ[_CACHE] = before


def keep_kernels(cache: Path, output: Path, facts: Facts) -> None:
    """Move what a start reads from Triton's cache to the output, which then gets its manifest."""
    output.mkdir(mode=0o755, exist_ok=True)
    for folder in sorted(path for path in cache.iterdir() if any(path.glob("*.cubin"))):
        target = output / folder.name
        target.mkdir(mode=0o755)
        for file in folder.iterdir():
            if file.suffix in _KEPT and not file.name.startswith("__grp__"):
                copied = target / file.name
                shutil.copyfile(file, copied)
                copied.chmod(0o644)
        target.chmod(0o755)
    output.chmod(0o755)
    write_manifest(output, facts)
    (output / MANIFEST).chmod(0o644)


def _say(line: str) -> None:
    print(f"tpdet: {line}", file=sys.stderr, flush=True)
