"""What a forward pass has to know of a model: sizes, and the constants that its weights do not hold."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from planner.errors import InputError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the positions that a model was first trained on.

    `linear` divides every frequency by `factor`. `llama3` (Llama 3.1, section 3.4.2) divides those of long waves alone,
    and blends in between.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. `architecture` names the file in runtime/models that computes it."""

    architecture: str
    layers: int
    hidden_size: int
    intermediate_size: int
    """Width of the MLP, or of one expert."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    """Biases on the q, k and v projections."""
    output_bias: bool = False
    """A bias on the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    norm_expert_weights: bool = True
    """Mixtures: the weights of the chosen experts are made to add up to one."""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    """The type that the weights were published in: float32, bfloat16 or float16."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise InputError(f"expected kv_heads that divide the {self.heads} heads, got {self.kv_heads}")
        if self.head_dim % 2:
            raise InputError(f"expected an even head_dim, got {self.head_dim}")

    @property
    def kv_values_per_token(self) -> int:
        """Return the numbers that one token adds to the KV cache of one layer: keys and values of each KV head."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def digest(self) -> str:
        """Return 16 hex digits that name this configuration, for the provenance of a profile."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]
