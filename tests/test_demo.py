"""The demo's real pair: the target against transformers, losslessness, and the acceptance that a silent draft bug would
lower. `make test-real` writes the target first."""

from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from conftest import FIXTURES
from safetensors.torch import load_file

import generate
from eagle3 import Eagle3
from options import parse_args
from speculators_config import fit_to_target, read_speculator

ROOT = FIXTURES.parents[1]
SPECULATOR, TARGET = ROOT / "demo/SmolLM2-135M-Instruct-speculator.eagle3", ROOT / "demo/SmolLM2-135M-Instruct"
PROMPTS = (
    "How does a lighthouse work?",
    "Write three sentences about a cat that learns to swim.",
    "What is 17 + 26? Explain each step.",
    "List five things to pack for a week in the mountains.",
    "Give me a recipe for pancakes.",
    "Explain to a child why the moon changes its shape.",
)
TOKENS = 64
ACCEPTED = [99, 46, 30]  # drafted tokens at positions 1 to 3 that were accepted, all prompts together
pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def plan():
    options = ["--speculator", SPECULATOR, "--target", TARGET, "--dtype", "fp32", "--max_new_tokens", TOKENS]
    prompts = [text for prompt in PROMPTS for text in ("--prompt", prompt)]
    return generate.make_plan(parse_args([*map(str, options), *prompts, "--no_compile", "--ignore_eos"]))


def answers(plan, decoder, plain=False):
    """Token ids and rounds of every prompt."""
    session = generate.Session(plan, decoder, [])
    for question in plan.questions:
        session.answers.append(answer := generate.Answer(0))
        session.decode(question.prompts(plan.dialogue())[0], answer, lambda text: None, plain=plain)
    return session.answers


def accepted_per_position(given, K=3):
    return [sum(done.accepted > i for answer in given for done in answer.rounds) for i in range(K)]


@torch.inference_mode()
def test_target_equals_transformers_on_the_demo_prompt(plan):
    want = load_file(FIXTURES / "demo/target_check.safetensors")
    target = generate.load_target(
        TARGET, plan.target, plan.speculator.aux_layer_ids, torch.device("cpu"), torch.float32
    )
    target.allocate(1, 512)
    ids = want["input_ids"]
    x, aux = target(ids, torch.arange(ids.size(1))[None])
    top = target.logits(x)[0].topk(8)
    assert torch.equal(top.indices, want["top_ids"])
    torch.testing.assert_close(top.values, want["top_logits"], atol=1e-3, rtol=0)
    aux_last = want["aux_last"].view(3, -1)
    difference = (aux[0, -1].view(3, -1) - aux_last).norm(dim=-1) / aux_last.norm(dim=-1)
    assert difference.max() < 1e-3
    greedy, token = [], top.indices[-1:, :1]
    for i in range(64):
        greedy.append(token.item())
        x, _ = target(token, torch.tensor([[ids.size(1) + i]]))
        token = target.logits(x)[0].argmax(-1, keepdim=True)
    assert greedy == want["greedy_ids"][0].tolist()


def load(plan):
    return generate.make_decoder(plan, *generate.load_models(plan))


@pytest.fixture(scope="module")
def drafted(plan):
    return answers(plan, load(plan))


def test_speculation_is_lossless_and_accepts_what_it_always_did(plan, drafted):
    """fp32, eager, K = 3: the numbers change only when the draft does, or when somebody breaks it silently."""
    plain = answers(plan, load(plan), plain=True)
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    assert accepted_per_position(drafted) == ACCEPTED


def check_that_acceptance_falls_silently(drafted, broken):
    assert [answer.token_ids for answer in broken] == [answer.token_ids for answer in drafted]  # the target hides it
    assert sum(accepted_per_position(broken)) < sum(ACCEPTED)


@pytest.mark.parametrize("change", [{"norm_before_residual": False}, {"aux_layer_ids": (2, 15, 28)}], ids=str)
def test_a_misread_config_would_be_noticed(plan, drafted, change):
    config = fit_to_target(read_speculator(SPECULATOR, **change), plan.target)
    changed = replace(plan, speculator=config)
    check_that_acceptance_falls_silently(drafted, answers(changed, load(changed)))


def test_keeping_the_rows_of_drafted_features_would_be_noticed(plan, drafted, monkeypatch):
    """A round's first pass overwrites what drafting left in the cache; here it writes its newest row only."""
    propose = Eagle3.propose

    def careless(self, tokens, aux, positions, last, K, pick):
        newest = torch.arange(positions.size(1)) == last[:, None]
        return propose(self, tokens, aux, positions.where(newest, self.positions.slots - 1), last, K, pick)

    monkeypatch.setattr(Eagle3, "propose", careless)
    check_that_acceptance_falls_silently(drafted, answers(plan, load(plan)))


def test_compiled_equals_eager_round_by_round(plan, drafted):
    """One prompt; what is proposed and accepted is compared, not only the text."""
    short = replace(plan, questions=plan.questions[:1], args=Namespace(**{**vars(plan.args), "compile": True}))
    (compiled,) = answers(short, load(short))
    assert (compiled.token_ids, compiled.rounds) == (drafted[0].token_ids, drafted[0].rounds)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs the CPU operators")
def test_bf16_is_lossless_too_where_a_row_is_summed_alike_in_any_company(plan):
    """One row and K + 1 rows round apart in torch's own bf16 linears; in cpu_kernels.cpp they do not."""
    settings = {**vars(plan.args), "compile": True, "dtype": "bf16"}
    short = replace(plan, dtype="bfloat16", questions=plan.questions[:3], args=Namespace(**settings))
    decoder = load(short)
    ours, plain = answers(short, decoder), answers(short, decoder, plain=True)
    assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in plain]
    assert sum(len(answer.token_ids) for answer in ours) == 3 * TOKENS
