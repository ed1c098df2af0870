"""transformers' continuous batching: pages of 32 tokens, 512 tokens per step."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.peers.trace import MAX_RUNNING, Request, arguments, tell, trace_tokens_per_s


@torch.inference_mode()
def main() -> None:
    """Print the throughput of the trace."""
    asked = arguments()
    torch.set_num_threads(asked.threads)
    model = AutoModelForCausalLM.from_pretrained(
        asked.folder, dtype=getattr(torch, asked.dtype), attn_implementation="sdpa"
    ).eval()
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=256)
    settings = ContinuousBatchingConfig(
        page_size=32, num_blocks=1024, max_batch_tokens=512, max_requests_per_batch=MAX_RUNNING
    )

    def serve(requests: list[Request]) -> list[int]:
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=settings, block=True
        ) as manager:
            for number, request in enumerate(requests):
                manager.add_request(request.prompt, str(number), max_new_tokens=request.output_tokens)
            counts = dict[str, int]()
            while len(counts) < len(requests):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    assert result.error is None, result.error
                    counts[result.request_id] = len(result.generated_tokens)
        return [counts[str(number)] for number in range(len(requests))]

    tell(trace=trace_tokens_per_s(serve))


if __name__ == "__main__":
    main()
