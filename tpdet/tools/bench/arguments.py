"""The benchmarks of `tpdet bench` and their flags, as data; running one imports its module."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tpdet.arguments.command_line import number, results_file, whole_number
from tpdet.checkpoint.model_config.known_shapes import SHAPES
from tpdet.client.engine_settings import add_engine_settings
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, FOLD_ORDERS

_MODEL_SHAPES = "qwen3-8b,llama-3-70b"


@dataclass(frozen=True)
class Flag:
    """One flag, or a positional argument: its names and what argparse's `add_argument` takes."""

    names: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: `NAME_command` of a module of `tpdet.tools.bench` runs it."""

    name: str
    module: str
    help: str
    flags: tuple[Flag, ...]
    engine: bool = False
    """Whether it takes the engine's settings too."""


def _flag(*names: str, **options: Any) -> Flag:
    return Flag(names, options)


def _text(name: str, default: str, text: str) -> Flag:
    return Flag((name,), {"default": default, "help": text})


def _choice(name: str, default: str, *others: str, **options: Any) -> Flag:
    return _flag(name, default=default, choices=[default, *others], **options)


def _count(name: str, default: int | None, text: str) -> Flag:
    return _flag(name, type=whole_number, default=default, help=text)


def _number(name: str, default: float | None, text: str) -> Flag:
    return _flag(name, type=number, default=default, help=text)


def _file(name: str, text: str) -> Flag:
    return _flag(name, type=Path, metavar="FILE", help=text)


_JSON = "end with the run as one line of JSON (default: where standard output is no terminal)"
_RESULTS = (
    _flag("--output", type=results_file,
          help="results file (JSON) to append to, or a directory that holds them by GPU"),
    _flag("--json", action=argparse.BooleanOptionalAction, default=None, help=_JSON),
)  # fmt: skip
_ADDED = "order in which leaf sums are added"
_FOLD_ORDER = _flag("--fold-order", default=DEFAULT_FOLD_ORDER, choices=FOLD_ORDERS, help=_ADDED)
_MODEL = (
    *_RESULTS,
    _flag("model", help="Hugging Face directory or hub name"),
    _text("--tp", "1", "tensor-parallel sizes, a list such as 1,2,4"),
)
_ENGINE = (
    *_MODEL,
    _flag("--budget", dest="max_num_batched_tokens", metavar="TOKENS",
          help="the same as --max-num-batched-tokens"),
)  # fmt: skip
"""Besides the settings of `LLM`, each with its default there."""
_SHAPES = _text("--model-shape", _MODEL_SHAPES, f"a list of {', '.join(sorted(SHAPES))}")
_URL = "http://127.0.0.1:8000"
_OUR_KEY = "(default: the key in TPDET_API_KEY or VLLM_API_KEY)"


def _kernel(sizes: str) -> tuple[Flag, ...]:
    """The flags of a kernel's benchmark at these tensor-parallel sizes by default."""
    return (
        *_RESULTS,
        _text("--tp", sizes, "shards as of these tensor-parallel sizes"),
        _count("--repeats", 9, "replays; the median counts"),
    )


BENCHMARKS = (
    Benchmark("latency", "latency", "ms a decode step, prompt tokens/s of prefill", (
        *_ENGINE,
        _text("--batch", "1,16", "decode batch sizes"),
        _flag("--context", "--prompt-tokens", default="128", help="prompt lengths before decoding"),
        _text("--prefill-tokens", "1024", "prompt lengths of prefill"),
        _count("--prefill-prompts", 4, "prompts prefilled together"),
        _count("--steps", 16, "decode steps timed"),
    ), engine=True),
    Benchmark("throughput", "throughput", "seconds for many requests submitted at once", (
        *_ENGINE,
        _count("--requests", 256, "in all"),
        _text("--input", "64:1024", "prompt tokens, LEAST:MOST"),
        _count("--generate", 128, "tokens of each answer"),
        _count("--seed", 0, "of lengths and prompts"),
    ), engine=True),
    Benchmark("generate", "generate",
              "LLM.generate: decode, prefill, a mixed load; beside another engine's", (
        *_ENGINE,
        _text("--batch", "1,16,64,256", "decode batch sizes"),
        _count("--prefill-prompts", 16, "prompts prefilled together"),
        _count("--prefill-tokens", 4096, "tokens of each"),
        _count("--requests", 256, "of the mixed load"),
        _text("--input", "64:1023", "its prompt tokens, LEAST:MOST"),
        _count("--generate", 128, "tokens of each of its answers"),
        _count("--seed", 0, "of lengths and prompts"),
        _flag("--peer", type=Path, action="append", metavar="FILE",
              help="figures of another engine, a file a size: scripts/vllm_generate.py"),
    ), engine=True),
    Benchmark("drafts", "drafts", "steps and tokens/s with drafters, synthetic ones and on text", (
        *_ENGINE,
        _choice("--cases", "all", "synthetic", "text", help="what is measured"),
        _text("--batch", "1,16", "batch sizes of synthetic drafts"),
        _text("--acceptance", "0,0.5,0.8,1", "shares of them that are right"),
        _count("--context", 128, "prompt tokens of each request with them"),
        _count("--generate", 128, "tokens of each answer"),
        _count("--repeats", 2, "runs; the fastest counts"),
        _count("--seed", 0, "of prompts, answers and drafts"),
    ), engine=True),
    Benchmark("serve", "serve", "load a running OpenAI-compatible server; vLLM's JSON keys", (
        *_RESULTS,
        _flag("--base-url", "--url", default=_URL, metavar="URL", help="its address"),
        _flag("--model", help="served name; the server's first if unset"),
        _file("--api-key-file", f"its first key is sent {_OUR_KEY}"),
        _count("--tp", None, "the server's size, for the results file only"),
        _count("--requests", 64, "in all"),
        _number("--rate", None, "requests a second, at random (default: all at once)"),
        _count("--concurrency", None, "requests at a time, at most"),
        _text("--input", "128", "prompt tokens, N or LEAST:MOST"),
        _count("--generate", 64, "tokens of each answer"),
        _number("--temperature", 0.0, "0 is greedy"),
        _count("--vocabulary", 1000, "prompt ids are below it"),
        _count("--seed", 0, "of prompts and arrivals"),
        _number("--timeout", 600.0, "seconds for one request"),
    )),
    Benchmark("peer", "peer",
              "this server beside any OpenAI-compatible one, by the same requests in turn", (
        *_RESULTS,
        _flag("--peer-url", required=True, metavar="URL", help="the other server's address"),
        _flag("--url", default=_URL, metavar="URL", help="our server's"),
        _flag("--peer-name", help="such as 'vLLM 0.26.0'; what the server says if unset"),
        _flag("--model", help="served name; the first of our server if unset"),
        _flag("--peer-model", help="its name at the peer; the first there if unset"),
        _file("--api-key-file", f"its first key is sent to our server {_OUR_KEY}"),
        _file("--peer-api-key-file",
              "its first key is sent to the peer; no variable is read for it"),
        _count("--tp", None, "the servers' size, for the results file only"),
        _text("--concurrency", "1,16,64,256", "requests at a time, a list"),
        _count("--requests", None, "at each; three a reader and at least 8 if unset"),
        _count("--turns", 2, "loads of each server at each concurrency"),
        _text("--input", "512", "prompt tokens, N or LEAST:MOST"),
        _count("--generate", 128, "tokens of each answer"),
        _count("--vocabulary", 1000, "prompt ids are below it"),
        _count("--seed", 0, "of prompts"),
        _number("--timeout", 600.0, "seconds for one request"),
    )),
    Benchmark("host", "host", "rank 0's processor time in a decode step, part by part", (
        *_MODEL,
        _choice("--load-format", "auto", "dummy", help="dummy: random weights"),
        _choice("--device", "auto", "cpu", "cuda", help="on the CPU no model is run"),
        _count("--batch", 256, "sequences that decode"),
        _count("--context", 512, "prompt tokens of each"),
        _count("--steps", 64, "decode steps timed"),
        _number("--temperature", 0.0, "0 is greedy"),
        _number("--top-p", 1.0, "1 is off"),
    )),
    Benchmark("gemm", "kernels.gemm", "matrix products beside torch's linear", (
        *_kernel("1,2,4"),
        _SHAPES,
        _FOLD_ORDER,
        _text("--rows", "1,8,16,32,64,128,256,512,1024,4096", "a list"),
    )),
    Benchmark("experts", "kernels.experts",
              "experts of a layer, whole on ranks and cut over them", (
        *_kernel("1,2,4"),
        _text("--model-shape", "qwen3-30b-a3b", "mixtures, a list"),
        _FOLD_ORDER,
        _text("--rows", "1,16,64,256,2048,8192", "a list"),
        _number("--skew", 0.0, "odds of expert i: (1 + i) ** -SKEW"),
    )),
    Benchmark("attention", "kernels.attention", "prefill beside cuDNN's attention, decode", (
        *_kernel("1,4"),
        _SHAPES,
        _text("--decode", "1:8192,16:8192,64:2048,256:512,1:32768", "BATCH:CONTEXT pairs"),
        _text("--prefill", "1:4096,2:4096,1:16384", "PROMPTS:LENGTH"),
    )),
    Benchmark("sampler", "kernels.sampler", "sampling tokens beside torch's way", (
        *_kernel("1,4"),
        _count("--vocabulary", 151_936, "its tokens"),
        _text("--batch", "1,16,64,256", "rows, a list"),
    )),
    Benchmark("allreduce", "exchange", "the exchange between ranks beside NCCL's", (
        *_kernel("2"),
        _count("--hidden", 4096, "values of a row"),
        _FOLD_ORDER,
        _text("--kilobytes", "8,32,128,512,2048,8192,32768,131072", "of the bf16 output"),
    )),
    Benchmark("kernels", "kernels.cpu", "the CPU's matrix product beside torch.mm",
              (*_RESULTS, _count("--size", 4096, "rows and columns of it"))),
    Benchmark("plot", "plot", "throughput against latency, and the roofline", (
        _flag("--results", type=Path, default=Path("docs/results"), help="their folder"),
        _flag("--output", type=Path, default=Path("docs/plots"), help="folder"),
        _flag("--gpu", help="such as h200; the one with most results if unset"),
    )),
)  # fmt: skip
NAMES = tuple(each.name for each in BENCHMARKS)


def complete(arguments: Sequence[str]) -> list[str]:
    """`tpdet bench MODEL ...` means `tpdet bench latency MODEL ...`, where MODEL is a directory or
    a hub name with its owner; anything else is an unknown benchmark's name.
    """
    rest = list(arguments)
    if rest[:1] != ["bench"] or rest[1:2] in ([], ["-h"], ["--help"]):
        return rest
    first = rest[1]
    if first.startswith("-") or "/" in first or Path(first).is_dir():
        return rest if first in NAMES else ["bench", "latency", *rest[1:]]
    return rest


def add_bench(commands: argparse._SubParsersAction) -> None:
    """Add `bench` to the commands of `tpdet`."""
    bench = commands.add_parser(
        "bench",
        help="time the engine, a server and the kernels, each beside its floor",
        epilog="tpdet bench MODEL is tpdet bench latency MODEL.",
    )
    group = bench.add_subparsers(required=True, metavar="BENCHMARK")
    for each in BENCHMARKS:
        text = f"{each.help[:1].upper()}{each.help[1:]}."
        command = group.add_parser(each.name, help=each.help, description=text)
        for flag in each.flags:
            command.add_argument(*flag.names, **flag.options)
        if each.engine:
            add_engine_settings(command)
        command.set_defaults(run=partial(_run, each))


def _run(benchmark: Benchmark, options: argparse.Namespace) -> int:
    module = import_module(f"tpdet.tools.bench.{benchmark.module}")
    code: int = getattr(module, f"{benchmark.name}_command")(options)
    return code
