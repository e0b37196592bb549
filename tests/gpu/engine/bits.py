"""The whole engine on one GPU: bits over every circumstance, the sampler, accuracy.

Tensor-parallel sizes above 1 run as threads of this process on the one GPU.
"""

import random

import torch

from tests.gpu.engine.draft_chain import check_chain
from tests.gpu.engine.parts import check_sampler, check_tables
from tests.gpu.lib.checks import poisoned_workspaces
from tests.gpu.lib.suite import Check
from tests.lib.engine_harness import Run, ask
from tests.lib.thread_world import run_threads
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.runner import Runner
from tpdet.tools.synthetic.make_model import make_model

FAMILIES = ("qwen3", "llama", "mistral", "qwen2")
DTYPES = ("bfloat16", "float16", "float32")
PAGES = 96
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "logprobs": 2}
BF16_ERROR = 1e-2


def prompt(length, seed):
    draw = random.Random(seed)
    return [draw.randrange(1024) for _ in range(length)]


def probes():
    return [
        ask("long", prompt(700, 1), prompt_logprobs=1, max_tokens=12),
        ask("short", prompt(7, 2), max_tokens=12, **SAMPLED),
        ask(
            "middle",
            prompt(255, 3),
            temperature=1.1,
            top_k=30,
            repetition_penalty=1.2,
            seed=9,
            max_tokens=12,
        ),
    ]


def crowd(count):
    return [
        ask(
            f"n{i}", prompt(3 + 11 * i % 90, 100 + i), temperature=1.0, seed=i, max_tokens=4 + i % 9
        )
        for i in range(count)
    ]


class Session:
    """One loaded model at one size, run again and again."""

    def __init__(self, model, world, **settings):
        values = {"kv_pages": PAGES, "max_num_seqs": 64, "device": "cuda"} | settings
        self.config = EngineConfig.from_values(model=str(model), **({"drafts": "off"} | values))
        self.world = world
        self.runner = Runner.start(self.config, world)

    def run(self, requests, preempt_every=0, poison=False, **changes):
        """What rank 0 saw; None on other ranks."""
        config = self.config.model_copy(update=changes)
        self.runner.reset_pages(PAGES)
        if poison:
            for layer in self.runner.pages.layers:
                layer.keys.fill_(torch.nan)
                layer.values.fill_(torch.nan)
        found, names = Run(), {}

        def tap(row, position, logits):
            for offset, values in enumerate(logits):
                key = (names[row.admission], row.choice, position + offset)
                known = found.logits.setdefault(key, values.clone())
                if not torch.equal(known, values):
                    raise AssertionError(f"{key} was computed again with other bits")

        engine = Engine(config, self.world, tap, preempt_every, self.runner)
        if self.world.rank > 0:
            engine.worker_loop()
            return None
        for admission, request in enumerate(requests):
            names[admission] = request.request_id
            found.outputs[request.request_id] = []
            engine.submit(request)
        while engine.has_work:
            for output in engine.step():
                found.outputs[output.request_id].append(output)
        engine.heartbeat()
        engine.stop_workers()
        return found


def assert_same_run(whole, other, what):
    """Every logit and answer of the probes."""
    for key, logits in whole.logits.items():
        if key[0].startswith("n"):
            continue
        if not torch.equal(logits.view(torch.int32), other.logits[key].view(torch.int32)):
            wrong = (logits != other.logits[key]).nonzero().view(-1)
            raise AssertionError(f"{what}: {key}: {len(wrong)} logits differ, first at {wrong[0]}")
    for name in ("long", "short", "middle"):
        if whole.answer(name) != other.answer(name):
            raise AssertionError(f"{what}: {name} answers differently")


def alone(session):
    whole = Run()
    for probe in probes():
        one = session.run([probe])
        whole.logits |= one.logits
        whole.outputs |= one.outputs
    finite = [torch.isfinite(logits).all() for logits in whole.logits.values()]
    assert all(finite), "logits are not finite"
    return whole


def check_circumstances(model, dtype):
    """Alone, in crowds, chunked, preempted, poisoned, decode as prefill: one set of bits."""
    session = Session(model, SoloWorld(), dtype=dtype)
    whole = alone(session)
    others = crowd(29)
    mixed = [*others[:5], *probes(), *others[5:]]
    assert_same_run(whole, session.run(probes()), "together")
    assert_same_run(whole, session.run(mixed), "in a crowd")
    assert_same_run(whole, session.run(mixed, poison=True), "on poisoned pages")
    for budget in (1, 17, 100):
        found = session.run(probes(), max_num_batched_tokens=budget)
        assert_same_run(whole, found, f"chunks of {budget}")
    assert_same_run(whole, session.run(mixed, preempt_every=3), "preempted")
    eager = Session(model, SoloWorld(), dtype=dtype, enforce_eager=True)
    assert_same_run(whole, eager.run(mixed), "without graphs")
    with poisoned_workspaces():
        assert_same_run(whole, eager.run(mixed, poison=True), "in poisoned workspaces")
    tokens = [*probes()[0].prompt_token_ids, *whole.tokens("long")]
    scored = session.run([ask("long", tokens, max_tokens=0, prompt_logprobs=0)])
    for position in range(len(tokens) - 1):
        key = ("long", 0, position)
        if not torch.equal(scored.logits[key], whole.logits[key]):
            raise AssertionError(f"prefill of decode differs at position {position}")
    return {"positions": len(whole.logits)}


def check_sizes(model, dtype, order):
    """Tensor-parallel sizes 2, 4, 8 against 1."""
    # Ranks that are threads meet on the host, which no graph can hold.
    settings = {"dtype": dtype, "fold_order": order, "enforce_eager": True}
    whole = alone(Session(model, SoloWorld(), **settings))
    mixed = [*crowd(9), *probes()]
    for size in (2, 4, 8):
        run = lambda world: Session(model, world, **settings).run(mixed)
        assert_same_run(whole, run_threads(size, run, timeout=240.0)[0], f"TP {size}")


def check_processed(model):
    """Processed log-probabilities: alone, in a crowd, preempted, without graphs, at TP 2 and 4."""
    mode = {"logprobs_mode": "processed_logprobs"}
    session = Session(model, SoloWorld(), dtype="bfloat16", **mode)
    whole, mixed = alone(session), [*crowd(9), *probes()]
    assert_same_run(whole, session.run(mixed), "processed, in a crowd")
    assert_same_run(whole, session.run(mixed, preempt_every=3), "processed, preempted")
    settings = {"dtype": "bfloat16", "enforce_eager": True, **mode}
    assert_same_run(whole, Session(model, SoloWorld(), **settings).run(mixed), "without graphs")
    for size in (2, 4):
        run = lambda world: Session(model, world, **settings).run(mixed)
        assert_same_run(whole, run_threads(size, run, timeout=240.0)[0], f"processed, TP {size}")
    raw = session.run(probes(), logprobs_mode="raw_logprobs")
    assert raw.prompt("long") == whole.prompt("long") and raw.answer("long") == whole.answer("long")
    for name in ("short", "middle"):
        assert raw.tokens(name) == whole.tokens(name) and raw.answer(name) != whole.answer(name)


def check_accuracy(folder, family, dtype):
    """Logits against transformers in fp32 with the same weights, beside its own error."""
    import transformers

    model = make_model(folder / f"accurate-{family}-{dtype}", like=family, layers=2, dtype=dtype)
    ids = prompt(300, 5)

    def theirs(kind):
        network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=kind).cuda()
        with torch.no_grad():
            return network(torch.tensor([ids]).cuda()).logits[0].double().cpu()

    exact = theirs(torch.float32)
    request = ask("a", ids, max_tokens=1, prompt_logprobs=0)
    found = Session(model, SoloWorld(), dtype=dtype).run([request])
    ours = torch.stack([found.logits["a", 0, p] for p in range(len(ids))]).double()
    error = ((ours - exact).norm() / exact.norm()).item()
    beside = ((theirs(getattr(torch, dtype)) - exact).norm() / exact.norm()).item()
    limit = 1e-4 if dtype == "float32" else min(BF16_ERROR, beside)
    assert error <= limit, f"relative error {error:.2e}, transformers' own {beside:.2e}"
    peer = {"peer": "transformers", "peer_value": beside}
    return {"value": error, "unit": "relative error", "limit": limit, **peer}


SIZES = {"hidden": 512, "layers": 9, "kv_heads": 2, "head_dim": 64}
"""Of so many layers graphs launch some from notes, also where every second has a window."""

UNEQUAL = {
    "9 heads": {"like": "llama", "hidden": 576, "heads": 9, "kv_heads": 3, "intermediate": 1536},
    "14 heads": {"like": "qwen2", "hidden": 896, "heads": 14, "kv_heads": 2, "intermediate": 4864},
    "28 heads": {
        **{"like": "qwen2", "hidden": 1024, "heads": 28, "kv_heads": 4, "head_dim": 128},
        "intermediate": 4736,
    },
    "odd width": {"like": "qwen3", "hidden": 512, "heads": 11, "kv_heads": 11, "intermediate": 720},
}
"""Heads or widths that 8 leaves do not divide: SmolLM2's, Qwen2.5-0.5B's, Qwen2.5-7B's heads."""

OF_DATA = ("gemma2", "gemma3_text", "olmo3", "starcoder2")
"""Families with other norms, activations, soft-caps and windows; heads of 128 take every kernel."""


def make_models(folder):
    """The models of `engine_checks`."""
    for family in FAMILIES:
        make_model(folder / family, like=family, **SIZES)
    make_model(folder / "window", like="mistral", sliding_window=100, **SIZES)
    for family in OF_DATA:
        shape = SIZES | {"heads": 8, "head_dim": 128}
        make_model(folder / family, like=family, **shape)
    for name, shape in UNEQUAL.items():
        make_model(folder / name, layers=2, **shape)


def engine_checks(folder):
    """Every check, the longest first; their models are in `folder`."""
    models = {name: folder / name for name in (*FAMILIES, "window")}
    checks = [
        Check(f"{family} {dtype}", check_circumstances, (model, dtype))
        for family, model in models.items()
        for dtype in DTYPES
    ]
    for dtype in DTYPES:
        for order in ("pairs", "sequential", "tree"):
            arguments = models["qwen3"], dtype, order
            checks.append(Check(f"TP 1, 2, 4, 8 {dtype} {order}", check_sizes, arguments))
    for name in (*UNEQUAL, *OF_DATA):
        checks.append(Check(f"{name} bfloat16", check_circumstances, (folder / name, "bfloat16")))
        for dtype, order in (("bfloat16", "tree"), ("float16", "pairs")):
            arguments = folder / name, dtype, order
            checks.append(Check(f"TP 1, 2, 4, 8 {name} {dtype} {order}", check_sizes, arguments))
    for family in FAMILIES:
        for dtype in DTYPES:
            name = f"accuracy {family} {dtype}"
            checks.append(Check(name, check_accuracy, (folder, family, dtype)))
    checks.append(Check("processed log-probabilities", check_processed, (models["qwen3"],)))
    checks.append(Check("chain of a draft model", check_chain, (folder / "qwen3",)))
    return [*checks, Check("sampler", check_sampler), Check("rotary tables", check_tables)]
