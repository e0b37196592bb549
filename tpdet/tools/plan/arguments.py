"""The flags of `tpdet plan`."""

from pathlib import Path

from tpdet.arguments.flags import count, figure, flag, switch
from tpdet.checkpoint.model_config.known_shapes import SHAPES
from tpdet.client.command import Command
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, FOLD_ORDERS, KV_CACHE_DTYPES
from tpdet.tools.plan.hardware import HARDWARE

PACKED = ("fp8-block", "int4-g128", "mxfp4")
"""What `tpdet quantise` writes."""

_FLAGS = (
    flag("--model", f"a directory, a cached hub name, or one of {', '.join(SHAPES)}",
         metavar="DIR_OR_NAME"),
    flag("--draft-model",
         "a draft model on rank 0, named as --model is, without linear attention: what it takes "
         "of the KV cache",
         metavar="DIR_OR_NAME"),
    flag("--config", "a run's settings; flags win over them", type=Path),
    flag("--gpu", f"whose times were measured: {', '.join(HARDWARE)}", default="h200"),
    count("--nodes", "hosts (default 1)"),
    count("--gpus-per-node", "GPUs of a host (default 8)", dest="gpus"),
    count("--tp", "tensor-parallel size; the recommended one if none"),
    count("--context", "tokens of each sequence (default 4096)"),
    count("--batch", "sequences a world decodes (default 64)"),
    count("--budget", "tokens in a step (default 8192)"),
    count("--leaves", "as of tpdet serve (default 8)"),
    flag("--fold-order", f"default {DEFAULT_FOLD_ORDER}", choices=FOLD_ORDERS),
    flag("--packed", "the weights of layers stay packed as `tpdet quantise` writes them: their "
         "memory; times are those of bfloat16", choices=PACKED),
    flag("--kv-cache-dtype", "how pages hold keys and values (default auto); times are those of "
         "bfloat16", choices=KV_CACHE_DTYPES),
    figure("--gpu-memory-utilization", "default 0.9", dest="utilization"),
    figure("--max-step-ms", "what a reader may wait for a token (default 50)", dest="most_ms"),
    figure("--network-gbps", "gigabits a second of each GPU's adapter (default 360)", dest="gbps"),
    figure("--network-us", "microseconds between hosts, beside NCCL's (default 5)", dest="hop_us"),
    switch("--json", "one JSON object"),
    flag("--plot", "draw STEM.png and STEM.svg instead: up to 64 nodes", type=Path, metavar="STEM"),
)  # fmt: skip

PLAN = Command(
    name="plan",
    run="tpdet.tools.plan.command:plan_command",
    flags=_FLAGS,
    help="memory, time and capacity of a model on GPUs, without them",
    epilog="  tpdet plan --model llama-3-70b --tp 4 --context 8192 --batch 96",
)
