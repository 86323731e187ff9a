"""Fast linears and attention for decoding on a CPU: builds cpu_kernels.cpp once, and puts it into a loaded model.

A step costs what it reads. torch's own operators read at a third of what the memory gives, and attention under a mask
reads slots that nobody filled. `install` rewrites modules after loading and before compiling; what it leaves alone, and
every model it is not called for, is plain PyTorch, which is the reference. Weights move into huge pages: with pages of
4 KB looking up addresses takes 5 to 25 % of the bandwidth.

Layouts, in 32-bit words of p = 1 float or p = 2 bfloat16: weights (out / 32, in / p, 32, p), of an mlp's first ones 16
rows of gate_proj and then the same 16 of up_proj; weights in eight bits as `pack_codes` lays them; keys
(B, Hkv, S / 32, Hd / p, 32, p), values (B, Hkv, S / p, Hd, p).
Shapes as in model.py.
"""

import ctypes
import hashlib
import math
import mmap
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from eight_bit import EightBitLinear
from model import Block, RMSNorm, Stack

DTYPES = (torch.float32, torch.bfloat16)
COLUMNS = 32  # outputs, or slots, that lie side by side
CHUNK = 64  # slots: what attention takes at a time
MAX_HEAD_DIM = 256
HUGE_PAGE = 2 << 20  # bytes
KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}  # of codes; 0: weights of the model's dtype
SOURCE = Path(__file__).with_suffix(".cpp")


# ---- building --------------------------------------------------------------------------------------------------------


def load_library() -> None:
    """Makes the operators known to torch; compiles them where that was not done for this source, torch and machine.

    Raises OSError or subprocess.CalledProcessError: no g++ (11 or newer), or no processor with AVX512, without whose
    registers the operators are slower than torch's own."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        raise OSError("they need a processor with AVX512")
    if not hasattr(torch.ops.eagle_fast, "linear"):
        torch.ops.load_library(str(build()))
        torch.library.register_fake("eagle_fast::linear", lambda x, w, bias, out, kind: x.new_empty(*x.shape[:-1], out))
        torch.library.register_fake("eagle_fast::norm", lambda x, *rest: torch.empty_like(x))
        torch.library.register_fake("eagle_fast::layers", fake_layers)


def fake_layers(x: Tensor, *rest) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(*x.shape[:2], x.size(2) * len(rest[-1]))


def build() -> Path:
    """The shared library, in the user's cache folder under a name that tells what it was made from and for."""
    root = Path(torch.__file__).parent
    flags = ["-O3", "-march=native", "-ffp-contract=fast", "-fno-strict-aliasing", "-std=gnu++20", "-shared", "-fPIC"]
    flags += ["-fopenmp", "-Wno-ignored-attributes", f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    flags += [f"-L{root}/lib", "-ltorch_cpu", "-lc10"]
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    run = partial(subprocess.run, capture_output=True, check=True, env=os.environ | {"LC_ALL": "C"})
    version, native = (
        run([*compiler, *asked]).stdout for asked in (["-dumpfullversion"], ["-march=native", "-Q", "--help=target"])
    )
    made_from = (SOURCE.read_bytes(), repr((compiler, flags, torch.__version__)).encode(), version, native)
    name = hashlib.sha256(b"".join(made_from)).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "eagle-fast"
    library = folder / f"cpu_kernels-{name}.so"
    if not library.exists():
        print(f"building the CPU operators into {folder}, once ...", file=sys.stderr, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # appears whole or not at all
            made = Path(scratch) / library.name
            run([*compiler, str(SOURCE), "-o", str(made), *flags])
            made.replace(library)
    return library


def reason(error: Exception) -> str:
    """One line of what `install` raised."""
    if isinstance(error, FileNotFoundError):
        return f"{error.filename}: is not installed; install it"
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    said = error.stderr.decode(errors="replace").splitlines()
    return next((line for line in said if "error" in line), f"{error.cmd[0]} ended with exit code {error.returncode}")


# ---- the modules -----------------------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """nn.Linear, or EightBitLinear, over packed weights."""

    def __init__(self, weight: Tensor, linear: nn.Linear | EightBitLinear):
        super().__init__()
        self.out_features, self.kind = linear.out_features, KINDS.get(linear.weight.dtype, 0)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.eagle_fast.linear(x.contiguous(), self.weight, self.bias, self.out_features, self.kind)


class PackedNorm(nn.Module):
    """model.RMSNorm."""

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.eps = norm.eps
        self.register_buffer("weight", norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.eagle_fast.norm(x.contiguous(), self.weight, self.eps)


class PackedEmbedding(nn.Module):
    """nn.Embedding that reads its rows from the packed weights of a tied head."""

    def __init__(self, weight: Tensor, num_embeddings: int):
        super().__init__()
        self.num_embeddings = num_embeddings
        self.register_buffer("weight", weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens // COLUMNS, :, tokens % COLUMNS].flatten(-2)


class PackedLayers(nn.Module):
    """Layers as one operator, over caches of which only the slots that some row sees are read.

    All weights are one tensor, and all caches another: handing over hundreds of them would cost a tenth of a step."""

    def __init__(self, norms: list[RMSNorm | None], blocks: list[Block]):
        super().__init__()
        attention, mlp = blocks[0].attention, blocks[0].mlp
        self.shape = (attention.n_head, attention.n_kv_head, attention.head_dim, mlp.down.in_features)
        self.eps = blocks[0].mlp_norm.eps
        self.windows = [block.attention.window or 0 for block in blocks]
        layers = [parts(norm, block) for norm, block in zip(norms, blocks, strict=True)]
        assert all(part is None or part.numel() for layer in layers for part, _ in layer), "packed before, elsewhere"
        self.kinds = kinds(blocks[0])
        self.sizes = [packed_bytes(*part) for part in paired(layers[0])]
        self.register_buffer("weights", huge_block(len(layers) * sum(self.sizes), torch.uint8))
        for layer, place in zip(layers, self.weights.view(len(layers), -1), strict=True):
            for part, into in zip(paired(layer), place.split(self.sizes), strict=True):
                pack(*part, into)
            free(*(part for part, _ in layer))

    def allocate_cache(self, batch: int, slots: int, like: Tensor) -> None:
        """(n_layer, 2, B, Hkv, S, Hd): keys and values, those of one head in the orders that stand at the top."""
        assert slots % CHUNK == 0, f"{slots} slots, in chunks of {CHUNK}"
        _, n_kv_head, head_dim, _ = self.shape
        shape = (len(self.windows), 2, batch, n_kv_head, slots, head_dim)
        caches = huge_block(math.prod(shape), like.dtype).view(shape)
        self.register_buffer("caches", caches, persistent=False)

    def run(self, x: Tensor, normed: Tensor | None, positions: Tensor, cos_sin: Tensor, taps: Sequence[int]):
        inputs = (x.contiguous(), normed, positions.contiguous(), cos_sin.contiguous())
        weights = (self.weights, self.sizes, self.kinds)
        return torch.ops.eagle_fast.layers(*inputs, *weights, self.caches, self.windows, self.shape, self.eps, taps)


class PackedStack(PackedLayers):
    """model.Stack."""

    def __init__(self, stack: Stack):
        super().__init__([layer.norm for layer in stack], [layer.block for layer in stack])

    def forward(self, x: Tensor, where: list[tuple], taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        positions, cos_sin, _ = where[0]
        x, aux = self.run(x, None, positions, cos_sin, sorted(taps))
        return x, aux if taps else None


class PackedBlock(PackedLayers):
    """model.Block."""

    def __init__(self, block: Block):
        super().__init__([None], [block])

    def forward(self, x: Tensor, normed: Tensor, positions: Tensor, cos_sin: Tensor, bias: Tensor) -> Tensor:
        return self.run(x, normed.contiguous(), positions, cos_sin, ())[0]


Part = tuple[Tensor | None, Tensor | None]  # a weight, or codes, or a vector; the scales of codes


def parts(norm: RMSNorm | None, block: Block) -> list[Part]:
    """A layer's weights in the operator's order."""
    attention, mlp = block.attention, block.mlp
    qkv, out = attention.qkv, attention.out
    return [
        part_of(norm), part_of(qkv), (qkv.bias, None), part_of(attention.q_norm), part_of(attention.k_norm),
        part_of(out), (out.bias, None), part_of(block.mlp_norm), part_of(mlp.gate_up), part_of(mlp.down),
    ]  # fmt: skip


def part_of(module: nn.Module | None) -> Part:
    return getattr(module, "weight", None), getattr(module, "scale", None)


def kinds(block: Block) -> list[int]:
    """Of each part of a layer."""
    return [0 if part is None else KINDS.get(part.dtype, 0) for part, _ in parts(None, block)]


def per_word(dtype: torch.dtype) -> int:
    return 4 // dtype.itemsize


# ---- putting them in -------------------------------------------------------------------------------------------------


def install(*models: nn.Module) -> None:
    """Rewrites models, which may share modules and embeddings' and heads' weights, in place; frees what it packed.
    Before `allocate`.

    What the operators do not do stays as it is: float16, inputs of no whole number of words, heads that are no multiple
    of 32 wide. EightBitLinears are all replaced: those that `reads` refuses are to be gone. Raises OSError or
    subprocess.CalledProcessError as load_library does, and then has changed nothing."""
    load_library()
    modules = [module for model in models for module in model.modules()]
    packable = {linear.weight for linear in modules if isinstance(linear, nn.Linear) and fits(linear)}
    packable |= {linear.weight for linear in modules if isinstance(linear, EightBitLinear)}
    packed: dict[Tensor, Tensor] = {}
    made: dict[nn.Module, nn.Module] = {}

    def rewrite(module: nn.Module) -> None:
        for name, child in module.named_children():
            if child not in made:
                made[child] = replacement(child, packable, packed)
                if made[child] is child:
                    rewrite(child)
            setattr(module, name, made[child])

    for model in models:
        rewrite(model)


def fits(linear: nn.Linear) -> bool:
    return linear.weight.dtype in DTYPES and linear.in_features % per_word(linear.weight.dtype) == 0


def reads(linear: EightBitLinear, dtype: torch.dtype) -> bool:
    """May `install` replace it in a model of this dtype? Once load_library is through."""
    suits = dtype in DTYPES and linear.scale.size(1) == 1 and linear.in_features % 2 == 0
    return suits and torch.ops.eagle_fast.reads_codes()


def replacement(module: nn.Module, packable: set[Tensor], packed: dict[Tensor, Tensor]) -> nn.Module:
    """What stands for `module`: itself, where there is nothing to gain. packable: linears' weights that may be packed;
    packed: what became of those that were."""
    if isinstance(module, EightBitLinear):
        return PackedLinear(pack_once(*part_of(module), packed), module)
    if isinstance(module, nn.Linear) and module.weight in packable:
        return PackedLinear(pack_once(module.weight, None, packed), module)
    if isinstance(module, RMSNorm) and module.weight.dtype in DTYPES:
        return PackedNorm(module)
    if isinstance(module, nn.Embedding) and module.weight in packable:
        return PackedEmbedding(pack_once(module.weight, None, packed), module.num_embeddings)
    if isinstance(module, Stack) and len(module) > 0 and all(runs(layer.block, packable) for layer in module):
        alike = all(kinds(layer.block) == kinds(module[0].block) for layer in module)
        return PackedStack(module) if alike else module
    if isinstance(module, Block) and runs(module, packable):
        return PackedBlock(module)
    return module


def runs(block: Block, packable: set[Tensor]) -> bool:
    linears = (module for module in block.modules() if isinstance(module, nn.Linear | EightBitLinear))
    head_dim = block.attention.head_dim
    return head_dim % COLUMNS == 0 and head_dim <= MAX_HEAD_DIM and all(linear.weight in packable for linear in linears)


def pack_once(weight: Tensor, scale: Tensor | None, packed: dict[Tensor, Tensor]) -> Tensor:
    """(out / 32, in / p, 32, p), or of codes (out / 32, bytes), made at the first call for `weight`."""
    if weight not in packed:
        p, size = per_word(weight.dtype), weight.size(1)
        into = huge_block(packed_bytes(weight, scale), torch.uint8)
        pack(weight, scale, into)
        codes = scale is not None
        packed[weight] = into.view(-(-weight.size(0) // COLUMNS), -1)
        packed[weight] = packed[weight] if codes else into.view(weight.dtype).view(-1, size // p, COLUMNS, p)
        free(weight)
    return packed[weight]


def paired(layer: list[Part]) -> list[Part]:
    """The parts of a layer, gate_up's (2 I, in) rows in turns: 16 gates and their 16 of up, filled up with zeros."""
    *before, gate_up, down = layer

    def in_turns(rows: Tensor | None) -> Tensor | None:
        if rows is None:
            return None
        halves = (rows.view(torch.uint8) if rows.dtype in KINDS else rows).unflatten(0, (2, -1))
        halves = nn.functional.pad(halves, (0, 0, 0, -halves.size(1) % 16)).unflatten(1, (-1, 16))
        return halves.transpose(0, 1).flatten(0, 2).view(rows.dtype)

    return [*before, tuple(map(in_turns, gate_up)), down]


def packed_bytes(weight: Tensor | None, scale: Tensor | None) -> int:
    """What a part takes, packed: whole blocks, so that all parts of a layer start at 64 bytes."""
    if weight is None:
        return 0
    of_column = weight[0].nbytes + (0 if scale is None else scale[0].nbytes)
    return -(-weight.size(0) // COLUMNS) * COLUMNS * of_column


@torch.no_grad()
def pack(weight: Tensor | None, scale: Tensor | None, into: Tensor) -> None:
    """weight (out, in) -> (out / 32, in / p, 32, p), a vector as it is, in the bytes `into`, of zeros: those fill the
    last block."""
    if weight is None:
        return
    if scale is not None:
        return pack_codes(weight, scale, into)
    into = into.view(weight.dtype)
    if weight.ndim == 1:
        into[: len(weight)] = weight
        return
    p, (out, size) = per_word(weight.dtype), weight.shape
    rows = into.view(-1, size // p, COLUMNS, p).transpose(1, 2)
    whole = out // COLUMNS * COLUMNS
    rows[: out // COLUMNS] = weight[:whole].view(-1, COLUMNS, size // p, p)
    if whole < out:
        rows[-1, : out - whole] = weight[whole:].view(-1, size // p, p)


def pack_codes(codes: Tensor, scale: Tensor, into: Tensor) -> None:
    """codes (out, in), scale (out, 1) -> blocks of 32 outputs: their scales, and for each two inputs 64 codes, in which
    8 of 4 outputs and 8 of the 4 that stand 16 further take turns; a sign and a magnitude each, -128 as minus zero."""
    out, size = codes.shape
    padding = (0, 0, 0, -out % COLUMNS)
    signed = codes.view(torch.uint8)
    if codes.dtype == torch.int8:
        signed = torch.where(codes < 0, 128 | (-codes.short() & 127), codes.short()).to(torch.uint8)
    blocks = into.view(-1, COLUMNS * (size + 4))
    scales = nn.functional.pad(scale, padding).view(-1, COLUMNS)
    blocks[:, : COLUMNS * 4] = scales.contiguous().view(torch.uint8)
    columns = nn.functional.pad(signed, padding).view(-1, 2, 4, 4, size // 2, 2)  # block, half, lane, column, pair
    blocks[:, COLUMNS * 4 :] = columns.permute(0, 4, 2, 1, 3, 5).reshape(len(blocks), -1)


def free(*weights: Tensor | None) -> None:
    for weight in weights:
        if weight is not None:
            weight.data = weight.new_empty(0)


@contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """What torch frees meanwhile goes back to the system at once, so that packing a model does not take it twice."""
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    set_option = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: None)  # glibc has it
    set_option(M_MMAP_THRESHOLD, 256 << 10)
    try:
        yield
    finally:  # scratch memory is to stay; 32 MB is the most that glibc takes
        set_option(M_MMAP_THRESHOLD, 32 << 20)
        set_option(M_TRIM_THRESHOLD, 64 << 20)


def huge_block(count: int, dtype: torch.dtype) -> Tensor:
    """`count` zeros in huge pages where the system has them; memory is taken when it is written."""
    block = mmap.mmap(-1, count * dtype.itemsize + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            block.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(block, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    return torch.frombuffer(block, dtype=dtype, offset=start, count=count)
