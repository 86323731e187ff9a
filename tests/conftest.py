"""Fixtures made by transformers and speculators (versions in tests/fixtures/README.md), and how tests open them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import generate
from speculators_config import find_target, fit_to_target, read_speculator, read_target

FIXTURES = Path(__file__).parent / "fixtures"
torch.set_num_threads(1)  # the fixtures are so small that a second thread only waits, and for long on a busy machine


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def expected(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "expected.safetensors")


def open_target(folder: Path, aux_layer_ids=(), slots: int = 512):
    target = generate.load_target(
        folder, read_target(folder)[0], tuple(aux_layer_ids), torch.device("cpu"), torch.float32
    )
    target.allocate(1, slots)
    return target


def open_pair(folder: Path, slots: int = 512, **options):
    """Target and draft of a speculator folder, fp32, with caches."""
    config = read_speculator(folder, **options)
    name = find_target(config, None)
    target_config, _ = read_target(Path(name))
    config = fit_to_target(config, target_config)
    target = open_target(Path(name), config.aux_layer_ids, slots)
    draft = generate.load_draft(config, target)
    draft.allocate(1, slots)
    return target, draft
