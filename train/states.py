"""Stage 2: the target reads the conversations once, and leaves on disk what a draft is trained on: the states that feed
it, and the last one, from which the law of the next token follows."""

import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from model import Transformer
from options import say, show_progress
from train.shards import count, shard, write


@torch.inference_mode()
def extract(target: Transformer, folder: Path, batch: int) -> None:
    """Writes the states of the text shards that `folder` still lacks. The target's caches hold `batch` rows."""
    shards = count(folder, "text")
    for i in range(count(folder, "states"), shards):
        ids, began, parts = load_file(shard(folder, "text", i))["ids"].long(), time.perf_counter(), []
        positions = torch.arange(ids.size(1)).expand(batch, -1).to(target.norm.weight.device)
        assert len(ids) % batch == 0, f"{len(ids)} rows in batches of {batch}"
        for j in range(0, len(ids), batch):
            x, aux = target(ids[j : j + batch].to(positions.device), positions)
            parts.append((aux.cpu(), x.cpu()))
            show_progress(i * len(ids) + j, shards * len(ids), "conversations read")
        aux, last = (torch.cat(part) for part in zip(*parts, strict=True))
        write(shard(folder, "states", i), {"aux": aux, "last": last})
        say(f"states {i + 1} of {shards}: {ids.numel() / (time.perf_counter() - began):.0f} tok/s")
