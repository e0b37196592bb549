"""The flags of `tpdet bench` and its benchmarks. Nothing heavy is imported before one runs."""

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from tpdet.arguments.command_line import dtype, number, whole_number
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, FOLD_ORDERS
from tpdet.synthetic.model_shapes import SHAPES

BENCHMARKS = (
    "latency", "throughput", "serve", "gemm", "attention", "sampler", "allreduce", "kernels",
    "plot",
)  # fmt: skip
_SHAPES = "qwen3-8b,llama-3-70b"


def complete(arguments: Sequence[str]) -> list[str]:
    """`tpdet bench MODEL ...` means `tpdet bench latency MODEL ...`, where MODEL is a directory or
    a hub name with its owner; anything else is an unknown benchmark's name.
    """
    rest = list(arguments)
    if rest[:1] != ["bench"] or rest[1:2] in ([], ["-h"], ["--help"]):
        return rest
    first = rest[1]
    if first.startswith("-") or "/" in first or Path(first).is_dir():
        return rest if first in BENCHMARKS else ["bench", "latency", *rest[1:]]
    return rest


def add_bench(commands: argparse._SubParsersAction) -> None:
    """Add `bench` to the commands of `tpdet`."""
    bench = commands.add_parser(
        "bench",
        help="time the engine, a server and the kernels, each beside its floor",
        epilog="tpdet bench MODEL is tpdet bench latency MODEL.",
    )
    group = bench.add_subparsers(required=True, metavar="BENCHMARK")
    for add in (
        _latency,
        _throughput,
        _serve,
        _gemm,
        _attention,
        _sampler,
        _allreduce,
        _cpu_kernels,
        _plot,
    ):
        add(group)


def _command(
    group: argparse._SubParsersAction, name: str, module: str, text: str, results: bool = True
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = group.add_parser(
        name, help=text, description=f"{text[:1].upper()}{text[1:]}."
    )
    if results:
        command.add_argument(
            "--output",
            type=Path,
            help="results file (JSON) to append to, or a directory that holds them by GPU",
        )
        command.add_argument(
            "--json",
            action="store_true",
            help="end with the run as one line of JSON, also on a terminal",
        )
    command.set_defaults(run=_later(module, f"{name}_command"))
    return command


def _later(module: str, function: str) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        found: int = getattr(import_module(f"tpdet.bench.{module}"), function)(options)
        return found

    return run


def _engine(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", help="Hugging Face directory or hub name")
    command.add_argument("--tp", default="1", help="tensor-parallel sizes, a list such as 1,2,4")
    command.add_argument(
        "--budget", type=whole_number, default=2048, help="tokens in a step, at most"
    )
    _fold_order(command)
    command.add_argument(
        "--row-layers",
        default="fold",
        choices=["fold", "gather"],
        help="what ranks exchange: leaf sums that are folded, or columns",
    )
    command.add_argument(
        "--transport",
        default="auto",
        choices=["auto", "gather", "peer"],
        help="what carries it between ranks",
    )
    command.add_argument(
        "--approximate",
        action="store_true",
        help="the same engine by the library's products, attention and all-reduce, the peer of "
        "the cost of determinism",
    )
    command.add_argument(
        "--dtype",
        type=dtype,
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="of weights and activations; auto takes the checkpoint's",
    )
    command.add_argument(
        "--load-format", default="auto", choices=["auto", "dummy"], help="dummy: random weights"
    )
    command.add_argument(
        "--device", default="auto", choices=["auto", "cpu", "cuda"], help="where the model runs"
    )


def _fold_order(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--fold-order",
        default=DEFAULT_FOLD_ORDER,
        choices=FOLD_ORDERS,
        help="order in which leaf sums are added",
    )


def _latency(group: argparse._SubParsersAction) -> None:
    command = _command(group, "latency", "run", "ms a decode step, prompt tokens/s of prefill")
    _engine(command)
    command.add_argument("--batch", default="1,16", help="decode batch sizes")
    command.add_argument(
        "--context", "--prompt-tokens", default="128", help="prompt lengths before decoding"
    )
    command.add_argument("--prefill-tokens", default="1024", help="prompt lengths of prefill")
    command.add_argument(
        "--prefill-prompts", type=whole_number, default=4, help="in flight together"
    )
    command.add_argument("--steps", type=whole_number, default=16, help="decode steps timed")


def _throughput(group: argparse._SubParsersAction) -> None:
    command = _command(group, "throughput", "run", "seconds for many requests submitted at once")
    _engine(command)
    command.add_argument("--requests", type=whole_number, default=256, help="in all")
    command.add_argument("--input", default="64:1024", help="prompt tokens, LEAST:MOST")
    command.add_argument("--generate", type=whole_number, default=128, help="tokens of each answer")
    command.add_argument("--seed", type=whole_number, default=0, help="of lengths and prompts")
    command.add_argument(
        "--max-num-seqs", type=whole_number, help="in a step, at most; all if unset"
    )


def _serve(group: argparse._SubParsersAction) -> None:
    command = _command(
        group, "serve", "serve", "load a running OpenAI-compatible server; vLLM's JSON keys"
    )
    command.add_argument(
        "--base-url", "--url", default="http://127.0.0.1:8000", metavar="URL", help="its address"
    )
    command.add_argument("--model", help="served name; the server's first if unset")
    command.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="its first key is sent (default: the key in TPDET_API_KEY or VLLM_API_KEY)",
    )
    command.add_argument(
        "--tp", type=whole_number, help="the server's size, for the results file only"
    )
    command.add_argument("--requests", type=whole_number, default=64, help="in all")
    command.add_argument("--rate", type=number, help="requests a second (Poisson); all at once")
    command.add_argument("--concurrency", type=whole_number, help="requests in flight, at most")
    command.add_argument("--input", default="128", help="prompt tokens, N or LEAST:MOST")
    command.add_argument("--generate", type=whole_number, default=64, help="tokens of each answer")
    command.add_argument("--temperature", type=number, default=0.0, help="0 is greedy")
    command.add_argument(
        "--vocabulary", type=whole_number, default=1000, help="prompt ids are below it"
    )
    command.add_argument("--seed", type=whole_number, default=0, help="of prompts and arrivals")
    command.add_argument("--timeout", type=number, default=600.0, help="seconds for one request")


def _kernel(
    group: argparse._SubParsersAction, name: str, text: str, tp: str
) -> argparse.ArgumentParser:
    command = _command(group, name, "run" if name == "allreduce" else f"kernels.{name}", text)
    command.add_argument("--tp", default=tp, help="shards as of these tensor-parallel sizes")
    command.add_argument(
        "--repeats", type=whole_number, default=9, help="replays; the median counts"
    )
    return command


def _model_shapes(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model-shape", default=_SHAPES, help=f"a list of {', '.join(sorted(SHAPES))}"
    )


def _gemm(group: argparse._SubParsersAction) -> None:
    command = _kernel(group, "gemm", "matrix products beside torch's linear", "1,2,4")
    _model_shapes(command)
    _fold_order(command)
    command.add_argument("--rows", default="1,8,16,32,64,128,256,512,1024,4096", help="a list")


def _attention(group: argparse._SubParsersAction) -> None:
    command = _kernel(group, "attention", "prefill beside cuDNN's attention, decode", "1,4")
    _model_shapes(command)
    command.add_argument(
        "--decode", default="1:8192,16:8192,64:2048,256:512,1:32768", help="BATCH:CONTEXT pairs"
    )
    command.add_argument("--prefill", default="1:4096,2:4096,1:16384", help="PROMPTS:LENGTH")


def _sampler(group: argparse._SubParsersAction) -> None:
    command = _kernel(group, "sampler", "sampling tokens beside torch's way", "1,4")
    command.add_argument("--vocabulary", type=whole_number, default=151_936, help="its tokens")
    command.add_argument("--batch", default="1,16,64,256", help="rows, a list")


def _allreduce(group: argparse._SubParsersAction) -> None:
    command = _kernel(group, "allreduce", "the exchange between ranks beside NCCL's", "2")
    command.add_argument("--hidden", type=whole_number, default=4096, help="values of a row")
    _fold_order(command)
    command.add_argument(
        "--kilobytes", default="8,32,128,512,2048,8192,32768,131072", help="of the bf16 output"
    )


def _cpu_kernels(group: argparse._SubParsersAction) -> None:
    command = _command(group, "kernels", "kernels.cpu", "the CPU's matrix product beside torch.mm")
    command.add_argument("--size", type=whole_number, default=4096, help="rows and columns of it")


def _plot(group: argparse._SubParsersAction) -> None:
    command = _command(
        group, "plot", "report.plot", "throughput against latency, and the roofline", results=False
    )
    command.add_argument("--results", type=Path, default=Path("docs/results"), help="their folder")
    command.add_argument("--output", type=Path, default=Path("docs/plots"), help="folder")
    command.add_argument("--gpu", help="such as h200; the one with most results if unset")
