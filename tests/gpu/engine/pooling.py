"""Pooled answers on a GPU: one set of bits, rankings that stay, and how many prompts a second.

python -m tests.gpu.engine.pooling [bits] [rerank] [throughput] [--device cuda|cpu] [--output DIR]
torchrun --nproc-per-node 2 -m tests.gpu.engine.pooling ranks

Each line that begins with { is a row of results, and --output adds the run to a results file of a
folder. `bits`: alone, together, in a batch of 256, in
chunks, preempted, with prefix hits, without graphs, and at TP 2 and 4 as threads on the one GPU;
what is pooled of equal rows has the CPU's bits. `rerank`: 200 queries with 50 documents at batch 1
and 256, at TP 1 and 2, rank alike; transformers in bf16, the control, must not. `throughput`: 512
tokens a prompt, random weights. `ranks`: each rank has a GPU of its own; rank 0 compares with
itself alone. `--peer` puts the figures of another engine, in one run, beside those of `throughput`.
"""

import argparse
import json
import random
import shlex
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from tests.lib.engine_harness import run
from tests.lib.models.pooled_models import classifier, pooled, sentence_folder
from tests.lib.models.reranked import NO, YES, asked, changed, pairs, rankings, stock_scores
from tests.lib.thread_world import run_threads
from tpdet import LLM
from tpdet.checkpoint.model_config.known_shapes import write_shape
from tpdet.comm.device import open_world
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.engine.pooling import PromptRows, pool
from tpdet.requests.request import PooledOutput, with_seed
from tpdet.runner import Runner
from tpdet.scheduler.sequence import Sequence
from tpdet.tools.bench.generate import beside, figure_row, read_peer
from tpdet.tools.bench.generate_load import Sizes, time_embed
from tpdet.tools.measurement.results_file import append_record, run_record
from tpdet.tools.synthetic.make_model import make_model
from tpdet.tools.worlds.machine import machine

SHAPE = {"hidden": 512, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
SMALL = SHAPE | {"hidden": 128, "layers": 1}
"""For a CPU, where this script is tried."""
TASKS = {"last": "embed", "mean": "embed", "labels": "classify", "tokens": "score"}
PAGES, TOKENS = 640, 512
PROMPTS = {"qwen3-0.6b": 4096, "qwen3-8b": 1024}
ROWS = []


def say(case, model="tiny qwen3", dtype="bfloat16", tp=1, **values):
    """A row of results."""
    ROWS.append({"case": case, "model": model, "dtype": dtype, "tp": tp} | values)
    print(json.dumps(ROWS[-1]), flush=True)


def make_models(folder, device="cuda"):
    """By what they answer, from the same weights."""
    plain = make_model(folder / "plain", like="qwen3", **(SMALL if device == "cpu" else SHAPE))
    dense = ((256, "activation.Tanh"),)
    return {
        "tokens": plain,
        "last": sentence_folder(plain, folder / "last"),
        "mean": sentence_folder(plain, folder / "mean", "mean_tokens", dense),
        "labels": classifier(plain, folder / "labels"),
    }


def requests(kind, count, seed=1):
    """Prompts of 1 to 700 tokens, of which every third begins as the first does."""
    draw = random.Random(seed)
    words = lambda n: [draw.randrange(1, 1000) for _ in range(n)]
    shared, ids = words(600), (YES, NO) if kind == "tokens" else ()
    lengths = (1, 7, 100, 255, 256, 257, 30, 64)
    prompts = [
        [*(shared if i % 3 == 0 else ()), *words(lengths[i % len(lengths)])] for i in range(count)
    ]
    return [pooled(f"p{i}", prompt, token_ids=ids) for i, prompt in enumerate(prompts)]


class Session:
    """A loaded model, which answers again and again."""

    def __init__(self, model, kind, world, device, **settings):
        sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_queue": 20_000}
        sizes |= {"kv_pages": PAGES, "max_model_len": 1024}
        named = {"drafts": "off", "device": device, "task": TASKS[kind]} | sizes | settings
        self.config = EngineConfig.from_values(model=str(model), **named)
        self.world, self.runner = world, Runner.start(self.config, world)

    def run(self, wanted, preempt_every=0, **changes):
        """The outputs of requests, in their order; None on other ranks than the first."""
        config = self.config.model_copy(update=changes)
        self.runner.reset_pages(self.runner.num_pages)
        engine = Engine(config, self.world, None, preempt_every, self.runner)
        if self.world.rank > 0:
            engine.worker_loop()
            return None
        for request in wanted:
            engine.submit(request)
        found = {}
        while engine.has_work:
            for output in engine.step():
                assert isinstance(output, PooledOutput), output
                found[output.request_id] = output
        engine.heartbeat()
        engine.check_integrity()
        engine.stop_workers()
        return [found[request.request_id] for request in wanted]


def values(outputs):
    """fp32 [prompts, W]."""
    return torch.stack(
        [torch.frombuffer(bytearray(one.values), dtype=torch.float32) for one in outputs]
    )


def compare(whole, other, what):
    """Raise unless two lists of outputs hold the same bytes."""
    wrong = [
        i
        for i, pair in enumerate(zip(whole, other, strict=True))
        if pair[0].values != pair[1].values
    ]
    assert not wrong, f"{what}: {len(wrong)} of {len(whole)} differ, first prompt {wrong[0]}"


def check_circumstances(model, kind, device):
    """One model: every circumstance against each prompt alone."""
    session = Session(model, kind, SoloWorld(), device)
    crowd = requests(kind, 32 if device == "cpu" else 256)
    few = crowd[:16]
    alone = session.run(few, max_num_seqs=1, enable_prefix_caching=False)
    assert torch.isfinite(values(alone)).all() and len({one.values for one in alone}) == 16
    compare(alone, session.run(few), f"{kind}: 16 together")
    together = session.run(crowd, enable_prefix_caching=False)
    compare(alone, together[:16], f"{kind}: in a batch of 256")
    compare(together, session.run(crowd[::-1])[::-1], f"{kind}: turned round")
    hot = session.run(few, max_num_seqs=1)
    compare(alone, hot, f"{kind}: with prefix hits")
    hits = sum(one.cached_tokens for one in hot)
    assert (hits > 0) is (kind != "mean"), f"{kind}: {hits} tokens from the prefix cache"
    for budget in (17, 100, 1000):
        found = session.run(few, max_num_batched_tokens=budget, max_num_seqs=16)
        compare(alone, found, f"{kind}: chunks of {budget}")
    compare(alone, session.run(few, preempt_every=3), f"{kind}: preempted")
    session.runner.close()
    eager = {"enforce_eager": True}
    compare(alone, Session(model, kind, SoloWorld(), device, **eager).run(few), f"{kind}: eager")
    for size in (2, 4):
        of_size = lambda world: Session(model, kind, world, device, **eager).run(few)
        (found, *_) = run_threads(size, of_size, timeout=240.0)
        compare(alone, found, f"{kind}: TP {size}")
    say(f"bits {kind}", equal=True, prompts=len(crowd), hits=hits)


def check_pooling_step(device):
    """What is pooled of equal rows has the CPU's bits, in blocks as a step has them."""
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(700, 1024, generator=draw) * torch.randn(700, 1, generator=draw).exp()
    for row, ids in (("last", ()), ("last", (YES, NO)), ("mean", ()), ("cls", ())):
        found = []
        for kind in ("cpu", device):
            request = pooled("a", [1] * 700, token_ids=ids, row=row)
            sequence, blocks = Sequence.of(with_seed(request, 0), 0, 0), []
            for first in range(0, 700, 256) if row != "last" else (699,):
                part = PromptRows(sequence, first, rows[first : first + 256].to(kind))
                blocks.append(pool([part]))
            assert blocks[:-1] == [None] * (len(blocks) - 1)
            ((_, kept, largest),) = blocks[-1].finish()
            found.append((kept.cpu().numpy().tobytes(), largest))
        assert found[0] == found[1], f"{row} {ids}: other bits than on the CPU"
    say("pooling of equal rows", equal=True)


def check_accuracy(folder, device):
    """fp32 vectors beside those of the CPU path."""
    model = make_model(folder / "float32", like="qwen3", **SMALL | {"dtype": "float32"})
    wanted = [one for one in requests("last", 16) if len(one.prompt_token_ids) < 400]
    settings = {"task": "embed", "look": False, "max_model_len": 1024}
    both = [run(model, wanted, device=kind, **settings) for kind in ("cpu", device)]
    first, second = (values([found.outputs[one.request_id][0] for one in wanted]) for found in both)
    error = (first - second).abs().max().item()
    assert error <= 1e-5, f"fp32 vectors differ from the CPU's by {error:.1e}"
    said = {"value": error, "unit": "absolute error", "limit": 1e-5}
    say("fp32 vectors beside the CPU's", dtype="float32", **said)


def check_rankings(model, device, queries, documents):
    """Rankings at batch 1 and 256, the cache cold and hot; the control."""
    prompts = pairs(queries, documents)
    session = Session(model, "tokens", SoloWorld(), device)
    cold = {"max_num_seqs": 1, "enable_prefix_caching": False}
    one, many = session.run(asked(prompts), **cold), session.run(asked(prompts))
    compare(one, many, "scores at batch 1 and 256")
    ranked = [rankings(values(outputs), documents) for outputs in (one, many)]
    session.runner.close()
    many = lambda world: Session(model, "tokens", world, device, enforce_eager=True).run(
        asked(prompts)
    )
    ranked.append(rankings(values(run_threads(2, many, timeout=400.0)[0]), documents))
    moved = max(changed(ranked[0], other) for other in ranked[1:])
    assert moved == 0, f"{moved} of {queries} rankings changed"
    stock = [rankings(stock_scores(model, prompts, n, device), documents) for n in (1, 256)]
    control = changed(*stock)
    assert control > 0, "the control, transformers in bf16, has no ranking that changed"
    asked_of = f"of {queries} with {documents} documents"
    said = f"rankings that change from batch 1 to 256, {asked_of}"
    for tp in (1, 2):
        say(said, tp=tp, value=moved, unit="queries")
    say(f"{said}, transformers", value=control, unit="queries")


def measure(folder, shape, peer):
    """Tokens a second of `LLM.embed`: the median of a few rounds of other prompts; a peer's."""
    model = write_shape(folder / shape, shape)
    settings = {"task": "embed", "load_format": "dummy", "skip_tokenizer_init": True}
    with LLM(str(model), device="cuda", max_model_len=1024, **settings) as llm:

        def embed(prompts):
            begin = time.perf_counter()
            assert len(llm.embed(prompts, use_tqdm=False)) == len(prompts)
            return time.perf_counter() - begin

        figure = time_embed(embed, PROMPTS[shape], TOKENS, Sizes())
        row = beside(figure_row(llm.engine, figure), [peer] if peer else [])
    say(**msgspec.to_builtins(row))


def check_ranks(folder, world):
    """Ranks with a GPU each, against the first of them alone."""
    models, whole = make_models(folder), {}
    prompts = pairs(40, 25)
    for kind, model in models.items():
        wanted = asked(prompts) if kind == "tokens" else requests(kind, 64)
        session = Session(model, kind, world, "cuda")
        whole[kind] = wanted, session.run(wanted)
        session.runner.close()
    world.close()
    for kind, (wanted, found) in whole.items() if world.rank == 0 else ():
        alone = Session(models[kind], kind, SoloWorld(), "cuda").run(wanted)
        compare(alone, found, f"{kind}: TP {world.size}")
        say(f"bits {kind}", equal=True, tp=world.size, prompts=len(wanted))


def main(arguments):
    """Run the parts that are named, all but `ranks` by default; an assertion ends it."""
    parts = ["bits", "rerank", "throughput"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=parts)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rerank", default="200x50", help="queries x documents")
    parser.add_argument("--shapes", default=",".join(PROMPTS), help="of throughput, a list")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="SHAPE=FILE",
        help="figures of scripts/vllm_generate.py",
    )
    parser.add_argument("--output", type=Path, help="folder of results files")
    options = parser.parse_args(arguments)
    if unknown := {*options.parts} - {*parts, "ranks"}:
        parser.error(f"there is no part {sorted(unknown)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "ranks" in options.parts:
            check_ranks(folder, open_world("cuda", 600.0))
            return
        models = make_models(folder, options.device)
        if "bits" in options.parts:
            check_pooling_step(options.device)
            check_accuracy(folder, options.device)
            for kind, model in models.items():
                check_circumstances(model, kind, options.device)
        if "rerank" in options.parts:
            sizes = map(int, options.rerank.split("x"))
            check_rankings(models["tokens"], options.device, *sizes)
        peers = dict(pair.split("=", 1) for pair in options.peer)
        for shape in options.shapes.split(",") if "throughput" in options.parts else ():
            measure(folder, shape, read_peer(Path(peers[shape])) if shape in peers else None)
    if options.output is not None:
        command = shlex.join(["python", "-m", "tests.gpu.engine.pooling", *arguments])
        record = run_record("pooling", machine(options.device, 1), command, ROWS)
        append_record(options.output, "pooling", record)


if __name__ == "__main__":
    main(sys.argv[1:])
