"""The round: lossless when greedy, the target's law when sampling, one graph, and caches without traces.

Acceptance and proposals are compared as well as tokens, because the target hides a broken draft."""

import json

import pytest
import torch
from conftest import FIXTURES, open_pair

from speculate import Decoder, State, build_steps

RUNS = json.loads((FIXTURES / "drafts/eagle3_trained/expected_runs.json").read_text())["runs"]


def make_decoder(target, draft, K, slots=512, compiled=False, seed=0, **sampling):
    width = len(target.aux_layer_ids) * target.config.hidden_size
    state = State(1, K, width, slots, torch.float32, torch.device("cpu"), **sampling)
    return Decoder(build_steps(target, draft, state, compiled), state, seed)


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
