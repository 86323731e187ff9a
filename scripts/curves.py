"""Loss and acceptance of training runs as a picture: python -m scripts.curves FILE.png DATA/RUN [DATA/RUN ...]"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure


def draw(out: str, *runs: str) -> None:
    """Each run is a folder with train.eagle3's log.jsonl."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for run in map(Path, runs):
        log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        tokens = [entry["tokens"] / 1e6 for entry in log]
        left.plot(tokens, [entry["loss"] for entry in log], ".-", label=run.name)
        right.plot(tokens, [entry["acceptance_length"] for entry in log], ".-", label=run.name)
    left.set(xlabel="million tokens seen", ylabel="loss, nats a guess")
    right.set(xlabel="million tokens seen", ylabel="acceptance length, held-out greedy answers")
    right.legend(loc="lower right")
    figure.savefig(out)


if __name__ == "__main__":
    draw(*sys.argv[1:])
