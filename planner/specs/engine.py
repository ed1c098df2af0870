"""Settings of the serving engine that planning and serving must share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planner.specs.base import Spec
from planner.specs.units import Bytes, Share

Tokens = Annotated[int, Field(strict=True, ge=1, le=2**20)]


class Engine(Spec):
    """How the engine is run. The defaults are those of the included runtime."""

    block_tokens: Annotated[int, Field(strict=True, ge=1, le=1024)] = 16
    """Tokens of one KV block."""
    max_batch: Annotated[int, Field(strict=True, ge=1, le=65536)] = 256
    """Requests that one decode or aggregated instance runs at once."""
    max_prefill_batch: Annotated[int, Field(strict=True, ge=1, le=65536)] = 128
    """Prompts in one prefill batch."""
    prefill_tokens: Tokens | None = None
    """Token budget of a prefill batch; by default the smallest that nearly saturates the GPU (DistServe's L_m)."""
    decode_pp: bool = True
    """False for an engine whose decode side, split from prefill, has no pipeline stages."""
    pipeline_tokens: Tokens | None = None
    """Prompts pass the stages of a prefill instance in chunks of so many tokens, one behind the other (chunked pipeline
    parallelism), for engines that do so; by default a batch passes whole."""
    chunk_tokens: Annotated[tuple[Tokens, ...], Field(min_length=1)] = (128, 256, 512, 1024, 2048)
    """Token budgets per step to try for the aggregated alternative (chunked prefill)."""
    memory_fraction: Share = 0.9
    """Share of the GPU's memory that the engine may use."""
    reserved_bytes: Bytes = 2 * 2**30
    """Kept for CUDA graphs, workspaces and communication buffers on every GPU."""
    max_pulls: Annotated[int, Field(strict=True, ge=1, le=64)] = 4
    """KV transfers that one decode instance runs at a time."""
    first_token_at: Literal["decode", "prefill"] = "decode"
    """Who sends the first token: the decode side once it has the KV, or the prefill side at once."""
    plans_ahead: bool = True
    """An aggregated instance of one stage plans a step while another one runs, as vLLM's asynchronous scheduling does;
    false for the included runtime, which plans the next step when the last one has ended."""
    layerwise_overlap: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Measured share of the KV transfer that hides behind the prefill (layer by layer); 0 unless measured."""
