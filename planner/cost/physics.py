"""What physics says of one iteration: bytes and FLOP of the model over the data-sheet rates of the GPU.

Used for three things: terms that measurements cannot identify, the start and the gentle pull of the roofline
fit, and a whole model of a GPU that nobody measured. The constants are typical, not exact; each says where it
comes from.
"""

from __future__ import annotations

import numpy as np

from planner.cost import kernel
from planner.specs.gpu import Gpu
from planner.specs.layout import Layout
from planner.specs.model import DTYPE_BYTES, ModelSpec

COMPUTE_EFFICIENCY = 0.65
"""Share of the dense peak in a prefill's matrices. DistServe's raw OPT fits reach 272/202/182 of 312 TFLOP/s
at TP1/2/4 and 262/244/237 (66B, TP2/3/4), collectives included; Splitwise's Llama-2-70B reaches 0.5 to 0.6 at
TP2."""

STREAM_EFFICIENCY = 0.8
"""Share of the data-sheet memory bandwidth when weights are streamed. Vidur times the four matrix products of
a Llama-2-70B layer at TP4 on H100, one token, at 159 us for 428 MB: 2.7 of 3.35 TB/s. DistServe's decode
constants, with the overhead of a step inside, stream OPT-66B at 1.35 of 2.04 TB/s."""

KV_EFFICIENCY, NARROW_KV_EFFICIENCY = 0.8, 0.6
"""Share of the memory bandwidth when paged KV blocks are read, of two bytes per value and of one. A start-up
and a rate, fitted to the decode attention of vLLM 0.24 (FlashAttention-3) on H200, give 0.79 to 0.85 and 0.57
to 0.60, whatever the heads (aiconfigurator's tables). Kernels of 2023 reached 0.55 to 0.65 (DistServe's
coefficients)."""

ATTENTION_EFFICIENCY = 0.55
"""Share of the dense peak in causal attention over a prompt: 0.44 to 0.60 from 2k to 8k tokens in the same
tables; FlashAttention-2 reports 0.5 to 0.73 on A100 (arXiv 2307.08691)."""

LINK_EFFICIENCY = 0.6
"""Share of the line rate in an all-reduce. A start-up and a rate, fitted to the custom kernels of vLLM up to
270 MB, give bus rates of 175 to 179 of 300 GB/s on A100 and of 251 to 363 of 450 GB/s on H100 and H200
(aiconfigurator's tables); Vidur's give 104 to 174 and 210 to 365, for 13 to 67 MB."""

COLLECTIVE_S = 5e-6
"""Start-up of one all-reduce: 4.3 to 6.3 us in those fits. NCCL takes 14 to 21 us on 8 H100 (APEX tables), but
since 2024 engines bring kernels of their own where the GPUs reach each other's memory."""

NORM_PASSES, PROJECTION_PASSES, MLP_PASSES = 10, 3, 5
"""How often a token's values go through memory between a layer's matrix products: around its two norms and
residuals and out of its two sharded products (times the hidden size), through the rotary embedding (times
queries, keys and values), and in and out of the gate (times the MLP's width). Counted, not fitted."""

STEP_S = 1.3e-3
"""Host work of one step that does not overlap (schedule, gather inputs, read tokens back): what is left of
the 4.38 ms of one request to Llama-3.1-8B FP8 on H200 (Dynamo) after 2.1 ms of weights and 32 layers of
kernel gaps. Engines of 2023 took 25 to 45 ms (Splitwise's table at TP8)."""

KERNELS_PER_LAYER, KERNELS_PER_MIXTURE = 12, 36
"""Two norms, QKV, rotary, cache write, attention, output, gate-up, activation, down and two collectives; a
mixture adds router, top-k, permutation, two grouped products and back, each in a few kernels (three times was
settled with DeepSeek-R1's figures in InferenceX issue 870 in sight, so these are no test of it)."""

GRAPH_GAP_S, LAUNCH_S = 2.5e-6, 10e-6
"""Between two kernels of a replayed CUDA graph, and to launch one from Python without a graph (prefill)."""

SEQUENCE_S = 20e-6
"""Host work per sequence and step: sampling parameters, detokenising, block tables. DistServe's fits give 33
to 63 us per request with the request's share of the matrices inside."""

SHARPNESS = 4.0
"""Exponent of the soft maximum of compute and memory: at the ridge it is 2^(1/4) = 1.19 times either."""

REFERENCE_TOKENS = 4096
"""Context at which sliding-window layers are averaged into one coefficient per token."""


def peak_flop_per_s(model: ModelSpec, gpu: Gpu) -> float:
    """Return the dense peak [FLOP/s] at the width of the operands; FP8 where the GPU has units for it."""
    return gpu.fp8_flop_per_s if model.compute_bits == 8 and gpu.fp8_flop_per_s else gpu.fp16_flop_per_s


def kv_read_s(model: ModelSpec, gpu: Gpu, tp: int, efficiency: float | None = None) -> float:
    """Return the time [s] to read one KV token: its bytes on a rank over the usable bandwidth."""
    per_token = sum(model.stage_kv_bytes(Layout(tp), REFERENCE_TOKENS)) / REFERENCE_TOKENS
    return per_token / ((efficiency or kv_efficiency(model)) * gpu.memory_bytes_per_s)


def kv_efficiency(model: ModelSpec) -> float:
    """Return the share of the memory bandwidth at which the model's KV is read."""
    return NARROW_KV_EFFICIENCY if DTYPE_BYTES[model.kv_dtype or model.dtype] < 2 else KV_EFFICIENCY


def between_products_s(model: ModelSpec, gpu: Gpu, tp: int) -> float:
    """Return the time [s] per token of what runs between the matrix products: norms, residuals, rotary, gate.

    It streams activations, so narrower weights do not shorten it, and the norms of a tensor-parallel rank run over
    the whole hidden state.
    """
    heads = (model.heads + 2 * model.kv_heads) * (model.head_dim or model.hidden_size // model.heads)
    mlp = model.intermediate_size or 0
    if model.moe is not None:
        mlp = model.moe.experts_per_token * model.moe.intermediate_size + model.moe.shared_width
    values = NORM_PASSES * model.hidden_size + (PROJECTION_PASSES * heads + MLP_PASSES * mlp) / tp
    value_bytes = model.activation_bytes_per_token / model.hidden_size
    return model.layers * values * value_bytes / (gpu.memory_bytes_per_s * STREAM_EFFICIENCY)


def typical(model: ModelSpec, gpu: Gpu, tp: int) -> np.ndarray:
    """Return the roofline vector of a typical engine, without collectives (see `kernel._roofline_s`)."""
    flops = tp * peak_flop_per_s(model, gpu)
    stream = tp * gpu.memory_bytes_per_s * STREAM_EFFICIENCY
    kernels = _kernels(model)
    p = np.zeros(kernel.SIZE)
    p[kernel.FAMILY] = kernel.ROOFLINE
    p[1], p[2], p[3] = STEP_S, STEP_S + GRAPH_GAP_S * kernels, SHARPNESS
    p[4] = (model.matrix_flops_per_token - model.head_flops_per_token) / (flops * COMPUTE_EFFICIENCY)
    p[4] += between_products_s(model, gpu, tp)
    p[5] = model.attention_flops(REFERENCE_TOKENS) / REFERENCE_TOKENS**2 / (flops * ATTENTION_EFFICIENCY)
    p[6] = SEQUENCE_S + model.head_flops_per_token / (flops * COMPUTE_EFFICIENCY)
    p[7], p[8] = model.shared_weight_bytes / stream, model.expert_weight_bytes / stream
    p[9] = model.moe.experts_per_token / model.moe.experts if model.moe else 0.0
    p[10] = kv_read_s(model, gpu, tp)
    p[13] = LAUNCH_S * kernels
    return p


def prefix_queries(p: np.ndarray) -> float:
    """Return how many queries of attention take as long as reading one cached token back, under a ROOFLINE vector."""
    return float(p[10] / (2.0 * p[5]))


def _kernels(model: ModelSpec) -> int:
    mixtures = sum(model.moe.covers(layer) for layer in range(model.layers)) if model.moe else 0
    return KERNELS_PER_LAYER * (model.layers - mixtures) + KERNELS_PER_MIXTURE * mixtures


def collectives_s(model: ModelSpec, tp: int, bytes_per_s: float, latency_s: float) -> tuple[float, float]:
    """Return the time [s] of a step's tensor-parallel collectives: a fixed part and a part per token.

    Two all-reduces per layer (Megatron-LM, arXiv 1909.08053, section 3), each moving 2 (tp - 1) / tp of the
    hidden states over a ring. `bytes_per_s` is the line rate of a GPU's link, one way.
    """
    if tp == 1:
        return 0.0, 0.0
    rounds = 2 * model.layers
    moved = 2 * (tp - 1) / tp * model.activation_bytes_per_token
    return rounds * (COLLECTIVE_S + latency_s), rounds * moved / (bytes_per_s * LINK_EFFICIENCY)


IMPOSSIBLE = 0.98
"""Rows faster than this share of the floors below are no measurements (timers and peaks are rounded)."""


def prefill_floor_s(model: ModelSpec, gpu: Gpu, tp: int, shape: tuple[int, int, int]) -> float:
    """Return the least time [s] of (batch, new, cached) tokens at the peak: less is no measurement."""
    batch, new, cached = shape
    per_token = model.matrix_flops_per_token - model.head_flops_per_token
    work = batch * (per_token * new + model.attention_flops(new, cached))
    return work / (tp * max(gpu.fp16_flop_per_s, peak_flop_per_s(model, gpu)))


def decode_floor_s(model: ModelSpec, gpu: Gpu, tp: int, batch: int, context: int) -> float:
    """Return the least time [s] of a decode step at the data-sheet bandwidth: weights and KV read once.

    Of a mixture only the experts of one token are counted: a batch may choose the same ones.
    """
    read = model.streamed_weight_bytes(1) + batch * model.kv_bytes(context)
    return read / (tp * gpu.memory_bytes_per_s)
