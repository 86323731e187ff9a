"""The round: lossless when greedy, the target's law when sampling, one graph, and caches without traces.

Acceptance and proposals are compared as well as tokens, because the target hides a broken draft."""

import itertools
import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from conftest import FIXTURES, open_pair
from safetensors.torch import load_file

import speculate
from generate import Session, make_plan
from metrics import Answer
from options import parse_args
from sampling import verify_chain
from speculate import PREFILL_CHUNK, Decoder, State, build_steps, cache_slots, compile_call

RUNS = json.loads((FIXTURES / "drafts/eagle3_trained/expected_runs.json").read_text())["runs"]


def make_decoder(target, draft, K, slots=512, compiled=False, seed=0, ahead=None, **sampling):
    width = len(target.aux_layer_ids) * target.config.hidden_size
    state = State(1, K, width, slots, torch.float32, target.norm.weight.device, **sampling)
    return Decoder(build_steps(target, draft, state, compiled), state, seed, ahead)


def greedy(decoder, prompt, n, plain=False, keep=False):
    """n tokens and the rounds that made them."""
    ids, rounds = [decoder.start(prompt, keep)[0]], []
    while len(ids) < n:
        rounds.append(decoder.round(plain))
        ids += rounds[-1].emitted
    return ids[:n], rounds


@pytest.mark.parametrize("run", RUNS, ids=range(len(RUNS)))
def test_golden_runs_round_by_round(run):
    """Computed without any cache: proposals, acceptance and tokens of every round."""
    target, draft = open_pair(FIXTURES / "drafts/eagle3_trained")
    decoder = make_decoder(target, draft, run["num_speculative_tokens"])
    _, rounds = greedy(decoder, run["prompt_ids"], len(run["token_ids"]))
    assert len(rounds) == len(run["trace"])
    for ours, wanted in zip(rounds, run["trace"], strict=True):
        assert ours.proposed == wanted["proposed"]
        kept = len(wanted["emitted"])  # an end inside the block cuts it
        assert (min(ours.accepted, kept), ours.emitted[:kept]) == (wanted["accepted"], wanted["emitted"])


# ---- lossless

PROMPT = [312, 39, 68, 75, 75, 78, 11, 220, 86, 289, 75, 67, 0]
PAIRS = ["eagle3_trained", "eagle3_full_vocab", "eagle3_two_layers_mixed", "eagle3_31_defaults", "eagle3_qwen3_layer"]


@pytest.mark.parametrize("case", PAIRS)
@pytest.mark.parametrize("K", [1, 2, 3, 5, 8])
def test_greedy_output_is_plain_decoding_token_for_token(case, K):
    """Whatever the draft: a trained one, random ones, and one that is always wrong or always right about nothing."""
    target, draft = open_pair(FIXTURES / "drafts" / case)
    prompt = [min(i, target.config.vocab_size - 1) for i in PROMPT]
    plain, _ = greedy(make_decoder(target, None, 0), prompt, 40)
    ours, rounds = greedy(make_decoder(target, draft, K), prompt, 40)
    beside, _ = greedy(make_decoder(target, draft, K), prompt, 40, plain=True)  # --baseline: the same state, K = 0
    assert ours == plain == beside
    assert all(len(done.proposed) == K and done.accepted <= K for done in rounds)


class Scripted(torch.nn.Module):
    """A draft that proposes what it is told: the adversary, and the oracle."""

    def __init__(self, target, answer, prompt_length):
        super().__init__()
        self.register_buffer("answer", torch.tensor(answer))
        self.prompt_length = prompt_length

    def prefill(self, tokens, aux, positions):
        pass

    def propose(self, tokens, aux, positions, last, K, pick):
        newest = positions.gather(1, last[:, None]) - self.prompt_length + 1  # of the answer's tokens, the pending one
        ahead = (newest + 1 + torch.arange(K)).clamp(max=len(self.answer) - 1)
        return self.answer[ahead], None


@pytest.mark.parametrize(("wrong", "accepted"), [(0, 3), (1, 0)])
def test_an_oracle_is_always_accepted_and_an_adversary_never(wrong, accepted):
    target, _ = open_pair(FIXTURES / "drafts/eagle3_trained")
    plain, _ = greedy(make_decoder(target, None, 0), PROMPT, 60)
    scripted = Scripted(target, [(token + wrong) % 320 for token in plain], len(PROMPT))
    ours, rounds = greedy(make_decoder(target, scripted, 3), PROMPT, 40)
    assert ours == plain[:40]
    assert {done.accepted for done in rounds} == {accepted}


def test_a_drafted_end_that_the_target_rejects_ends_nothing():
    """A draft that always proposes the EOS, 316: only where the target says it too does the answer end."""
    folder = FIXTURES / "drafts/eagle3_trained"
    target, _ = open_pair(folder)
    for run, reason in ((RUNS[1], "length"), (RUNS[0], "stop")):  # the target's answer: without 316; 316 second
        prompt, wanted = run["prompt_ids"], run["token_ids"][: 24 if reason == "length" else 2]
        argv = ["--speculator", folder, "--prompt_ids", ",".join(map(str, prompt)), "--max_new_tokens", 24]
        plan, answer = make_plan(parse_args([str(arg) for arg in argv])), Answer(len(prompt))
        assert 316 in plan.stop_ids
        decoder = make_decoder(target, Scripted(target, [316], len(prompt)), 3)
        Session(plan, decoder, []).decode(prompt, answer, lambda text: None)
        assert (answer.token_ids, answer.finish_reason) == (wanted, reason)
        assert all(done.proposed == [316] * 3 for done in answer.rounds)
        assert [done.accepted for done in answer.rounds] == ([0] * 23 if reason == "length" else [1])


@pytest.mark.parametrize("length", [1, 2, PREFILL_CHUNK - 1, PREFILL_CHUNK, PREFILL_CHUNK + 1, 150])
def test_prompts_of_any_length_round_by_round_as_if_read_in_one_piece(length, monkeypatch):
    """Chunks, padding and the row between chunks: proposals and acceptance, not only tokens, equal one big chunk's."""
    prompt = [(7 * i + 3) % 300 for i in range(length)]
    pair = partial(open_pair, FIXTURES / "drafts/eagle3_trained")
    ours = greedy(make_decoder(*pair(), 3), prompt, 30)
    monkeypatch.setattr("speculate.PREFILL_CHUNK", length)
    assert ours == greedy(make_decoder(*pair(), 3), prompt, 30)


# ---- running ahead


class Landed:
    """Stands for a CUDA event on a device that is always done."""

    def record(self):
        pass

    def synchronize(self):
        pass


@pytest.mark.parametrize("K", [0, 3])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_a_round_read_late_is_the_same_round(K, sampling):
    """Also through the buffers that results land in on CUDA, and over a second and a continued sequence."""

    def answers(ahead, landing):
        decoder = make_decoder(*open_pair(FIXTURES / "drafts/eagle3_trained"), K, ahead=ahead, **sampling)
        if landing:
            decoder.landings = itertools.cycle([(torch.empty(K + 2, dtype=torch.int64), Landed()) for _ in range(2)])
        first, rounds = greedy(decoder, PROMPT, 30)
        second = greedy(decoder, PROMPT + first, 20, keep=True)
        return first, rounds, second, greedy(decoder, PROMPT[:4], 20), greedy(decoder, PROMPT[:4], 20, plain=True)

    in_time = answers(False, False)
    assert answers(True, False) == in_time
    assert answers(True, True) == in_time


def test_two_rounds_past_the_end_stay_inside_the_caches():
    """The largest K, every draft accepted as it is the target's own token: slots are written, not run over."""
    target, draft = open_pair(FIXTURES / "drafts/eagle3_trained", slots=cache_slots(512))
    decoder = make_decoder(target, draft, 64, slots=cache_slots(512), ahead=True)
    decoder.start(PROMPT)
    decoder.state.length.fill_(511)
    decoder.steps.round()
    decoder.state.length.fill_(511 + 65)
    decoder.steps.round()
    with pytest.raises(AssertionError, match="K = 95"):
        make_decoder(target, draft, 95)


# ---- caches


def test_a_second_prompt_and_stale_slots_change_nothing():
    target, draft = open_pair(FIXTURES / "drafts/eagle3_trained")
    fresh = greedy(make_decoder(target, draft, 3), PROMPT, 40)
    decoder = make_decoder(target, draft, 3)
    for module in (*target.modules(), *draft.modules()):
        if hasattr(module, "k_cache"):
            module.k_cache.fill_(50.0)
            module.v_cache.fill_(-50.0)
    greedy(decoder, PROMPT[::-1] * 9, 70)
    assert greedy(decoder, PROMPT, 40) == fresh


@pytest.mark.parametrize("plain_between", [False, True])
@pytest.mark.parametrize("change", [0, 1, 5, 12])
def test_a_kept_cache_drafts_like_a_fresh_one(plain_between, change):
    """A conversation's next prompt shares a prefix with what the caches hold; the draft's rows are the delicate part:
    those of the last round's tokens are not written yet, and a plain step writes none."""
    target, draft = open_pair(FIXTURES / "drafts/eagle3_trained")
    decoder = make_decoder(target, draft, 3)
    ids, _ = greedy(decoder, PROMPT, 30)
    if plain_between:
        greedy(decoder, PROMPT, 30, plain=True)
    said = decoder.ids[: len(decoder.ids) - change]
    prompt = said + [300, 7, 8, 9]
    kept = greedy(decoder, prompt, 30, keep=True)
    assert kept == greedy(make_decoder(target, draft, 3), prompt, 30)


def test_a_kept_cache_is_really_used():
    target, draft = open_pair(FIXTURES / "drafts/eagle3_trained")
    decoder = make_decoder(target, draft, 3)
    greedy(decoder, PROMPT, 30)
    assert decoder.reusable([*decoder.ids, 5]) >= len(decoder.ids) - 5
    assert decoder.reusable(decoder.ids[:4]) == 3
    assert decoder.reusable([9, *PROMPT]) == 0


def test_the_last_round_stays_inside_the_cache():
    """The caches have slots to spare for a round that looks past the end, also for a context that is a power of two."""
    assert [cache_slots(n) for n in (1, 512, 513, 4096)] == [704, 704, 1216, 4288]
    target, draft = open_pair(FIXTURES / "drafts/eagle3_trained", slots=cache_slots(512))
    decoder = make_decoder(target, draft, 8, cache_slots(512))
    ids, _ = greedy(decoder, PROMPT, 512 - len(PROMPT))
    assert ids == greedy(make_decoder(target, None, 0, cache_slots(512)), PROMPT, 512 - len(PROMPT))[0]


# ---- sampling


def sample_many(case, K, rounds, batch, **sampling):
    """`batch` sequences in one go: tokens (B, n) after PROMPT, how many of them are real (B,), and the target."""
    target, draft = open_pair(FIXTURES / "drafts" / case, slots=64)
    for module in (target, draft):
        module.allocate(batch, 64)
    width = target.config.hidden_size * len(target.aux_layer_ids)
    state = State(batch, K, width, 64, torch.float32, torch.device("cpu"), **sampling)
    prompt = torch.tensor(PROMPT).expand(batch, -1)
    following = torch.cat((prompt[:, 1:], prompt[:, :1]), dim=1)
    start, count = torch.zeros(batch, dtype=torch.int64), torch.full((batch,), len(PROMPT))
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        state.uniforms.uniform_(generator=generator)
        first, _ = speculate.prefill(target, draft, state, prompt, following, start, count)
        tokens, length = torch.zeros(batch, 64, dtype=torch.int64), torch.ones(batch, dtype=torch.int64)
        tokens[:, :1] = first
        for _ in range(rounds):
            state.uniforms.uniform_(generator=generator)
            record = speculate.speculate(target, draft, state, K)
            new = record[:, 1 : K + 1].clone() if K else record[:, :0]
            new = torch.cat((new, record[:, -1:]), 1).scatter(1, record[:, :1], record[:, -1:])
            tokens.scatter_(1, length[:, None] + torch.arange(K + 1), new)
            length += record[:, 0] + 1
    return tokens, length, target


def chi_square_of_conditional_laws(tokens, length, target, position, **sampling):
    """Given its prefix, each token's law is known exactly: its place in that law's running sum, at random within the
    token's own share, is uniform on [0, 1). Returns chi-square over 20 bins. Tokens that the draft knows come first,
    because a wrong test favours or neglects just these."""
    batch = tokens.size(0)
    target.allocate(batch, 64)
    ids = torch.cat((torch.tensor(PROMPT).expand(batch, -1), tokens[:, :position]), dim=1)
    with torch.inference_mode():
        x, _ = target(ids, torch.arange(ids.size(1)).expand(batch, -1))
        state = State(1, 0, 0, 64, torch.float32, torch.device("cpu"), **sampling)
        probs = state.law(target.logits(x[:, -1]))
    real = length > position
    order = (probs[real] + KNOWN).argsort(descending=True)
    ranked = probs[real].double().gather(1, order)
    rank = (order == tokens[real, position, None]).int().argmax(-1, keepdim=True)
    share = ranked.gather(1, rank)
    assert (share > 0).all(), "a token outside the target's law was emitted"
    below = ranked.cumsum(-1).gather(1, rank) - share
    place = below + share * torch.rand(share.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    counts = (place * 20).long().clamp(max=19).flatten().bincount(minlength=20).double()
    wanted = real.sum() / 20
    return ((counts - wanted) ** 2 / wanted).sum().item()


# 1 for the 64 ids in eagle3_trained's draft vocabulary, (V,).
KNOWN = load_file(FIXTURES / "drafts/eagle3_trained/model.safetensors")["t2d"].float()
LIMIT = 50.0  # chi-square with 19 degrees of freedom exceeds this once in 7000 times
SAMPLING = [
    ("eagle3_trained", {"temperature": 1.0}),  # this draft knows 64 of 320 tokens
    ("eagle3_trained", {"temperature": 0.6}),
    ("eagle3_trained", {"temperature": 1.3, "top_k": 8}),
    ("eagle3_trained", {"temperature": 1.0, "top_p": 0.7}),
    ("eagle3_trained", {"temperature": 0.9, "top_k": 20, "top_p": 0.8}),
    ("eagle3_full_vocab", {"temperature": 0.9, "top_k": 20, "top_p": 0.8}),
    ("eagle3_full_vocab", {"temperature": 1.0}),
]


@pytest.mark.parametrize("K", [1, 3])  # 1: the token after a rejection is drawn right after the only acceptance test
@pytest.mark.parametrize(("case", "sampling"), SAMPLING, ids=str)
def test_sampled_tokens_follow_the_targets_law_after_several_rounds(case, sampling, K):
    tokens, length, target = sample_many(case, K, rounds=4, batch=2000, **sampling)
    assert 5 < length.float().mean() < 1 + 4 * (K + 1)  # some drafts are accepted and some are not
    for position in range(5):
        assert chi_square_of_conditional_laws(tokens, length, target, position, **sampling) < LIMIT


def test_the_chi_square_notices_a_wrong_residual(monkeypatch):
    """The check can fail: after a rejection the plain target's law instead of the residual."""

    def careless(draft_tokens, draft_probs, target_probs, u):
        n, _ = verify_chain(draft_tokens, draft_probs, target_probs, u)
        return n, target_probs.gather(1, n[:, None, None].expand(-1, 1, target_probs.size(-1))).squeeze(1)

    monkeypatch.setattr(speculate, "verify_chain", careless)
    tokens, length, target = sample_many("eagle3_trained", 3, rounds=2, batch=2000, temperature=1.0)
    assert max(chi_square_of_conditional_laws(tokens, length, target, i, temperature=1.0) for i in (1, 2)) > 2 * LIMIT


def test_plain_sampling_follows_the_law_too():
    tokens, length, target = sample_many("eagle3_trained", 0, rounds=3, batch=2000, temperature=0.8)
    for position in range(4):
        assert chi_square_of_conditional_laws(tokens, length, target, position, temperature=0.8) < LIMIT


def test_the_seed_restarts_with_every_prompt_and_matters():
    target, draft = open_pair(FIXTURES / "drafts/eagle3_trained")
    decoder = make_decoder(target, draft, 3, temperature=1.0, seed=5)
    first = greedy(decoder, PROMPT, 30)
    greedy(decoder, PROMPT[:5], 12)
    assert greedy(decoder, PROMPT, 30) == first
    assert greedy(make_decoder(target, draft, 3, temperature=1.0, seed=6), PROMPT, 30) != first


# ---- one graph


def test_two_calls_of_the_same_code_do_not_share_what_was_compiled():
    """torch keeps it by code object, and nothing is checked when it runs."""

    def double(x):
        return compile_call(lambda: 2 * x, is_cuda=False)

    one, five = double(torch.ones(3)), double(torch.full((3,), 5.0))
    assert one().tolist() == [2.0] * 3
    assert five().tolist() == [10.0] * 3


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 50, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_one_graph_without_breaks_or_recompiles_that_drafts_and_decodes_as_eager_does(sampling):
    """fullgraph=True raises at a graph break; graphs are counted over prompts of all lengths, and proposals compared:
    with Inductor's inplace_buffers the third drafted token was wrong while the text stayed right."""
    torch._dynamo.reset()
    pair = partial(open_pair, FIXTURES / "drafts/eagle3_trained", slots=2240)
    compiled = make_decoder(*pair(), 3, 2240, compiled=True, **sampling)
    eager = make_decoder(*pair(), 3, 2240, **sampling)
    arms = (False,) if sampling else (False, True)
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled.warm_up(plain_too=not sampling)
    warm = {name: dict(counter) for name, counter in counters.items()}
    assert warm["stats"]["unique_graphs"] == 1 + len(arms)  # prefill, round, plain step
    for length in (1, 7, 60, 300, 1000):
        prompt = [(7 * i + 3) % 300 for i in range(length)]
        for plain in arms:
            assert greedy(compiled, prompt, 24, plain) == greedy(eager, prompt, 24, plain)
    assert {name: dict(counter) for name, counter in counters.items() if counter} == {
        k: v for k, v in warm.items() if v
    }
    assert not counters["graph_break"]


@pytest.mark.gpu
@pytest.mark.parametrize("K", [1, 3, 5])
def test_on_cuda_a_round_is_one_replayed_graph_and_drafts_as_eager_does(K):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    decoders = []
    for compiled in (True, False):
        target, draft = open_pair(FIXTURES / "drafts/eagle3_trained")
        decoders.append(make_decoder(target.cuda(), draft.cuda(), K, compiled=compiled))
    decoders[0].warm_up(plain_too=False)
    for prompt in (PROMPT, PROMPT[:1]):
        compiled, eager = (greedy(decoder, prompt, 40) for decoder in decoders)
        assert compiled == eager
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


PROCESS = """
import sys
sys.path[:0] = ["tests", "."]
import torch
from test_speculate import FIXTURES, greedy, make_decoder, open_pair
import speculate
length, budget = int(sys.argv[1]), int(sys.argv[2])
slots = speculate.cache_slots(length + budget)
decoder = make_decoder(*open_pair(FIXTURES / "drafts/eagle3_trained", slots=slots), 3, slots, compiled=True)
decoder.warm_up(plain_too=False)
greedy(decoder, [i % 300 for i in range(length)], budget)
counters = torch._dynamo.utils.counters
print(slots, counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


def test_a_second_process_with_another_prompt_and_budget_compiles_nothing_new():
    def run(*arguments):
        command = [sys.executable, "-c", PROCESS, *arguments]
        done = subprocess.run(command, cwd=FIXTURES.parents[1], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [int(number) for number in done.stdout.split()]

    slots, hits, misses = run("1000", "40")
    assert (slots, hits + misses) == (2240, 2)
    assert run("1100", "60") == [2240, 2, 0]
