"""The verbs of weight updates over a real engine: what each answers, and what it refuses."""

import json
import shutil
from types import SimpleNamespace

import pytest
from safetensors.torch import save_file

from tests.lib.engine_harness import ask, small_config
from tests.lib.weight_sender import LocalSender, info_of, tensors_of
from tpdet.comm.world.world import SoloWorld
from tpdet.control.weight_orders import CarrierInfo
from tpdet.engine import Engine
from tpdet.errors import DrainTimeoutError
from tpdet.requests.body.problems import ApiError
from tpdet.serve import state
from tpdet.server.leader.canary import Canary
from tpdet.server.leader.control import ControlPlane
from tpdet.server.leader.open_calls import OpenCalls
from tpdet.server.leader.weight_verbs import WeightSources, WeightVerbs
from tpdet.server.wire.control_verbs import fields_of
from tpdet.server.wire.protocol import Control, Controlled

QUIET = SimpleNamespace(begun=False, sound=True, healthy=True, failed=False)


class Served:
    """A control plane as rank 0's loop has it, and what it sent.

    stops: whether the server is to stop, in a moment.
    """

    stops = False

    def __init__(self, engine, root=None, peers=()):
        self.engine, self.reports, self.announced = engine, 0, []
        self.calls, self.answers = [], []
        self.bridge = SimpleNamespace(
            take_calls=self.take,
            deliver=lambda *given: None,
            report=self.report,
            reached=lambda besides: True,
            has_work=lambda engine: engine.has_work,
            calls=OpenCalls(),
            state="accepting",
        )
        self.link = SimpleNamespace(socket=SimpleNamespace(send=self.answers.append))
        canary = Canary(engine, 0.0)

        def announce():
            self.announced.append((engine.weights.number, engine.weights.version))

        self.control = ControlPlane(engine, self.bridge, canary, announce)
        sources = WeightSources(root, peers)
        verbs = WeightVerbs(engine, self.control, self.bridge, canary, sources, self.look)
        self.control.add(verbs.handlers)

    def take(self):
        calls, self.calls = self.calls, []
        return calls

    def report(self, engine):
        self.reports += 1

    def look(self):
        if self.stops and self.reports > 3:
            raise DrainTimeoutError("no time is left")

    def turn(self):
        """One round of rank 0's loop."""
        self.control.go_on()
        self.control.tell()

    def __call__(self, verb, **body):
        """Status and content that a client would get."""
        self.calls.append((self.link, Control(1, verb, fields_of(verb, body, {}))))
        self.turn()
        answer = self.answers.pop()
        assert isinstance(answer, Controlled) and not self.answers
        return answer.status, json.loads(answer.body)

    @property
    def state(self):
        pause, usable = self.control.pause, self.engine.weights.usable
        return state(QUIET, QUIET, QUIET, QUIET, pause, usable)


@pytest.fixture(scope="module")
def root(tiny_model, tmp_path_factory):
    """A root of weights with three directories, one of them not as it should be."""
    root = tmp_path_factory.mktemp("root")
    for seed in (0, 1):
        shutil.copytree(tiny_model("qwen3", kv_heads=2, seed=seed), root / f"step-{seed}")
    bad = shutil.copytree(root / "step-1", root / "bad")
    tensors = tensors_of(bad)
    del tensors["model.norm.weight"]
    save_file(tensors, bad / "model.safetensors")
    return root


@pytest.fixture
def served(root):
    engine = Engine(small_config(root / "step-0"), SoloWorld())
    return Served(engine, str(root), ("127.0.0.1", "trainer"))


@pytest.fixture(scope="module")
def digest(root):
    return Engine(small_config(root / "step-1"), SoloWorld()).weights.digest


def test_a_directory_comes_between_start_and_finish(served, root, digest):
    assert served("start_weight_update") == (200, {"message": "Weight update started"})
    assert served("update_weights", update_info={"weight_dir": "step-1"})[0] == 200
    assert served.state == "incomplete" and not served.engine.interventions.may_step
    status, answer = served("finish_weight_update", weight_version="step-1")
    assert status == 200
    assert (answer["weight_version"], answer["weights"]) == ("step-1", digest)
    assert served.state == "accepting" and served.announced == [(1, "step-1")]
    assert served.reports > 0, "rank 0 was heard of meanwhile"
    info = {"weight_version": "step-1", "weights": digest, "state": "whole"}
    assert served("weight_info") == (200, info)


@pytest.mark.parametrize("verb", ["update_weights", "update_weights_from_disk"])
def test_a_directory_is_a_whole_update_in_one_call(served, root, digest, verb):
    """As prime-rl's call and SGLang's have it."""
    name = "weight_dir" if verb == "update_weights" else "model_path"
    status, answer = served(verb, **{name: str(root / "step-1")})
    assert status == 200 and served.engine.weights.digest == digest
    if verb == "update_weights_from_disk":
        assert answer["success"] is True and answer["num_paused_requests"] == 0
        assert answer["weight_version"] == "1"
    assert served.announced == [(1, "1")]


def refused(answer, status, message):
    assert answer[0] == status, answer
    assert message in answer[1]["error"]["message"]


def test_a_directory_that_does_not_fit_changes_nothing(served, root):
    (root / "empty").mkdir()
    answer = served("update_weights", weight_dir="empty")
    refused(answer, 400, "empty/config.json does not exist")
    assert str(root) not in str(answer), "no path of the server's"
    before = served.engine.weights.digest
    refused(served("update_weights", weight_dir="bad"), 400, "tensor model.norm.weight is in none")
    assert served.state == "accepting" and served.engine.weights.state == "whole"
    assert served.engine.weights.digest == before and served.announced == []


@pytest.mark.parametrize("version", ["", "x" * 257, "a\nb"])
@pytest.mark.parametrize("verb", ["update_weights", "update_weights_from_disk"])
def test_a_name_that_cannot_be_is_refused_before_anything_changes(served, verb, version):
    before = served.engine.weights.digest
    name = "weight_dir" if verb == "update_weights" else "model_path"
    answer = served(verb, **{name: "step-1"}, weight_version=version)
    counted = f"weight_version has {len(version)} characters: give it 1 to 256"
    refused(answer, 400, r"weight_version is 'a\nb'" if version == "a\nb" else counted)
    assert served.state == "accepting" and served.engine.weights.state == "whole"
    assert served.engine.weights.digest == before and served.announced == []


def test_directories_are_below_the_root_and_lead_nowhere_else(served, root, tmp_path):
    outside = shutil.copytree(root / "step-1", tmp_path / "outside")
    (root / "leads-out").symlink_to(outside)
    inner = shutil.copytree(root / "step-1", root / "with-link")
    (inner / "model.safetensors").unlink()
    (inner / "model.safetensors").symlink_to(outside / "model.safetensors")
    for name in (str(outside), "../outside", "leads-out", "/"):
        refused(served("update_weights", weight_dir=name), 403, "is not below --weights-root")
    refused(served("update_weights", weight_dir="with-link"), 403, "is a link out of")
    refused(served("update_weights", weight_dir="nowhere"), 400, "is no directory")
    closed = Served(served.engine)
    refused(closed("update_weights", weight_dir="step-1"), 403, "with --weights-root DIR")
    assert served.engine.weights.number == 0
    shutil.rmtree(inner)
    (root / "leads-out").unlink()


@pytest.mark.parametrize("name", ["step\0-1", "x" * 300, "/".join("x" * 3000), "circle"])
def test_a_name_that_no_directory_can_have_is_refused(served, root, name):
    if name == "circle":
        (root / "circle").symlink_to(root / "circle")
    for inside in ("", "with-circle"):
        if name == "circle" and inside:
            (root / inside).mkdir()
            (root / inside / "model.safetensors").symlink_to("model.safetensors")
            name = inside
        refused(served("update_weights", weight_dir=name), 400, "")
        refused(served("update_weights_from_disk", model_path=name), 400, "")
    assert served.engine.weights.state == "whole"


def test_a_number_that_no_group_has_is_refused_before_any_rank_hears_of_it(served):
    for field in ("world_size", "master_port", "rank_offset", "packed_buffer_size_bytes"):
        with pytest.raises(ApiError, match=field):
            served("init_weight_transfer_engine", init_info=GROUP | {field: 1 << 70})
    with pytest.raises(ApiError, match="packed_num_buffers"):
        served("update_weights", update_info={"packed_num_buffers": 1 << 70})


def test_what_would_be_ignored_is_refused(served, root):
    whole, tensors = {"weight_dir": "step-1"}, tensors_of(root / "step-1")
    named = as_json(info_of(tensors, ["model.norm.weight"]))
    refused(served("update_weights", **whole, update_info=named), 400, "leave update_info out")
    refused(served("update_weights", update_info=whole | named), 400, "leave names out")
    refused(served("update_weights", update_info=named, weight_version="a"), 400, "when you finish")
    sent = as_json(info_of(tensors), "names", "dtypes", "shapes")
    for body in ({"model_path": "step-1", "load_format": "dummy"}, sent | {"load_format": "flat"}):
        verb = "from_disk" if "model_path" in body else "from_distributed"
        with pytest.raises(ApiError, match="load_format"):
            served(f"update_weights_{verb}", **body)
    served.engine.runner.weights.carrier_info = CarrierInfo(group_name="ours")
    for verb, body in (
        ("update_weights_from_distributed", sent),
        ("destroy_weights_update_group", {}),
    ):
        refused(served(verb, **body, group_name="theirs"), 400, "the sender's group is 'ours'")
    assert served.engine.weights.state == "whole"


GROUP = {"master_address": "10.0.0.9", "master_port": 5, "rank_offset": 1, "world_size": 2}


def test_senders_are_those_of_the_peers(served):
    refused(served("init_weight_transfer_engine", init_info=GROUP), 403, "'10.0.0.9' is none of")
    refused(served("init_weights_update_group", **GROUP, backend="gloo"), 403, "is none of")
    ours = GROUP | {"master_address": "trainer"}
    refused(served("init_weight_transfer_engine", init_info=ours), 400, "nccl needs a GPU")
    closed = Served(served.engine)
    refused(closed("init_weight_transfer_engine", init_info=ours), 403, "with --weights-peers")
    with pytest.raises(Exception, match="ipc_handles_pickled"):
        served("update_weights", update_info={"names": [], "ipc_handles_pickled": "gASV"})


def as_json(info, *names):
    keys = names or ("names", "dtype_names", "shapes")
    return dict(zip(keys, (info.names, info.dtype_names, info.shapes), strict=True))


def test_tensors_come_in_calls_and_an_incomplete_finish_names_what_is_missing(served, root, digest):
    tensors = tensors_of(root / "step-1")
    LocalSender(tensors).joined(served.engine)
    names = sorted(tensors)
    refused(served("finish_weight_update"), 409, "start one first")
    served("start_weight_update")
    refused(served("start_weight_update"), 409, "open already")
    first = as_json(info_of(tensors, names[2:]))
    assert served("update_weights", update_info=first)[0] == 200
    status, answer = served("finish_weight_update")
    assert status == 409 and answer["error"]["code"] == "conflict"
    assert all(name in answer["error"]["message"] for name in names[:2])
    assert served.state == "incomplete"
    unnamed = {"weight_version": None, "weights": None}
    assert served("weight_info")[1] == {**unnamed, "state": "torn", "missing": names[:2]}
    served.engine.submit(ask("held", range(9)))
    for verb, body in (
        ("weight_checker", {}),
        ("update_weight_version", {"new_version": "a"}),
        ("pause", {"mode": "wait"}),  # which would wait for ever
    ):
        refused(served(verb, **body), 503, "the weights are incomplete")
    refused(served("update_weights", weight_dir="bad"), 400, "tensor model.norm.weight is in none")
    assert served.state == "incomplete", "what was refused has made nothing whole"
    LocalSender(tensors).joined(served.engine)
    served("start_weight_update")
    assert served.state == "incomplete"
    served("update_weights", update_info=first)
    info = {**unnamed, "state": "open", "missing": names[:2]}
    assert served("weight_info") == (200, info)
    served("update_weights", update_info=[as_json(info_of(tensors, names[:2]))])
    assert served("finish_weight_update")[1]["weights"] == digest
    assert served.state == "accepting"


def test_sglangs_calls_end_an_update_once_all_is_there(served, root, digest):
    tensors = tensors_of(root / "step-1")
    LocalSender(tensors).joined(served.engine)
    names = sorted(tensors)
    keys = "names", "dtypes", "shapes"
    for part in (names[:9], names[9:]):
        body = as_json(info_of(tensors, part), *keys)
        verb = "update_weights_from_distributed"
        status, answer = served(verb, **body, weight_version="step-9", flush_cache=False)
        assert status == 200 and answer["success"] is True
        assert (served.engine.weights.number == 1) == (part == names[9:])
    assert (served.engine.weights.version, served.engine.weights.digest) == ("step-9", digest)
    assert served("destroy_weights_update_group")[1]["success"] is True


class SilentSender(LocalSender):
    def receive(self, tensors, info, take, tick):
        while True:
            tick()


def test_a_silent_sender_does_not_keep_a_server_that_is_to_stop(served, root):
    served.stops = True
    SilentSender().joined(served.engine)
    served("start_weight_update")
    with pytest.raises(DrainTimeoutError):
        served("update_weights", update_info=as_json(info_of(tensors_of(root / "step-1"))))
    served.stops = False


def test_a_lost_sender_is_502_and_requests_wait_in_a_kept_pause(served, root):
    tensors = tensors_of(root / "step-1")
    served.engine.submit(ask("a", range(9)))
    assert served("pause", mode="keep") == (200, {"status": "paused"})
    LocalSender(tensors, dies_before=4).joined(served.engine)
    served("start_weight_update")
    info = as_json(info_of(tensors))
    answer = served("update_weights", update_info=info)
    refused(answer, 502, "the sender is gone")
    assert answer[1]["error"]["code"] == "sender_lost"
    assert served.state == "accepting", "the pause keeps requests, new ones too"
    served("resume")
    assert served.state == "incomplete" and not served.engine.interventions.may_step
    assert served("update_weights", weight_dir="step-1")[0] == 200
    assert served.state == "accepting" and served.engine.interventions.may_step
    outputs = []
    while served.engine.has_work:
        outputs += served.engine.step()
    assert {output.weights for output in outputs} == {1}
