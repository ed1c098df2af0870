"""vLLM's build for CPUs, as installed by `make bench-peers`. Environment variables as in its documentation."""

from __future__ import annotations

import os

from benchmarks.peers.trace import MAX_RUNNING, Request, arguments, prefill_tokens_per_s, tell, trace_tokens_per_s


def main() -> None:
    """Print the throughput of the trace and of prefill."""
    asked = arguments()
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{asked.threads - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM, SamplingParams  # reads the environment

    model = LLM(
        asked.folder,
        dtype=asked.dtype,
        max_num_seqs=MAX_RUNNING,
        max_model_len=2048,
        enforce_eager=True,
        enable_prefix_caching=False,
    )

    def serve(requests: list[Request]) -> list[int]:
        wanted = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=request.output_tokens) for request in requests
        ]
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        answers = model.generate(prompts, wanted, use_tqdm=False)
        return [len(answer.outputs[0].token_ids) for answer in answers]

    tell(prefill=prefill_tokens_per_s(lambda prompt: serve([Request(prompt, 1)])), trace=trace_tokens_per_s(serve))


if __name__ == "__main__":
    main()
