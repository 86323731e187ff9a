"""cpu_kernels: the operators against plain PyTorch, which they stand for."""

import copy
import shutil
import subprocess

import pytest
import torch
from torch import nn

import cpu_kernels
from model import Block, Positions, Transformer, allocate_caches
from speculators_config import DecoderConfig, Rope

SLOTS = 640
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module", autouse=True)
def library():
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    cpu_kernels.load_library()


def config(**changes) -> DecoderConfig:
    options = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 70,
        "n_layer": 2,
        "n_head": 6,
        "n_kv_head": 2,
        "head_dim": 32,
        "norm_eps": 1e-5,
        "rope": Rope(kind="default", theta=1e4),
        "context": 2048,
        "windows": (None, None),
        "qkv_bias": False,
        "o_bias": False,
        "qk_norm": False,
        "tied": True,
        "dtype": None,
    }
    return DecoderConfig(**{**options, **changes})


def fill(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape) * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1)
    return module.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("size", "out", "bias"), [(64, 96, False), (48, 100, True), (2, 31, True)])
def test_linear_is_pytorchs_and_does_not_depend_on_the_other_rows(dtype, size, out, bias):
    plain = fill(nn.Sequential(nn.Linear(size, out, bias=bias)), dtype)
    packed = copy.deepcopy(plain)
    cpu_kernels.install(packed)
    assert isinstance(packed[0], cpu_kernels.PackedLinear)
    for rows in (1, 3, 12, 13, 40):
        x = torch.randn(1, rows, size).to(dtype)
        y = packed(x)
        torch.testing.assert_close(y, plain(x), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert torch.equal(y, torch.cat([packed(x[:, i : i + 1]) for i in range(rows)], dim=1))


def run(block: nn.Module, positions: Positions, window: int | None, x: torch.Tensor, start: torch.Tensor):
    where = positions(start[:, None] + torch.arange(x.size(1)), x.dtype)
    return block(x, x.flip(-1), *where[0])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qkv_bias": True, "o_bias": True},
        {"qk_norm": True, "n_head": 2},
        {"windows": (70, None)},
        {"n_head": 16, "n_kv_head": 1, "head_dim": 64},
    ],
    ids=["plain", "biases", "qk_norm", "window", "one key head"],
)
def test_block_is_pytorchs_and_does_not_depend_on_the_other_rows(dtype, changes):
    settings = config(**changes)
    window, positions = settings.windows[0], Positions(settings)
    positions.allocate(SLOTS, torch.device("cpu"))
    plain = fill(nn.Sequential(Block(settings, window, 48)), dtype)
    packed = copy.deepcopy(plain)
    cpu_kernels.install(packed)
    assert isinstance(packed[0], cpu_kernels.PackedBlock)
    singly = copy.deepcopy(packed)
    for model in (plain[0], packed[0], singly[0]):
        allocate_caches(model, 2, SLOTS)
    start = torch.tensor([0, 5])  # the two sequences are at different positions
    for rows in (64, 64, 64, 1, 4, 40):
        x = torch.randn(2, rows, 48).to(dtype)
        y = run(packed[0], positions, window, x, start)
        torch.testing.assert_close(
            y, run(plain[0], positions, window, x, start), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
        alone = [run(singly[0], positions, window, x[:, i : i + 1], start + i) for i in range(rows)]
        assert torch.equal(y, torch.cat(alone, dim=1))
        start += rows


def test_padding_in_the_last_slot_is_neither_seen_nor_sees_anything():
    settings = config()
    positions = Positions(settings)
    positions.allocate(SLOTS, torch.device("cpu"))
    block = fill(nn.Sequential(Block(settings, None, 48)), torch.float32)
    cpu_kernels.install(block)
    allocate_caches(block[0], 1, SLOTS)
    x = torch.randn(1, 3, 48)
    real = run(block[0], positions, None, x, torch.tensor([0]))
    where = positions(torch.tensor([[0, 1, SLOTS - 1]]), x.dtype)[0]
    assert torch.equal(block[0](x, x.flip(-1), *where)[:, :2], real[:, :2])
    assert torch.isfinite(block[0](x, x.flip(-1), *where)).all()


def test_a_tied_embedding_reads_the_packed_head_and_the_weights_are_kept_once():
    model = fill(Transformer(config(), tied=True), torch.bfloat16)
    plain = copy.deepcopy(model)
    cpu_kernels.install(model)
    assert isinstance(model.embed, cpu_kernels.PackedEmbedding)
    assert model.embed.weight.data_ptr() == model.head.weight.data_ptr()
    tokens = torch.tensor([[0, 31, 32, 99]])
    assert torch.equal(model.embed(tokens), plain.embed(tokens))
    assert sum(parameter.numel() for parameter in model.parameters()) == 48  # the last norm


def test_modules_that_two_models_share_stay_shared():
    target = fill(Transformer(config(), tied=True), torch.float32)
    draft = nn.ModuleDict({"embed": target.embed, "head": target.head, "fc": nn.Linear(48, 48)})
    cpu_kernels.install(target, draft)
    assert draft["head"] is target.head
    assert draft["embed"] is target.embed
    assert isinstance(draft["fc"], cpu_kernels.PackedLinear)


def test_what_does_not_fit_stays_plain_pytorch():
    half = fill(nn.Sequential(nn.Linear(4, 4)), torch.float16)
    odd = fill(nn.Sequential(nn.Linear(5, 4)), torch.bfloat16)
    heads = fill(nn.Sequential(Block(config(head_dim=16), None, 48)), torch.float32)
    cpu_kernels.install(half, odd, heads)
    assert [type(model[0]) for model in (half, odd, heads)] == [nn.Linear, nn.Linear, Block]


def test_a_missing_compiler_and_a_failing_one_are_told_apart_from_a_defect(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(OSError, match="no-such-compiler"):
        cpu_kernels.build()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(subprocess.CalledProcessError):
        cpu_kernels.build()
    assert not list(tmp_path.rglob("*.so"))
