"""A decoder-only transformer: what it weighs, what it caches and what it computes, whole and cut into ranks.

Everything derives from one list: the tensors of a layer, as one tensor-parallel rank holds them. A whole
model is the rank of TP1, so no figure is worked out twice. Sizes are in bytes, work in FLOP (a multiply and
an add are two).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from planner.specs.base import Spec
from planner.specs.layout import Layout, split_layers
from planner.specs.units import Count, CountOrZero, Name

Dtype = Literal["float32", "float16", "bfloat16", "fp8", "int8"]
DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "int8": 1}

Attention = Literal["full", "sliding", "linear"]
Biases = Literal["none", "qkv", "attention", "mlp", "all"]
Layers = Annotated[int, Field(strict=True, ge=1, le=10_000)]
Bits = Annotated[int, Field(strict=True, ge=1, le=32)]

# Methods whose engines re-quantise or pad a rank's share, so that a cut group is no error.
_CUTS_ANYWHERE = ("bitsandbytes", "mxfp4")


class Mla(Spec):
    """Multi-head latent attention: one cached latent holds keys and values (DeepSeek-V2, section 2.1)."""

    q_lora_rank: Count | None = None
    """None: queries are projected directly."""
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_width(self) -> int:
        """Values cached per token and layer: the latent and one shared rotary key, not twice anything."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class Moe(Spec):
    """Which layers are mixtures of experts, and how wide. `every: 2` means every second layer."""

    experts: Count
    experts_per_token: Count
    intermediate_size: Count
    """Width of one routed expert."""
    shared_experts: CountOrZero = 0
    shared_intermediate_size: Count | None = None
    """Width of one shared expert; None: as wide as a routed one."""
    router_bias: bool = False
    first_dense_layers: CountOrZero = 0
    every: Count = 1
    dense_layers: tuple[CountOrZero, ...] = ()
    """Further layers, counted from 0, that have a plain MLP."""

    @model_validator(mode="after")
    def _check(self) -> Moe:
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"expected experts_per_token up to the {self.experts} experts, got {self.experts_per_token}"
            )
        return self

    @property
    def shared_width(self) -> int:
        """Width of all shared experts together; 0 when there are none."""
        return self.shared_experts * (self.shared_intermediate_size or self.intermediate_size)

    def covers(self, layer: int) -> bool:
        """True when `layer` (from 0) is a mixture."""
        return layer >= self.first_dense_layers and (layer + 1) % self.every == 0 and layer not in self.dense_layers

    def touched_share(self, tokens: float) -> float:
        """Return the expected share of the experts that `tokens` tokens wake: 1 - (1 - k/E)^T.

        Holds for tokens that choose independently and evenly; correlated tokens wake fewer.
        """
        return 1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens


class Quantisation(Spec):
    """How the matrices of the layers are stored.

    Embeddings, the vocabulary projection, norms and routers stay in the model's dtype.
    """

    method: Name
    bits: Bits
    group_size: Count | None = None
    """Inputs that share a scale; None: one scale per output."""
    block: tuple[Count, Count] | None = None
    """Outputs x inputs that share a scale, instead of `group_size`."""
    scale_bytes: Annotated[int, Field(strict=True, ge=0, le=4)] = 2
    zero_points: bool = False
    activation_bits: Bits = 16
    """16: weights are expanded before multiplying, so arithmetic is no faster than without quantisation."""
    experts_only: bool = False

    def stored_bytes(self, inputs: int, outputs: int) -> int:
        """Return the bytes of one matrix: its values, then a scale (and a zero point) per group."""
        if self.block:
            groups = _parts(outputs, self.block[0]) * _parts(inputs, self.block[1])
        else:
            groups = outputs * _parts(inputs, (self.group_size or inputs))
        zero_bits = self.bits if self.zero_points else 0
        return _parts((inputs * outputs * self.bits + groups * zero_bits), 8) + groups * self.scale_bytes

    @property
    def cut_units(self) -> tuple[int, ...]:
        """Widths of which a rank's share of a matrix must be a multiple."""
        if self.method in _CUTS_ANYWHERE:
            return ()
        return tuple(sorted(set(self.block or (self.group_size or 1,))))


Role = Literal["linear", "expert", "matrix", "vector", "table"]


class Tensor(NamedTuple):
    """Weights of one shape on one rank.

    linear  a matrix that quantisation covers        expert  the same, of a routed expert
    matrix  a matrix in the model's dtype            vector  a norm or bias: no matrix product
    table   rows looked up, neither multiplied nor streamed
    """

    role: Role
    inputs: int
    outputs: int
    copies: int = 1

    @property
    def parameters(self) -> int:
        """How many numbers it holds."""
        return self.inputs * self.outputs * self.copies

    def times(self, count: int) -> Tensor:
        """Return the same tensor in `count` layers."""
        return self._replace(copies=self.copies * count)


class ModelSpec(Spec):
    """The LLM.

    Left out, `kv_heads` is one per head, `head_dim` is hidden_size / heads and `kv_dtype` is `dtype`.
    `tp_fault` and `pp_fault` say which layouts are legal; the per-rank figures round shares up, never fail.
    """

    name: Name
    aliases: tuple[str, ...] = ()
    layers: Layers
    hidden_size: Count
    intermediate_size: Count | None = None
    """Width of a plain MLP; may be left out when every layer is a mixture of experts."""
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocab_size: Count
    embedding_size: Count | None = None
    """Width of the token embedding where it is projected to `hidden_size` and back."""
    max_positions: Count | None = None
    position_rows: CountOrZero = 0
    """Rows of a learned position table (OPT: max_positions + 2)."""
    tied_embeddings: bool = False
    gated_mlp: bool = True
    """True: three matrices (gate, up, down), as in SwiGLU; False: two."""
    biases: Biases = "none"
    norm_biases: bool = False
    norms_per_layer: CountOrZero = 2
    qk_norm: bool = False
    """True: a norm over each head of the queries and keys."""
    attention_pattern: tuple[Attention, ...] = Field(default=("full",), min_length=1, max_length=10_000)
    """Attention of layer 0, 1, ..., repeated. `linear` layers keep a state, not a cache that grows."""
    window_tokens: Count | None = None
    """Tokens that a sliding layer keeps."""
    mla: Mla | None = None
    moe: Moe | None = None
    quantisation: Quantisation | None = None
    dtype: Dtype = "bfloat16"
    kv_dtype: Dtype | None = None
    """Type of cached keys and values. Quantised weights do not change it."""
    source: str = ""
    notes: tuple[str, ...] = ()
    """What was assumed where the source was silent."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        if data.get("kv_heads") is None and "heads" in data:
            data["kv_heads"] = data["heads"]
        hidden, heads = data.get("hidden_size"), data.get("heads")
        if data.get("head_dim") is None and _positive(hidden) and _positive(heads):
            if hidden % heads and data.get("mla") is None:
                raise ValueError(f"hidden_size {hidden} does not divide by {heads} heads; give head_dim")
            data["head_dim"] = max(1, hidden // heads)
        return data

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        if self.mla is None and self.heads % self.kv_heads:
            raise ValueError(f"expected kv_heads that divide the {self.heads} heads, got {self.kv_heads}")
        if "sliding" in self.attention_pattern and self.window_tokens is None:
            raise ValueError("sliding attention needs window_tokens")
        if self.intermediate_size is None and self._mixtures(range(self.layers)) < self.layers:
            raise ValueError("intermediate_size is required: not every layer is a mixture of experts")
        return self

    def is_called(self, name: str) -> bool:
        """True when `name` is this model's name or an alias, ignoring case and an organisation before `/`."""
        return _bare(name) in {_bare(known) for known in (self.name, *self.aliases)}

    # -- size -----------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> int:
        """Parameters in all: every expert, a tied embedding once."""
        return sum(tensor.parameters for tensor in self._tensors())

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, embeddings included: of the experts only those it is sent to."""
        return sum(self._active(tensor) for tensor in self._tensors())

    @property
    def weight_bytes(self) -> int:
        """Bytes of one whole copy: quantised matrices with their scales, the rest in `dtype`."""
        return sum(self._bytes(tensor) for tensor in self._tensors())

    def stage_weight_bytes(self, layout: Layout) -> tuple[int, ...]:
        """Return the bytes that ONE rank of each pipeline stage holds.

        Heads, MLP widths and vocabulary are cut over the ranks and rounded up. Every rank holds a copy of
        norms, routers, position tables and latent projections, and of a key-value head when there are fewer
        than ranks. The first stage has the token embedding and the last the vocabulary projection; a tied
        matrix is on both.
        """
        return tuple(
            sum(self._bytes(tensor) for tensor in self._stage_tensors(layout, stage)) for stage in range(layout.pp)
        )

    @property
    def expert_weight_bytes(self) -> int:
        """Bytes of all routed experts; 0 for a dense model."""
        return sum(self._bytes(tensor) for tensor in self._tensors() if tensor.role == "expert")

    @property
    def shared_weight_bytes(self) -> int:
        """Bytes that every step streams whatever its tokens: all but routed experts and looked-up tables."""
        return sum(self._bytes(tensor) for tensor in self._tensors() if tensor.role not in ("expert", "table"))

    def streamed_weight_bytes(self, tokens: float) -> float:
        """Return the weight bytes that a step of T tokens reads: shared + experts (1 - (1 - k/E)^T)."""
        touched = self.moe.touched_share(tokens) if self.moe else 0.0
        return self.shared_weight_bytes + touched * self.expert_weight_bytes

    @property
    def activation_bytes_per_token(self) -> int:
        """Bytes of one token's hidden state: what a stage hands on and what an all-reduce sums."""
        return self.hidden_size * DTYPE_BYTES[self.dtype]

    # -- key-value cache ------------------------------------------------------------------------------------

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token adds to the cache of the whole model, each key-value head once.

        This is what a prefill-to-decode transfer moves per token, whatever the layouts. Sliding layers count
        until they are full: see `kv_bytes` for long contexts.
        """
        return self.kv_bytes(1)

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes that `tokens` tokens cache in the whole model; sliding layers cap at a window."""
        return self._kv_bytes(range(self.layers), tokens, 1)

    def stage_kv_bytes(self, layout: Layout, tokens: int) -> tuple[int, ...]:
        """Return the bytes that ONE rank of each stage caches for a context of `tokens`."""
        return tuple(self._kv_bytes(stage, tokens, layout.tp) for stage in _stages(self.layers, layout.pp))

    def stage_kv_bytes_per_token(self, layout: Layout) -> tuple[int, ...]:
        """Return the bytes that one token adds on ONE rank of each stage.

        With fewer key-value heads than ranks, heads are repeated; the MLA latent is repeated on every rank.
        """
        return self.stage_kv_bytes(layout, 1)

    def _kv_bytes(self, layers: range, tokens: int, tp: int) -> int:
        kept = sum(self._kept_tokens(layer, tokens) for layer in layers)
        width = self.mla.cached_width if self.mla else 2 * _parts(self.kv_heads, tp) * self.head_dim
        return kept * width * DTYPE_BYTES[self.kv_dtype or self.dtype]

    def _kept_tokens(self, layer: int, tokens: int) -> int:
        window = self._window(layer)
        return tokens if window is None else min(tokens, window)

    def _window(self, layer: int) -> int | None:
        """Tokens that `layer` can look back on: None without limit, 0 for linear attention."""
        kind = self.attention_pattern[layer % len(self.attention_pattern)]
        return {"full": None, "sliding": self.window_tokens, "linear": 0}[kind]

    # -- work -----------------------------------------------------------------------------------------------

    @property
    def matrix_flops_per_token(self) -> int:
        """FLOP of one token through its matrices, the vocabulary projection included even when it is tied."""
        return sum(self._flops(tensor) for tensor in self._tensors())

    @property
    def head_flops_per_token(self) -> int:
        """FLOP of the vocabulary projection, which a prefill needs for each prompt's last token only."""
        return 2 * self.vocab_size * (self.embedding_size or self.hidden_size)

    def attention_flops(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Return the FLOP of QK^T and PV for n new tokens behind k cached: n k + n^2 / 2 pairs per layer.

        A layer with window w pairs each query with at most w keys. Exact up to the diagonal (n / 2 pairs).
        """
        widths = (self.mla.qk_head_dim + self.mla.v_head_dim) if self.mla else 2 * self.head_dim
        windows = [self._window(layer) for layer in range(self.layers)]
        total = new_tokens + cached_tokens
        pairs = {w: _causal_pairs(total, w) - _causal_pairs(cached_tokens, w) for w in set(windows)}
        return 2.0 * self.heads * widths * sum(pairs[window] for window in windows)

    def stage_share(self, pp: int, projected_share: float = 1.0) -> tuple[float, ...]:
        """Return each stage's share of the matrix FLOP of a step; sums to 1.

        Stages differ in layers, and in dense against expert layers; the last has the vocabulary projection.
        `projected_share` of the tokens need that: 1 in decode, one per prompt (nearly 0) in prefill.
        """
        work = [float(sum(map(self._flops, self._stage_tensors(Layout(1, pp), stage)))) for stage in range(pp)]
        work[-1] -= (1.0 - projected_share) * self.head_flops_per_token
        return tuple(share / sum(work) for share in work)

    @property
    def compute_bits(self) -> int:
        """Width of the operands that are multiplied: 8 only where activations are quantised too."""
        return self.quantisation.activation_bits if self.quantisation else 8 * DTYPE_BYTES[self.dtype]

    # -- legal cuts -----------------------------------------------------------------------------------------

    def tp_fault(self, tp: int, expert_parallel: bool = False) -> str | None:
        """Return why `tp` ranks cannot share a layer, or None when they can.

        `expert_parallel`: ranks hold whole experts instead of a slice of each. The rule of block- and
        group-quantised widths is that of engines which refuse to cut a block; newer ones may pad instead.
        """
        return next(self._tp_faults(tp, expert_parallel), None)

    def _tp_faults(self, tp: int, expert_parallel: bool) -> Iterator[str]:
        if tp < 1:
            yield f"expected at least one rank, got TP{tp}"
        if tp <= 1:
            return
        if self.heads % tp:
            yield f"{self.heads} attention heads do not divide by TP{tp}"
        if self.mla is None and self.kv_heads % tp and tp % self.kv_heads:
            yield f"{self.kv_heads} key-value heads neither divide by TP{tp} nor repeat evenly over it"
        for what, width in self._cut_widths(expert_parallel):
            if width % tp:
                yield f"{what} {width} does not divide by TP{tp}"
            elif uneven := self._uneven(width // tp):
                yield f"{what} {width} / TP{tp} = {width // tp} {uneven}"

    def _cut_widths(self, expert_parallel: bool) -> Iterator[tuple[str, int]]:
        """Widths cut between ranks: outputs of one matrix and, but for queries, inputs of the next."""
        if self.mla:
            yield "query width", self.heads * self.mla.qk_head_dim
        yield "attention width", self.heads * (self.mla.v_head_dim if self.mla else self.head_dim)
        if self.intermediate_size is not None and self._mixtures(range(self.layers)) < self.layers:
            yield "MLP width", self.intermediate_size
        if self.moe and not expert_parallel:
            yield "expert width", self.moe.intermediate_size
        if self.moe and self.moe.shared_width:
            yield "shared-expert width", self.moe.shared_width

    def _uneven(self, width: int) -> str | None:
        """Return how `width` fails to be whole blocks of the quantisation, or None."""
        units = self.quantisation.cut_units if self.quantisation else ()
        unit = next((unit for unit in units if width % unit), None)
        if unit is None or self.quantisation is None:
            return None
        kind = "block" if self.quantisation.block else "group"
        return f"is not a multiple of the {self.quantisation.method} {kind} of {unit}"

    def padding_notes(self) -> tuple[str, ...]:
        """Return what an engine pads even at TP1: widths that are no whole number of quantised blocks."""
        uneven = ((what, width, self._uneven(width)) for what, width in self._cut_widths(False))
        return tuple(f"{what} {width} {reason}: padded" for what, width, reason in uneven if reason)

    def pp_fault(self, pp: int) -> str | None:
        """Return why the model cannot be cut into `pp` stages, or None when it can."""
        if pp < 1:
            return f"expected at least one stage, got PP{pp}"
        return f"{self.layers} layers cannot fill PP{pp}" if pp > self.layers else None

    # -- the tensors, from which all of the above follows ---------------------------------------------------

    def _tensors(self) -> Iterator[Tensor]:
        return self._stage_tensors(Layout(1, 1), 0)

    def _stage_tensors(self, layout: Layout, stage: int) -> Iterator[Tensor]:
        """Yield what one rank of `stage` holds."""
        layers = _stages(self.layers, layout.pp)[stage]
        mixtures = self._mixtures(layers)
        alone = layout.pp == 1
        if stage == 0:
            yield from self._embedding(layout.tp, looked_up=not (alone and self.tied_embeddings))
        for tensor in self._attention(layout.tp):
            yield tensor.times(len(layers))
        if mixtures < len(layers):
            for tensor in self._mlp("linear", self.intermediate_size or 0, layout.tp):
                yield tensor.times(len(layers) - mixtures)
        if mixtures:
            for tensor in self._mixture(layout.tp):
                yield tensor.times(mixtures)
        if stage == layout.pp - 1:
            yield from self._head(layout.tp, separate=not (alone and self.tied_embeddings))

    def _mixtures(self, layers: range) -> int:
        return sum(self.moe.covers(layer) for layer in layers) if self.moe else 0

    def _embedding(self, tp: int, looked_up: bool) -> Iterator[Tensor]:
        """A tied matrix on a single stage counts once, and as a matrix, for its role at the end."""
        width = self.embedding_size or self.hidden_size
        yield Tensor("table" if looked_up else "matrix", _parts(self.vocab_size, tp), width)
        if self.embedding_size:
            yield Tensor("matrix", self.embedding_size, self.hidden_size)
        if self.position_rows:
            yield Tensor("table", self.position_rows, self.hidden_size)

    def _head(self, tp: int, separate: bool) -> Iterator[Tensor]:
        yield self._norm()
        if self.embedding_size:
            yield Tensor("matrix", self.hidden_size, self.embedding_size)
        if separate:
            yield Tensor("matrix", self.embedding_size or self.hidden_size, _parts(self.vocab_size, tp))

    def _norm(self, count: int = 1) -> Tensor:
        return Tensor("vector", 2 if self.norm_biases else 1, self.hidden_size, count)

    def _attention(self, tp: int) -> Iterator[Tensor]:
        yield self._norm(self.norms_per_layer)
        heads = _parts(self.heads, tp)
        yield from self._latent_attention(self.mla, heads) if self.mla else self._head_attention(heads, tp)

    def _head_attention(self, heads: int, tp: int) -> Iterator[Tensor]:
        queries, keys = heads * self.head_dim, _parts(self.kv_heads, tp) * self.head_dim
        yield Tensor("linear", self.hidden_size, queries)
        yield Tensor("linear", self.hidden_size, keys, 2)
        yield Tensor("linear", queries, self.hidden_size)
        if self.biases in ("qkv", "attention", "all"):
            yield Tensor("vector", 1, queries + 2 * keys)
        if self.biases in ("attention", "all"):
            yield Tensor("vector", 1, self.hidden_size)
        if self.qk_norm:
            yield Tensor("vector", 2, self.head_dim)

    def _latent_attention(self, mla: Mla, heads: int) -> Iterator[Tensor]:
        """The down-projections make the latent that every head reads: each rank needs them whole."""
        source = self.hidden_size
        if mla.q_lora_rank:
            yield Tensor("linear", self.hidden_size, mla.q_lora_rank)
            yield Tensor("vector", 1, mla.q_lora_rank)
            source = mla.q_lora_rank
        yield Tensor("linear", source, heads * mla.qk_head_dim)
        yield Tensor("linear", self.hidden_size, mla.cached_width)
        yield Tensor("vector", 1, mla.kv_lora_rank)
        yield Tensor("linear", mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim))
        yield Tensor("linear", heads * mla.v_head_dim, self.hidden_size)

    def _mlp(self, role: Role, width: int, tp: int, copies: int = 1) -> Iterator[Tensor]:
        """Gate and up are cut by output and down by input, so a rank holds the same share of each."""
        share, ups = _parts(width, tp), 2 if self.gated_mlp else 1
        yield Tensor(role, self.hidden_size, share, ups * copies)
        yield Tensor(role, share, self.hidden_size, copies)
        if self.biases in ("mlp", "all"):
            yield Tensor("vector", 1, ups * share + self.hidden_size, copies)

    def _mixture(self, tp: int) -> Iterator[Tensor]:
        assert self.moe is not None
        moe = self.moe
        yield from self._mlp("expert", moe.intermediate_size, tp, moe.experts)
        if moe.shared_width:
            yield from self._mlp("linear", moe.shared_width, tp)
        yield Tensor("matrix", self.hidden_size, moe.experts)
        if moe.router_bias:
            yield Tensor("vector", 1, moe.experts)

    def _active(self, tensor: Tensor) -> int:
        """Parameters of `tensor` that one token meets (copies of experts are a multiple of their number)."""
        if tensor.role != "expert" or self.moe is None:
            return tensor.parameters
        return tensor.parameters // self.moe.experts * self.moe.experts_per_token

    def _flops(self, tensor: Tensor) -> int:
        return 0 if tensor.role in ("vector", "table") else 2 * self._active(tensor)

    def _bytes(self, tensor: Tensor) -> int:
        covered = ("expert",) if self.quantisation and self.quantisation.experts_only else ("linear", "expert")
        if self.quantisation and tensor.role in covered:
            return self.quantisation.stored_bytes(tensor.inputs, tensor.outputs) * tensor.copies
        return tensor.parameters * DTYPE_BYTES[self.dtype]


def _stages(layers: int, pp: int) -> list[range]:
    """Return the layers of each stage, in order, none lost and none twice."""
    ends = [0]
    for size in split_layers(layers, pp):
        ends.append(ends[-1] + size)
    return [range(start, end) for start, end in pairwise(ends)]


def _causal_pairs(tokens: int, window: int | None) -> float:
    """Return the query-key pairs of the first `tokens` positions: x^2 / 2, then `window` for each more."""
    full = tokens if window is None else min(tokens, window)
    return full * full / 2 + (tokens - full) * (window or 0)


def _parts(whole: int, size: int) -> int:
    """Return whole / size, rounded up."""
    return -(-whole // size)


def _bare(name: str) -> str:
    return name.strip().rstrip("/").rsplit("/", 1)[-1].lower()


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
