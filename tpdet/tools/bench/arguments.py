"""The benchmarks of `tpdet bench` and their flags, as data."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tpdet.arguments.command_line import results_file
from tpdet.arguments.flags import Flag, choice, count, figure, file, flag
from tpdet.checkpoint.model_config.known_shapes import SHAPES
from tpdet.client.command import Command, CommandGroup
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, FOLD_ORDERS

_MODEL_SHAPES = "qwen3-8b,llama-3-70b"


def _benchmark(
    name: str, module: str, text: str, flags: tuple[Flag, ...], engine: bool = False
) -> Command:
    """`NAME_command` of a module of this room; engine: whether it takes the engine's settings."""
    run, without = f"tpdet.tools.bench.{module}:{name}_command", () if engine else None
    return Command(name=name, run=run, flags=flags, help=text, without=without)


_JSON = "end with the run as one line of JSON (default: where standard output is no terminal)"
_RESULTS = (
    flag("--output", "results file (JSON) to append to, or a directory that holds them by GPU",
         type=results_file),
    flag("--json", _JSON, action=argparse.BooleanOptionalAction, default=None),
)  # fmt: skip
_ADDED = "order in which leaf sums are added"
_FOLD_ORDER = flag("--fold-order", _ADDED, default=DEFAULT_FOLD_ORDER, choices=FOLD_ORDERS)
_MODEL = (
    *_RESULTS,
    flag("model", "Hugging Face directory or hub name"),
    flag("--tp", "tensor-parallel sizes, a list such as 1,2,4", default="1"),
)
_ENGINE = (
    *_MODEL,
    flag("--budget", "the same as --max-num-batched-tokens", dest="max_num_batched_tokens",
         metavar="TOKENS"),
)  # fmt: skip
"""Besides the settings of `LLM`, each with its default there."""
_SHAPES = flag("--model-shape", f"a list of {', '.join(sorted(SHAPES))}", default=_MODEL_SHAPES)
_URL = "http://127.0.0.1:8000"
_AS_CHAT = "send prompts as a chat's message, the ids in decimals"
_CHAT = flag("--chat", _AS_CHAT, action="store_true")
_OUR_KEY = "(default: the key in TPDET_API_KEY or VLLM_API_KEY)"


def _kernel(sizes: str) -> tuple[Flag, ...]:
    """The flags of a kernel's benchmark at these tensor-parallel sizes by default."""
    return (
        *_RESULTS,
        flag("--tp", "shards as of these tensor-parallel sizes", default=sizes),
        count("--repeats", "replays; the median counts", default=9),
    )


_BENCHMARKS = (
    _benchmark("latency", "latency", "ms a decode step, prompt tokens/s of prefill", (
        *_ENGINE,
        flag("--batch", "decode batch sizes", default="1,16"),
        flag("--context --prompt-tokens", "prompt lengths before decoding", default="128"),
        flag("--prefill-tokens", "prompt lengths of prefill", default="1024"),
        count("--prefill-prompts", "prompts prefilled together", default=4),
        count("--steps", "decode steps timed", default=16),
    ), engine=True),
    _benchmark("throughput", "throughput", "seconds for many requests submitted at once", (
        *_ENGINE,
        count("--requests", "in all", default=256),
        flag("--input", "prompt tokens, LEAST:MOST", default="64:1024"),
        count("--generate", "tokens of each answer", default=128),
        count("--seed", "of lengths and prompts", default=0),
    ), engine=True),
    _benchmark("generate", "generate",
              "LLM.generate: decode, prefill, a mixed load; beside another engine's", (
        *_ENGINE,
        flag("--batch", "decode batch sizes", default="1,16,64,256"),
        count("--prefill-prompts", "prompts prefilled together", default=16),
        count("--prefill-tokens", "tokens of each", default=4096),
        count("--requests", "of the mixed load", default=256),
        flag("--input", "its prompt tokens, LEAST:MOST", default="64:1023"),
        count("--generate", "tokens of each of its answers", default=128),
        flag("--contexts", "lengths of single long prompts, a list, such as 8192,32000"),
        count("--repeats", "measurements of each case; their median counts", default=5),
        count("--seed", "of lengths and prompts", default=0),
        file("--peer", "figures of another engine, a file a size: scripts/vllm_generate.py",
             action="append"),
    ), engine=True),
    _benchmark("drafts", "drafts", "steps and tokens/s with drafters, synthetic ones and on text", (
        *_ENGINE,
        choice("--cases", "what is measured", "all", "synthetic", "text"),
        flag("--batch", "batch sizes of synthetic drafts", default="1,16"),
        flag("--acceptance", "shares of them that are right", default="0,0.5,0.8,1"),
        count("--context", "prompt tokens of each request with them", default=128),
        count("--generate", "tokens of each answer", default=128),
        count("--repeats", "runs; the fastest counts", default=2),
        count("--seed", "of prompts, answers and drafts", default=0),
    ), engine=True),
    _benchmark("serve", "serve", "load a running OpenAI-compatible server; vLLM's JSON keys", (
        *_RESULTS,
        flag("--base-url --url", "its address", default=_URL, metavar="URL"),
        flag("--model", "served name; the server's first if unset"),
        file("--api-key-file", f"its first key is sent {_OUR_KEY}"),
        count("--tp", "the server's size, for the results file only"),
        count("--requests", "in all", default=64),
        figure("--rate", "requests a second, at random (default: all at once)"),
        count("--concurrency", "requests at a time, at most"),
        flag("--input", "prompt tokens, N or LEAST:MOST", default="128"),
        count("--generate", "tokens of each answer", default=64),
        figure("--temperature", "0 is greedy", default=0.0),
        count("--vocabulary", "prompt ids are below it", default=1000),
        _CHAT,
        count("--seed", "of prompts and arrivals", default=0),
        figure("--timeout", "seconds for one request", default=600.0),
    )),
    _benchmark("peer", "peer",
              "this server beside any OpenAI-compatible one, by the same requests in turn", (
        *_RESULTS,
        flag("--peer-url", "the other server's address", required=True, metavar="URL"),
        flag("--url", "our server's", default=_URL, metavar="URL"),
        flag("--peer-name", "such as 'vLLM 0.26.0'; what the server says if unset"),
        flag("--model", "served name; the first of our server if unset"),
        flag("--peer-model", "its name at the peer; the first there if unset"),
        file("--api-key-file", f"its first key is sent to our server {_OUR_KEY}"),
        file("--peer-api-key-file",
              "its first key is sent to the peer; no variable is read for it"),
        count("--tp", "the servers' size, for the results file only"),
        flag("--concurrency", "requests at a time, a list", default="1,16,64,256"),
        count("--requests", "at each; three a reader and at least 8 if unset"),
        count("--turns", "loads of each server at each concurrency", default=2),
        flag("--input", "prompt tokens, N or LEAST:MOST", default="512"),
        count("--generate", "tokens of each answer", default=128),
        count("--vocabulary", "prompt ids are below it", default=1000),
        _CHAT,
        count("--seed", "of prompts", default=0),
        figure("--timeout", "seconds for one request", default=600.0),
    )),
    _benchmark("host", "host", "rank 0's processor time in a decode step, part by part", (
        *_MODEL,
        choice("--load-format", "dummy: random weights", "auto", "dummy"),
        choice("--device", "on the CPU no model is run", "auto", "cpu", "cuda"),
        count("--batch", "sequences that decode", default=256),
        count("--context", "prompt tokens of each", default=512),
        count("--steps", "decode steps timed", default=64),
        figure("--temperature", "0 is greedy", default=0.0),
        figure("--top-p", "1 is off", default=1.0),
    )),
    _benchmark("gemm", "kernels.gemm", "matrix products beside torch's linear", (
        *_kernel("1,2,4"),
        _SHAPES,
        _FOLD_ORDER,
        flag("--rows", "a list", default="1,8,16,32,64,128,256,512,1024,4096"),
    )),
    _benchmark("experts", "kernels.experts",
              "experts of a layer, whole on ranks and cut over them", (
        *_kernel("1,2,4"),
        flag("--model-shape", "mixtures, a list", default="qwen3-30b-a3b"),
        _FOLD_ORDER,
        flag("--rows", "a list", default="1,16,64,256,2048,8192"),
        figure("--skew", "odds of expert i: (1 + i) ** -SKEW", default=0.0),
    )),
    _benchmark("attention", "kernels.attention", "prefill beside cuDNN's attention, decode", (
        *_kernel("1,4"),
        _SHAPES,
        flag("--decode", "BATCH:CONTEXT pairs", default="1:8192,16:8192,64:2048,256:512,1:32768"),
        flag("--prefill", "PROMPTS:LENGTH", default="1:4096,2:4096,1:16384"),
    )),
    _benchmark("sampler", "kernels.sampler", "sampling tokens beside torch's way", (
        *_kernel("1,4"),
        count("--vocabulary", "its tokens", default=151_936),
        flag("--batch", "rows, a list", default="1,16,64,256"),
    )),
    _benchmark("allreduce", "exchange", "the exchange between ranks beside NCCL's", (
        *_kernel("2"),
        count("--hidden", "values of a row", default=4096),
        _FOLD_ORDER,
        flag("--kilobytes", "of the bf16 output", default="8,32,128,512,2048,8192,32768,131072"),
    )),
    _benchmark("kernels", "kernels.cpu", "the CPU's matrix product beside torch.mm",
              (*_RESULTS, count("--size", "rows and columns of it", default=4096))),
    _benchmark("plot", "plot", "throughput against latency, and the roofline", (
        flag("--results", "their folder", type=Path, default=Path("docs/results")),
        flag("--output", "folder", type=Path, default=Path("docs/plots")),
        flag("--gpu", "such as h200; the one with most results if unset"),
    )),
)  # fmt: skip
NAMES = tuple(benchmark.name for benchmark in _BENCHMARKS)


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


BENCH = CommandGroup(
    name="bench",
    metavar="BENCHMARK",
    commands=_BENCHMARKS,
    help="time the engine, a server and the kernels, each beside its floor",
    epilog="tpdet bench MODEL is tpdet bench latency MODEL.",
)
