"""train/: the unrolled forward against speculators', its gradients, the conversations' rules, stages that go on."""

import json
import random
import re
import shutil

import pytest
import torch
from conftest import FIXTURES, expected, open_pair
from safetensors.torch import load_file, save_file

import generate as command
import quantize
import train.eagle3 as trainer
from tokenizer import load_tokenizer
from train import conversations
from train.conversations import Headers, Row, loop_start
from train.shards import ANSWER, GREEDY, QUESTION, TEMPLATE
from train.unroll import Teacher, Unrolled, loss_of, rounds, unroll

TARGET = FIXTURES / "targets/llama_gqa"
UNROLLED = sorted(
    path.parent.name
    for path in (FIXTURES / "drafts").glob("eagle3_*/expected.safetensors")
    if "logits_step0" in expected(path.parent)
)


# ---- the unrolled forward --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", UNROLLED)
def test_each_step_is_speculators(case):
    _, draft = open_pair(FIXTURES / "drafts" / case)
    golden = expected(FIXTURES / "drafts" / case)
    tokens, steps = golden["input_ids"], 3
    draft.positions = Unrolled(draft.config.layer, tokens.size(1), steps)
    with torch.no_grad():
        for step, x in enumerate(unroll(draft, tokens, golden["aux"], steps, torch.float32)):
            torch.testing.assert_close(draft.feedback(x), golden[f"state_step{step}"], rtol=0, atol=1e-4)
            torch.testing.assert_close(draft.logits(x), golden[f"logits_step{step}"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["eagle3_nbr_true", "eagle3_two_layers_mixed"])
def test_a_chain_is_the_same_whichever_others_are_left_out(case):
    _, draft = open_pair(FIXTURES / "drafts" / case)
    golden, roots = expected(FIXTURES / "drafts" / case), torch.tensor([0, 3, 4, 9, 13])
    tokens, aux = golden["input_ids"], golden["aux"]
    draft.positions = Unrolled(draft.config.layer, tokens.size(1), 3)
    with torch.no_grad():
        whole = list(unroll(draft, tokens, aux, 3, torch.float32))
        some = list(unroll(draft, tokens, aux, 3, torch.float32, roots))
    for all_chains, chains in zip(whole, some, strict=True):
        torch.testing.assert_close(chains, all_chains[:, roots], rtol=0, atol=1e-5)


def tiny_training(case, rows=3, length=24, steps=3):
    """Target, draft, teacher and data."""
    target, draft = open_pair(FIXTURES / "drafts" / case)
    draft.positions = Unrolled(draft.config.layer, length - 1, steps)
    torch.manual_seed(0)
    data = {
        "ids": torch.randint(300, (rows, length)),
        "kinds": torch.randint(4, (rows, length), dtype=torch.uint8),
        "aux": torch.randn(rows, length, draft.fc.in_features),
        "last": torch.randn(rows, length, draft.config.target_hidden_size),
    }
    return target, draft, Teacher(target.norm, target.head.weight[: draft.config.draft_vocab_size]), data


@pytest.mark.parametrize("case", ["eagle3_nbr_true", "eagle3_norm_output", "eagle3_two_layers_mixed"])
def test_gradients_match_numerical_ones(case):
    _, draft, teacher, data = tiny_training(case)
    weights = [weight for name, weight in draft.named_parameters() if not name.startswith("embed.")]
    for weight in weights:
        weight.requires_grad_(True)

    def loss() -> torch.Tensor:
        return loss_of(draft, teacher, data, 3, 0.8, 1.0, torch.float32)

    loss().backward()
    for weight in weights:
        along = torch.randn_like(weight)
        step = 3e-3 * max(weight.norm().item(), 1.0) / along.norm().item()
        with torch.no_grad():
            up = loss_at(loss, weight, step * along)
            down = loss_at(loss, weight, -step * along)
        numerical = (up - down) / (2 * step)
        assert (weight.grad * along).sum().item() == pytest.approx(numerical, rel=0.05, abs=3e-3)


def loss_at(loss, weight, change) -> float:
    weight += change
    value = loss().item()
    weight -= change
    return value


def test_steps_are_weighted_and_template_tokens_are_not_guessed():
    _, draft, teacher, data = tiny_training("eagle3_nbr_true")
    with torch.no_grad():
        one, two, three = (loss_of(draft, teacher, data, n, 0.5, 1.0, torch.float32) for n in (1, 2, 3))
        assert one > 0
        assert loss_of(draft, teacher, data, 3, 1.0, 1.0, torch.float32) - one == pytest.approx(
            ((two - one) / 0.5 + (three - two) / 0.25).item(), rel=1e-4
        )
        law_of_next = data["last"][:, :-1]
        wanted = data["kinds"][:, 1:] != TEMPLATE
        law_of_next[~wanted] += 1  # the laws of a template's tokens
        assert loss_of(draft, teacher, data, 1, 0.5, 1.0, torch.float32) == one
        law_of_next[wanted] += torch.arange(32)
        assert loss_of(draft, teacher, data, 1, 0.5, 1.0, torch.float32) != one


def test_a_share_of_the_chains_has_the_loss_of_those_chains():
    target, draft, teacher, data = tiny_training("eagle3_nbr_true")
    with torch.no_grad():
        torch.manual_seed(3)
        some = loss_of(draft, teacher, data, 2, 0.5, 0.4, torch.float32)
        torch.manual_seed(3)
        roots, by_hand = torch.randperm(23)[:10].sort().values, 0.0
        for step, x in enumerate(unroll(draft, data["ids"][:, 1:], data["aux"][:, :-1], 2, torch.float32)):
            terms = []
            for b, i in [(b, i) for b in range(3) for i in roots.tolist() if i + 2 + step < 24]:
                if data["kinds"][b, i + 2 + step] != TEMPLATE:
                    law = target.head(target.norm(data["last"][b, i + 1 + step]))[: draft.config.draft_vocab_size]
                    terms.append(-(law.softmax(-1) * draft.logits(x[b, i]).log_softmax(-1)).sum())
            by_hand += 0.5**step * torch.stack(terms).mean()
    assert some.item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_rounds_are_those_of_inference():
    """Over the golden runs of a trained draft: the same rounds, each with what it accepted."""
    folder = FIXTURES / "drafts/eagle3_trained"
    target, draft = open_pair(folder)
    draft.positions = Unrolled(draft.config.layer, 0, 0)
    for golden in json.loads((folder / "expected_runs.json").read_text())["runs"]:
        if golden.get("stop_ids"):
            continue
        ids, K = torch.tensor([golden["prompt_ids"] + golden["token_ids"]]), golden["num_speculative_tokens"]
        draft.positions = Unrolled(draft.config.layer, ids.size(1) - 1, K)
        kinds = torch.full_like(ids, GREEDY)
        kinds[:, : len(golden["prompt_ids"])] = TEMPLATE
        with torch.no_grad():
            _, aux = target(ids, torch.arange(ids.size(1))[None])
        ours = rounds(draft, {"ids": ids, "kinds": kinds, "aux": aux}, K, torch.float32)
        theirs = [entry["accepted"] for entry in golden["trace"]]
        assert len(theirs) > 3
        assert ours == theirs


# ---- conversations ---------------------------------------------------------------------------------------------------


HEADERS = Headers(opening=[1, 2], to_answer=[9, 3, 4], to_question=[8, 5, 6])


def row(temperature: float, question=(), unfinished=False) -> Row:
    made = Row(HEADERS)
    made.restart(random.Random(0), list(question), unfinished)
    made.answer_temperature = temperature
    return made


def test_turns_follow_each_other_and_each_token_knows_who_wrote_it():
    made = row(0.0)
    assert (made.temperature, made.ids, made.kinds) == (conversations.QUESTION_TEMPERATURE, [1, 2], [TEMPLATE] * 2)
    for drawn in (10, 11, 9, 77, 77, 20, 8, 77, 77, 30):  # 77: drawn while the template is given, so of no account
        made.take(drawn)
    assert made.ids == [1, 2, 10, 11, 9, 3, 4, 20, 8, 5, 6, 30]
    kinds = [TEMPLATE] * 2 + [QUESTION] * 3 + [TEMPLATE] * 2 + [GREEDY] * 2 + [TEMPLATE] * 2 + [QUESTION]
    assert made.kinds == kinds
    drawn_answer = row(0.7)
    for drawn in (9, 0, 0, 20):
        drawn_answer.take(drawn)
    assert (drawn_answer.kinds[-1], drawn_answer.temperature) == (ANSWER, 0.7)


def test_a_real_question_is_given_and_then_answered():
    made = row(0.0, question=[50, 51])
    for _ in range(5):
        made.take(77)
    made.take(20)
    assert made.ids == [1, 2, 50, 51, 9, 3, 4, 20]
    assert made.kinds == [TEMPLATE] * 7 + [GREEDY]


def test_a_question_that_is_unfinished_is_gone_on_with():
    made = row(0.0, question=[50, 51], unfinished=True)
    for drawn in (77, 77, 52, 9, 77, 77, 20):
        assert made.temperature == (conversations.QUESTION_TEMPERATURE if len(made.ids) < 6 else 0)
        made.take(drawn)
    assert made.ids == [1, 2, 50, 51, 52, 9, 3, 4, 20]
    assert made.kinds == [TEMPLATE] * 4 + [QUESTION] * 2 + [TEMPLATE] * 2 + [GREEDY]


def test_a_loop_is_cut_behind_its_first_time_and_the_turn_ends():
    made, lap = row(0.0), list(range(100, 100 + conversations.REPEATED))
    made.take(9), made.take(0), made.take(0)
    for drawn in lap * 4:
        made.take(drawn)
        if made.given:
            break
    begin = len(HEADERS.opening) + len(HEADERS.to_answer)
    assert made.ids[begin:][: len(lap)] == lap
    assert len(made.ids) < begin + 2 * len(lap)
    made.take(77)
    assert (made.ids[-1], made.kinds[-1], made.asking) == (8, TEMPLATE, True)
    assert loop_start(list(range(200)), 0) is None
    assert loop_start(lap + [1, 2] + lap, 30) is None  # said before this turn


def test_headers_are_the_templates():
    tokenizer = load_tokenizer(TARGET)
    headers = Headers.of(tokenizer)
    question, answer = (tokenizer.encode(text, bos=False) for text in ("one", "two"))
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    messages.append({"role": "user", "content": "one"})
    whole = headers.opening + question + headers.to_answer + answer + headers.to_question + question
    assert tokenizer.encode_chat(messages)[: len(whole)] == whole


# ---- the stages ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Shards of ten conversations."""
    monkeypatch.setattr(trainer, "SHARD_ROWS", 10)
    monkeypatch.setattr(trainer, "VALIDATION_ROWS", 10)


def run(tmp_path, *options):
    argv = ["--target", TARGET, "--out", tmp_path / "draft", "--length", 128, "--tokens", 1280, "--batch", 4]
    questions = tmp_path / "questions.txt"
    questions.write_text("one\ntwo\n")
    argv += ["--prompts", questions, "--draft_vocab", 64, "--rows", 5, "--device", "cpu", *options]
    return trainer.main(list(map(str, argv)))


def test_what_a_stage_leaves_is_enough_for_the_next(small, tmp_path, capsys):
    (tmp_path / "unfinished.txt").write_text("one...\n")
    for stage in ("generate", "extract", "train"):
        options = ["--epochs", "1,2", "--prompts", tmp_path / "unfinished.txt"]
        assert run(tmp_path, "--stage", stage, *options) == 0, capsys.readouterr().err
    assert run(tmp_path, "--stage", "export", "--target_name", "a/name") == 0  # what it is called matters here alone
    assert "acceptance length in generate.py" in capsys.readouterr().err
    draft = tmp_path / "draft"
    assert (draft / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert json.loads((draft / "config.json").read_text())["speculators_config"]["verifier"]["name_or_path"] == "a/name"
    assert "# EAGLE-3 draft for a/name\n" in (draft / "README.md").read_text()
    target = command.load_target(TARGET, command.read_target(TARGET)[0], (2, 4, 5), torch.device("cpu"), torch.float32)
    text, states = (load_file(tmp_path / f"draft.data/{name}-00001.safetensors") for name in ("text", "states"))
    target.allocate(10, 192)
    with torch.no_grad():
        x, aux = target(text["ids"].long(), torch.arange(128).expand(10, -1))
    torch.testing.assert_close(states["aux"], aux, rtol=0, atol=1e-4)
    torch.testing.assert_close(states["last"], x, rtol=0, atol=1e-4)
    tokenizer = load_tokenizer(TARGET)
    begun = [*Headers.of(tokenizer).opening, *tokenizer.encode("one", bos=False)]
    asked = [row for row in text["ids"].tolist() if row[: len(begun)] == begun]
    assert 0 < len(asked) < 10
    greedy = text["kinds"] == GREEDY
    best = target.logits(x).argmax(-1)
    assert greedy[:, 1:].any()
    assert torch.equal(best[:, :-1][greedy[:, 1:]], text["ids"].long()[:, 1:][greedy[:, 1:]])


def test_a_second_run_does_nothing_anew_and_other_data_is_refused(small, tmp_path, capsys):
    assert run(tmp_path, "--epochs", "1") == 0
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "draft.data").glob("*.safetensors")}
    assert len(files) == 4
    assert run(tmp_path, "--epochs", "1") == 0
    assert files == {path: path.stat().st_mtime_ns for path in files}
    capsys.readouterr()
    assert run(tmp_path, "--length", "96") == 2
    assert "manifest.json: length: this data was made with 128, now it is 96" in capsys.readouterr().err


def test_a_run_that_was_broken_off_ends_where_an_unbroken_one_does(small, tmp_path, monkeypatch):
    assert run(tmp_path, "--stage", "generate") == 0
    assert run(tmp_path, "--stage", "extract") == 0
    options = ["--stage", "train", "--data", tmp_path / "draft.data", "--epochs", "1,2,1"]
    assert run(tmp_path, *options) == 0
    save, saved = torch.save, []

    def interrupt(*args):
        save(*args)
        saved.append(args)
        if len(saved) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupt)
    again = [*options, "--out", tmp_path / "again"]
    assert run(tmp_path, *again) == 130
    assert run(tmp_path, *again) == 0
    ours, theirs = (
        torch.load(tmp_path / "draft.data" / name / "checkpoint.pt", weights_only=True) for name in ("again", "draft")
    )
    assert ours["done"] == theirs["done"] == 6
    assert all(torch.equal(ours["draft"][name], weight) for name, weight in theirs["draft"].items())


def test_ten_conversations_are_learnt_by_heart(small, tmp_path, monkeypatch, capsys):
    """And the folder that is written drafts them through generate.py as well as the trainer thought."""
    shutil.copytree(TARGET, tmp_path / "target")
    weights = load_file(TARGET / "model.safetensors")
    weights["lm_head.weight"] *= 8  # a target of random weights is sure of nothing, and ties are not learnt
    save_file(weights, tmp_path / "target/model.safetensors")
    options = ["--target", tmp_path / "target", "--length", 96, "--draft_vocab", 320, "--rows", 10]
    options += ["--epochs", ",".join(["1"] * 60 + ["3"] * 60), "--lr", "3e-2", "--loss_share", "1"]
    assert run(tmp_path, "--stage", "generate", *options) == run(tmp_path, "--stage", "extract", *options) == 0
    for name in ("text", "states"):  # validated on what it learns, for once
        shutil.copy(
            tmp_path / f"draft.data/{name}-00001.safetensors", tmp_path / f"draft.data/{name}-00000.safetensors"
        )
    assert run(tmp_path, "--stage", "train", *options) == 0
    log = [json.loads(line) for line in (tmp_path / "draft.data/draft/log.jsonl").read_text().splitlines()]
    assert log[-1]["per_position"][0] > 0.9
    capsys.readouterr()
    assert run(tmp_path, "--stage", "export", *options) == 0
    reached, said = map(float, re.findall(r"(?:generate.py|validation) ([\d.]+)", capsys.readouterr().err))
    assert reached == pytest.approx(said, rel=0.1)


# ---- the door --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs", "1,0"], "--epochs: 1,0: a step count is below 1 or above 8; give each between 1 and 8"),
        (["--epochs", "one"], "--epochs: 'one' is not a list of ids like 1,2,3; see --help"),
        (["--tokens", 0], "--tokens: 0 is not at least 1; see --help"),
        (["--stage", "train"], "states-00001.safetensors: missing; run the stages generate and extract first"),
        (["--prompts", "absent.txt"], "--prompts: absent.txt: there is no such file"),
        (["--draft_vocab", 999], "draft_vocab_size: 999 is more than the 320 tokens it drafts from"),
        (["--aux_layer_ids", "5,2"], "eagle_aux_hidden_state_layer_ids: [5, 2] are not ascending layers"),
        (["--norm_before_fc", "true", "--fc_norm", "true"], "fc_norm: excludes norm_before_fc, and both are on"),
        (
            ["--target", FIXTURES / "targets/llama_mha", "--aux_layer_ids", "0,1"],
            "tokenizer_config.json: no chat template",
        ),
        (["--target", FIXTURES / "targets/nowhere"], "no such folder"),
        (["--out", FIXTURES / "targets/llama_gqa"], "llama_gqa: holds "),
        (["--out", "draft", "--data", "draft/data"], "--data: draft/data: lies in --out, which is replaced at the end"),
        (["--out", "."], "--out: .: a link, a file, or a folder without a name is not replaced; give another"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_what_is_refused(small, tmp_path, capsys, options, message):
    assert run(tmp_path, *options) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "draft").exists()


def test_export_needs_a_trained_draft_and_a_checkpoint_its_own_options(small, tmp_path, capsys):
    assert run(tmp_path, "--stage", "generate") == run(tmp_path, "--stage", "extract") == 0
    assert run(tmp_path, "--stage", "export") == 2
    assert "best.pt: missing; run the stage train first" in capsys.readouterr().err
    assert run(tmp_path, "--stage", "train", "--epochs", "1") == 0
    assert run(tmp_path, "--stage", "train", "--epochs", "1,1") == 2
    error = capsys.readouterr().err
    assert "checkpoint.pt: is of a run with {'epochs': (1,), " in error
    assert "'steps': 4}; give the same options" in error
    big = ["--data", tmp_path / "draft.data", "--out", tmp_path / "big", "--rows", 99]
    assert run(tmp_path, "--stage", "train", *big) == 2
    assert "--rows: 99 is more than the 10 conversations; give less, or more --tokens" in capsys.readouterr().err
    assert run(tmp_path, "--stage", "export", "--draft_vocab", 32) == 2
    assert "config.json: another draft is in training here" in capsys.readouterr().err


def test_a_draft_can_begin_with_anothers_weights(small, tmp_path, capsys):
    assert run(tmp_path, "--epochs", "1", "--layers", 1) == 0
    data = ["--data", tmp_path / "draft.data", "--init", tmp_path / "draft", "--stage", "train"]
    assert run(tmp_path, *data, "--out", tmp_path / "more", "--epochs", "1", "--lr", "1e-9") == 0
    first, more = (
        torch.load(tmp_path / "draft.data" / name / "best.pt", weights_only=True)["draft"] for name in ("draft", "more")
    )
    assert all(torch.allclose(more[name].float(), weight.float(), atol=1e-6) for name, weight in first.items())
    assert run(tmp_path, *data, "--out", tmp_path / "less", "--epochs", "1", "--lr", "1e-9", "--draft_vocab", 32) == 0
    less = torch.load(tmp_path / "draft.data/less/best.pt", weights_only=True)["draft"]
    known, kept = (draft["d2t"] + torch.arange(len(draft["d2t"])) for draft in (first, less))
    shared = torch.isin(kept, known)
    assert shared.sum() == 32
    assert torch.allclose(less["head.weight"][shared], first["head.weight"][torch.isin(known, kept)], atol=1e-6)
    capsys.readouterr()
    for option, value, named in (
        ("--layers", 2, "n_layer"), ("--norm_output", "true", "norm_output"), ("--fc_norm", "true", "fc_norm"),
    ):  # fmt: skip
        assert run(tmp_path, *data, "--out", tmp_path / named, option, value) == 2
        assert f"draft: {named}: is " in capsys.readouterr().err
    coded = tmp_path / "coded"
    options = ["--mode", "int8", "--also_heads", "--also_draft", tmp_path / "draft", "--out", coded]
    quantize.main(["--checkpoint", str(TARGET), *map(str, options)])
    eight = [*data[:2], "--stage", "train", "--init", coded / "speculator", "--epochs", "1", "--lr", "1e-9"]
    assert run(tmp_path, *eight, "--out", tmp_path / "eight") == 0
    head = torch.load(tmp_path / "draft.data/eight/best.pt", weights_only=True)["draft"]["head.weight"]
    assert torch.allclose(head, first["head.weight"], atol=first["head.weight"].abs().max() / 200)
    own = [*data[:2], "--stage", "train", "--init", FIXTURES / "drafts/eagle3_own_embed"]
    assert run(tmp_path, *own, "--out", tmp_path / "own") == 2
    assert "embed_tokens: is not the target's" in capsys.readouterr().err


@pytest.mark.gpu
def test_all_stages_on_cuda(small, tmp_path, capsys):
    assert run(tmp_path, "--epochs", "1,2", "--device", "cuda") == 0, capsys.readouterr().err


def test_the_curves_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from scripts import curves

    (tmp_path / "run").mkdir()
    entries = [{"tokens": n, "loss": 3 / n, "acceptance_length": 1 + n / 10} for n in (1, 2)]
    (tmp_path / "run/log.jsonl").write_text("\n".join(map(json.dumps, entries)))
    curves.draw(str(tmp_path / "a.png"), str(tmp_path / "run"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
