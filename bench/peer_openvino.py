"""OpenVINO GenAI's share of bench.peers, run inside its own venv: answers the task in a file, one JSON line on stdout.

Plain decoding only: optimum-intel's export reads no draft of this format (peer_setup.PEERS)."""

import json
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai


def main(task: dict) -> None:
    options = {"INFERENCE_NUM_THREADS": task["threads"], "INFERENCE_PRECISION_HINT": "bf16"}
    pipeline = openvino_genai.LLMPipeline(task["target"], "CPU", **options)
    config = openvino_genai.GenerationConfig()
    config.do_sample, config.stop_token_ids = False, set(task["stop_ids"])
    config.eos_token_id = min(task["stop_ids"], default=-1)

    def answer(prompt: list[int], max_new_tokens: int) -> dict:
        config.max_new_tokens = max_new_tokens
        ids = np.array([prompt], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        done = pipeline.generate(inputs, config)
        (token_ids,) = done.tokens
        per_token = done.perf_metrics.get_tpot().mean / 1000  # seconds, of those after the first
        return {"token_ids": list(token_ids), "decode_seconds": per_token * (len(token_ids) - 1)}

    answer(task["prompts"][0], 8)  # warm-up
    results = [answer(prompt, task["max_new_tokens"]) for prompt in task["prompts"]]
    command = (
        f"LLMPipeline({task['target']!r}, 'CPU', {', '.join(f'{name}={value!r}' for name, value in options.items())})"
    )
    print(json.dumps({"command": command, "results": results, "totals": {}}), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
