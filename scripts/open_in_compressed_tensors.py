"""Opens what quantize.py wrote with the compressed-tensors library, through transformers, and compares.

In an environment of its own, made by `pip install compressed-tensors==0.20.1 transformers==5.19.0 -r requirements.txt`:

    python -m scripts.open_in_compressed_tensors DIR

Prints, or fails at: warnings; weights that are not ours bit for bit; and logits in fp32, which transformers computes
with activations quantised for each token where the config says so: ours are made with the same ones.
"""

import logging
import sys
import warnings
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers import logging as their_logging

from eight_bit import EightBitLinear, dequantised
from generate import load_target
from speculators_config import read_json, read_target

TOKENS = 64
PARTS = {
    "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.out": ["self_attn.o_proj"],
    "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down": ["mlp.down_proj"],
}


class Heard(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def each_token_quantised(linear: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Dynamic float8 activations: a scale for each token."""
    (x,) = inputs
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale),)


def off(ours: torch.Tensor, wanted: torch.Tensor) -> str:
    return f"{(ours - wanted).abs().max():.1e}"


def main(folder: Path) -> None:
    heard = Heard()
    their_logging.get_logger().addHandler(heard)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.randint(theirs.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            wanted = theirs(ids).logits
    said = [line for line in heard.lines + [str(warning.message) for warning in caught] if "torch.jit" not in line]
    print(f"{len(said)} warnings{''.join(f'{chr(10)}  {line}' for line in said)}")

    config, _ = read_target(folder)
    ours = load_target(folder, config, (), torch.device("cpu"), torch.float32)
    ours.allocate(1, TOKENS + 1)
    modules, compared = dict(theirs.named_modules()), 0
    for i, layer in enumerate(ours.layers):
        for name, parts in PARTS.items():
            linear, their = layer.block.get_submodule(name), [modules[f"model.layers.{i}.{part}"] for part in parts]
            weight = dequantised(linear.weight, linear.scale, linear.group)
            assert torch.equal(weight, torch.cat([module.weight for module in their])), f"layer {i}: {name}"
            compared += len(their)
    print(f"{compared} weights, decompressed: ours bit for bit")

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return ours.logits(ours(ids, torch.arange(TOKENS)[None])[0])

    print(f"logits up to {wanted.abs().max():.2f}; ours, with activations as they are: {off(logits(), wanted)} away")
    groups = read_json(folder / "config.json")["quantization_config"]["config_groups"]
    if all(group["input_activations"] for group in groups.values()):
        for module in ours.modules():
            if isinstance(module, EightBitLinear):
                module.register_forward_pre_hook(each_token_quantised)
        print(f"ours, with activations quantised as they are there: {off(logits(), wanted)} away")
    torch.testing.assert_close(logits(), wanted, rtol=0, atol=1e-4)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
