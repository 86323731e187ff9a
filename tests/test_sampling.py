"""The decisions, against laws computed by hand and by counting."""

import itertools

import pytest
import torch

from sampling import draw, law, verify_chain, verify_greedy


def by_hand(logits, temperature, top_k=None, top_p=None):
    """One row, in fp64, token by token."""
    logits = logits.double() / temperature
    ranked = sorted(range(logits.numel()), key=lambda i: (-logits[i].item(), i))[:top_k]
    weights = {i: (logits[i] - logits.max()).exp().item() for i in ranked}
    total, reached, kept = sum(weights.values()), 0.0, {}
    for i in ranked:
        if top_p is None or reached < top_p * total or not kept:
            kept[i] = weights[i]
        reached += weights[i]
    out = torch.zeros_like(logits)
    for i, weight in kept.items():
        out[i] = weight / sum(kept.values())
    return out.float()


def tensor(value):
    return None if value is None else torch.tensor(value)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (1, None), (7, None), (None, 0.6), (9, 0.5), (100, 1.0)])
def test_law_is_temperature_then_top_k_then_top_p(temperature, top_k, top_p):
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 40)
    probs = law(logits, torch.tensor(temperature), tensor(top_k), tensor(top_p))
    wanted = torch.stack([by_hand(row, temperature, top_k, top_p) for row in logits.view(-1, 40)]).view_as(probs)
    torch.testing.assert_close(probs, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1.0, 1e6, 1e30])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(None, None), (1, 1e-30), (1, None), (None, 1e-30), (None, 1.0), (10**9, 0.5)]
)
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4, 1e30])
def test_no_legal_setting_gives_nan_or_masks_everything(temperature, top_k, top_p, scale):
    torch.manual_seed(0)
    probs = law(torch.randn(8, 50) * scale, torch.tensor(temperature), tensor(top_k), tensor(top_p))
    assert probs.isfinite().all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_law_of_16_bit_logits_is_fp32(dtype):
    logits, temperature = torch.randn(4, 50).to(dtype), torch.tensor(0.7)
    assert torch.equal(law(logits, temperature), law(logits.float(), temperature))


def test_ties_keep_exactly_k():
    assert law(torch.zeros(1, 10), torch.tensor(1.0), torch.tensor(3)).nonzero()[:, 1].tolist() == [0, 1, 2]


def test_draw_follows_the_law_and_never_draws_the_impossible():
    torch.manual_seed(0)
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    u = torch.rand(200_000)
    counts = draw(probs.expand(200_000, -1), u).bincount(minlength=6) / 200_000
    assert (counts - probs).abs().max() < 5e-3
    edges = torch.tensor([0.0, 1 - 2**-24])  # what torch.rand can give at most
    big = law(torch.randn(500, 50_000), torch.tensor(1.0), torch.tensor(20))
    for u in edges:
        ids = draw(big, u.expand(500))
        assert (big.gather(1, ids[:, None]) > 0).all()
    assert draw(probs.expand(2, -1), edges).tolist() == [1, 4]


def test_greedy_verification_is_the_chain_on_one_hot_laws():
    torch.manual_seed(0)
    V, K = 3, 4
    drafts, best = torch.randint(V, (500, K)), torch.randint(V, (500, K + 1))
    hot = lambda ids: torch.nn.functional.one_hot(ids, V).float()  # noqa: E731
    n, probs = verify_chain(drafts, hot(drafts), hot(best), torch.rand(500, K))
    n_greedy, token = verify_greedy(drafts, best)
    assert torch.equal(n, n_greedy)
    assert torch.equal(probs.argmax(-1, keepdim=True), token)
    assert n.unique().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["alike", "reduced vocabulary", "one-hot", "equal", "disjoint"])
def test_emitted_tokens_follow_the_target(kind):
    """The joint law of the first two emitted tokens, whatever the draft: 5 x 5 cells, exactly known."""
    torch.manual_seed(0)
    N, K, V = 400_000, 3, 5
    target = law(torch.randn(K + 1, V) * 1.5, torch.tensor(1.0))
    draft = law(target[:K].log() + torch.randn(K, V), torch.tensor(1.0))
    if kind == "reduced vocabulary":
        draft = draft * torch.tensor([1.0, 0, 1, 1, 0])
        draft = draft / draft.sum(-1, keepdim=True)
    elif kind == "one-hot":
        draft = torch.nn.functional.one_hot(draft.argmax(-1), V).float()
    elif kind == "equal":
        draft = target[:K].clone()
    elif kind == "disjoint":
        target[:, :2] = 0
        target, draft = target / target.sum(-1, keepdim=True), torch.tensor([0.5, 0.5, 0, 0, 0]).expand(K, V)
    many = lambda probs: probs.expand(N, *probs.shape)  # noqa: E731
    drafts = draw(many(draft), torch.rand(N, K))
    n, next_probs = verify_chain(drafts, many(draft), many(target), torch.rand(N, K))
    token = draw(next_probs, torch.rand(N))
    emitted = torch.cat((drafts, token[:, None]), 1).scatter(1, n[:, None], token[:, None])
    first = emitted[:, 0].bincount(minlength=V) / N
    assert (first - target[0]).abs().max() < 4e-3
    two = emitted[n >= 1]  # position 1 exists where position 0 was accepted; the law there does not depend on it
    if len(two):
        assert (two[:, 1].bincount(minlength=V) / len(two) - target[1]).abs().max() < 4 / len(two) ** 0.5
    accepted = torch.minimum(target[0], draft[0]).sum()  # the best any lossless test can do
    assert ((n >= 1).float().mean() - accepted).abs() < 4e-3


def test_next_law_is_normalised_also_where_rounding_leaves_no_residual():
    probs = law(torch.randn(1000, 1, 50), torch.tensor(1.0))
    for u in (0.0, 1 - 2**-24, 1.0):  # 1.0 can't be drawn: it forces the rejection
        n, next_probs = verify_chain(
            draw(probs, torch.rand(1000, 1)), probs, probs.repeat(1, 2, 1), torch.full((1000, 1), u)
        )
        torch.testing.assert_close(next_probs.sum(-1), torch.ones(1000))
        assert n.unique().tolist() == ([0] if u == 1.0 else [1])


def test_every_combination_of_acceptance_is_a_prefix():
    """A later agreement after a disagreement counts nothing."""
    for hits in itertools.product((0, 1), repeat=3):
        drafts = torch.tensor([[1, 1, 1]])
        best = torch.tensor([[1 if hit else 0 for hit in hits] + [2]])
        n, _ = verify_greedy(drafts, best)
        assert n.item() == next((i for i, hit in enumerate(hits) if not hit), 3)
