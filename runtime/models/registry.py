"""Architectures by name: a new one is a file beside this one and a line here."""

from __future__ import annotations

import torch

from planner.errors import InputError
from runtime.model_config import ModelConfig
from runtime.models import llama, mixtral, opt, qwen
from runtime.models.decoder import Decoder, Parts
from runtime.shard import Shard
from runtime.weights import Weights

ARCHITECTURES: dict[str, Parts] = {
    "llama": llama.PARTS,
    "mistral": llama.PARTS,
    "qwen2": qwen.PARTS,
    "qwen3": qwen.PARTS,
    "opt": opt.PARTS,
    "mixtral": mixtral.PARTS,
}


def build(config: ModelConfig, shard: Shard, weights: Weights, device: torch.device) -> Decoder:
    """Return one rank's part of the model. Raises InputError for an architecture that nobody wrote."""
    parts = ARCHITECTURES.get(config.architecture)
    if parts is None:
        raise InputError(f"architecture: expected one of {', '.join(ARCHITECTURES)}, got {config.architecture!r}")
    return Decoder(parts, config, shard, weights, device)
