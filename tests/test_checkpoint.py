"""Folders and safetensors: what is found in them, what is refused, and how a module is filled."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES
from safetensors.torch import load_file, save_file
from torch import nn

from checkpoint import INDEX, TOLERATED, Stored, fetch_weights, load_weights, open_checkpoint, stored_tensors
from convert_hf_checkpoint import draft_tensors, eagle3_names, target_names
from eagle3 import Eagle3
from generate import load_target
from speculators_config import ConfigError, read_speculator, read_target

ROOT = Path(__file__).parent.parent
SHARDED = FIXTURES / "targets" / "llama_sharded"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


class Tiny(nn.Module):
    """A fused projection with a bias, a head tied to the embedding, a map and a table that no checkpoint holds."""

    def __init__(self, tied: bool = True):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.qkv = nn.Linear(4, 8)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("d2t", torch.empty(3, dtype=torch.int64))
        self.register_buffer("table", torch.ones(2), persistent=False)


NAMES = {
    "embed.weight": ("embed_tokens.weight",),
    "qkv.weight": ("q.weight", "k.weight", "v.weight"),
    "qkv.bias": ("q.bias", "k.bias", "v.bias"),
    "d2t": ("d2t",),
}


def tiny_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    rows = {"q": 4, "k": 2, "v": 2}
    tensors = {"embed_tokens.weight": torch.randn(6, 4), "d2t": torch.tensor([0, 2, 3])}
    tensors |= {f"{part}.weight": torch.randn(n, 4) for part, n in rows.items()}
    tensors |= {f"{part}.bias": torch.randn(n) for part, n in rows.items()}
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def load_tiny(folder: Path, tensors: dict[str, torch.Tensor], *, tied=True, names=NAMES, **options) -> Tiny:
    save_file(tensors, folder / "model.safetensors")
    with torch.device("meta"):
        module = Tiny(tied)
    load_weights(module, names, stored_tensors(folder), device="cpu", **{"dtype": torch.float32, **options})
    return module


@pytest.fixture
def sharded(tmp_path) -> Path:
    return Path(shutil.copytree(SHARDED, tmp_path / "sharded"))


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


# Folders.


def test_a_local_folder_needs_no_hub_client(tmp_path):
    """Run where importing huggingface_hub fails: with a relative path, and for the weights as well."""
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError('the Hub was asked')")
    code = (
        "from checkpoint import fetch_weights, open_checkpoint\n"
        "folder = open_checkpoint('owner/name', 'target')\n"
        "print(folder, fetch_weights(folder, 'owner/name', 'speculator'))"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.stdout.split() == ["owner/name", "owner/name"], run.stderr


def test_home_is_expanded(tmp_path, monkeypatch):
    (tmp_path / "draft").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = open_checkpoint("~/draft", "speculator")
    assert folder == fetch_weights(folder, "~/draft", "speculator") == tmp_path / "draft"


@pytest.mark.parametrize(
    "name", ["./draft", "../draft", "/no/draft", "~/draft", "~nobody-here/x", "draft/", "a/b/c", ""]
)
def test_a_path_without_a_folder_is_refused_before_the_hub_is_asked(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError) as refusal:
        open_checkpoint(name, "speculator")
    assert str(refusal.value) == (
        f"--speculator: {name}: no such folder, and no name of a Hub repository; check the path, or give OWNER/NAME"
    )


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="--target: .*/model.safetensors: a file; give the folder that holds it"):
        open_checkpoint(str(tmp_path / "model.safetensors"), "target")


# Headers.


def test_a_single_file_is_listed(tmp_path):
    save_file(tiny_tensors(torch.bfloat16), tmp_path / "model.safetensors")
    stored = stored_tensors(tmp_path)
    assert stored.keys() == tiny_tensors().keys()
    assert stored["q.weight"] == Stored(tmp_path / "model.safetensors", "q.weight", (4, 4), "BF16")
    assert stored["d2t"].dtype == "I64"


def test_shards_are_listed_by_the_index():
    stored = stored_tensors(SHARDED)
    index = json.loads((SHARDED / INDEX).read_text())["weight_map"]
    assert {name: tensor.file.name for name, tensor in stored.items()} == index
    name = "model.embed_tokens.weight"
    assert stored[name] == Stored(SHARDED / SHARDS[0], name, (128, 32), "F32")


def test_files_outside_the_index_are_ignored(sharded):
    save_file({"model.norm.weight": torch.zeros(7)}, sharded / "model.safetensors")
    save_file({"everything.weight": torch.zeros(7)}, sharded / "consolidated.safetensors")
    stored = stored_tensors(sharded)
    assert stored == {
        name: tensor._replace(file=sharded / tensor.file.name) for name, tensor in stored_tensors(SHARDED).items()
    }


def test_missing_shards_are_named(sharded):
    (sharded / SHARDS[0]).unlink()
    (sharded / SHARDS[2]).unlink()
    with pytest.raises(ConfigError) as refusal:
        stored_tensors(sharded)
    assert f"{INDEX}: {SHARDS[0]}, {SHARDS[2]}: 2 of 3 files listed here do not exist; incomplete download?" in str(
        refusal.value
    )


def test_a_stale_index_beside_a_whole_file_is_no_licence_to_guess(sharded):
    for shard in SHARDS:
        (sharded / shard).unlink()
    save_file(tiny_tensors(), sharded / "model.safetensors")
    with pytest.raises(ConfigError, match="3 of 3 files listed here do not exist.*delete a stale index"):
        stored_tensors(sharded)


def test_a_tensor_that_only_the_index_knows_is_an_error(sharded):
    edit_index(sharded, lambda weight_map: weight_map.update({"model.layers.9.mlp.up_proj.weight": SHARDS[1]}))
    with pytest.raises(
        ConfigError, match=f"{SHARDS[1]}: model.layers.9.mlp.up_proj.weight: in the index, not in the file"
    ):
        stored_tensors(sharded)


def test_a_tensor_that_the_index_forgot_is_not_dropped(sharded):
    """Left over or used: load_weights decides. Dropping it would hide an unknown architecture."""
    edit_index(sharded, lambda weight_map: weight_map.pop("model.norm.weight"))
    assert stored_tensors(sharded)["model.norm.weight"].file.name == SHARDS[2]


@pytest.mark.parametrize(
    ("name", "shard", "copy_in"),
    [("lm_head.weight", 2, 0), ("model.embed_tokens.weight", 0, 2)],
    ids=["before", "after"],
)
def test_of_two_copies_the_index_picks_one(name, shard, copy_in, sharded):
    copies = load_file(sharded / SHARDS[copy_in]) | {name: torch.zeros(1, 1)}
    save_file(copies, sharded / SHARDS[copy_in])
    stored = stored_tensors(sharded)[name]
    assert (stored.file.name, stored.shape) == (SHARDS[shard], (128, 32))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_pickled_checkpoints_are_refused(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=f"{tmp_path}: {name}: pickled weights are not run; give a checkpoint saved"):
        stored_tensors(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=f"{tmp_path}: model.safetensors: no weights, neither this file nor {INDEX}"):
        stored_tensors(tmp_path)


def test_a_file_without_tensors_is_refused(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="model.safetensors: no tensors in it"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize(
    "cut",
    [
        lambda raw: b"",
        lambda raw: raw[:100],
        lambda raw: raw[:-1],
        lambda raw: b"version https://git-lfs.github.com/spec/v1\n",
    ],
    ids=["empty", "header", "tensors", "lfs pointer"],
)
def test_a_broken_file_is_named(cut, sharded):
    path = sharded / SHARDS[1]
    path.write_bytes(cut(path.read_bytes()))
    with pytest.raises(
        ConfigError, match=f"{SHARDS[1]}: not readable as safetensors .*incomplete download\\? fetch it again"
    ):
        stored_tensors(sharded)


@pytest.mark.parametrize("text", [b"", b"[]", b'{"weight_map": {', b"\xff\xfe"])
def test_a_broken_index_is_named(text, sharded):
    (sharded / INDEX).write_bytes(text)
    with pytest.raises(ConfigError, match=f"{INDEX}: JSON: .*; download the file again"):
        stored_tensors(sharded)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_table_is_named(text, sharded):
    (sharded / INDEX).write_text(text)
    with pytest.raises(ConfigError, match=f"{INDEX}: weight_map: not a table from tensors to files"):
        stored_tensors(sharded)


@pytest.mark.parametrize(
    "file",
    ["../outside.safetensors", "/outside.safetensors", "a\\b.safetensors", "*.safetensors", "model.bin", "..", 3],
)
def test_the_index_stays_in_its_folder(file, sharded):
    save_file(load_file(sharded / SHARDS[2]), sharded.parent / "outside.safetensors")
    edit_index(sharded, lambda weight_map: weight_map.update({"lm_head.weight": file}))
    with pytest.raises(ConfigError) as refusal:
        stored_tensors(sharded)
    assert f"{INDEX}: lm_head.weight: {file!r} is no safetensors file of this folder" in str(refusal.value)


# Loading.


def test_fused_rows_are_the_stored_ones_in_order(tmp_path):
    tensors = tiny_tensors()
    module = load_tiny(tmp_path, tensors)
    for kind, fused in (("weight", module.qkv.weight), ("bias", module.qkv.bias)):
        assert torch.equal(fused, torch.cat([tensors[f"{part}.{kind}"] for part in "qkv"]))
    assert torch.equal(module.embed.weight, tensors["embed_tokens.weight"])
    assert torch.equal(module.d2t, tensors["d2t"])


def test_tied_parameters_stay_tied_and_nothing_asks_for_a_gradient(tmp_path):
    module = load_tiny(tmp_path, tiny_tensors())
    assert module.head.weight is module.embed.weight
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert sorted(module.state_dict()) == sorted([*NAMES, "head.weight"]), "buffers changed their persistence"


def test_either_name_of_a_tied_parameter_fills_both(tmp_path):
    names = {"head.weight" if name == "embed.weight" else name: parts for name, parts in NAMES.items()}
    module = load_tiny(tmp_path, tiny_tensors(), names=names)
    assert module.head.weight is module.embed.weight
    assert torch.equal(module.embed.weight, tiny_tensors()["embed_tokens.weight"])


def test_one_stored_tensor_may_fill_two_parameters(tmp_path):
    module = load_tiny(tmp_path, tiny_tensors(), tied=False, names=NAMES | {"head.weight": ("embed_tokens.weight",)})
    assert module.head.weight is not module.embed.weight
    assert torch.equal(module.head.weight, module.embed.weight)


def test_a_tensor_may_go_by_another_name_than_in_its_file(tmp_path):
    """Converters' prefixes are renamed in the table; the first version then asked the file for the new name."""
    save_file({f"midlayer.{name}": tensor for name, tensor in tiny_tensors().items()}, tmp_path / "model.safetensors")
    renamed = {name.removeprefix("midlayer."): tensor for name, tensor in stored_tensors(tmp_path).items()}
    with torch.device("meta"):
        module = Tiny()
    load_weights(module, NAMES, renamed, device="cpu", dtype=torch.float32)
    assert torch.equal(module.embed.weight, tiny_tensors()["embed_tokens.weight"])


def test_non_persistent_buffers_are_left_alone(tmp_path):
    with torch.device("meta"):
        module = Tiny()
    module.table = table = torch.full((2,), 7.0)
    save_file(tiny_tensors(), tmp_path / "model.safetensors")
    load_weights(module, NAMES, stored_tensors(tmp_path), device="cpu", dtype=torch.float32)
    assert module.table is table


def test_the_sharded_fixture_loads_bit_for_bit():
    stored = stored_tensors(SHARDED)
    with torch.device("meta"):
        module = nn.ParameterDict({name.replace(".", "/"): torch.empty(t.shape) for name, t in stored.items()})
    names = {name.replace(".", "/"): (name,) for name in stored}
    load_weights(module, names, stored, device="cpu", dtype=torch.float32)
    expected = {name: tensor for shard in SHARDS for name, tensor in load_file(SHARDED / shard).items()}
    assert all(torch.equal(module[name.replace(".", "/")], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("stored_as", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats_become_the_dtype_asked_for_and_integers_stay(stored_as, dtype, tmp_path):
    tensors = tiny_tensors(stored_as)
    module = load_tiny(tmp_path, tensors, dtype=dtype)
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    assert torch.equal(module.embed.weight, tensors["embed_tokens.weight"].to(dtype))
    assert module.d2t.dtype == torch.int64


def test_int32_widens(tmp_path):
    tensors = tiny_tensors()
    module = load_tiny(tmp_path, tensors | {"d2t": tensors["d2t"].int()})
    assert module.d2t.dtype == torch.int64
    assert module.d2t.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("name", "dtype", "spelled"),
    [
        ("k.weight", torch.float8_e4m3fn, "F8_E4M3, not as F32 or F16 or BF16"),
        ("k.weight", torch.float8_e5m2, "F8_E5M2, not as F32 or F16 or BF16"),
        ("embed_tokens.weight", torch.int8, "I8, not as F32 or F16 or BF16"),
        ("embed_tokens.weight", torch.int64, "I64, not as F32 or F16 or BF16"),
        ("d2t", torch.float32, "F32, not as I64 or I32"),
        ("d2t", torch.uint8, "U8, not as I64 or I32"),
    ],
)
def test_codes_never_pass_for_weights(name, dtype, spelled, tmp_path):
    tensors = tiny_tensors()
    with pytest.raises(
        ConfigError, match=f"model.safetensors: {name}: stored as {spelled}; give a checkpoint that stores it so"
    ):
        load_tiny(tmp_path, tensors | {name: tensors[name].to(dtype)})


def test_missing_tensors_are_named(tmp_path):
    tensors = {name: tensor for name, tensor in tiny_tensors().items() if not name.endswith(("bias", "d2t"))}
    with pytest.raises(ConfigError) as refusal:
        load_tiny(tmp_path, tensors)
    assert str(refusal.value) == (
        f"{tmp_path}: q.bias, k.bias, v.bias and 1 more: not in the weights; do they belong to this config.json?"
    )


def test_leftover_tensors_are_named_unless_tolerated(tmp_path):
    extra = {"t2d": torch.ones(6, dtype=torch.bool), "layers.0.rotary_emb.inv_freq": torch.ones(2)}
    tensors = tiny_tensors() | extra | {"input_norm.weight": torch.ones(4)}
    with pytest.raises(ConfigError, match="safetensors: input_norm.weight: stored, but nothing in the model takes it"):
        load_tiny(tmp_path, tensors, tolerated=("t2d", r".*rotary_emb\.inv_freq"))
    with pytest.raises(ConfigError, match="input_norm.weight: stored, but nothing"):  # a regex matches the whole name
        load_tiny(tmp_path, tensors, tolerated=("t2d", r".*rotary_emb\.inv_freq", "input_norm", "weight"))
    load_tiny(tmp_path, tensors, tolerated=("t2d", r".*rotary_emb\.inv_freq", r"input_norm\.weight"))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("embed_tokens.weight", (5, 4), r"embed_tokens.weight: stored as \[5, 4\], the model has \[6, 4\]"),
        ("embed_tokens.weight", (4, 6), r"embed_tokens.weight: stored as \[4, 6\], the model has \[6, 4\]"),
        (
            "k.weight",
            (3, 4),
            r"q.weight \+ k.weight \+ v.weight: .*\[4, 4\] \+ \[3, 4\] \+ \[2, 4\], the model has \[8, 4\]",
        ),
        ("v.weight", (2, 5), r"v.weight: stored as \[4, 4\] \+ \[2, 4\] \+ \[2, 5\], the model has \[8, 4\]"),
        ("k.bias", (), r"\[4\] \+ \[\] \+ \[2\], the model has \[8\]"),
        ("d2t", (4,), r"d2t: stored as \[4\], the model has \[3\]"),
    ],
)
def test_shapes_that_do_not_fit_are_shown(name, shape, message, tmp_path):
    tensors = tiny_tensors()
    with pytest.raises(ConfigError, match=message):
        load_tiny(tmp_path, tensors | {name: torch.zeros(shape, dtype=tensors[name].dtype)})


def test_nothing_is_touched_by_a_checkpoint_that_does_not_fit(tmp_path):
    save_file(tiny_tensors() | {"extra": torch.ones(1)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        module = Tiny()
    with pytest.raises(ConfigError):
        load_weights(module, NAMES, stored_tensors(tmp_path), device="cpu", dtype=torch.float32)
    assert all(parameter.is_meta for parameter in module.parameters())


@pytest.mark.parametrize("name", ["qkv.bias", "embed.weight", "d2t"])
def test_our_own_name_tables_are_complete(name, tmp_path):
    with pytest.raises(AssertionError, match=f"not in the names: .*'{name}'"):
        load_tiny(tmp_path, tiny_tensors(), names={key: parts for key, parts in NAMES.items() if key != name})


def test_our_own_name_tables_name_nothing_else(tmp_path):
    with pytest.raises(AssertionError, match="not in the module: {'fc.bias'}"):
        load_tiny(tmp_path, tiny_tensors(), names=NAMES | {"fc.bias": ("q.bias",)})


# Other people's names.


def edited_draft(folder: Path, case: str, tensors=dict, layer=dict, **config) -> Path:
    """The folder, now with a fixture's draft; `tensors` and `layer` turn its weights and its transformer_layer_config
    into others, and these fields of its config are replaced."""
    source = FIXTURES / "drafts" / case
    save_file(tensors(load_file(source / "model.safetensors")), folder / "model.safetensors")
    raw = json.loads((source / "config.json").read_text()) | config
    raw["transformer_layer_config"] = layer(raw["transformer_layer_config"])
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def load_draft(folder: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Our parameters, and the names of what was tolerated."""
    stored = draft_tensors(stored_tensors(folder))
    config, names = eagle3_names(read_speculator(folder), stored)
    with torch.device("meta"):
        draft = Eagle3(config, own=names)
    ignored = load_weights(draft, names, stored, tolerated=TOLERATED, device="cpu", dtype=torch.float32)
    return draft.state_dict(), ignored


def plus(**more):
    return lambda entries: entries | more


def without(*names: str):
    return lambda entries: {name: entry for name, entry in entries.items() if name not in names}


def half_fc(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """For a target of half the draft's hidden size."""
    return tensors | {"fc.weight": tensors["fc.weight"][:, :48].contiguous()}


@pytest.mark.parametrize(
    ("old", "prefix"), [("layers.0.", "midlayer."), ("", "model."), ("layers.0.", "model.midlayer.")]
)
def test_converters_prefixes_load_to_the_same_weights(old, prefix, tmp_path):
    def rename(tensors):
        return {prefix + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}

    wanted, _ = load_draft(FIXTURES / "drafts" / "eagle3_two_layers_mixed")
    weights, _ = load_draft(edited_draft(tmp_path, "eagle3_two_layers_mixed", rename))
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_two_tensors_with_one_name_are_refused(tmp_path):
    twice = plus(**{"midlayer.hidden_norm.weight": torch.ones(32)})
    with pytest.raises(ConfigError) as refusal:
        load_draft(edited_draft(tmp_path, "eagle3_nbr_true", twice))
    said = "midlayer.hidden_norm.weight: the same tensor as layers.0.hidden_norm.weight; remove one of them"
    assert str(refusal.value) == f"{tmp_path / 'model.safetensors'}: {said}"


EAGLE3_DOORS = {
    "too few layers": (
        "eagle3_nbr_true",
        {"layer": plus(num_hidden_layers=2)},
        "config.json: transformer_layer_config.num_hidden_layers: the config says 2, the weights hold 1; correct the",
    ),
    "too many layers": (
        "eagle3_two_layers",
        {"layer": plus(num_hidden_layers=1)},
        "config.json: transformer_layer_config.num_hidden_layers: the config says 1, the weights hold 2; correct the",
    ),
    "fc of another width": (
        "eagle3_nbr_true",
        {"eagle_aux_hidden_state_layer_ids": [2, 4]},
        "config.json: eagle_aux_hidden_state_layer_ids: 2 layers of 32 do not make the 96 columns of fc.weight; "
        "give --aux_layer_ids",
    ),
    "no head for a reduced vocabulary": (
        "eagle3_nbr_true",
        {"tensors": without("lm_head.weight")},
        ": lm_head.weight: not in the weights",
    ),
    "no map for a reduced vocabulary": (
        "eagle3_nbr_true",
        {"tensors": without("d2t", "t2d")},
        ": d2t: not in the weights",
    ),
    "no embedding of the draft's size": (
        "eagle3_no_embed",
        {"tensors": half_fc, "target_hidden_size": 16},
        ": embed_tokens.weight: not in the weights",
    ),
    "no head of the draft's size": (
        "eagle3_full_vocab",
        {"tensors": lambda tensors: half_fc(without("lm_head.weight")(tensors)), "target_hidden_size": 16},
        ": lm_head.weight: not in the weights",
    ),
    "a norm that the config does not name": (
        "eagle3_norm_before_fc",
        {"norm_before_fc": False},
        "model.safetensors: input_norm.weight: stored, but nothing in the model takes it",
    ),
    "a norm that only the config names": (
        "eagle3_nbr_true",
        {"norm_before_fc": True},
        ": input_norm.weight: not in the weights",
    ),
    "q/k norms that the config excludes": (
        "eagle3_qwen3_layer",
        {"layer": plus(model_type="llama")},
        "layers.0.self_attn.k_norm.weight, layers.0.self_attn.q_norm.weight: stored, but nothing in the model takes it",
    ),
    "q/k norms that only the config names": (
        "eagle3_head_dim",
        {"layer": plus(model_type="qwen3")},
        ": layers.0.self_attn.q_norm.weight, layers.0.self_attn.k_norm.weight: not in the weights",
    ),
}


@pytest.mark.parametrize("door", EAGLE3_DOORS)
def test_a_draft_whose_config_and_tensors_differ_is_refused(door, tmp_path):
    case, edits, message = EAGLE3_DOORS[door]
    with pytest.raises(ConfigError) as refusal:
        load_draft(edited_draft(tmp_path, case, **edits))
    assert str(refusal.value).startswith(str(tmp_path))
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("case", "edits", "absent"),
    [
        ("eagle3_no_embed", {}, {"embed.weight"}),
        ("eagle3_full_vocab", {"tensors": without("lm_head.weight")}, {"head.weight"}),
        ("eagle3_own_embed", {"tensors": half_fc, "target_hidden_size": 16}, set()),
    ],
)
def test_what_the_target_can_lend_may_be_absent(case, edits, absent, tmp_path):
    weights, _ = load_draft(edited_draft(tmp_path, case, **edits))
    assert {"embed.weight", "head.weight"} - weights.keys() == absent


@pytest.mark.parametrize(("case", "normed"), [("eagle3_qwen3_layer", True), ("eagle3_head_dim", False)])
def test_a_layer_without_model_type_has_the_norms_that_are_stored(case, normed, tmp_path):
    folder = edited_draft(tmp_path, case, layer=without("model_type"))
    weights, _ = load_draft(folder)
    assert ("first.block.attention.q_norm.weight" in weights) == normed
    wanted, _ = load_draft(FIXTURES / "drafts" / case)
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_tensors_of_no_use_are_tolerated_and_returned(tmp_path):
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")
    extra = plus(**{name: torch.ones(4) for name in names})
    _, ignored = load_draft(edited_draft(tmp_path, "eagle3_nbr_true", extra))
    assert sorted(ignored) == sorted(name.removeprefix("model.") for name in names)
    for name in ("verifier_norm.bias", "verifier_fc.weight", "rotary_emb.inv_freq.scale"):
        with pytest.raises(ConfigError, match=f"{name}: stored, but nothing in the model takes it"):
            load_draft(edited_draft(tmp_path, "eagle3_nbr_true", plus(**{name: torch.ones(4)})))


@pytest.mark.parametrize(("case", "tied"), [("llama_gqa", False), ("llama_gqa", True), ("llama_tied", True)])
def test_a_stored_head_is_used_whatever_the_config_says(case, tied):
    folder, device = FIXTURES / "targets" / case, torch.device("cpu")
    target = load_target(folder, replace(read_target(folder)[0], tied=tied), (), device, torch.float32)
    stored = load_file(folder / "model.safetensors")
    assert (target.head.weight is target.embed.weight) == (case == "llama_tied")
    assert torch.equal(target.head.weight, stored.get("lm_head.weight", stored["model.embed_tokens.weight"]))


def test_a_head_that_is_neither_stored_nor_tied_is_missing():
    folder = FIXTURES / "targets" / "llama_tied"
    config = replace(read_target(folder)[0], tied=False)
    assert target_names(config, stored_tensors(folder))["head.weight"] == ("lm_head.weight",)
    with pytest.raises(ConfigError, match="llama_tied: lm_head.weight: not in the weights"):
        load_target(folder, config, (), torch.device("cpu"), torch.float32)


LOAD_AND_MEASURE = """
import sys
from pathlib import Path
import torch
from torch import nn

def kilobytes(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0])

before = kilobytes("VmRSS")
from checkpoint import load_weights, stored_tensors
stored = stored_tensors(Path(sys.argv[1]))
with torch.device("meta"):
    module = nn.Sequential(*(nn.Linear(1024, rows, bias=False) for rows in [32768] + [8192] * 8))
names = {f"{i}.weight": (f"{i}.gate.weight", f"{i}.up.weight") for i in range(1, 9)} | {"0.weight": ("head.weight",)}
load_weights(module, names, stored, device="cpu", dtype=torch.bfloat16)
assert float(module[8].weight[-1, -1]) == 8.0
print((kilobytes("VmHWM") - before) * 1024 / sum(p.numel() * p.element_size() for p in module.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_peak_memory_is_little_more_than_the_weights(tmp_path):
    """192 MB, a third of it one tensor, in two shards. Mapped pages that stay until the end make the ratio 2."""
    fused = {
        f"{i}.{part}.weight": torch.full((4096, 1024), i, dtype=torch.bfloat16)
        for i in range(1, 9)
        for part in ("gate", "up")
    }
    shards = {
        "model-1.safetensors": fused,
        "model-2.safetensors": {"head.weight": torch.zeros(32768, 1024, dtype=torch.bfloat16)},
    }
    for shard, tensors in shards.items():
        save_file(tensors, tmp_path / shard)
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    command = [sys.executable, "-c", LOAD_AND_MEASURE, str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert 1.0 < float(run.stdout) < 1.3
