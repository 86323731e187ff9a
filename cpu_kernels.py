"""Fast linears and attention for decoding on a CPU: builds cpu_kernels.cpp once, and puts it into a loaded model.

A step costs what it reads. torch's own operators read at a third of what the memory gives, and attention under a mask
reads slots that nobody filled. `install` rewrites modules after loading and before compiling; what it leaves alone, and
every model it is not called for, is plain PyTorch, which is the reference. Weights move into one block of huge pages:
with pages of 4 KB a quarter of the bandwidth goes into looking up addresses.

Layouts, in 32-bit words of p = 1 float or p = 2 bfloat16: weights (out / 32, in / p, 32, p), keys
(B, Hkv, S / 32, Hd / p, 32, p), values (B, Hkv, S / p, Hd, p). Shapes as in model.py.
"""

import hashlib
import itertools
import math
import mmap
import os
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import Block, RMSNorm, Stack

COLUMNS = 32  # outputs, or slots, that lie side by side
CHUNK = 64  # slots: what attention takes at a time
HUGE_PAGE = 2 << 20  # bytes
SOURCE = Path(__file__).with_suffix(".cpp")


# ---- building --------------------------------------------------------------------------------------------------------


def load_library() -> None:
    """Makes the operators known to torch; compiles them where that was not done for this source, torch and machine.

    Raises OSError or subprocess.CalledProcessError where there is no compiler, or none that takes this source."""
    if not hasattr(torch.ops.eagle_fast, "linear"):
        torch.ops.load_library(str(build()))
        torch.library.register_fake("eagle_fast::linear", lambda x, packed, bias, out: x.new_empty(*x.shape[:-1], out))
        torch.library.register_fake("eagle_fast::layers", fake_layers)


def reason(error: Exception) -> str:
    """One line of what load_library raised."""
    said = error.stderr.decode(errors="replace").strip() if isinstance(error, subprocess.CalledProcessError) else ""
    return next((line for line in said.splitlines() if "error" in line), str(error))


def fake_layers(x: Tensor, *rest) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(*x.shape[:2], x.size(2) * len(rest[-1]))


def build() -> Path:
    """The shared library, in the user's cache folder under a name that tells what it was made from and for."""
    root = Path(torch.__file__).parent
    include, lib = root / "include", root / "lib"
    flags = ["-O3", "-march=native", "-std=gnu++20", "-shared", "-fPIC", "-fopenmp", "-Wno-ignored-attributes"]
    flags += [f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-L{lib}", "-ltorch_cpu", "-lc10"]
    compiler = os.environ.get("CXX", "g++")
    native = subprocess.run([compiler, "-march=native", "-Q", "--help=target"], capture_output=True, check=True).stdout
    made_from = (SOURCE.read_bytes(), repr((compiler, flags, torch.__version__)).encode(), native)
    name = hashlib.sha256(b"".join(made_from)).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "eagle-fast"
    library = folder / f"cpu_kernels-{name}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # appears whole or not at all
            made = Path(scratch) / library.name
            subprocess.run([compiler, str(SOURCE), "-o", str(made), *flags], capture_output=True, check=True)
            made.replace(library)
    return library


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
        self.weights: list[Tensor | None] = []
        for norm, block in zip(norms, blocks, strict=True):
            attention, mlp = block.attention, block.mlp
            self.weights += [weight_of(norm), packed[attention.qkv.weight], attention.qkv.bias]
            self.weights += [weight_of(attention.q_norm), weight_of(attention.k_norm)]
            self.weights += [packed[attention.out.weight], attention.out.bias, weight_of(block.mlp_norm)]
            self.weights += [packed[mlp.gate_up.weight], packed[mlp.down.weight]]
        for i, weight in enumerate(self.weights):
            self.register_buffer(f"weight_{i}", weight)

    def allocate_cache(self, batch: int, slots: int) -> None:
        assert slots % CHUNK == 0, f"{slots} slots, in chunks of {CHUNK}"
        dtype, p = self.weights[-1].dtype, per_word(self.weights[-1].dtype)
        keys = (batch, self.n_kv_head, slots // COLUMNS, self.head_dim // p, COLUMNS, p)
        values = (batch, self.n_kv_head, slots // p, self.head_dim, p)
        shapes = [keys, values] * len(self.windows)
        blocks = huge_blocks([math.prod(shape) for shape in shapes], dtype)
        self.caches = [block.view(shape) for block, shape in zip(blocks, shapes, strict=True)]
        for i, cache in enumerate(self.caches):
            self.register_buffer(f"cache_{i}", cache, persistent=False)

    def run(self, x: Tensor, normed: Tensor | None, positions: Tensor, cos_sin: Tensor, taps: tuple[int, ...]):
        inputs = (x.contiguous(), normed, positions.contiguous(), cos_sin.contiguous(), self.weights, self.caches)
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

    What the operators do not do stays as it is: float16, odd sizes."""
    load_library()
    modules = [module for model in models for module in model.modules()]
    weights = list({linear.weight: None for linear in modules if isinstance(linear, nn.Linear) and fits(linear)})
    if not weights:
        return
    sizes = [-(-weight.size(0) // COLUMNS) * COLUMNS * weight.size(1) for weight in weights]
    parts = huge_blocks(sizes, weights[0].dtype)
    packed = {weight: pack(weight, part) for weight, part in zip(weights, parts, strict=True)}
    made: dict[nn.Module, nn.Module] = {}
    for module in modules:
        for name, child in module.named_children():
            if child not in made:
                made[child] = replacement(child, packed)
            setattr(module, name, made[child])
    for weight in weights:
        weight.data = weight.new_empty(0)


def fits(linear: nn.Linear) -> bool:
    weight = linear.weight
    return weight.dtype in (torch.float32, torch.bfloat16) and weight.size(1) % per_word(weight.dtype) == 0


def replacement(module: nn.Module, packed: dict[Tensor, Tensor]) -> nn.Module:
    """What stands for `module`: itself, where there is nothing to gain."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Linear) and weight in packed:
        return PackedLinear(packed[weight], module.bias, module.out_features)
    if isinstance(module, nn.Embedding) and weight in packed:
        return PackedEmbedding(packed[weight], module.num_embeddings)
    if isinstance(module, Stack) and len(module) > 0 and all(packable(layer.block, packed) for layer in module):
        return PackedStack(module, packed)
    if isinstance(module, Block) and packable(module, packed):
        return PackedBlock(module, packed)
    return module


def packable(block: Block, packed: dict[Tensor, Tensor]) -> bool:
    linears = (module for module in block.modules() if isinstance(module, nn.Linear))
    return block.attention.head_dim % COLUMNS == 0 and all(linear.weight in packed for linear in linears)


def pack(weight: Tensor, into: Tensor) -> Tensor:
    """weight (out, in) -> (out / 32, in / p, 32, p) in the memory `into`; rows that fill the last block are 0."""
    p, (out, size) = per_word(weight.dtype), weight.shape
    packed = into.view(-1, size // p, COLUMNS, p)
    blocks = F.pad(weight.detach(), (0, 0, 0, -out % COLUMNS)).view(-1, COLUMNS, size // p, p)
    return packed.copy_(blocks.transpose(1, 2))


def huge_blocks(sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Zeros, one tensor for each size, in huge pages where the system has them; memory is taken when it is written.

    Each has a storage of its own: torch.compile copies tensors in and out that share one with what it mutates."""
    size = dtype.itemsize
    block = mmap.mmap(-1, sum(sizes) * size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(block, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    starts = [start + size * count for count in itertools.accumulate(sizes, initial=0)]
    return [torch.frombuffer(block, dtype=dtype, offset=at, count=n) for at, n in zip(starts, sizes, strict=False)]
