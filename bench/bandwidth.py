"""Memory: what a decoding pass must read of it, and how fast this machine reads it. Together they are the ceiling.

Bytes are counted from what the modules hold, whatever its layout: each weight once a pass, each draft pass anew (a
draft that fits the last-level cache may beat that), of the caches only the rows in use. Embeddings are read by the row,
logits and activations stay in the processor's caches: they count nothing.
"""

import mmap
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn

from model import Transformer
from speculators_config import DecoderConfig

FUSING = ("input_norm", "fc_norm", "fc")  # of a draft: what only its first pass of a round reads


def held_bytes(*modules: nn.Module | None, caches: bool = False) -> int:
    """Bytes of all weights inside `modules`, shared ones once; caches: of what `allocate` made, which is no
    part of the state dict: keys, values and rotary tables."""
    held = {}
    for module in filter(None, modules):
        weights = module.state_dict(keep_vars=True)
        made = {name: buffer for name, buffer in module.named_buffers() if name not in weights}
        held |= {id(tensor): tensor.nbytes for tensor in (made if caches else weights).values()}
    return sum(held.values())


def cache_bytes(config: DecoderConfig, context: float, itemsize: int) -> float:
    """Bytes of the keys and values that one pass reads behind `context` tokens."""
    rows = sum(min(context, window or context) for window in config.windows)  # all layers together
    return 2 * rows * config.n_kv_head * config.head_dim * itemsize


def pass_bytes(target: Transformer, draft: nn.Module | None, K: int, context: float) -> dict[str, float]:
    """Bytes that one round reads, by part; K = 0: one plain step."""
    itemsize = target.norm.weight.element_size()
    reads = {"target_layers": held_bytes(target.layers, target.norm), "target_head": held_bytes(target.head)}
    reads |= {"draft": 0, "draft_head": 0, "cache": cache_bytes(target.config, context, itemsize)}
    if K > 0:
        parts = dict(draft.named_children())
        once = held_bytes(*(parts.pop(name) for name in FUSING if name in parts))
        head = held_bytes(parts.pop("head"))
        every = held_bytes(*(part for name, part in parts.items() if name != "embed"))
        reads |= {"draft": once + K * every, "draft_head": K * head}
        reads["cache"] += K * cache_bytes(draft.config.layer, context, itemsize)
    return reads


def prefill_flops(target: Transformer, draft: nn.Module | None, tokens: int) -> float:
    """Floating-point operations of a prompt, a multiply-add as two: the linears, heads left out as they see one row,
    and attention, where a row sees half of the prompt on average."""
    operations = 0
    for config in [target.config] + ([draft.config.layer] if draft else []):
        queries, keys = (heads * config.head_dim for heads in (config.n_head, config.n_kv_head))
        weights = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
        operations += config.n_layer * (2 * weights + 2 * tokens * queries)
        if draft and config is draft.config.layer:  # the features, and a first layer that is twice as wide
            features = len(draft.config.aux_layer_ids) * draft.config.target_hidden_size
            operations += 2 * config.hidden_size * (features + queries + 2 * keys)
    return tokens * operations


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int = 1536, repeats: int = 20) -> float:
    """Floating-point operations per second of torch's own product of two square matrices, the best of `repeats`."""
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / best_seconds(lambda: a @ b, device, repeats)


def read_bandwidth(device: torch.device, size: int | None = None, repeats: int = 40) -> dict[str, float]:
    """Measured bytes per second, by kind of memory; the best of `repeats`, after one to warm up.

    On the CPU all of torch's threads look for the maximum of `size` bytes (default 512 MB), which is as fast as reading
    gets there; elsewhere one large copy, of which each byte is read and written."""
    return rates_of(readers(device, size or 512 << 20), device, repeats)


def readers(device: torch.device, size: int) -> dict[str, tuple[int, Callable[[], Tensor]]]:
    """By kind of memory: the bytes that a call moves, and the call."""
    if device.type == "cpu":
        kinds = {"4 KB pages": False} | ({"huge pages": True} if hasattr(mmap, "MADV_HUGEPAGE") else {})
        return {kind: (size, pages(size, huge).max) for kind, huge in kinds.items()}
    source = torch.ones(size // 8, dtype=torch.int64, device=device)
    copy = torch.empty_like(source)
    return {"copy": (2 * source.nbytes, lambda: copy.copy_(source))}


def rates_of(
    calls: dict[str, tuple[int, Callable[[], Tensor]]], device: torch.device, repeats: int
) -> dict[str, float]:
    return {kind: size / best_seconds(call, device, repeats) for kind, (size, call) in calls.items()}


@contextmanager
def bandwidth_meter(device: torch.device, size: int = 512 << 20, repeats: int = 5) -> Iterator[Callable[[], dict]]:
    """A call that measures as read_bandwidth does, again and again, in a process of its own that lasts as long as the
    context: its memory never was this process's, and is written only once."""
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve_rates, args=(theirs, device, size, repeats), daemon=True)
    process.start()

    def probe() -> dict[str, float]:
        ours.send(None)
        return ours.recv()

    try:
        yield probe
    finally:
        process.kill()
        process.join()


def serve_rates(pipe: Connection, device: torch.device, size: int, repeats: int) -> None:
    """The meter's process: answers until it is killed. Ctrl-C is its parent's to report."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    calls = readers(device, size)
    while True:
        pipe.recv()
        pipe.send(rates_of(calls, device, repeats))


def pages(size: int, huge: bool) -> Tensor:
    """(size / 8,) int64 in memory of its own, written once: unwritten pages are all one page of zeros."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int64).fill_(1)


def best_seconds(call: Callable[[], Tensor], device: torch.device, repeats: int) -> float:
    """The shortest of `repeats` calls, each waited for."""
    wait, best = torch.get_device_module(device).synchronize, float("inf")
    for i in range(1 + repeats):
        wait()
        began = time.perf_counter()
        call()
        wait()
        best = min(best, time.perf_counter() - began) if i else best
    return best
