"""Checks that `tpdet serve` makes before any process starts.

Flags, `config.json`, files, the port and the device; each check raises what a rank would raise
seconds later. A rank refuses what only a rank can know.
"""

import importlib.util
from pathlib import Path

from tpdet.audit.receipts.directory import check_directory
from tpdet.checkpoint.checks import check_checkpoint
from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.model_config.expert_load import route_shape
from tpdet.checkpoint.model_config.fit import check_widths, context_length
from tpdet.checkpoint.resolve import resolve_tokenizer
from tpdet.comm.arithmetic_environment import check_environment
from tpdet.errors import NotFoundError, UsageError
from tpdet.kernels.order import Contract
from tpdet.launch.host.kernel_directory import check_caches
from tpdet.requests.body.limits import MAX_ROUTED_BYTES
from tpdet.server.answers.files import make_writable
from tpdet.server.batches import upload
from tpdet.server.batches.store import BatchStore
from tpdet.server.commands.gpus import count_gpus, torch_build
from tpdet.server.leader.http_child import bind_port
from tpdet.server.settings.keys import read_key_file
from tpdet.server.settings.settings import Settings
from tpdet.server.wire.protocol import socket_address
from tpdet.speculative.draft_model.pair import read_draft_model
from tpdet.text.parsing.calls import check_call_parser
from tpdet.text.parsing.reasoning import check_marks
from tpdet.text.pooled_prompts import answering_tokens
from tpdet.text.tokenizer import Tokenizer, read_files


def check_start(settings: Settings, ranks: int) -> None:
    """Raise the error that would stop a server of `ranks` ranks with these settings, if any.

    A hub name is downloaded here. Raises NotFoundError, CheckpointError, UsageError, ResourceError
    and NotPermittedError, each naming the value and the remedy.
    """
    model, contract = _check_model(settings, ranks)
    device = check_device(settings.engine.device, ranks)
    check_environment(device)
    check_widths(model, device)
    check_caches(settings.engine.kernel_cache, contract, ranks, device)
    _check_transport(settings.engine.transport, device, ranks)
    server = settings.server
    if server.api_key_file is not None:
        read_key_file(server.api_key_file)
    if server.admin_key_file is not None:
        read_key_file(server.admin_key_file, "--admin-key-file")
    if server.audit_dir is not None and server.audit_key is not None:
        check_directory(server.audit_dir, server.audit_key)
    if server.answer_cache is not None:
        make_writable(Path(server.answer_cache))
    if server.batch_dir is not None:
        upload.check_installed()
        BatchStore(Path(server.batch_dir)).close()
    if server.weights_root is not None and not Path(server.weights_root).is_dir():
        raise NotFoundError(
            f"--weights-root {server.weights_root} is no directory: make it, updates come below it"
        )
    if server.run_dir is not None:
        socket_address(str(Path(server.run_dir).absolute()))
    bind_port(server.host, server.port).close()
    if server.admin_address is not None:
        bind_port(*server.admin_address, "--admin-listen").close()


def _check_model(settings: Settings, ranks: int) -> tuple[ModelConfig, str]:
    """The checkpoint's configuration against the flags, and the files that have to be there.

    Returns the configuration, and the contract's id on a GPU.
    """
    engine = settings.engine
    model, cut = check_checkpoint(engine, ranks)
    if model.head != "tokens" or engine.task == "score":
        for flag in ("audit_dir", "answer_cache"):
            if getattr(settings.server, flag) is not None:
                raise UsageError(
                    f"--{flag.replace('_', '-')} is of answers of text: leave it out, as the model "
                    "pools"
                )
    context = context_length(engine.max_model_len, model)
    if engine.enable_return_routed_experts:
        check_routed(model, context)
    if engine.draft_model is not None:
        read_draft_model(engine)
    if engine.chat_template is not None and not Path(engine.chat_template).exists():
        raise NotFoundError(
            f"--chat-template {engine.chat_template} does not exist: name a file with one"
        )
    files = None
    if not engine.skip_tokenizer_init:
        names = engine.tokenizer, engine.model
        directory = resolve_tokenizer(*names, engine.revision)
        files = read_files(directory, engine.chat_template, engine.chat_template_date)
    check_marks(settings.server.reasoning_parser, files)
    check_call_parser(settings.server.tool_call_parser, files)
    if engine.task == "score" and model.head == "tokens" and files is not None:
        answering_tokens(Tokenizer.from_files(files))
    contract = Contract(
        "cuda",
        model.dtype,
        cut.count,
        engine.fold_order,
        row_layers=engine.row_layers,
        edges=cut.edges,
        experts=model.experts,
        linear=model.linear is not None,
        kv_cache_dtype=engine.kv_cache_dtype,
    )
    return model, contract.identifier


def check_routed(model: ModelConfig, context: int) -> None:
    """Refuse (UsageError) to return experts that are not there, or too many for an answer."""
    layers, chosen = route_shape(model)
    size = 2 * layers * chosen * context
    if not layers:
        raise UsageError(
            f"{model.family} has no experts to return: leave --enable-return-routed-experts out"
        )
    if size > MAX_ROUTED_BYTES:
        raise UsageError(
            f"the experts of {context} tokens are {size} bytes, over the {MAX_ROUTED_BYTES} of an "
            "answer: lower --max-model-len, or leave --enable-return-routed-experts out"
        )


def check_device(device: str, ranks: int) -> str:
    """The device that the ranks will find, "cpu" or "cuda". Raises UsageError for missing GPUs."""
    if device == "cpu":
        return "cpu"
    version, with_cuda = torch_build()
    gpus = count_gpus() if with_cuda else 0
    if gpus == 0 and device == "auto":
        return "cpu"
    if gpus == 0:
        reason = "sees no GPU" if with_cuda else "is built without CUDA"
        raise UsageError(
            f"device cuda: torch {version} {reason}: use --device cpu, or install torch for CUDA "
            "and check nvidia-smi"
        )
    if importlib.util.find_spec("triton") is None:
        raise UsageError("device cuda needs Triton: install it, or use --device cpu")
    if gpus is not None and ranks > gpus:
        raise UsageError(
            f"{ranks} ranks on a host with {gpus} GPUs: start as many ranks as there are GPUs, or "
            "use --device cpu"
        )
    return "cuda"


def _check_transport(transport: str, device: str, ranks: int) -> None:
    """Ranks of one host talk through their GPUs or gloo; MPI carries between mpirun's own."""
    if ranks == 1:
        return
    if transport == "mpi":
        raise UsageError(
            "transport mpi needs ranks that talk by MPI: start the server with tpdet launch "
            "mpirun, or use --transport gather"
        )
    if transport == "peer" and device == "cpu":
        raise UsageError("transport peer needs GPUs: use --transport gather")
