"""Qwen2 and Qwen3: Llama with biases on q, k and v (Qwen2), or a norm over each head of q and k (Qwen3).

Both differences are fields of ModelConfig that the attention reads, so the layer is Llama's own.
"""

from __future__ import annotations

from runtime.models.decoder import Parts
from runtime.models.llama import LlamaLayer

PARTS = Parts(LlamaLayer)
