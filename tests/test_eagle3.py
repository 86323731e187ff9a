"""The draft against what speculators computes (fixtures/drafts): logits and states, since text hides a broken draft."""

from dataclasses import replace

import pytest
import torch
from conftest import FIXTURES, expected, open_pair

from speculators_config import ConfigError

DRAFTS = sorted(path.parent.name for path in (FIXTURES / "drafts").glob("*/expected.safetensors"))


def true_rows(draft, want):
    """Prefills the oracle's rows, token x_{i+1} with the feature of x_i at position i. Returns the states (1, T, D)."""
    T = want["input_ids"].size(1)
    return draft(want["input_ids"], draft.fuse(want["aux"]), torch.arange(T)[None])


def close(actual, wanted):
    torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", DRAFTS)
@torch.inference_mode()
def test_fused_feature_and_training_steps_equal_speculators(case):
    """logits_step s: every row drafts a chain of its own, on ground-truth tokens (training-time test, TTT).

    In training a sliding window is anchored at the chain's root, at inference it moves: widened by s it is the same."""
    want = expected(FIXTURES / "drafts" / case)
    _, draft = open_pair(FIXTURES / "drafts" / case)
    close(draft.fuse(want["aux"]), want["fc_out"])
    x = true_rows(draft, want)
    close(draft.logits(x), want["logits_step0"])
    close(draft.feedback(x), want["state_step0"])
    T, windows = x.size(1), draft.positions.config.windows
    tokens = torch.cat((want["input_ids"], torch.zeros(1, 2, dtype=torch.int64)), dim=1)
    for root in range(T):
        widen(draft, windows, 0)
        state = draft.feedback(true_rows(draft, want)[:, root : root + 1])
        for step in (1, 2):
            widen(draft, windows, step)
            x = draft(tokens[:, root + step : root + step + 1], state, torch.tensor([[root + step]]))
            state = draft.feedback(x)
            close(draft.logits(x), want[f"logits_step{step}"][:, root : root + 1])
            close(state, want[f"state_step{step}"][:, root : root + 1])


def widen(draft, windows, by):
    draft.positions.config = replace(
        draft.positions.config, windows=tuple(None if window is None else window + by for window in windows)
    )


@pytest.mark.parametrize("case", DRAFTS)
@torch.inference_mode()
def test_proposed_chain_equals_speculators(case):
    want = expected(FIXTURES / "drafts" / case)
    _, draft = open_pair(FIXTURES / "drafts" / case)
    logits, drafts = [], []

    def pick(row, step):
        logits.append(row[0])
        drafts.append(row.argmax(-1))
        return drafts[-1], None

    T = want["input_ids"].size(1)
    rows = torch.arange(T)[None]
    tokens, _ = draft.propose(want["input_ids"], want["aux"], rows, torch.tensor([T - 1]), 4, pick)
    assert tokens[0].tolist() == want["chain_tokens"].tolist()
    assert torch.cat(drafts).tolist() == want["chain_draft_ids"].tolist()
    close(torch.stack(logits), want["chain_logits"])


@torch.inference_mode()
def test_aux_states_come_from_the_target_as_the_oracle_has_them():
    """The taps, end to end: ids 0 and N (embeddings; the last layer's output, un-normed) included."""
    for case in ("eagle3_nbr_true", "eagle3_four_aux"):
        want = expected(FIXTURES / "drafts" / case)
        target, _ = open_pair(FIXTURES / "drafts" / case)
        ids = want["target_input_ids"][:, :-1]
        close(target(ids, torch.arange(ids.size(1))[None])[1], want["aux"])


@torch.inference_mode()
def test_padding_rows_of_the_first_pass_change_nothing():
    """A round's first pass has K + 1 rows, of which only the committed ones are real."""
    want = expected(FIXTURES / "drafts" / "eagle3_nbr_true")
    _, draft = open_pair(FIXTURES / "drafts" / "eagle3_nbr_true")
    greedy = lambda row, step: (row.argmax(-1), None)  # noqa: E731
    T = want["input_ids"].size(1)
    tokens = torch.cat((want["input_ids"], torch.full((1, 3), 5)), dim=1)
    aux = torch.cat((want["aux"], torch.full_like(want["aux"][:, :3], 9.0)), dim=1)
    drafted, _ = draft.propose(tokens, aux, torch.arange(T + 3)[None], torch.tensor([T - 1]), 4, greedy)
    assert drafted[0].tolist() == want["chain_tokens"].tolist()


def test_embedding_and_head_are_the_checkpoints_or_the_targets():
    for case, own in (("eagle3_no_embed", False), ("eagle3_own_embed", True)):
        target, draft = open_pair(FIXTURES / "drafts" / case)
        assert (draft.embed is target.embed) is not own
        assert draft.head is not target.head


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_logits_in_16_bits_are_fp32_and_near_speculators(dtype):
    want = expected(FIXTURES / "drafts" / "eagle3_nbr_true")
    _, draft = open_pair(FIXTURES / "drafts" / "eagle3_nbr_true")
    draft.to(dtype).allocate(1, 512)
    logits = draft.logits(true_rows(draft, want | {"aux": want["aux"].to(dtype)}))
    assert logits.dtype == torch.float32
    assert (logits - want["logits_step0"]).square().mean().sqrt() < 0.02 * want["logits_step0"].std()


# ---- the vocabulary map: 64 draft ids, offsets into 320 target ids


def remapped(ids, known=None):
    """A draft whose ids stand for these target ids, settled; known: the ids that its t2d marks, if it has one."""
    target, draft = open_pair(FIXTURES / "drafts" / "eagle3_nbr_true")
    draft.d2t = torch.tensor(ids) - torch.arange(64)
    draft.t2d = None if known is None else torch.zeros(320, dtype=torch.bool).index_fill(0, torch.tensor(known), True)
    draft.settle(target.embed, target.head)
    return draft


EVEN = list(range(0, 128, 2))


@pytest.mark.parametrize(
    ("ids", "known", "span"),
    [
        ([*EVEN[:-1], 320], None, "0..320"),
        ([-1, *EVEN[1:]], None, "-1..126"),
        ([i + even for i, even in enumerate(EVEN)], EVEN, "0..189"),  # absolute ids where offsets should be
        ([300 + i for i in range(64)], None, "300..363"),
        ([2, *EVEN[1:]], None, "2..126"),  # 2 twice
        (EVEN, [*EVEN[:-1], 127], "0..126"),
        (EVEN, [*EVEN, 127], "0..126"),
    ],
    ids=["past the end", "negative", "absolute", "all past", "twice", "t2d marks another", "t2d marks one more"],
)
def test_a_map_that_leads_astray_is_refused(ids, known, span):
    with pytest.raises(ConfigError) as refusal:
        remapped(ids, known)
    wrong = f"its offsets lead to ids {span}, against t2d, the target's vocabulary or each other"
    message = f"{FIXTURES}/drafts/eagle3_nbr_true: d2t: {wrong}; the file may hold absolute ids"
    assert str(refusal.value) == message


@pytest.mark.parametrize("known", [False, True])
def test_a_sound_map_is_applied_and_the_identity_dropped(known):
    draft = remapped(EVEN, EVEN if known else None)
    assert draft.target_ids(torch.tensor([[0, 5], [63, 1]])).tolist() == [[0, 10], [126, 2]]
    assert draft.t2d is None
    draft = remapped(range(64), range(64) if known else None)
    assert draft.d2t is None
    assert draft.target_ids(torch.tensor([0, 5, 63])).tolist() == [0, 5, 63]


@pytest.mark.parametrize("ids", [EVEN, range(64)], ids=["mapped", "identity"])
@pytest.mark.parametrize("size", [320, 328])  # the target's vocabulary, padded or not
def test_probabilities_are_spread_over_the_targets_vocabulary(ids, size):
    draft = remapped(ids)
    draft.config = replace(draft.config, target_vocab_size=size)
    probs = torch.rand(2, 3, 64)
    spread = draft.spread(probs)
    assert spread.shape == (2, 3, size)
    assert torch.equal(spread[..., list(ids)], probs)
    assert spread.count_nonzero() == probs.count_nonzero()


@torch.inference_mode()
def test_a_target_id_past_the_drafts_embedding_reads_its_last_row():
    """Targets pad their vocabulary: 328 here, where the draft's own embedding has 320 rows."""
    want = expected(FIXTURES / "drafts" / "eagle3_own_embed")
    _, draft = open_pair(FIXTURES / "drafts" / "eagle3_own_embed")
    ids = want["input_ids"].clone()
    ids[0, -2:] = torch.tensor([320, 327])
    padded = true_rows(draft, want | {"input_ids": ids})
    assert torch.equal(padded, true_rows(draft, want | {"input_ids": ids.clamp(max=319)}))
    assert not torch.equal(padded, true_rows(draft, want))
