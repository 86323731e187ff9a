"""Opens a draft's folder with the speculators library and compares its training forward with ours, in fp32.

In an environment of its own, made by `pip install speculators==0.9.0 -r requirements.txt`:

    python -m scripts.open_in_speculators DRAFT TARGET
"""

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel

from generate import load_draft, load_target
from speculators_config import fit_to_target, read_speculator, read_target
from train.unroll import Unrolled, unroll

ROWS, STEPS = 64, 3


def theirs(draft: Path, target: Path, embed: torch.Tensor, ids: torch.Tensor, aux: torch.Tensor) -> list[torch.Tensor]:
    """The logits of each unrolled step. A missing embedding stays uninitialised in speculators, so it is copied in."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(draft, scratch, dirs_exist_ok=True)
        path = Path(scratch) / "model.safetensors"
        save_file({"embed_tokens.weight": embed} | load_file(path), path, {"format": "pt"})
        config = Eagle3DraftModel.config_class.from_pretrained(scratch)
        config.speculators_config.verifier.name_or_path = str(target)
        config.transformer_layer_config._attn_implementation = "eager"
        model = Eagle3DraftModel.from_pretrained(scratch, config=config, dtype=torch.float32).eval()
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(aux, ids, torch.zeros_like(ids), ttt_steps=STEPS)
    return seen


@torch.no_grad()
def main(draft: Path, target: Path) -> None:
    target_config, _ = read_target(target)
    config = fit_to_target(read_speculator(draft), target_config)
    model = load_target(target, target_config, config.aux_layer_ids, torch.device("cpu"), torch.float32)
    model.allocate(1, ROWS + 2)
    ids = torch.randint(target_config.vocab_size, (1, ROWS + 1), generator=torch.Generator().manual_seed(0))
    _, aux = model(ids, torch.arange(ROWS + 1)[None])
    ours = load_draft(config, model)
    ours.positions = Unrolled(config.layer, ROWS, STEPS)
    guesses = [ours.logits(x) for x in unroll(ours, ids[:, 1:], aux[:, :-1], STEPS, torch.float32)]
    wanted = theirs(draft, target, model.embed.weight, ids[:, 1:], aux[:, :-1])
    for step, (guess, want) in enumerate(zip(guesses, wanted, strict=True)):
        print(f"step {step}: logits up to {want.abs().max():.2f}, largest difference {(guess - want).abs().max():.1e}")
        torch.testing.assert_close(guess, want, rtol=0, atol=1e-4)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
