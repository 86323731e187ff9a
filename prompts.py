"""What is asked: prompts from options, files and stdin, and conversations as token ids. Knows nothing of models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from speculators_config import ConfigError
from tokenizer import Tokenizer

# Of different kinds: explain, list, code, arithmetic, rewrite, chat. What is measured with by default.
QUESTIONS: tuple[str, ...] = (
    "Explain to a gardener why leaves are green in summer and red in autumn.",
    "List seven things that are worth checking before a long bicycle tour, one line each.",
    "Write a Python function that returns the longest word of a sentence, with a docstring and two examples.",
    "A baker sells 48 rolls at 35 cents each and 12 loaves at 3 euros each. How much does she take in? Show each step.",
    "Rewrite this politely: 'Your report is late again and half of the numbers in it are wrong.'",
    "Hi! I have just moved to a new town and know nobody here. What would you do on the first weekend?",
)


@dataclass(frozen=True)
class Question:
    """One conversation: turns of text, or one turn of token ids."""

    turns: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()

    def prompts(self, dialogue: Dialogue) -> list[list[int]]:
        """Its turns as token ids, the answers between them left empty."""
        prompts = [list(self.ids)] if self.ids else []
        for text in self.turns:
            prompts.append(dialogue.ask(text))
            dialogue.hear("", [])
        return prompts


def read_prompt_file(path: Path) -> list[Question]:
    """.txt: a prompt a line, empty lines left out; .jsonl: objects with `prompt` (str) or `turns` (list of str)."""
    if path.suffix not in (".txt", ".jsonl"):
        raise ConfigError(f"--prompts: {path}: '{path.suffix}' is no kind of prompt file; give .txt or .jsonl")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"--prompts: {path}: there is no such file; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: {path}: not readable ({error}); give a UTF-8 text file") from None
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts: {path}: holds no prompts; give a file with at least one")
    if path.suffix == ".txt":
        return [Question(turns=(line,)) for _, line in lines]
    return [Question(turns=read_turns(path, i, line)) for i, line in lines]


def read_turns(path: Path, number: int, line: str) -> tuple[str, ...]:
    """The turns of one .jsonl line; ConfigError names the line."""
    try:
        entry = json.loads(line)
        turns = entry["turns"] if "turns" in entry else [entry["prompt"]]
    except (ValueError, KeyError, TypeError):
        turns = None
    if not turns or not isinstance(turns, list) or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        wrong = "no JSON object with `prompt` (a text) or `turns` (a list of texts)"
        raise ConfigError(f"{path}: line {number}: {wrong}; correct the line")
    return tuple(turns)


class Dialogue:
    """A conversation as token ids: what has been said, in the chat template or, raw, simply strung together."""

    def __init__(self, tokenizer: Tokenizer | None, raw: bool, system: str | None):
        self.tokenizer, self.raw = tokenizer, raw
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.ids: list[int] = []

    def ask(self, text: str) -> list[int]:
        """The prompt ids for a new turn of the user's."""
        if self.raw:
            self.ids += self.tokenizer.encode(text, bos=not self.ids)
            return list(self.ids)
        self.messages.append({"role": "user", "content": text})
        return self.tokenizer.encode_chat(self.messages)

    def hear(self, text: str, token_ids: list[int]) -> None:
        """Records the answer."""
        self.ids += token_ids
        self.messages.append({"role": "assistant", "content": text})
