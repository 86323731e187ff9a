"""vLLM's share of bench.peers, run inside vLLM's own venv: answers the task in a file, one JSON line last on stdout."""

import json
import os
import sys
from pathlib import Path

COUNTERS = {"rounds": "vllm:spec_decode_num_drafts", "accepted": "vllm:spec_decode_num_accepted_tokens"}


def read_counters(llm) -> dict[str, int]:
    """Since the engine started; absent, and so 0, where it decodes plainly."""
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {ours: values.get(theirs, 0) for ours, theirs in COUNTERS.items()}


def main(task: dict) -> None:
    cores = sorted(os.sched_getaffinity(0))[: task["threads"]]
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
    from vllm import LLM, SamplingParams

    options = {"model": task["target"], "dtype": "bfloat16", "max_model_len": task["context"], "max_num_seqs": 1}
    options |= {"gpu_memory_utilization": 0.3, "enable_prefix_caching": False, "disable_log_stats": False}
    if task["K"]:
        draft = {"method": "eagle3", "model": task["speculator"], "num_speculative_tokens": task["K"]}
        options["speculative_config"] = draft
    llm = LLM(**options)

    def answer(prompt: list[int], max_new_tokens: int) -> dict:
        stop = {"ignore_eos": True, "stop_token_ids": task["stop_ids"]}  # the same ids as ours, and no others
        params = SamplingParams(temperature=0, max_tokens=max_new_tokens, **stop)
        (done,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        seconds = done.metrics.last_token_ts - done.metrics.first_token_ts
        return {"token_ids": list(done.outputs[0].token_ids), "decode_seconds": seconds}

    answer(task["prompts"][0], 8)  # warm-up
    before = read_counters(llm)
    results = [answer(prompt, task["max_new_tokens"]) for prompt in task["prompts"]]
    totals = {name: count - before[name] for name, count in read_counters(llm).items()}
    binding = f"VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND={os.environ['VLLM_CPU_OMP_THREADS_BIND']}"
    command = f"{binding} LLM({', '.join(f'{name}={value!r}' for name, value in options.items())})"
    print("\n" + json.dumps({"command": command, "results": results, "totals": totals}), flush=True)


if __name__ == "__main__":  # the engine's own process imports this file again
    main(json.loads(Path(sys.argv[1]).read_text()))
