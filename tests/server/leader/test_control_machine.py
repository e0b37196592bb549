"""Control calls in any order on a real engine: every token is one of the weights that it names.

Requests come and go while a random hand pauses, resumes, aborts, empties the cache, changes the
weights and renames them. Afterwards each span of each answer is computed again, from the ids before
it, by an engine that has had these weights from its start.
"""

import random
from types import SimpleNamespace

import pytest

from tests.engine.test_interventions import Driver, compared_spans, fresh_engine
from tests.lib.engine_harness import ask
from tests.lib.some_slow import some_slow
from tpdet.control.weight_orders import LoadModel
from tpdet.requests.weight_versions import WeightVersions
from tpdet.server.leader.control import ControlPlane
from tpdet.server.leader.open_calls import OpenCalls
from tpdet.server.wire.control_verbs import fields_of
from tpdet.server.wire.protocol import Control

VOCABULARY = 1024
MODES = ("abort", "wait", "keep")
SHARED = [(5 * i + 3) % VOCABULARY for i in range(560)]


class Machine:
    """A control plane over an engine, and the hands of clients and operators."""

    def __init__(self, models, draw, ahead):
        self.models, self.draw = models, draw
        self.driver = Driver(models[0], (), ahead, kv_pages=12, max_num_batched_tokens=300)
        self.engine = self.driver.engine
        self.numbers = [0]  # of the model under each number of weights
        self.requests = {}
        self.answers = []
        self.calls = []
        self.published = 0
        bridge = SimpleNamespace(
            state="accepting",
            take_calls=self.take_calls,
            reached=lambda besides: True,
            has_work=lambda engine: engine.has_work,
            calls=OpenCalls(),
            deliver=lambda outputs, seconds: self.driver.hear(outputs),
        )
        canary = SimpleNamespace(take=lambda outputs: outputs, abandon=lambda: None)
        self.plane = ControlPlane(self.engine, bridge, canary, self.publish)
        self.socket = SimpleNamespace(send=self.answers.append)
        self.counts = {}

    def publish(self):
        self.published += 1

    def take_calls(self):
        calls, self.calls = self.calls, []
        return calls

    def call(self, verb, **fields):
        link = SimpleNamespace(socket=self.socket)
        self.calls.append((link, Control(len(self.answers), verb, fields_of(verb, fields, {}))))
        self.go_on()

    def go_on(self):
        """Take the calls that came, and send the answers that there are."""
        self.plane.go_on()
        self.plane.tell()

    def turn(self):
        """One round of rank 0's loop."""
        self.go_on()
        before = {key: len(outputs) for key, outputs in self.driver.heard.items()}
        if self.engine.interventions.may_step:
            outputs = self.engine.step()
            self.plane.publish()
            self.driver.hear(outputs)
        elif self.plane.pause.keeps:
            assert before == {key: len(outputs) for key, outputs in self.driver.heard.items()}

    def submit(self):
        if self.plane.pause.refuses:
            return
        name, draw = f"r{len(self.requests)}", self.draw
        length = draw.choice((3, 20, 257, 300, 530))
        request = ask(
            name,
            [*SHARED[: length - 1], draw.randrange(VOCABULARY)],
            max_tokens=draw.randrange(1, 12),
            n=draw.choice((1, 1, 2)),
            seed=draw.randrange(5),
            temperature=draw.choice((0.0, 1.0)),
            logprobs=draw.choice((None, 1)),
        )
        self.requests[name] = request
        self.engine.submit(request)

    def update(self):
        """Other weights, as an update commits them; now and then under a name."""
        number = self.draw.randrange(len(self.models))
        self.plane.settle()
        self.engine.runner.obey(LoadModel(str(self.models[number])), lambda: None)
        self.engine.versions.advance(self.engine.runner.model_digest)
        self.engine.interventions.recompute(other_weights=True)
        self.numbers.append(number)

    def act(self):
        """Something that a client or an operator may do at any time."""
        draw = self.draw
        deeds = {
            "submit": (8, self.submit),
            "turn": (12, self.turn),
            "pause": (2, lambda: self.call("pause", mode=draw.choice(MODES))),
            "retract": (1, lambda: self.call("pause_generation", mode="retract")),
            "resume": (3, lambda: self.call("resume")),
            "abort": (1, lambda: self.call("abort_requests", request_ids=self.some())),
            "reset": (1, lambda: self.call("reset_prefix_cache")),
            "spare": (1, lambda: self.call("reset_prefix_cache", reset_running_requests=False)),
            "flush": (1, lambda: self.call("flush_cache")),
            "update": (2, self.update),
            "rename": (1, lambda: self.call("update_weight_version", new_version=self.name())),
        }
        (name,) = draw.choices([*deeds], [weight for weight, _ in deeds.values()])
        self.counts[name] = self.counts.get(name, 0) + 1
        deeds[name][1]()
        self.engine.check_integrity()
        if name == "pause" and self.plane.pause.mode == "abort":
            assert not self.engine.interventions.request_ids() and not self.engine.has_work

    def some(self):
        return [
            name for name in self.engine.interventions.request_ids() if self.draw.random() < 0.5
        ]

    def name(self):
        return f"v{self.draw.randrange(6)}"

    def end(self):
        """Let all that is left come to its end."""
        self.call("resume")
        while self.engine.has_work:
            self.turn()
        self.engine.heartbeat()
        self.engine.check_integrity()
        assert not self.plane.busy


def check_spans(machine):
    """Compute every span again from the ids before it; how many tokens and spans were compared."""
    for request in machine.requests.values():
        for choice in range(request.params.n):
            heard = machine.driver.heard[request.request_id, choice]
            ends = [output.finish_reason is not None for output in heard]
            assert ends == [False] * (len(heard) - 1) + [True]  # it ended, once
    fresh = [fresh_engine(machine.models[number]) for number in machine.numbers]
    return compared_spans(machine.driver, machine.requests.values(), fresh)


@pytest.fixture(scope="module")
def models(tiny_model):
    """Two of the same shapes."""
    shape = {"kv_heads": 2, "hidden": 64, "intermediate": 128, "layers": 1, "vocab": VOCABULARY}
    return [tiny_model("qwen3", seed=seed, **shape) for seed in (1, 2)]


@pytest.mark.parametrize("seed", some_slow({0}, range(22)))
def test_no_token_is_of_other_weights_than_it_names(models, seed):
    machine = Machine(models, random.Random(seed), ahead=seed % 2 == 0)
    for _ in range(120):
        machine.act()
    machine.end()
    compared, spans = check_spans(machine)
    assert compared > 20 and spans > 5
    assert machine.counts.keys() >= {"submit", "turn", "pause", "resume", "update"}
    assert machine.published >= machine.counts["update"]
    assert isinstance(machine.engine.versions, WeightVersions)


def test_a_span_that_names_other_weights_would_be_seen(models):
    """Negative control: the answers are held against the other model."""
    machine = Machine(models, random.Random(0), False)
    for _ in range(3):
        machine.submit()
    machine.end()
    machine.numbers = [1]
    with pytest.raises(AssertionError):
        check_spans(machine)
