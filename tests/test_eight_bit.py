"""Eight-bit checkpoints against what compressed-tensors and transformers make of them (fixtures/eight_bit)."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES, expected, open_target
from safetensors.torch import load_file, save_file
from torch import nn

from eight_bit import EightBitLinear, dequantised, held_as, quantised
from generate import hold_eight_bits
from speculators_config import ConfigError

EIGHT_BIT = FIXTURES / "eight_bit"
CASES = sorted(path.name for path in EIGHT_BIT.iterdir())
FP8, INT8 = torch.float8_e4m3fn, torch.int8


def logits(target, ids: torch.Tensor) -> torch.Tensor:
    x, _ = target(ids, torch.arange(ids.size(1))[None])
    return target.logits(x)


def edited(case: str, folder: Path, tensors=dict, drop=(), **quantization) -> Path:
    """A copy with other tensors and another quantization_config; a value of `...` removes the key."""
    shutil.copytree(EIGHT_BIT / case, folder)
    raw = json.loads((folder / "config.json").read_text())
    found = raw.get("quantization_config", {}) | quantization
    raw["quantization_config"] = {key: value for key, value in found.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if key not in drop}))
    save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


# Reading.


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_are_those_of_codes_times_scales(case):
    want, target = expected(EIGHT_BIT / case), open_target(EIGHT_BIT / case)
    torch.testing.assert_close(logits(target, want["input_ids"]), want["logits"], atol=1e-4, rtol=0)
    if "logits_w8a8" in want:
        assert (want["logits_w8a8"] - want["logits"]).abs().max() > 0.1  # what quantised activations would give


def weight_of(block, which: str) -> torch.Tensor:
    """What became of one of the tensors that we fuse."""
    attention, mlp = block.attention, block.mlp
    q, k = attention.n_head * attention.head_dim, attention.n_kv_head * attention.head_dim
    if which in ("q_proj", "k_proj", "v_proj"):
        return attention.qkv.weight.split((q, k, k))["qkv".index(which[0])]
    if which in ("gate_proj", "up_proj"):
        return mlp.gate_up.weight.chunk(2)[which == "up_proj"]
    return {"o_proj": attention.out, "down_proj": mlp.down}[which].weight


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_librarys_bit_for_bit_in_eight_bits_and_held_in_more(case):
    want, target = expected(EIGHT_BIT / case), open_target(EIGHT_BIT / case)
    blocks = [layer.block for layer in target.layers]
    assert isinstance(blocks[0].attention.qkv, EightBitLinear)
    hold_eight_bits([target], lambda linear, dtype: False)
    assert not any(isinstance(module, EightBitLinear) for module in target.modules())
    checked = 0
    for name, weight in want.items():
        if not name.startswith("dequant."):
            continue
        _, _, _, i, _, which, _ = name.split(".")
        assert torch.equal(weight_of(blocks[int(i)], which), weight), name
        checked += 1
    assert checked >= 2


@pytest.mark.parametrize("case", ["ct_dynamic", "ct_int_channel"])
def test_a_linear_of_which_one_part_is_plain_is_held_in_16_bits(case, tmp_path):
    """Mixed checkpoints: the ignore list may name one of the tensors that we fuse."""
    name = "model.layers.0.self_attn.k_proj"

    def mixed(tensors):
        weight = tensors[f"{name}.weight"].float() * tensors.pop(f"{name}.weight_scale").float()
        return tensors | {f"{name}.weight": weight}

    folder = edited(case, tmp_path / "mixed", mixed, ignore=["lm_head", r"re:.*layers\.0\.self_attn\.k_proj"])
    target, want = open_target(folder), expected(EIGHT_BIT / case)
    assert isinstance(target.layers[0].block.attention.qkv, nn.Linear)
    assert isinstance(target.layers[1].block.attention.qkv, EightBitLinear)
    torch.testing.assert_close(logits(target, want["input_ids"]), want["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (32,), (32, 1)])
def test_scales_come_in_several_shapes(shape, tmp_path):
    name = "model.layers.0.mlp.down_proj.weight_scale"

    def reshaped(tensors):
        scale = tensors[name] if shape and shape[0] == 32 else tensors[name][:1]
        return tensors | {name: scale.reshape(shape)}

    down = open_target(edited("ct_dynamic", tmp_path / "in", reshaped)).layers[0].block.mlp.down
    assert down.scale.shape == (32, 1)
    assert torch.equal(down.scale[0], expected_scale("ct_dynamic", name)[0].float())


def expected_scale(case: str, name: str) -> torch.Tensor:
    return load_file(EIGHT_BIT / case / "model.safetensors")[name]


@pytest.mark.parametrize("names", [("self_attn.k_scale", "self_attn.v_scale"), ("self_attn.k_proj.output_scale",)])
def test_scales_of_caches_are_tolerated(names, tmp_path):
    def scaled(tensors):
        return tensors | {f"model.layers.0.{name}": torch.ones(1) for name in names}

    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    open_target(edited("ct_dynamic", tmp_path / "in", scaled, kv_cache_scheme=scheme))


def test_a_preset_stands_for_its_group(tmp_path):
    folder = edited("ct_dynamic", tmp_path / "in", config_groups={"FP8_DYNAMIC": ["Linear"]})
    want = expected(EIGHT_BIT / "ct_dynamic")
    torch.testing.assert_close(logits(open_target(folder), want["input_ids"]), want["logits"], atol=1e-4, rtol=0)


# What is refused.


DOWN = "model.layers.0.mlp.down_proj"


def without(name: str):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def plus(name: str, tensor: torch.Tensor):
    return lambda tensors: tensors | {name: tensor}


def group(inputs: dict | None = None, **weights) -> dict:
    weights = {"num_bits": 8, "type": "float"} | weights
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}}


DOORS = [
    ("ct_dynamic", without(f"{DOWN}.weight_scale"), {}, f"{DOWN}.weight: no {DOWN}.weight_scale; codes mean nothing"),
    ("fp8_block_scale_inv", without(f"{DOWN}.weight_scale_inv"), {}, f"{DOWN}.weight: no {DOWN}.weight_scale_inv"),
    ("ct_int_packed", without(f"{DOWN}.weight_shape"), {}, f"no {DOWN}.weight_shape"),
    ("ct_int_packed", plus(f"{DOWN}.weight_shape", torch.tensor([32, 99])), {}, "do not hold 32 x 99"),
    (
        "ct_dynamic",
        plus(f"{DOWN}.weight_scale", torch.ones(31, 1)),
        {},
        r"stored as \[31, 1\], for codes of \[32, 64\]",
    ),
    ("ct_block", plus(f"{DOWN}.weight_scale", torch.ones(1, 3)), {}, r"stored as \[1, 3\], for codes of \[128, 256\]"),
    ("ct_dynamic", plus(f"{DOWN}.weight_zero_point", torch.ones(32, 1)), {}, "weight_zero_point: stored, but nothing"),
    ("ct_dynamic", dict, {"ignore": ["lm_head", DOWN]}, f"{DOWN}.weight: stored as F8_E4M3, though its ignore list"),
    ("ct_dynamic", dict, group(type="int", strategy="channel") | {"format": ...}, "config says I8; mend it"),
    ("ct_dynamic", dict, group(num_bits=4, type="int"), "num_bits: int weights of 4 bits are not implemented"),
    ("ct_dynamic", dict, group(num_bits=4), "num_bits: float weights of 4 bits are not implemented"),
    ("ct_dynamic", dict, group(symmetric=False), "weights.symmetric: is not implemented unless it is true"),
    ("ct_dynamic", dict, group(dynamic=True), "weights.dynamic: is not implemented unless it is false"),
    ("ct_dynamic", dict, group(actorder="group"), "weights.actorder: is not implemented"),
    (
        "ct_dynamic",
        dict,
        group(strategy="tensor_group"),
        "float weights with a scale a tensor_group are not implemented",
    ),
    ("ct_dynamic", dict, group(strategy="block", block_structure=[128]), r"blocks of \[128\] are not implemented"),
    ("ct_dynamic", dict, {"config_groups": {"NVFP4": ["Linear"]}}, "config_groups.NVFP4: is not implemented"),
    ("ct_dynamic", dict, {"config_groups": {"MXFP4": ["Linear"]}}, "config_groups.MXFP4: is not implemented"),
    ("ct_dynamic", dict, {"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16: is not implemented"),
    ("ct_dynamic", dict, {"config_groups": {"FP8": [], "W8A16": []}}, "2 kinds of weights in one model"),
    ("ct_dynamic", dict, {"config_groups": {}}, "config_groups: 0 kinds of weights"),
    ("ct_dynamic", dict, {"format": "nvfp4-pack-quantized"}, "format: 'nvfp4-pack-quantized' is not implemented"),
    ("ct_dynamic", dict, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: is not implemented"),
    ("ct_dynamic", dict, {"transform_config": {"config_groups": {"R1": 1}}}, "transform_config: is not implemented"),
    ("ct_dynamic", dict, {"ignore": ["lm_head", None]}, "ignore: null is no name and no re:regex"),
    ("ct_dynamic", dict, {"ignore": ["re:["]}, r'ignore: "re:\[" is no name and no re:regex'),
    (
        "ct_int_channel",
        dict,
        group({"num_bits": 8}, type="int", strategy="channel"),
        "int activations .W8A8. are not implem",
    ),
    ("ct_dynamic", dict, {"quant_method": "gptq"}, "quant_method: 'gptq' is not implemented"),
    ("ct_dynamic", dict, {"quant_method": ...}, "quant_method: missing"),
    ("fp8_static_per_tensor", dict, {"fmt": "e5m2"}, "fmt: 'e5m2' is not implemented"),
    ("fp8_block_scale_inv", dict, {"weight_block_size": [128]}, r"weight_block_size: blocks of \[128\]"),
]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door[3][:70])
def test_what_is_not_weights_in_eight_bits_with_their_scales_is_refused_by_name(door, tmp_path):
    case, tensors, quantization, message = door
    with pytest.raises(ConfigError, match=message):
        open_target(edited(case, tmp_path / "in", tensors, **quantization))


@pytest.mark.parametrize("case", ["ct_dynamic", "ct_int_channel"])
def test_codes_without_a_quantization_config_are_refused(case, tmp_path):
    with pytest.raises(ConfigError, match="not as F32 or F16 or BF16; give a checkpoint that stores it so"):
        open_target(edited(case, tmp_path / "in", drop=["quantization_config"]))


# Making.


@pytest.mark.parametrize("case", ["ct_dynamic", "ct_dynamic_tied"])
def test_codes_and_scales_are_compressed_tensors_bit_for_bit(case):
    want, stored = expected(EIGHT_BIT / case), load_file(EIGHT_BIT / case / "model.safetensors")
    originals = {name.removeprefix("original."): t for name, t in want.items() if name.startswith("original.")}
    assert originals
    for name, weight in originals.items():
        codes, scale = quantised(weight, FP8)
        assert torch.equal(scale, stored[f"{name}_scale"])
        assert torch.equal(codes.view(torch.uint8), stored[name].view(torch.uint8))


@pytest.mark.parametrize("codes", [FP8, INT8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_extreme_rows_stay_finite_and_zero_stays_zero(codes, dtype):
    """Every value is within half a step of its row's scale (float8: or 1/16 of itself, its last bit)."""
    torch.manual_seed(0)
    weight = torch.randn(7, 64)
    weight[0] = 0
    weight[1, 3] = 1e4  # an outlier
    weight[2] *= torch.finfo(dtype).smallest_normal * 100
    weight[3] *= torch.finfo(dtype).smallest_normal / 4  # subnormal
    weight[4, 7] = 0
    weight[5] = torch.finfo(dtype).max / 2
    weight = weight.to(dtype)
    made, scale = quantised(weight, codes)
    back, weight = dequantised(made, scale.float(), 64), weight.float()
    assert scale.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    assert back.isfinite().all()
    assert not back[weight == 0].any()
    step = scale.float() * (2.0**-9 if codes == FP8 else 1)  # float8: between its smallest values
    own = weight.abs() / 16 if codes == FP8 else 0
    rounded = 2.0**-7 if codes == FP8 else 0  # the quotient is rounded to bfloat16 first
    allowed = torch.maximum(0.51 * step + rounded * weight.abs(), torch.as_tensor(own) * (1 + 2 * rounded))
    sound = (
        scale[:, 0].float() > 100 * torch.finfo(scale.dtype).smallest_normal
    )  # coarser, where the scale is subnormal
    assert sound[[0, 1, 4, 5, 6]].all()
    largest = weight.abs().amax(1, keepdim=True)
    assert ((back - weight).abs() <= allowed + largest * 2.0**-8)[sound].all()
    assert ((back - weight).abs() <= 1.01 * largest).all()


def test_the_scale_is_rounded_before_it_divides():
    torch.manual_seed(0)
    weight = torch.randn(64, 64).bfloat16()
    made, scale = quantised(weight, INT8)
    assert scale.dtype == torch.bfloat16
    assert torch.equal(made.float(), (weight.float() / scale.float()).round().clamp(-127, 127))
    exact = weight.float().abs().amax(1, keepdim=True) / 127
    assert not torch.equal(made.float(), (weight.float() / exact).round().clamp(-127, 127))


@pytest.mark.parametrize("codes", [FP8, INT8])
def test_a_linear_held_in_16_bits_says_the_same(codes):
    torch.manual_seed(0)
    linear = EightBitLinear(64, 48, True, codes, 16)
    linear.weight, _ = quantised(torch.randn(48, 64), codes)
    linear.scale, linear.bias = torch.rand(48, 4), nn.Parameter(torch.randn(48))
    x = torch.randn(3, 64)
    said = linear(x)
    torch.testing.assert_close(held_as(linear, torch.float32)(x), said)
    assert linear.weight.numel() == linear.scale.numel() == 0  # the codes are not kept beside it
