"""Hybrids of linear and full attention: transformers' logits, equal bits at every size."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.conftest import HYBRIDS
from tests.lib.bits import assert_same_bits
from tests.lib.engine_harness import ask, run

SIZES = {"layers": 4, "heads": 8, "kv_heads": 2}
LENGTH = 200
FEW = 70


def ids(length):
    return torch.randint(0, 1024, (length,), generator=torch.Generator().manual_seed(5)).tolist()


def ours(model, length=LENGTH, **settings):
    """Logits [T, V] of every position of a prompt."""
    asked = [ask("a", ids(length), max_tokens=1, prompt_logprobs=0)]
    logits = run(model, asked, **settings).logits
    return torch.stack([logits["a", 0, position] for position in range(length)])


def theirs(model, dtype, length=LENGTH):
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    with torch.no_grad():
        return network(torch.tensor([ids(length)])).logits[0].double()


def relative_error(logits, expected):
    """The largest difference, in units of the largest logit."""
    return ((logits.double() - expected).abs().max() / expected.abs().max()).item()


def but_slow(*families):
    """All hybrids; those not named are slow."""
    return [
        pytest.param(name, marks=() if name in families else pytest.mark.slow) for name in HYBRIDS
    ]


@pytest.mark.parametrize("family", but_slow("qwen3_5_text", "qwen3_next"))
def test_a_hybrid_has_the_logits_of_transformers_at_two_sizes(tiny_model, family):
    model = tiny_model(family, **SIZES)
    alone = ours(model)
    assert relative_error(alone, theirs(model, torch.float32)) <= 1e-5
    assert_same_bits(ours(model, tp=2), alone)


@pytest.mark.parametrize("family", but_slow("qwen3_5_text"))
def test_a_hybrid_in_bf16_errs_no_more_than_transformers(tiny_model, tmp_path, family):
    """Every expert is chosen: in bf16 near ties fall otherwise, which outweighs all rounding."""
    chosen = {} if family == "qwen3_5_text" else {"num_experts_per_tok": 16}
    model, _ = copied(tiny_model(family, **SIZES), tmp_path / "all", **chosen)
    exact = theirs(model, torch.float32)
    narrow, other = ours(model, dtype="bfloat16"), theirs(model, torch.bfloat16)
    assert (narrow - exact).norm() <= (other - exact).norm()


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_has_the_logits_of_transformers_at_5000_tokens(tiny_model, family):
    model, long = tiny_model(family, context=8192, **SIZES), 5000
    exact = theirs(model, torch.float32, long)
    assert relative_error(ours(model, long), exact) <= 1e-4
    if family == "qwen3_5_text":
        narrow, other = ours(model, long, dtype="bfloat16"), theirs(model, torch.bfloat16, long)
        assert (narrow - exact).norm() <= 1.2 * (other - exact).norm()


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hybrid_is_equal_at_four_and_eight_ranks(tiny_model, family, dtype):
    model = tiny_model(family, **SIZES)
    alone = ours(model, dtype=dtype)
    for tp in (4, 8):
        assert_same_bits(ours(model, tp=tp, dtype=dtype), alone)


@pytest.fixture
def one_thread():
    """What torch has: rules of transformers are many small operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pattern(order):
    """Two ids in a cycle of 2^order, in which what comes next depends on the `order` before it."""
    bits, windows = [0] * order, {(0,) * order}
    while len(bits) < 2**order:
        bits.append(int((*bits[1 - order :], 1) not in windows))
        windows.add(tuple(bits[-order:]))
    return [10 + bit for bit in bits]


def trained(model, folder, text, order):
    """The folder of a model that has learnt, in seconds, how a cycle of ids goes on."""
    draw = torch.Generator().manual_seed(1)
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=60)
    for _ in range(60):
        starts = torch.randint(0, len(text), (4,), generator=draw).tolist()
        rows = torch.tensor([(text * 3)[start : start + 160] for start in starts])
        logits = network(rows).logits[:, order - 1 : -1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, rows[:, order:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if loss < 0.003:
            break
    network.save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", but_slow("qwen3_5_text"))
def test_a_trained_hybrid_goes_on_with_a_pattern_over_ends_of_chunks(tiny_model, tmp_path, family):
    """As transformers has trained and written it; before, it does not know the pattern."""
    order, first = 7, 70
    text = pattern(order)
    model = tiny_model(family, hidden=64, head_dim=16, intermediate=128, **SIZES)
    asked = [ask("a", text[:first], max_tokens=200)]
    wanted = (text * 3)[first : first + 200]
    assert run(model, asked, dtype="bfloat16").tokens("a") != wanted
    learnt = trained(model, tmp_path / "trained", text, order)
    for tp in (1, 2):
        assert run(learnt, asked, tp=tp, dtype="bfloat16").tokens("a") == wanted


def copied(model, folder, **settings):
    """A copy of a model under a changed `config.json`, and its tensors."""
    path = shutil.copytree(model, folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder, load_file(folder / "model.safetensors")


def stored(folder, tensors):
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def separate(name, tensor, config):
    """A tensor of Qwen3-Next -> by name those of Qwen3.5, whose rows are not cut by key heads."""
    groups, r = config["linear_num_key_heads"], 2
    key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
    if "in_proj_qkvz" in name:
        parts = tensor.unflatten(0, (groups, -1)).split([key, key, r * value, r * value], dim=1)
        q, k, v, z = (part.flatten(0, 1) for part in parts)
        return {name.replace("qkvz", "qkv"): torch.cat([q, k, v]), name.replace("qkvz", "z"): z}
    if "in_proj_ba" in name:
        b, a = (x.flatten(0, 1) for x in tensor.unflatten(0, (groups, -1)).split(r, dim=1))
        return {name.replace("_ba", "_b"): b, name.replace("_ba", "_a"): a}
    return {name: tensor}


def test_both_published_layouts_have_the_same_bits(tiny_model, tmp_path):
    model = tiny_model("qwen3_next", **SIZES)
    names = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
    folder, tensors = copied(model, tmp_path / "separate", **names)
    config = json.loads((folder / "config.json").read_text())
    apart = {}
    for name, tensor in tensors.items():
        apart |= separate(name, tensor, config)
    assert len(apart) > len(tensors)
    expected = ours(model, FEW)
    assert_same_bits(ours(stored(folder, apart), FEW, tp=2), expected)


def test_experts_in_one_tensor_and_guessing_layers_change_no_bit(tiny_model, tmp_path):
    model = tiny_model("qwen3_5_moe_text", **SIZES)
    folder, tensors = copied(model, tmp_path / "stacked", mtp_num_hidden_layers=1)
    joined = {name: x for name, x in tensors.items() if ".experts." not in name}
    for layer in range(SIZES["layers"]):
        block = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors[f"{block}.{i}.{part}_proj.weight"] for i in range(16)])
            for part in ("gate", "up", "down")
        )
        joined |= {f"{block}.gate_up_proj": torch.cat([gate, up], 1), f"{block}.down_proj": down}
    joined["mtp.layers.0.self_attn.q_proj.weight"] = torch.ones(8, 8)
    joined["mtp.fc.weight"] = torch.ones(8, 16)
    assert_same_bits(ours(stored(folder, joined), FEW), ours(model, FEW))


@pytest.mark.parametrize("values", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_value_heads_of_a_key_head_and_two_key_value_heads_fit_every_size(
    tiny_model, tmp_path, values
):
    folder, tensors = copied(
        tiny_model("qwen3_5_text", **SIZES | {"layers": 2}),
        tmp_path / "values",
        linear_num_value_heads=8 * values,
    )
    draw = torch.Generator().manual_seed(values)
    block, heads = "model.layers.0.linear_attn", 8 * values
    rows, channels = heads * 48, 2 * 8 * 32 + heads * 48
    shapes = {"in_proj_qkv.weight": (channels, 256), "in_proj_z.weight": (rows, 256)}
    shapes |= dict.fromkeys(("in_proj_b.weight", "in_proj_a.weight"), (heads, 256))
    shapes |= {"A_log": (heads,), "dt_bias": (heads,)}
    shapes |= {"conv1d.weight": (channels, 1, 4), "out_proj.weight": (256, rows)}
    for name, shape in shapes.items():
        tensors[f"{block}.{name}"] = torch.randn(shape, generator=draw) / 16
    model = stored(folder, tensors)
    alone = ours(model, FEW)
    assert relative_error(alone, theirs(model, torch.float32, FEW)) <= 1e-5
    for tp in (4, 8):
        assert_same_bits(ours(model, FEW, tp=tp), alone)
