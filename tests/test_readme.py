"""The README's commands, options and file map are the project's."""

import re
import shlex

from conftest import FIXTURES

import convert_hf_checkpoint
import quantize
from options import parse_args

ROOT = FIXTURES.parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_commands_are_commands():
    commands = re.findall(r"^(?:\$ )?python generate\.py (.+)$", README, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        assert parse_args(shlex.split(command)).speculator
    conversions = re.findall(r"^python convert_hf_checkpoint\.py (.+)$", README, re.MULTILINE)
    assert conversions
    for command in conversions:
        assert convert_hf_checkpoint.parse_args(shlex.split(command)).out
    quantisations = re.findall(r"^python quantize\.py (.+)$", README, re.MULTILINE)
    assert quantisations
    for command in re.findall(r"^python quantize\.py (.+)$", README, re.MULTILINE):
        assert quantize.parse_args(shlex.split(command))


def test_its_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = re.findall(r"^make ([\w-]+)$", README, re.MULTILINE)
    assert {"demo", "test", "test-real", "lint"} <= set(named) <= targets


def test_its_options_exist_and_its_file_map_is_complete():
    source = "".join(
        (ROOT / name).read_text(encoding="utf-8") for name in ("options.py", "train/eagle3.py", "quantize.py")
    )
    assert all(f'"{option}"' in source for option in re.findall(r"`(--\w+)", README))
    listed = set(re.findall(r"^\| `(\w+\.py)` \|", README, re.MULTILINE))
    assert listed == {path.name for path in ROOT.glob("*.py")}


def test_its_links_into_the_repository_lead_somewhere():
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
