"""Steps behind unverified drafts: tokens a second beside steps that wait.

    python -m scripts.gpu_times.engine.drafts_ahead [synthetic] [rare] [text]

`synthetic`: drafts that are right with a
chance, at batch 1 and 16. `rare`: that hardly ever are. `text`: n-grams of real text, which a model
of random weights is made to answer: sampled ids are replaced on the device by the text's, in all
ways alike.
"""

import random
import re
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from scripts.gpu_times.parts import run_parts
from tpdet import LLM, SamplingParams
from tpdet.checkpoint.model_config.known_shapes import write_shape
from tpdet.engine import results as engine_results
from tpdet.sampling.sampler import to_device, to_host
from tpdet.speculative.speculator import DraftSpeculator
from tpdet.tools.bench.drafts import Synthetic, measured
from tpdet.tools.bench.load import prompt

SHAPE, CONTEXT = "qwen3-8b", 128
CHANCES, RARE, TURNS = (0.8, 0.5, 0.95), (0.0, 0.3), 2
TOKENS, MORE_TOKENS = {1: 384, 16: 256}, {1: 256, 16: 192, 64: 160}
HERE = Path(__file__).parents[3]


class Session:
    """The shape with random weights, started once."""

    llm: LLM | None = None

    @classmethod
    def start(cls):
        """The engine, started by the first caller."""
        if cls.llm is None:
            folder = Path(tempfile.mkdtemp(prefix="tpdet-drafts-ahead-"))
            how = {"max_model_len": 8192, "max_num_seqs": 64, "dtype": "bfloat16"}
            load = {"load_format": "dummy", "skip_tokenizer_init": True}
            cls.llm = LLM(str(write_shape(folder / "m", SHAPE)), **load, **how)
        return cls.llm


def say(text):
    """Print at once."""
    print(text, flush=True)


def speculate(llm, follows, first=None):
    """Draft anew; follows: rows may follow unverified drafts."""
    engine = llm.engine
    engine.scheduler.follows_drafts = follows
    times = engine.scheduler.speculator.times
    engine.scheduler.speculator = DraftSpeculator(
        engine.config.drafters, engine.run_ahead, times=times, first=first
    )


def in_turns(llm, generate, batch, first, name):
    """Say tokens a second with steps that wait and with steps ahead, as multiples of those off."""
    speculate(llm, False, first)
    plain = measured(llm, generate, 2, paused=True, batch=batch)
    ids = [answer.outputs[0].token_ids for answer in plain.answers]
    rates = {False: [], True: []}
    for turn in range(TURNS + 1):  # the first captures graphs
        for follows in (False, True):
            speculate(llm, follows, first)
            found = measured(llm, generate, 1, batch=batch)
            assert [answer.outputs[0].token_ids for answer in found.answers] == ids
            if turn:
                steady = found.steady or found.rate
                rates[follows].append((steady, found.rate, found.steps, found.drafters))
    after = measured(llm, generate, 1, paused=True, batch=batch)
    off = max(plain.steady or plain.rate, after.steady or after.rate)
    whole = max(plain.rate, after.rate)
    for follows, label in ((False, "waits"), (True, "ahead")):
        times = statistics.median(rate for rate, *_ in rates[follows]) / off
        calls = statistics.median(rate for _, rate, *_ in rates[follows]) / whole
        _, _, steps, drafters = rates[follows][-1]
        counts = [(n, it.accepted_tokens, it.draft_tokens) for n, it in drafters.items()]
        say(f"{name} {label}: {times:.3f} ({calls:.3f}) times, {steps} steps, right {counts}")
    say(f"{name} off: {off:.1f} tokens/s, {plain.steps} steps")


def synthetic(chances=CHANCES, tokens_of=TOKENS):
    """Time drafts that are right with a chance."""
    llm = Session.start()
    vocabulary = llm.engine.model_config.vocab_size
    for batch, tokens in tokens_of.items():
        prompts = [list(prompt(CONTEXT, vocabulary, f"{batch}-{i}")) for i in range(batch)]
        params = SamplingParams(
            temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        generate = lambda p=prompts, s=params: llm.generate(p, s, use_tqdm=False)
        speculate(llm, False)
        answers = {
            tuple(ids): answer.outputs[0].token_ids
            for ids, answer in zip(prompts, generate(), strict=True)
        }
        for chance in chances:
            draw = random.Random(f"{batch} {chance}")

            def first(sequence, answers=answers, chance=chance, draw=draw):
                answer = answers[sequence.request.prompt_token_ids]
                return Synthetic(answer, sequence.prompt_length, chance, draw)

            in_turns(llm, generate, batch, first, f"synthetic {chance} batch {batch}")


def words(text, known):
    """Ids of words, spaces and signs, as a tokenizer cuts them; `known` grows."""
    return [known.setdefault(word, len(known)) for word in re.findall(r" ?\w+| ?[^\w\s]|\s+", text)]


def texts():
    """(name, prompt, answer): code with a name changed, and pages that go on, as ids."""
    known = {}
    code = (HERE / "tpdet/scheduler/policy.py").read_text()
    page = (HERE / "docs/numerics.md").read_text()
    log = (HERE / "docs/journal.md").read_text()
    edited = code.replace("sequence", "row").replace("budget", "tokens_left")
    yield "code edited", words(code, known), words(edited, known)[:500]
    longer = code.replace("sequence", "row. of").replace("budget", "tokens. left")
    yield "code edited, longer names", words(code, known), words(longer, known)[:500]
    for name, text in (("docs page", page), ("journal", log)):
        ids = words(text, known)
        yield name, ids[:1500], ids[1500:2000]


class Forced:
    """Sampling that gives the ids of texts: that of seed `i` those of the i-th."""

    def __init__(self, answers, device):
        """answers: ids of prompt and answer of each."""
        length = max(map(len, answers))
        rows = [[*ids, *[0] * (length - len(ids))] for ids in answers]
        self._ids, self.sample = to_device(rows, device), engine_results.sample_columns

    def __call__(self, logits, params, *others):
        """Sample, then put the text's ids in place of what was sampled."""
        sample = self.sample(logits, params, *others)
        device = logits.device
        where = [params.seed_words[:, 0].tolist(), params.positions.tolist()]
        text, positions = to_device(where, device)
        if params.moved is not None:
            positions = positions + params.moved
        tokens = self._ids[text, positions.clamp(max=self._ids.shape[1] - 1)]
        packed = sample.packed.clone()
        packed[:, 1] = tokens
        answers, copied = to_host(packed.view(-1))
        return replace(sample, tokens=tokens, packed=packed, answers=answers, copied=copied)


def text():
    """Time n-grams of real text at batch 1 and 16."""
    llm = Session.start()
    cases = [*texts()]
    device = llm.engine.runner.device
    forced = Forced([[*asked, *answer] for _, asked, answer in cases], device)
    engine_results.sample_columns = forced
    try:
        for batch in (1, 16):
            for number, (name, asked, answer) in enumerate(cases):
                params = SamplingParams(
                    temperature=1.0,
                    seed=number,
                    max_tokens=len(answer) - 1,
                    ignore_eos=True,
                    detokenize=False,
                )
                prompts = [asked] * batch
                generate = lambda p=prompts, s=params: llm.generate(p, s, use_tqdm=False)
                in_turns(llm, generate, batch, None, f"text {name} batch {batch}")
    finally:
        engine_results.sample_columns = forced.sample


def rare():
    """Time drafts that hardly ever are right."""
    synthetic(RARE, MORE_TOKENS)


PARTS = {"synthetic": synthetic, "rare": rare, "text": text}


def main(arguments: list[str]) -> int:
    """Run the parts that are named, else all."""
    return run_parts("engine.drafts_ahead", PARTS, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
