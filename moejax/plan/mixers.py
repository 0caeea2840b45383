"""Parameters of the token mixers of published models, by their own dims. Biases are counted where a model has them.

Each mixer is a frozen dataclass; `parameters(d)` counts its weights for model width d, its own norms included.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockIndexer:
    """Scores blocks of keys for sparse attention: queries, one shared key, a norm on each."""

    num_heads: int
    head_dim: int

    def parameters(self, d: int) -> int:
        """Count for width d."""
        return d * self.head_dim * (self.num_heads + 1) + 2 * self.head_dim


@dataclass(frozen=True)
class Attention:
    """Multi-head, grouped-query or multi-query attention.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of queries and keys.
        v_head_dim: Width of values; `head_dim` if left out.
        bias: Biases on all four projections.
        qk_norm: Norm scales on queries and keys: `none`, one `head` wide, or `full`.
        sinks: One learned logit per head.
        gate: An output gate as wide as the queries.
        key_is_value: No value projection.
        indexer: Sparse attention's own projections.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    bias: bool = False
    qk_norm: str = "none"
    sinks: bool = False
    gate: bool = False
    key_is_value: bool = False
    indexer: BlockIndexer | None = None

    def parameters(self, d: int) -> int:
        """Count for width d."""
        value = self.v_head_dim or self.head_dim
        query = self.num_heads * self.head_dim
        key = self.num_kv_heads * self.head_dim
        values = 0 if self.key_is_value else self.num_kv_heads * value
        weights = d * (query * (2 if self.gate else 1) + key + values + self.num_heads * value)
        bias = query + key + values + d if self.bias else 0
        norms = {"none": 0, "head": 2 * self.head_dim, "full": query + key}[self.qk_norm]
        sinks = self.num_heads if self.sinks else 0
        return weights + bias + norms + sinks + (self.indexer.parameters(d) if self.indexer else 0)


@dataclass(frozen=True)
class LatentIndexer:
    """The lightning indexer of DeepSeek sparse attention; it reads the query latent.

    Attributes:
        num_heads: Heads.
        head_dim: Width of a head.
    """

    num_heads: int
    head_dim: int

    def parameters(self, d: int, latent: int) -> int:
        """Count: queries, one key with a LayerNorm that has a bias, and head weights."""
        return latent * self.num_heads * self.head_dim + d * (self.head_dim + self.num_heads) + 2 * self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): low-rank queries, one latent for keys and values.

    Attributes:
        num_heads: Heads.
        q_rank: Width of the query latent.
        kv_rank: Width of the latent of keys and values.
        nope_dim: Width of a head's part without rotary positions.
        rope_dim: Width of the part with them; its key is shared by the heads.
        v_head_dim: Width of values.
        gate: A full output gate.
        indexer: Sparse attention's own projections.
    """

    num_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_head_dim: int
    gate: bool = False
    indexer: LatentIndexer | None = None

    def parameters(self, d: int) -> int:
        """Count for width d."""
        query = d * self.q_rank + self.q_rank + self.q_rank * self.num_heads * (self.nope_dim + self.rope_dim)
        up = self.kv_rank * self.num_heads * (self.nope_dim + self.v_head_dim)
        out = self.num_heads * self.v_head_dim * d * (2 if self.gate else 1)
        indexer = self.indexer.parameters(d, self.q_rank) if self.indexer else 0
        return query + d * (self.kv_rank + self.rope_dim) + self.kv_rank + up + out + indexer


@dataclass(frozen=True)
class Compressor:
    """Pools groups of tokens into one key: two projections, a bias for each position of a group, a norm.

    Attributes:
        rate: Tokens in a group.
        overlap: Whether groups overlap, which doubles the width of the projections.
    """

    rate: int
    overlap: bool = False

    def parameters(self, d: int, width: int) -> int:
        """Count for keys of `width`."""
        wide = width * (2 if self.overlap else 1)
        return 2 * d * wide + self.rate * wide + width


@dataclass(frozen=True)
class CompressedAttention:
    """DeepSeek-V4's attention: one shared key and value over compressed and recent tokens, low-rank output in groups.

    Attributes:
        num_heads: Query heads.
        head_dim: Width of a head, and of the one key that is also the value.
        q_rank: Width of the query latent.
        out_groups: Groups of heads of the output projection.
        out_rank: Latent width of each group.
        compressor: Of keys; None for the sliding window alone.
        index_heads: Heads of the indexer that chooses compressed keys; 0 for none.
        index_dim: Width of such a head.
    """

    num_heads: int
    head_dim: int
    q_rank: int
    out_groups: int
    out_rank: int
    compressor: Compressor | None = None
    index_heads: int = 0
    index_dim: int = 0

    def parameters(self, d: int) -> int:
        """Count for width d."""
        inner = self.num_heads * self.head_dim
        query = d * self.q_rank + self.q_rank + self.q_rank * inner
        out = inner * self.out_rank + self.out_groups * self.out_rank * d
        total = query + d * self.head_dim + self.head_dim + out + self.num_heads
        if self.compressor:
            total += self.compressor.parameters(d, self.head_dim)
        if self.index_heads and self.compressor:
            total += self.compressor.parameters(d, self.index_dim) + d * self.index_heads
            total += self.q_rank * self.index_heads * self.index_dim
        return total


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated DeltaNet: a linear recurrence with a short convolution on queries, keys and values.

    Attributes:
        num_k_heads: Query and key heads.
        k_head_dim: Their width.
        num_v_heads: Value heads.
        v_head_dim: Their width.
        conv: Taps of the convolution.
    """

    num_k_heads: int
    k_head_dim: int
    num_v_heads: int
    v_head_dim: int
    conv: int = 4

    def parameters(self, d: int) -> int:
        """Count for width d."""
        values = self.num_v_heads * self.v_head_dim
        mixed = 2 * self.num_k_heads * self.k_head_dim + values
        gates = 2 * d * self.num_v_heads + 2 * self.num_v_heads
        return d * (mixed + values) + gates + self.conv * mixed + self.v_head_dim + values * d


@dataclass(frozen=True)
class DeltaAttention:
    """Kimi Delta Attention: as Gated DeltaNet, with a forget gate of low rank for every channel.

    Attributes:
        num_heads: Heads.
        head_dim: Their width, and the rank of the forget gate.
        conv: Taps of the convolutions.
    """

    num_heads: int
    head_dim: int
    conv: int = 4

    def parameters(self, d: int) -> int:
        """Count for width d."""
        inner = self.num_heads * self.head_dim
        forget = d * self.head_dim + self.head_dim * inner + inner + self.num_heads
        return 5 * d * inner + 3 * self.conv * inner + forget + d * self.num_heads + self.head_dim


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2: a state-space recurrence.

    Attributes:
        num_heads: Heads.
        head_dim: Their width.
        groups: Groups that share input and output matrices.
        state: Width of the state.
        conv: Taps of the convolution, which has a bias.
    """

    num_heads: int
    head_dim: int
    groups: int
    state: int
    conv: int = 4

    def parameters(self, d: int) -> int:
        """Count for width d."""
        inner = self.num_heads * self.head_dim
        mixed = inner + 2 * self.groups * self.state
        return d * (inner + mixed + self.num_heads) + mixed * (self.conv + 1) + 3 * self.num_heads + inner + inner * d


Mixer = Attention | LatentAttention | CompressedAttention | GatedDeltaNet | DeltaAttention | Mamba2

KINDS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "latent": LatentAttention,
    "compressed": CompressedAttention,
    "deltanet": GatedDeltaNet,
    "delta_attention": DeltaAttention,
    "mamba2": Mamba2,
}
"""Mixers by the name that descriptions use."""
