"""What design.md's picture says, read from the source: imports go one way, and nothing is loaded or caught silently."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# From the first stop on the path to the last: a file imports only those before it. A new file takes its place here.
PATH = [
    "speculators_config",
    "sampling",
    "tokenizer",
    "options",
    "prompts",
    "metrics",
    "eight_bit",
    "gpu_kernels",
    "checkpoint",
    "draft_families",
]
PATH += ["model", "cpu_kernels", "eagle3", "convert_hf_checkpoint", "speculate", "generate", "quantize"]


def nodes(tree: ast.AST):
    """Every node that runs, inside functions too; blocks for type checkers alone don't."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from nodes(node)


def imported(name: str) -> set[str]:
    found = set()
    for node in nodes(ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            found.add(node.module.split(".")[0])
    return found


def test_every_file_is_a_stop_on_the_path():
    assert sorted(path.stem for path in ROOT.glob("*.py")) == sorted(PATH)


@pytest.mark.parametrize("name", PATH)
def test_imports_go_one_way(name):
    """Folders (bench/, train/, ...) hold what the path never imports."""
    others = (
        set(PATH[PATH.index(name) :]) | {"bench", "train"} | {path.name for path in ROOT.iterdir() if path.is_dir()}
    )
    assert not imported(name) & others


@pytest.mark.parametrize("name", PATH)
def test_nothing_is_loaded_or_caught_silently(name):
    for node in nodes(ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))):
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{name}:{node.lineno}: bare except"
        assert not isinstance(node, ast.Global), f"{name}:{node.lineno}: module-level state"
        if isinstance(node, ast.Call):
            loose = {keyword.arg for keyword in node.keywords if ast.unparse(keyword.value) == "False"}
            silent = loose & {"strict", "weights_only"} and ast.unparse(node.func) != "zip"
            assert not silent, f"{name}:{node.lineno}: {ast.unparse(node)}"
