"""cpu_kernels: the operators against plain PyTorch, which they stand for."""

import copy
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import cpu_kernels
import eight_bit
import generate
from bench.bandwidth import held_bytes
from eight_bit import EightBitLinear, quantised, replace_children
from model import Block, Positions, RMSNorm, Transformer, allocate_caches
from speculators_config import DecoderConfig, Rope

SLOTS = 640
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module", autouse=True)
def library():
    if shutil.which("g++") is None or torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("needs g++ and AVX512")
    cpu_kernels.load_library()


@pytest.fixture
def threads():
    """Sets the number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


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


CODES = [torch.int8, torch.float8_e4m3fn]


def in_eight_bits(model: nn.Module, codes: torch.dtype) -> nn.Module:
    """Linears with codes of all kinds: subnormal ones of float8 and -128 of int8 included."""

    def of(path: str, linear: nn.Linear) -> EightBitLinear:
        made = EightBitLinear(
            linear.in_features, linear.out_features, linear.bias is not None, codes, linear.in_features
        )
        made.weight, scale = quantised(linear.weight.detach().float(), codes)
        made.scale, made.bias = scale.float(), linear.bias
        every = torch.arange(-128, 128).to(torch.int8).view(codes)[: linear.in_features]
        made.weight[0, : len(every)] = torch.where(every.float().isnan(), 0, every.float()).to(codes)
        return made

    replace_children(model, nn.Linear, of)
    return model


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize(("size", "out", "bias"), [(256, 96, False), (48, 100, True), (2, 31, True)])
def test_a_linear_in_eight_bits_is_pytorchs_and_does_not_depend_on_the_other_rows(codes, dtype, size, out, bias):
    plain = in_eight_bits(fill(nn.Sequential(nn.Linear(size, out, bias=bias)), dtype), codes)
    packed = copy.deepcopy(plain)
    cpu_kernels.install(packed)
    assert isinstance(packed[0], cpu_kernels.PackedLinear)
    exact = eight_bit.held_as(plain[0], torch.float32)
    exact.bias = None if exact.bias is None else nn.Parameter(exact.bias.float())
    for rows in (1, 3, 12, 13, 40):
        x = torch.randn(1, rows, size).to(dtype)
        y, wanted = packed(x), exact(x.float())
        torch.testing.assert_close(
            y.float(), wanted, rtol=TOLERANCE[dtype] / 4, atol=wanted.std().item() * TOLERANCE[dtype]
        )
        assert torch.equal(y, torch.cat([packed(x[:, i : i + 1]) for i in range(rows)], dim=1))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("codes", CODES)
def test_every_code_is_read_exactly(codes, dtype):
    """Against a row that holds a single one: the product is the code, whatever its neighbours."""
    every = torch.arange(-128, 128).to(torch.int8).view(codes)
    every = torch.where(every.float().isnan(), 0, every.float()).to(codes)
    linear = EightBitLinear(256, 32, False, codes, 256)
    linear.weight[:], linear.scale[:] = every, 1
    box = nn.Sequential(linear)
    cpu_kernels.install(box)
    ones = torch.eye(256, dtype=dtype)[None]
    assert torch.equal(box(ones)[0], every.to(dtype)[:, None].expand(256, 32))


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("mixed", [False, True])
def test_a_stack_in_eight_bits_is_pytorchs(codes, mixed):
    """mixed: not all layers alike, so that each becomes an operator of its own."""
    settings = config(n_layer=3, windows=(None, 70, None), qkv_bias=True, o_bias=True)
    plain = fill(Transformer(settings, (1, 3)), torch.float32)
    in_eight_bits(plain, codes)
    if mixed:
        plain.layers[1].block.mlp.down = eight_bit.held_as(plain.layers[1].block.mlp.down, torch.float32)
    packed = copy.deepcopy(plain)
    cpu_kernels.install(packed)
    assert isinstance(packed.layers, cpu_kernels.PackedStack) != mixed
    assert not any(isinstance(module, EightBitLinear | Block) for module in packed.modules())
    for model in (plain, packed):
        model.allocate(1, SLOTS)
    for start, rows in ((0, 100), (100, 5)):
        tokens, where = torch.randint(100, (1, rows)), start + torch.arange(rows)[None]
        (x, aux), (y, ours) = plain(tokens, where), packed(tokens, where)
        for ours_, theirs in ((y, x), (ours, aux), (packed.logits(y), plain.logits(x))):
            torch.testing.assert_close(ours_, theirs, rtol=3e-5, atol=1e-4)


def test_codes_are_kept_once_and_in_eight_bits():
    model = in_eight_bits(fill(Transformer(config()), torch.bfloat16), torch.int8)
    linears = sum(
        linear.weight.nbytes + linear.scale.nbytes for linear in model.modules() if isinstance(linear, EightBitLinear)
    )
    rest = sum(parameter.nbytes for parameter in model.parameters())
    cpu_kernels.install(model)
    assert linears + rest <= held_bytes(model) < 1.2 * (linears + rest)  # whole blocks of 32


def test_what_it_does_not_read_is_held_in_16_bits():
    settings = config(hidden_size=47)
    model = in_eight_bits(fill(Transformer(settings), torch.bfloat16), torch.int8)
    assert eight_bit.hold([model], cpu_kernels.reads) == 5  # qkv and gate_up of two layers, and the head
    assert isinstance(model.head, nn.Linear)
    assert isinstance(model.layers[0].block.mlp.down, EightBitLinear)


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
        {"head_dim": 96},
        {"head_dim": 256, "n_head": 2},
    ],
    ids=["plain", "biases", "qk_norm", "window", "one key head", "heads of 96", "heads of 256"],
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
        allocate_caches(model, 2, SLOTS, torch.empty(0, dtype=dtype))
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


def packed_block(dtype: torch.dtype) -> tuple[cpu_kernels.PackedBlock, Positions]:
    """With caches of SLOTS for one sequence."""
    positions, box = Positions(config()), fill(nn.Sequential(Block(config(), None, 48)), dtype)
    positions.allocate(SLOTS, torch.device("cpu"))
    cpu_kernels.install(box)
    allocate_caches(box, 1, SLOTS, torch.empty(0, dtype=dtype))
    return box[0], positions


def test_the_number_of_threads_changes_no_bit(threads):
    """With few threads they share blocks of rows, with many the chunks of each block."""
    block, positions = packed_block(torch.bfloat16)
    inputs = [torch.randn(1, rows, 48).bfloat16() for rows in (64, 64, 64, 1, 4)]

    def answers(count: int) -> list[torch.Tensor]:
        threads(count)
        allocate_caches(block, 1, SLOTS, torch.empty(0, dtype=torch.bfloat16))
        starts = torch.tensor([0, 64, 128, 192, 193]).unsqueeze(1)
        return [run(block, positions, None, x, start) for x, start in zip(inputs, starts, strict=True)]

    one = answers(1)
    for count in (2, 5, 16):
        assert all(map(torch.equal, answers(count), one))


def test_threads_that_work_in_step_change_no_bit_of_a_stack(threads):
    """Every kind of part, two sequences, several times: a missing barrier shows only now and then."""
    settings = config(n_layer=3, windows=(None, 70, None), qkv_bias=True, o_bias=True, qk_norm=True)
    model = fill(Transformer(settings, (0, 2, 3), tied=True), torch.bfloat16)
    cpu_kernels.install(model)
    pieces = [(torch.randint(100, (2, rows)), start) for rows, start in ((100, 0), (5, 100), (1, 105), (9, 106))]

    def answers(count: int) -> list[torch.Tensor]:
        threads(count)
        model.allocate(2, SLOTS)
        states = [model(tokens, (start + torch.arange(tokens.size(1))).expand(2, -1)) for tokens, start in pieces]
        return [tensor for x, aux in states for tensor in (x, aux, model.logits(x))]

    one = answers(1)
    for count in (2, 3, 5) * 4:
        assert all(map(torch.equal, answers(count), one))


@pytest.mark.parametrize("taps", [(), (0, 2), (1, 3)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_stack_is_pytorchs_with_the_states_between_its_layers(dtype, taps):
    settings = config(n_layer=3, windows=(None, 70, None))
    plain = fill(Transformer(settings, taps, tied=True), dtype)
    packed = copy.deepcopy(plain)
    cpu_kernels.install(packed)
    assert isinstance(packed.layers, cpu_kernels.PackedStack)
    assert isinstance(packed.norm, cpu_kernels.PackedNorm)
    for model in (plain, packed):
        model.allocate(1, SLOTS)
    for start, rows in ((0, 100), (100, 5)):
        tokens = torch.randint(100, (1, rows))
        where = start + torch.arange(rows)[None]
        (x, aux), (y, ours) = plain(tokens, where), packed(tokens, where)
        tolerance = {"rtol": 3 * TOLERANCE[dtype], "atol": 10 * TOLERANCE[dtype]}
        torch.testing.assert_close(y, x, **tolerance)
        assert (ours is None) == (aux is None) == (not taps)
        if taps:
            torch.testing.assert_close(ours, aux, **tolerance)
        torch.testing.assert_close(packed.logits(y), plain.logits(x), **tolerance)


def test_a_position_outside_the_cache_is_refused():
    block, positions = packed_block(torch.float32)
    x = torch.randn(1, 1, 48)
    _, cos_sin, bias = positions(torch.tensor([[0]]), x.dtype)[0]
    for wrong in (-1, SLOTS):
        with pytest.raises(RuntimeError, match=f"position {wrong} in a cache of {SLOTS} slots"):
            block(x, x, torch.tensor([[wrong]]), cos_sin, bias)


def test_padding_in_the_last_slot_is_neither_seen_nor_sees_anything():
    block, positions = packed_block(torch.float32)
    x = torch.randn(1, 3, 48)
    real = run(block, positions, None, x, torch.tensor([0]))
    where = positions(torch.tensor([[0, 1, SLOTS - 1]]), x.dtype)[0]
    assert torch.equal(block(x, x.flip(-1), *where)[:, :2], real[:, :2])
    assert torch.isfinite(block(x, x.flip(-1), *where)).all()


def test_a_tied_embedding_reads_the_packed_head_and_the_weights_are_kept_once():
    model = fill(Transformer(config(), tied=True), torch.bfloat16)
    plain = copy.deepcopy(model)
    cpu_kernels.install(model)
    assert isinstance(model.embed, cpu_kernels.PackedEmbedding)
    assert model.embed.weight.data_ptr() == model.head.weight.data_ptr()
    tokens = torch.tensor([[0, 31, 32, 99]])
    assert torch.equal(model.embed(tokens), plain.embed(tokens))
    assert sum(parameter.numel() for parameter in model.parameters()) == 0


def test_the_caches_are_one_tensor_with_a_storage_of_its_own():
    """Else torch.compile copies them in and out at every call."""
    model = fill(Transformer(config(), tied=True), torch.bfloat16)
    cpu_kernels.install(model)
    model.allocate(1, SLOTS)
    assert {name for name, _ in model.layers.named_buffers()} == {"weights", "caches"}
    caches = model.layers.caches
    assert caches.nbytes == caches.untyped_storage().nbytes() == 2 * 2 * 2 * SLOTS * 2 * 32


def test_modules_that_two_models_share_stay_shared():
    target = fill(Transformer(config(), tied=True), torch.float32)
    draft = nn.ModuleDict({"embed": target.embed, "head": target.head, "fc": nn.Linear(48, 48)})
    cpu_kernels.install(target, draft)
    assert draft["head"] is target.head
    assert draft["embed"] is target.embed
    assert isinstance(draft["fc"], cpu_kernels.PackedLinear)


def test_what_does_not_fit_stays_plain_pytorch():
    half = fill(nn.Sequential(nn.Linear(4, 4), RMSNorm(4, 1e-5)), torch.float16)
    odd = fill(nn.Sequential(nn.Linear(5, 4)), torch.bfloat16)
    heads = fill(nn.Sequential(Block(config(head_dim=16), None, 48)), torch.float32)
    cpu_kernels.install(half, odd, heads)
    assert [type(model[0]) for model in (half, odd, heads)] == [nn.Linear, nn.Linear, Block]
    assert type(half[1]) is RMSNorm


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_what_a_compiler_leaves_behind_is_all_or_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = 'case "$*" in *--help=target*|*-dumpfullversion*) exit 0;; esac;'
    failing = f'{asked} echo "x.cpp:1: error: too old" >&2; exit 1'
    for compiler, reason in (
        ("no-such-compiler", "no-such-compiler: is not installed; install it"),
        ("false", "false ended with exit code 1"),
        (script(tmp_path / "failing", failing), "error: too old"),
    ):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises((OSError, subprocess.CalledProcessError)) as raised:
            cpu_kernels.build()
        assert reason in cpu_kernels.reason(raised.value)
    assert not list((tmp_path / "cache").rglob("*.*"))
    working = f'{asked} while [ "$1" != -o ]; do shift; done; echo made > "$2"'
    monkeypatch.setenv("CXX", f"sh {script(tmp_path / 'working', working)}")
    made = cpu_kernels.build()
    assert made.read_text() == "made\n"
    assert [path.name for path in made.parent.iterdir()] == [made.name]


def test_without_them_a_notice_says_why_and_the_model_stays_as_it_is(monkeypatch, capsys):
    def refuse():
        raise OSError("they need a processor with AVX512")

    monkeypatch.setattr(cpu_kernels, "load_library", refuse)
    model = nn.Sequential(nn.Linear(4, 4))
    generate.use_cpu_kernels([model])
    said = capsys.readouterr().err
    assert said == "notice: decoding is slower without our CPU operators: they need a processor with AVX512\n"
    assert type(model[0]) is nn.Linear
