"""The numbers: cli.md's definitions on rounds made by hand and on whole runs of the reference, and what is said."""

import json

import pytest
from conftest import FIXTURES

from metrics import MANY_ROUNDS, Answer, acceptance, describe, describe_baseline, doubt, result, totals
from speculate import Round

RUNS = json.loads((FIXTURES / "drafts/eagle3_trained/expected_runs.json").read_text())["runs"]


def answer(*accepted: int, K: int = 3, cut: int = 0, seconds: float = 1.0) -> Answer:
    """One with these numbers accepted; `cut` tokens, past a stop or the budget, are missing from the last round."""
    made, rounds = Answer(prompt_tokens=5, token_ids=[100], decode_seconds=seconds), []
    for i, n in enumerate(accepted):
        emitted = list(range(n + 1))
        if i == len(accepted) - 1 and cut:
            emitted = emitted[:-cut]
        rounds.append(Round([9] * K, min(n, len(emitted)), emitted))
        made.token_ids += emitted
    made.rounds = rounds
    return made


def test_acceptance_of_one_answer():
    """Five rounds of K = 3 that accept 0, 1, 3, 3 and 1."""
    assert acceptance([answer(0, 1, 3, 3, 1)], 3) == {
        "rounds": 5,
        "proposed": 15,
        "accepted": 8,
        "emitted": 14,
        "acceptance_length": 1 + 8 / 5,
        "acceptance_rate": 8 / 15,
        "acceptance_per_position": [4 / 5, 2 / 5, 2 / 5],
        "conditional_acceptance_per_position": [4 / 5, 2 / 4, 2 / 2],
    }


def test_a_position_that_no_round_reached_has_no_conditional_acceptance():
    numbers = acceptance([answer(0, 1, 1)], 3)
    assert numbers["acceptance_per_position"] == [2 / 3, 0, 0]
    assert numbers["conditional_acceptance_per_position"] == [2 / 3, 0, None]


@pytest.mark.parametrize("K", [0, 1, 3])
def test_without_rounds(K):
    """One token, from the prefill: nothing proposed; with K = 0 also after many plain steps."""
    numbers = acceptance([Answer(5, token_ids=[1] * (1 if K else 7))], K)
    assert numbers == {
        "rounds": 0,
        "proposed": 0,
        "accepted": 0,
        "emitted": 1 if K else 7,
        "acceptance_length": 0,
        "acceptance_rate": 0,
        "acceptance_per_position": [0] * K,
        "conditional_acceptance_per_position": [None] * K,
    }


@pytest.mark.parametrize(("cut", "accepted"), [(0, 3), (1, 3), (2, 2), (3, 1)])
def test_cut_tokens_count_nowhere(cut, accepted):
    """The last round drafted three good tokens and one more followed; what is cut was neither emitted nor accepted."""
    numbers = acceptance([answer(1, 3, cut=cut)], 3)
    assert (numbers["accepted"], numbers["emitted"], numbers["proposed"]) == (1 + accepted, 7 - cut, 6)


@pytest.mark.parametrize("run", RUNS, ids=range(len(RUNS)))
def test_whole_runs_have_the_references_numbers(run):
    K = run["num_speculative_tokens"]
    made = Answer(len(run["prompt_ids"]), run["token_ids"], rounds=[Round(**done) for done in run["trace"]])
    numbers = result(made, K, trace=True)
    shared = run.keys() & numbers.keys()
    assert {key: numbers[key] for key in shared} == {key: run[key] for key in shared}
    assert shared >= {"rounds", "proposed", "accepted", "emitted", "acceptance_length", "acceptance_rate", "trace"}
    assert numbers["emitted"] == 1 + sum(len(done["emitted"]) for done in run["trace"])  # the first: the prefill's


def test_totals_are_ratios_of_sums():
    """A long answer that goes well and a short one that doesn't: means of ratios would give 2.5 and 0.5."""
    well, badly = answer(3, 3, 3, 3, seconds=2.0), answer(0, seconds=1.0)
    numbers = totals([well, badly], 3)
    assert (numbers["rounds"], numbers["accepted"], numbers["emitted"]) == (5, 12, 19)
    assert numbers["acceptance_length"] == 1 + 12 / 5
    assert numbers["acceptance_rate"] == 12 / 15
    assert numbers["acceptance_per_position"] == [4 / 5] * 3
    assert numbers["tokens_per_second"] == (16 + 1) / 3.0  # the first token of each comes from its prefill
    assert "speedup" not in numbers


def test_speedup_is_a_ratio_of_sums_too():
    answers = [answer(3, 3, seconds=1.0), answer(0, seconds=1.0)]
    for made, seconds in zip(answers, (4.0, 1.0), strict=True):
        made.baseline = {"token_ids": made.token_ids, "decode_seconds": seconds}
    assert totals(answers, 3)["speedup"] == pytest.approx((9 / 2) / (9 / 5))


@pytest.mark.parametrize("answers", [[], [Answer(5)], [Answer(5, token_ids=[1])]])
def test_totals_of_what_was_interrupted(answers):
    numbers = totals(answers, 3)
    assert (numbers["rounds"], numbers["tokens_per_second"]) == (0, 0)
    assert describe(numbers) == f"{numbers['emitted']} tokens, 0.0 tok/s"
    assert totals([answer(3, 3), *answers], 3)["tokens_per_second"] == 8  # no answer takes from the others


def test_a_result_holds_what_was_asked_for():
    made = answer(1, 2)
    made.text, made.finish_reason, made.prefill_seconds = "text", "length", 0.5
    plain = result(made, 3, trace=False)
    assert plain == {
        "prompt_tokens": 5,
        "token_ids": made.token_ids,
        "text": "text",
        "finish_reason": "length",
        "prefill_seconds": 0.5,
        "decode_seconds": 1.0,
        "tokens_per_second": 5.0,
        **acceptance([made], 3),
    }
    traced = result(made, 3, trace=True)
    assert traced["trace"][0] == {"proposed": [9, 9, 9], "accepted": 1, "emitted": [0, 1]}
    made.baseline = {"token_ids": [], "first_divergence": None}
    assert result(made, 3, trace=False) == plain | {"baseline": made.baseline}
    json.dumps(traced)


def test_lines_for_people():
    made = answer(1, 3, seconds=0.5)
    assert describe(totals([made], 3)) == (
        "7 tokens, 12.0 tok/s; 2 rounds, acceptance length 3.00, accepted per position 1.00 0.50 0.50"
    )
    made.baseline = {"token_ids": made.token_ids, "decode_seconds": 1.0}
    assert describe(totals([made], 3)).endswith("; 2.00 x plain decoding")
    same = {"tokens_per_second": 6.0, "first_divergence": None}
    assert describe_baseline(same) == "plain decoding: 6.0 tok/s, the same tokens"
    parted = same | {"first_divergence": {"index": 4, "margin": 0.00123}}
    assert describe_baseline(parted) == (
        "plain decoding: 6.0 tok/s, other tokens from 4 on, where the target's two best logits are 0.0012 apart"
    )


@pytest.mark.parametrize(
    ("accepted", "words"),
    [
        ([0] * MANY_ROUNDS, "none of 60 drafted tokens was accepted: was this draft trained on this target?"),
        ([0] * (MANY_ROUNDS - 1), None),  # too few to tell
        ([0] * (MANY_ROUNDS - 1) + [1], None),
        ([3] * MANY_ROUNDS, "60 of 60 drafted tokens were accepted, which is rare: does the text repeat itself?"),
        ([3] * (MANY_ROUNDS - 1), None),
        ([3] * (MANY_ROUNDS - 2) + [2, 0], None),
        ([], None),
    ],
)
def test_both_ends_of_the_scale_are_doubted(accepted, words):
    assert doubt(totals([answer(*accepted)], 3)) == words


def test_a_cut_at_the_budget_hides_no_perfect_acceptance():
    numbers = totals([answer(*[3] * MANY_ROUNDS, cut=3)], 3)
    assert doubt(numbers) == "58 of 60 drafted tokens were accepted, which is rare: does the text repeat itself?"


def test_plain_decoding_is_not_doubted():
    assert doubt(totals([Answer(5, token_ids=[1] * 50)], 0)) is None
