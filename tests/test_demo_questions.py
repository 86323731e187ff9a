"""scripts/demo_questions.py: what the demo's draft was trained on can be written again."""

import random
import subprocess
import sys
from collections import Counter

from prompts import read_prompt_file
from scripts import demo_questions

KINDS = ("Summarize: ", "def ", "How ", "who ", "Write ")


def test_the_same_questions_each_time_and_a_prompt_file(tmp_path):
    command = [sys.executable, "-m", "scripts.demo_questions"]
    one, two = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert one == two
    path = tmp_path / "questions.jsonl"
    path.write_text(one)
    questions = read_prompt_file(path)
    assert len(questions) == demo_questions.COUNT
    texts = Counter(question.turns[0] for question in questions)
    assert len(texts) > demo_questions.COUNT / 3
    assert all(any(kind in text for text in texts) for kind in KINDS)
    assert not any(mark in text for text in texts for mark in ("{", "|", "\\n"))
    assert sum(text.endswith("...") for text in texts) > 100


def test_the_code_to_complete_is_python():
    for seed in range(50):
        compile(demo_questions.stub(random.Random(seed)), "stub", "exec")
