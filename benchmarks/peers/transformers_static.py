"""transformers' generate: batches of 16 in order of arrival, padded left, each as long as its longest answer."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.trace import MAX_RUNNING, Request, arguments, prefill_tokens_per_s, tell, trace_tokens_per_s


@torch.inference_mode()
def main() -> None:
    """Print the throughput of the trace and of prefill."""
    asked = arguments()
    torch.set_num_threads(asked.threads)
    model = AutoModelForCausalLM.from_pretrained(asked.folder, dtype=getattr(torch, asked.dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def batch(requests: list[Request]) -> list[int]:
        longest = max(len(request.prompt) for request in requests)
        ids, mask = (torch.zeros(len(requests), longest, dtype=torch.int64) for _ in range(2))
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        most = max(request.output_tokens for request in requests)
        got = model.generate(ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False)
        return [min(request.output_tokens, got.shape[1] - longest) for request in requests]

    def serve(requests: list[Request]) -> list[int]:
        groups = [requests[first : first + MAX_RUNNING] for first in range(0, len(requests), MAX_RUNNING)]
        return [count for group in groups for count in batch(group)]

    tell(
        prefill=prefill_tokens_per_s(lambda prompt: model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)),
        trace=trace_tokens_per_s(serve),
    )


if __name__ == "__main__":
    main()
