"""Fast linears and attention for decoding on a CPU: builds cpu_kernels.cpp once, and puts it into a loaded model.

A step costs what it reads. torch's own operators read at a third of what the memory gives, and attention under a mask
reads slots that nobody filled. `install` rewrites modules after loading and before compiling; what it leaves alone, and
every model it is not called for, is plain PyTorch, which is the reference. Weights move into one block of huge pages:
with pages of 4 KB looking up addresses takes 5 to 25 % of the bandwidth.

Layouts, in 32-bit words of p = 1 float or p = 2 bfloat16: weights (out / 32, in / p, 32, p), keys
(B, Hkv, S / 32, Hd / p, 32, p), values (B, Hkv, S / p, Hd, p). Shapes as in model.py.
"""

import ctypes
import hashlib
import itertools
import math
import mmap
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from model import Block, RMSNorm, Stack

COLUMNS = 32  # outputs, or slots, that lie side by side
CHUNK = 64  # slots: what attention takes at a time
MAX_HEAD_DIM = 256
HUGE_PAGE = 2 << 20  # bytes
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
        torch.library.register_fake("eagle_fast::linear", lambda x, packed, bias, out: x.new_empty(*x.shape[:-1], out))
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
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    said = error.stderr.decode(errors="replace").splitlines()
    return next((line for line in said if "error" in line), f"{error.cmd[0]} ended with exit code {error.returncode}")


# ---- the modules -----------------------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """nn.Linear over packed weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None, out_features: int):
        super().__init__()
        self.out_features = out_features
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.eagle_fast.linear(x.contiguous(), self.weight, self.bias, self.out_features)


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
    """Layers as one operator, over caches of which only the slots that some row sees are read."""

    def __init__(self, norms: list[RMSNorm | None], blocks: list[Block], packed: dict[Tensor, Tensor]):
        super().__init__()
        attention = blocks[0].attention
        self.n_head, self.n_kv_head, self.head_dim = attention.n_head, attention.n_kv_head, attention.head_dim
        self.eps = blocks[0].mlp_norm.eps
        self.windows = [block.attention.window or 0 for block in blocks]
        weights: list[Tensor | None] = []
        for norm, block in zip(norms, blocks, strict=True):
            attention, mlp = block.attention, block.mlp
            weights += [weight_of(norm), packed[attention.qkv.weight], attention.qkv.bias]
            weights += [weight_of(attention.q_norm), weight_of(attention.k_norm)]
            weights += [packed[attention.out.weight], attention.out.bias, weight_of(block.mlp_norm)]
            weights += [packed[mlp.gate_up.weight], packed[mlp.down.weight]]
        self.n_weights, self.dtype = len(weights), blocks[0].mlp_norm.weight.dtype
        for i, weight in enumerate(weights):
            self.register_buffer(f"weight_{i}", weight)

    def allocate_cache(self, batch: int, slots: int) -> None:
        assert slots % CHUNK == 0, f"{slots} slots, in chunks of {CHUNK}"
        p = per_word(self.dtype)
        keys = (batch, self.n_kv_head, slots // COLUMNS, self.head_dim // p, COLUMNS, p)
        values = (batch, self.n_kv_head, slots // p, self.head_dim, p)
        shapes = [keys, values] * len(self.windows)
        blocks = huge_blocks([math.prod(shape) for shape in shapes], self.dtype)
        for i, (block, shape) in enumerate(zip(blocks, shapes, strict=True)):
            self.register_buffer(f"cache_{i}", block.view(shape), persistent=False)

    def run(self, x: Tensor, normed: Tensor | None, positions: Tensor, cos_sin: Tensor, taps: tuple[int, ...]):
        weights = [getattr(self, f"weight_{i}") for i in range(self.n_weights)]
        caches = [getattr(self, f"cache_{i}") for i in range(2 * len(self.windows))]
        inputs = (x.contiguous(), normed, positions.contiguous(), cos_sin.contiguous(), weights, caches)
        return torch.ops.eagle_fast.layers(*inputs, self.windows, self.n_head, self.eps, taps)


class PackedStack(PackedLayers):
    """model.Stack."""

    def __init__(self, stack: Stack, packed: dict[Tensor, Tensor]):
        super().__init__([layer.norm for layer in stack], [layer.block for layer in stack], packed)

    def forward(self, x: Tensor, where: list[tuple], taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        positions, cos_sin, _ = where[0]
        x, aux = self.run(x, None, positions, cos_sin, sorted(taps))
        return x, aux if taps else None


class PackedBlock(PackedLayers):
    """model.Block."""

    def __init__(self, block: Block, packed: dict[Tensor, Tensor]):
        super().__init__([None], [block], packed)

    def forward(self, x: Tensor, normed: Tensor, positions: Tensor, cos_sin: Tensor, bias: Tensor) -> Tensor:
        return self.run(x, normed.contiguous(), positions, cos_sin, ())[0]


def weight_of(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight


def per_word(dtype: torch.dtype) -> int:
    return 4 // dtype.itemsize


# ---- putting them in -------------------------------------------------------------------------------------------------


def install(*models: nn.Module) -> None:
    """Rewrites models, which may share modules, in place; frees the weights it packed. Before `allocate`.

    What the operators do not do stays as it is: float16, inputs of no whole number of words, heads that are no multiple
    of 32 wide. Raises OSError or subprocess.CalledProcessError as load_library does, and then has changed nothing."""
    load_library()
    modules = [module for model in models for module in model.modules()]
    weights = list({linear.weight: None for linear in modules if isinstance(linear, nn.Linear) and fits(linear)})
    if not weights:
        return
    sizes = [-(-weight.size(0) // COLUMNS) * COLUMNS * weight.size(1) for weight in weights]
    packed = {}
    for weight, part in zip(weights, huge_blocks(sizes, weights[0].dtype), strict=True):
        packed[weight] = pack(weight, part)
        weight.data = weight.new_empty(0)
    made: dict[nn.Module, nn.Module] = {}
    for module in modules:
        for name, child in module.named_children():
            if child not in made:
                made[child] = replacement(child, packed)
            setattr(module, name, made[child])


def fits(linear: nn.Linear) -> bool:
    weight = linear.weight
    return weight.dtype in (torch.float32, torch.bfloat16) and weight.size(1) % per_word(weight.dtype) == 0


def replacement(module: nn.Module, packed: dict[Tensor, Tensor]) -> nn.Module:
    """What stands for `module`: itself, where there is nothing to gain."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Linear) and weight in packed:
        return PackedLinear(packed[weight], module.bias, module.out_features)
    if isinstance(module, RMSNorm):
        return PackedNorm(module)
    if isinstance(module, nn.Embedding) and weight in packed:
        return PackedEmbedding(packed[weight], module.num_embeddings)
    if isinstance(module, Stack) and len(module) > 0 and all(packable(layer.block, packed) for layer in module):
        return PackedStack(module, packed)
    if isinstance(module, Block) and packable(module, packed):
        return PackedBlock(module, packed)
    return module


def packable(block: Block, packed: dict[Tensor, Tensor]) -> bool:
    linears = (module for module in block.modules() if isinstance(module, nn.Linear))
    head_dim = block.attention.head_dim
    return head_dim % COLUMNS == 0 and head_dim <= MAX_HEAD_DIM and all(linear.weight in packed for linear in linears)


@torch.no_grad()
def pack(weight: Tensor, into: Tensor) -> Tensor:
    """weight (out, in) -> (out / 32, in / p, 32, p) in the memory `into`, of zeros: those fill the last block."""
    p, (out, size) = per_word(weight.dtype), weight.shape
    packed = into.view(-1, size // p, COLUMNS, p)
    whole = out // COLUMNS * COLUMNS
    rows = packed.transpose(1, 2)
    rows[: out // COLUMNS] = weight[:whole].view(-1, COLUMNS, size // p, p)
    if whole < out:
        rows[-1, : out - whole] = weight[whole:].view(-1, size // p, p)
    return packed


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


def huge_blocks(sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Zeros, one tensor for each size, in huge pages where the system has them; memory is taken when it is written.

    Each has a storage of its own: torch.compile copies tensors in and out that share one with what it mutates."""
    size = dtype.itemsize
    block = mmap.mmap(-1, sum(sizes) * size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            block.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(block, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    starts = itertools.accumulate((size * count for count in sizes[:-1]), initial=start)
    return [torch.frombuffer(block, dtype=dtype, offset=at, count=n) for at, n in zip(starts, sizes, strict=True)]
