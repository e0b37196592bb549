"""`tpdet compile`: the kernels that a start asks for; a start takes them, and refuses what it may
not trust."""

import json
import os

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from tests.checkpoint.test_packing import quantised
from tests.kernels.compiled.test_recording import add_number
from tests.lib.kernels.driverless import (
    changed_by_a_journey,
    compile_for_hopper,
    take_gpu_kernels,
)
from tpdet.checkpoint.model_config import load_model_config
from tpdet.cli import main
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.errors import (
    CheckpointError,
    DisagreementError,
    NotFoundError,
    NotPermittedError,
    TpdetError,
    UsageError,
)
from tpdet.kernels.cuda.compile import pool
from tpdet.kernels.cuda.compile.cache import DirectoryCache, read_first
from tpdet.kernels.cuda.compile.pool import compile_all, watching_compilations
from tpdet.kernels.cuda.compile.recording import recording
from tpdet.kernels.cuda.gemm import admission
from tpdet.kernels.cuda.hardware import H200, pretending
from tpdet.launch.host import kernel_directory
from tpdet.launch.host.kernel_directory import (
    MANIFEST,
    Facts,
    check_caches,
    check_own_cache,
    read_directory,
)
from tpdet.layers.arithmetic import make_arithmetic
from tpdet.layers.partition import make_partition
from tpdet.models.products import table_products
from tpdet.models.warm_up import warm_up
from tpdet.runner import Runner
from tpdet.runner.graphs.engine_graphs import make_graphs
from tpdet.runner.start.warming import rehearse_checks
from tpdet.server.commands import preflight, supervised
from tpdet.tools.compile.asked import (
    contract_of,
    kernels_of,
    on_gpu,
    one_layer_of_each_kind,
)
from tpdet.tools.compile.command import compile_to, keep_kernels
from tpdet.tools.compile.weightless import SMALL, Weightless

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
STEPS = {"max_num_seqs": 20, "max_num_batched_tokens": 300, "max_model_len": 2048}


def settings(model, **more):
    return EngineConfig.from_values(model=str(model), dtype="bfloat16", **STEPS, **more)


@pytest.mark.parametrize(
    ("like", "shape"),
    [
        ("mistral", {"sliding_window": 300, "layers": 3}),
        pytest.param("qwen3_5_text", {"layers": 8}, marks=pytest.mark.slow),
    ],
)
def test_what_is_compiled_is_what_a_start_asks_for(tiny_model, monkeypatch, tmp_path, like, shape):
    folder = tiny_model(like, **shape)
    config = settings(folder, device="cpu", kv_pages=4)
    runner = Runner.start(config, SoloWorld())
    with on_gpu(H200):
        model = load_model_config(folder, "bfloat16")
        compiled = kernels_of(config, model, 2048, 0, 1)
    compile_for_hopper(monkeypatch, tmp_path)
    take_gpu_kernels(monkeypatch)
    partition = make_partition(model, SoloWorld(), config.fold_order, None)
    products = table_products(partition)
    limits = {"column": 300, "head": 256}
    arithmetic = make_arithmetic(False, SoloWorld(), runner.loaded.strict_exchange)
    arithmetic.admitted = admission.foreseen(products, CPU, limits)
    runner.model.adopt(arithmetic)
    with pretending(H200), recording() as asked:
        rehearse_checks(partition, CPU, limits)
        warm_up(runner.model, runner.model, runner.pages, CPU, 20, 300, 2048, 256)
        make_graphs(runner.model, runner.pages, runner.sampled, config, 300, 2048, capture=False)
    runner.close()
    assert set(compiled) == set(asked) and len(compiled) > 60
    assert changed_by_a_journey(asked.values()) == []


@pytest.mark.slow
def test_ranks_of_several_ask_for_an_exchange(tiny_model):
    folder = tiny_model()
    config, model = settings(folder), load_model_config(folder, "bfloat16")
    with on_gpu(H200):
        one, *two = (kernels_of(config, model, 2048, r, n) for r, n in ((0, 1), (0, 2), (1, 2)))
    names = [each.name for digest, each in (two[0] | two[1]).items() if digest not in one]
    assert "gather_words" in names and len({*names}) >= 3
    assert contract_of(config, model, 1) == contract_of(config, model, 2)


@pytest.mark.slow
def test_packed_weights_have_kernels_of_their_own(tmp_path):
    folder = quantised(tmp_path, "int4-g128")
    model = load_model_config(folder)
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        weights="packed",
        max_num_seqs=2,
        max_num_batched_tokens=16,
        enforce_eager=True,
    )
    with on_gpu(H200):
        asked = kernels_of(config, model, 64, 0, 1)
    assert {each.name for each in asked.values()} >= {"packed_chain", "unpacked_weight"}


@pytest.mark.slow
def test_layers_with_and_without_experts_are_both_rehearsed(tiny_model):
    """The first layer of a small mixture is dense; its experts' kernels are asked for too."""
    folder = tiny_model("qwen3_moe")
    model = load_model_config(folder, "bfloat16")
    assert not model.has_experts(0)
    config = EngineConfig(
        model=str(folder), max_num_seqs=2, max_num_batched_tokens=16, enforce_eager=True
    )
    with on_gpu(H200):
        asked = kernels_of(config, model, 64, 0, 1)
    names = {each.name for each in asked.values()}
    assert names >= {"gate_rows", "pointer_chain", "lane_sums", "norm_rows", "finish_sums"}


def test_a_mixture_keeps_a_layer_of_each_kind(tiny_model):
    model = load_model_config(tiny_model("qwen3_moe"), "bfloat16")
    few = one_layer_of_each_kind(model)
    assert [few.has_experts(i) for i in range(few.num_layers)] == [False, True]


def test_what_nobody_reads_takes_neither_memory_nor_time():
    small = torch.arange(6).view(2, 3)
    with Weightless():
        huge = torch.zeros(1 << 32, dtype=torch.bfloat16)
        view = huge.view(1 << 18, -1)[5:, ::2]
        y = torch.where(view > 0, view.float() * 2, view.float()).sum(1)
        drawn = torch.randn(1 << 30, generator=torch.Generator().manual_seed(1))
        huge.fill_(3.0)
        assert view.data_ptr() == huge.data_ptr() + 2 * 5 * (1 << 14)
        assert y.shape == ((1 << 18) - 5,) and not y[:9].any() and not drawn[-9:].any()
        assert (small * 2).tolist() == [[0, 2, 4], [6, 8, 10]]
    assert len(y) > SMALL and not huge[:9].any()


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Records `add_number` for a number, as a process does that has compiled nothing yet."""
    compile_for_hopper(monkeypatch, tmp_path / "triton")

    def record(number):
        caches = type(add_number.device_caches)(add_number.create_binder)
        monkeypatch.setattr(add_number, "device_caches", caches)
        with recording() as found:
            add_number[1,](torch.zeros(32, dtype=torch.int32), 32, number)
        return found.values()

    return record


@pytest.fixture
def compiled(ask, tmp_path):
    """A compiled directory of two kernels, for one rank with the contract "abc"."""
    for number in (91, 92):
        assert compile_all(ask(number), 1) == []
    output = tmp_path / "kernels"
    contracts = {"1": "abc", "2": "abc"}
    facts = Facts(
        kernel_directory.triton_version(), "9.0", kernel_directory.sources_digest(), contracts
    )
    keep_kernels(tmp_path / "triton", output, facts)
    return output


def test_a_start_takes_what_was_compiled_and_compiles_the_rest(compiled, ask, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiled.parent / "new"))
    directory = check_caches(str(compiled), "abc", 2, "cuda", "9.0")
    assert directory.kernels == 2 and (compiled.parent / "new").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(knobs.cache, "manager_class", None)
    read_first(directory.path)
    monkeypatch.setattr(DirectoryCache, "found", 0)
    names = []
    with watching_compilations(names.append):
        for number in (91, 92, 93):
            assert compile_all(ask(number), 1) == []
    assert names == ["add_number"] and DirectoryCache.found == 2


def rewrite(folder, **changes):
    file = folder / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def cubin(folder):
    return sorted(folder.rglob("*.cubin"))[0]


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda d: rewrite(d, triton="3.5.1"), DisagreementError, "Triton: compiled for 3.5.1"),
        (lambda d: rewrite(d, capability="8.0"), DisagreementError, "capability: compiled for 8.0"),
        (lambda d: rewrite(d, sources="00ff"), DisagreementError, "kernel sources"),
        (lambda d: rewrite(d, contracts={"2": "xyz"}), DisagreementError, "compiled for xyz"),
        (lambda d: rewrite(d, contracts={"4": "abc"}), DisagreementError, "size 4, 2 ranks"),
        (lambda d: rewrite(d, format=9), CheckpointError, "format 9"),
        (lambda d: rewrite(d, files={}), CheckpointError, "names no kernels"),
        (lambda d: (d / MANIFEST).write_bytes(b'{"format": 1, "tri'), CheckpointError, "damaged"),
        (lambda d: (d / MANIFEST).unlink(), CheckpointError, f"has no {MANIFEST}"),
        (lambda d: cubin(d).unlink(), CheckpointError, "is missing"),
        (lambda d: os.truncate(cubin(d), 700), CheckpointError, "has 700 bytes of"),
        (lambda d: cubin(d).open("r+b").write(b"!"), CheckpointError, "what was compiled"),
        (lambda d: (d / "more").write_text(""), CheckpointError, "more is not one of"),
        (lambda d: d.chmod(0o775), NotPermittedError, "has mode 0775"),
        (lambda d: cubin(d).chmod(0o666), NotPermittedError, "has mode 0666"),
        (lambda d: cubin(d).parent.chmod(0o757), NotPermittedError, "has mode 0757"),
        (lambda d: (d / "link").symlink_to("/bin/sh"), NotPermittedError, "link is a link"),
        (lambda d: d.rename(d.parent / "gone"), NotFoundError, "no directory"),
    ],
)
def test_a_directory_that_does_not_fit_or_may_be_others_is_refused(
    compiled, damage, error, words, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiled.parent / "new"))
    check_caches(str(compiled), "abc", 2, "cuda", "9.0")
    damage(compiled)
    with pytest.raises(error, match=words) as caught:
        check_caches(str(compiled), "abc", 2, "cuda", "9.0")
    assert str(compiled) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_another_user_owns_is_refused(compiled):
    os.chown(cubin(compiled), 12345, -1)
    with pytest.raises(NotPermittedError, match="belongs to user 12345"):
        read_directory(str(compiled))
    with pytest.raises(NotPermittedError, match="belongs to user 12345"):
        check_own_cache(compiled)


def test_tritons_own_cache_is_checked_too(compiled):
    check_own_cache(compiled)
    cubin(compiled).parent.chmod(0o775)
    with pytest.raises(NotPermittedError, match="0775"):
        check_own_cache(compiled)
    compiled.chmod(0o700)  # nobody else comes as far
    check_own_cache(compiled)
    size = cubin(compiled).stat().st_size
    os.truncate(cubin(compiled), size - 1)
    with pytest.raises(CheckpointError, match=f"cut short, {size - 1} bytes of {size}"):
        check_own_cache(compiled)
    compiled.chmod(0o770)
    with pytest.raises(NotPermittedError, match="0770"):
        check_own_cache(compiled)


def test_serve_refuses_a_kernel_cache_before_it_starts_ranks(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(supervised, "serve", lambda *_, **__: pytest.fail("started"))
    flags = [str(tiny_model()), "--port", "0", "--kernel-cache", str(tmp_path)]
    with pytest.raises(UsageError, match="leave it out on the CPU"):
        supervised.serve_command([*flags, "--device", "cpu"])
    monkeypatch.setattr(preflight, "check_device", lambda *_: "cuda")
    with pytest.raises(CheckpointError, match=f"has no {MANIFEST}"):
        supervised.serve_command(flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu", "h2000"], "--gpu 'h2000' is not known: use one of h100, h200"),
        (["--gpu", "h200", "--tp", "1,x"], "--tp '1,x' is no list"),
        (["--gpu", "h200", "--tp", "3"], "tensor-parallel size 3 does not fit"),
        (["--gpu", "h200", "--output", "/usr"], "not empty"),
        (["--gpu", "h200", "--leaves", "3"], "--leaves 3 is not a power of two"),
    ],
)
def test_compile_refuses_wrong_arguments(tiny_model, tmp_path, capsys, flags, words):
    output = ["--output", str(tmp_path / "new")] if "--output" not in flags else []
    assert main(["compile", str(tiny_model()), *output, *flags]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_kernel_that_does_not_compile_leaves_no_directory(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "compile_all", lambda *_: ["add_number: no"])
    monkeypatch.setattr("tpdet.tools.compile.asked.kernels_of", lambda *_: {})  # tested above
    folder = tiny_model()
    model, output = load_model_config(folder, "bfloat16"), tmp_path / "new"
    with pytest.raises(TpdetError, match=": no"):
        compile_to(output, settings(folder), model, 2048, H200, [1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_whole_directory_is_compiled_and_fits(tiny_model, tmp_path, monkeypatch, capsys):
    output = tmp_path / "kernels"
    folder = str(tiny_model())
    flags = ["--dtype", "bfloat16", "--max-num-batched-tokens", "300", "--max-num-seqs", "20"]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert main(["compile", folder, "--gpu", "h200", "--output", str(output), *flags]) == 0
    model = load_model_config(tiny_model(), "bfloat16")
    contract = contract_of(settings(folder), model, 1)
    assert check_caches(str(output), contract, 1, "cuda", "9.0").kernels > 50
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
def test_experts_that_are_cut_over_ranks_are_rehearsed_with_their_gathers(tiny_model):
    folder = tiny_model("mixtral")
    for placed, gathered in (("lanes", False), ("columns", True)):
        config = settings(folder, device="cuda", transport="peer", experts=placed)
        with on_gpu(H200):
            asked = kernels_of(config, load_model_config(folder, "bfloat16"), 2048, 0, 2)
        names = {kernel.name for kernel in asked.values()}
        assert ("gather_columns" in names and "copy_from_blocks" in names) == gathered


@pytest.mark.parametrize("output", ["/proc/out", "/proc/none/out", "/dev/null/out"])
def test_an_output_that_cannot_be_made_is_refused_before_any_work(output, capsys):
    """Before the model is looked for: there is none."""
    assert main(["compile", "none", "--gpu", "h200", "--output", output]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--output {output} cannot be made (" in line and "name another folder" in line
