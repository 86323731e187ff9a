"""The target against what transformers computes (fixtures/targets), its cache, and its memory of positions."""

import pytest
import torch
from conftest import FIXTURES, expected, open_target

from model import RMSNorm, rotate
from speculators_config import ConfigError, read_target

TARGETS = sorted(path.parent.name for path in (FIXTURES / "targets").glob("*/expected.safetensors"))


def forward(target, ids, start=0):
    """All rows in one call: logits (1, T, V) and aux states (1, T, n * D)."""
    x, aux = target(ids, start + torch.arange(ids.size(1))[None])
    return target.logits(x), aux


@pytest.mark.parametrize("case", TARGETS)
@torch.inference_mode()
def test_logits_and_every_hidden_state_equal_transformers(case):
    folder = FIXTURES / "targets" / case
    want = expected(folder)
    n_layer = read_target(folder)[0].n_layer
    target = open_target(folder, range(n_layer + 1))
    logits, aux = forward(target, want["input_ids"])
    torch.testing.assert_close(logits, want["logits"], atol=1e-4, rtol=0)
    states = [*want["hidden_states"][:-1], want["last_prenorm"]]  # transformers' last one is normed, ours is not
    torch.testing.assert_close(aux, torch.cat(states, dim=-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", TARGETS)
@torch.inference_mode()
def test_cached_greedy_decoding_equals_transformers_and_one_forward(case):
    want = expected(FIXTURES / "targets" / case)
    target, ids = open_target(FIXTURES / "targets" / case), want["input_ids"]
    logits, _ = forward(target, ids)
    greedy, steps = [], [logits[:, -1]]
    for i in range(16):
        greedy.append(steps[-1].argmax(-1).item())
        steps.append(forward(target, torch.tensor([[greedy[-1]]]), start=ids.size(1) + i)[0][:, -1])
    assert greedy == want["greedy_ids"][0].tolist()
    whole, _ = forward(open_target(FIXTURES / "targets" / case), torch.cat((ids, want["greedy_ids"]), dim=1))
    torch.testing.assert_close(torch.stack(steps, dim=1), whole[:, ids.size(1) - 1 :], atol=1e-4, rtol=0)


@torch.inference_mode()
def test_a_rejected_suffix_leaves_no_trace_in_the_cache():
    folder = FIXTURES / "targets" / "llama_gqa"
    clean, dirty, ids = open_target(folder), open_target(folder), expected(folder)["input_ids"]
    for target in (clean, dirty):
        forward(target, ids[:, :10])
    forward(dirty, torch.full((1, 9), 7), start=10)  # nine rows of something else, then rewound
    for start, stop in ((10, 14), (14, 24)):
        a, b = (forward(target, ids[:, start:stop], start)[0] for target in (clean, dirty))
        assert torch.equal(a, b)


@torch.inference_mode()
def test_positions_past_the_configured_context_are_ordinary_positions():
    """The rotary table is sized by the run: yarn's fixture names a context of 128."""
    target = open_target(FIXTURES / "targets" / "llama_yarn", slots=1024)
    logits, _ = forward(target, torch.arange(90).repeat(3)[None] % 128, start=700)
    assert logits.isfinite().all()


@torch.inference_mode()
def test_rows_of_a_batch_go_their_own_way():
    """Every row of a batch has positions of its own."""
    want = expected(FIXTURES / "targets" / "llama_gqa")
    target, ids = open_target(FIXTURES / "targets" / "llama_gqa"), want["input_ids"]
    alone, _ = forward(target, ids)
    target.allocate(2, 512)
    positions = torch.stack((torch.arange(12), torch.arange(12)))
    target(ids[:, :12].repeat(2, 1), positions)
    positions = torch.stack((torch.arange(12, 20), torch.arange(8, 16)))
    x, _ = target(torch.stack((ids[0, 12:20], ids[0, 8:16])), positions)
    torch.testing.assert_close(target.logits(x), torch.stack((alone[0, 12:20], alone[0, 8:16])), atol=1e-4, rtol=0)


# ---- 16 bits


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.025), (torch.float16, 0.003)], ids=str)
@pytest.mark.parametrize("case", TARGETS)
@torch.inference_mode()
def test_logits_in_16_bits_are_fp32_and_near_transformers(case, dtype, share):
    """share: of the logits' spread, of which rounding costs at most 0.015 and 0.002."""
    want = expected(FIXTURES / "targets" / case)
    target = open_target(FIXTURES / "targets" / case).to(dtype)
    target.allocate(1, 512)
    logits, _ = forward(target, want["input_ids"])
    assert logits.dtype == torch.float32
    assert (logits - want["logits"]).square().mean().sqrt() < share * want["logits"].std()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_norms_and_rotations_in_16_bits_round_once_at_their_end(dtype):
    """Against fp64, with states whose squares overflow fp16 and at positions that bf16 cannot tell apart."""
    torch.manual_seed(0)
    once = {"rtol": 0.51 * torch.finfo(dtype).eps, "atol": 1e-6}
    x, norm = (1000 * torch.randn(50, 64)).to(dtype), RMSNorm(64, 1e-5).to(dtype)
    norm.weight.fill_(1)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x).double(), exact, **once)

    target = open_target(FIXTURES / "targets" / "llama_gqa").to(dtype)
    target.allocate(1, 4224)
    positions = torch.arange(4000, 4050)
    _, cos_sin, _ = target.positions(positions[None], dtype)[0]
    angles = torch.outer(positions.double(), 10000 ** -(torch.arange(4).double() / 4))[None, :, None]
    cos, sin = angles.cos(), angles.sin()
    torch.testing.assert_close(cos_sin.double(), torch.stack((cos, sin)), rtol=0, atol=5e-4)
    x = torch.randn(1, 50, 4, 8).to(dtype)
    x1, x2 = x.double().chunk(2, dim=-1)
    cos, sin = cos_sin.double()
    exact = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    torch.testing.assert_close(rotate(x, *cos_sin).double(), exact, **once)


# ---- doors


@pytest.mark.parametrize(
    ("case", "word"), [("qwen3_moe_later", "qwen3_moe"), ("gpt_oss_later", "gpt_oss"), ("llama_mlpbias", "mlp_bias")]
)
def test_what_is_not_implemented_is_refused_by_name(case, word):
    with pytest.raises(ConfigError, match=f"config.json: .*{word}.*;"):
        read_target(FIXTURES / "targets" / case)
