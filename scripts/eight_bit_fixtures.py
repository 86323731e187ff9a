"""Makes tests/fixtures/eight_bit/ct_int* with the library that owns the format: int8 weights, plain and packed.

python -m scripts.eight_bit_fixtures      (needs: pip install compressed-tensors==0.20.1 transformers==5.19.0)
"""

import shutil
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures" / "eight_bit"
SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 66, "num_hidden_layers": 2}  # 66: not whole int32s
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
HEADS |= {"rms_norm_eps": 1e-5, "initializer_range": 0.2}
LAYOUTS = {  # strategy and format; None: the activations too, which we leave alone
    "ct_int_channel": ("channel", "int-quantized", None),
    "ct_int_packed": ("channel", "pack-quantized", None),
    "ct_int_packed_groups": ("group", "pack-quantized", 16),
}


def make(folder: Path, strategy: str, form: str, group: int | None) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).to(torch.bfloat16)
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group}
    scheme = {"targets": ["Linear"], "weights": weights, "format": form}
    ignore = ["lm_head"] if group is None else ["lm_head", "re:.*down_proj"]  # 66 inputs make no whole groups
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=form, ignore=ignore)
    apply_quantization_config(model, config)
    exact = {}
    for name, linear in model.named_modules():
        if hasattr(linear, "weight_scale"):
            rows = linear.weight.data.unflatten(1, (-1, group or linear.in_features))
            args = linear.quantization_scheme.weights
            scale, _ = calculate_qparams(rows.amin(-1), rows.amax(-1), args)
            linear.weight_scale.data = scale
            codes = (rows / scale[..., None]).round().clamp(-128, 127).float() * scale[..., None].float()
            exact[name] = codes.flatten(1)
    compressor = ModelCompressor(quantization_config=config)
    ids = torch.randint(SIZES["vocab_size"], (1, 24))
    compressor.compress_model(model)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    plain = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).eval()
    state = {name: tensor.float() for name, tensor in model.state_dict().items() if name in plain.state_dict()}
    plain.load_state_dict(state | {f"{name}.weight": weight for name, weight in exact.items()})
    with torch.no_grad():
        logits = plain(ids).logits
    tensors = {f"dequant.{name}.weight": weight for name, weight in exact.items() if "layers.0." in name}
    save_file({"input_ids": ids, "logits": logits, **tensors}, folder / "expected.safetensors")


if __name__ == "__main__":
    for name, layout in LAYOUTS.items():
        make(FIXTURES / name, *layout)
