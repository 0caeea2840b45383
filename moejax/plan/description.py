"""A description of a model that can express the published ones, and its counts of parameters.

A model is a list of layer groups; each is a pattern, repeated, of (mixer, FFN), by names that the description
gives to dims. It says what there is to count, not how to compute it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moejax.plan.mixers import Mixer
from moejax.plan.parameters import Counts


@dataclass(frozen=True)
class FFN:
    """The feed-forward part of a layer: dense, routed experts, or both side by side.

    Attributes:
        dense_dim: Hidden width of a dense FFN; 0 for none.
        num_experts: Routed experts.
        top_k: Experts of a token.
        expert_dim: Their hidden width.
        shared_dim: Hidden width of all shared experts together.
        shared_gate: A learned gate on the shared expert.
        gated: Gate, up and down projections; otherwise up and down alone.
        expert_bias: Biases in the experts.
        router_bias: A bias in the router that is trained by gradient; selection biases are no parameters here.
        router_scale: A learned scale on the router's input, and one on each expert's output.
        latent_dim: Width at which routed experts work, behind two projections; 0 for the model's own.
        latent_norm: A norm on their combined output.
    """

    dense_dim: int = 0
    num_experts: int = 0
    top_k: int = 0
    expert_dim: int = 0
    shared_dim: int = 0
    shared_gate: bool = False
    gated: bool = True
    expert_bias: bool = False
    router_bias: bool = False
    router_scale: bool = False
    latent_dim: int = 0
    latent_norm: bool = False

    def routed(self, d: int) -> int:
        """Parameters of all routed experts for width d."""
        width, matrices = self.latent_dim or d, 3 if self.gated else 2
        bias = (matrices - 1) * self.expert_dim + width if self.expert_bias else 0
        return self.num_experts * (matrices * width * self.expert_dim + bias)

    def parts(self, d: int) -> dict[str, int]:
        """Parameters by part of the model for width d."""
        matrices = 3 if self.gated else 2
        router = self.num_experts * (d + int(self.router_bias) + int(self.router_scale))
        latent = 2 * d * self.latent_dim + (self.latent_dim if self.latent_norm else 0)
        return {
            "dense FFN": matrices * d * self.dense_dim + latent,
            "routed experts": self.routed(d),
            "routers": router + (d if self.router_scale else 0),
            "shared experts": matrices * d * self.shared_dim + (d if self.shared_gate else 0),
        }


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        mixer: Attention or another; None for none.
        ffn: Feed-forward part; None for none.
        norms: Norm scales as wide as the model.
    """

    mixer: Mixer | None
    ffn: FFN | None
    norms: int = 2


@dataclass(frozen=True)
class Group:
    """A pattern of layers, repeated."""

    repeat: int
    pattern: tuple[Layer, ...]


@dataclass(frozen=True)
class MTP:
    """Multi-token prediction: layers behind the model, which training uses and the published totals leave out.

    Attributes:
        layers: Its layers.
        repeat: How often they are there.
        projections: Square matrices that join hidden states and embeddings.
        norms: Norm scales outside the layers.
    """

    layers: tuple[Layer, ...]
    repeat: int = 1
    projections: int = 2
    norms: int = 3


@dataclass(frozen=True)
class Description:
    """A model.

    Attributes:
        vocab_size: Rows of the embedding.
        d_model: Width d.
        groups: Layers, first to last.
        tied: The head is the embedding.
        residual: How layers add up: `plain`; `streams`, mixed by learned hyper-connections; or `attention`
            over the outputs of earlier layers.
        streams: Parallel residual streams.
        mtp: Multi-token prediction; None for none.
    """

    vocab_size: int
    d_model: int
    groups: tuple[Group, ...]
    tied: bool = False
    residual: Literal["plain", "streams", "attention"] = "plain"
    streams: int = 1
    mtp: MTP | None = None

    def counts(self) -> Counts:
        """Parameters, without multi-token prediction."""
        d = self.d_model
        layers = [layer for group in self.groups for layer in group.pattern * group.repeat]
        embedding = self.vocab_size * d
        parts = count_layers(layers, d)
        parts["norms"] += d
        parts |= {"embedding": embedding, "head": 0 if self.tied else embedding}
        parts["residual"] = self._residual(len(layers))
        total, routed = sum(parts.values()), parts["routed experts"]
        used = sum(_used(layer, d) for layer in layers)
        parts = {name: size for name, size in parts.items() if size}
        return Counts(total, routed, total - routed + used, embedding, parts.get("head", 0), parts)

    def mtp_parameters(self) -> int:
        """Parameters of multi-token prediction, which `counts` leaves out."""
        if self.mtp is None:
            return 0
        d = self.d_model
        one = sum(count_layers(self.mtp.layers, d).values()) + self._residual(len(self.mtp.layers))
        return self.mtp.repeat * (one + self.mtp.projections * d * d + self.mtp.norms * d)

    def _residual(self, layers: int) -> int:
        """Parameters of what adds up mixers and FFNs, of which each layer has one, and of the end."""
        d, n = self.d_model, self.streams
        if self.residual == "streams":
            mixes = (2 + n) * n  # read, write and mix weights, each with a bias, and three scales
            return layers * 2 * (mixes * (n * d + 1) + 3) + n * (n * d + 1) + 1
        return (2 * layers + 1) * 2 * d if self.residual == "attention" else 0


def _used(layer: Layer, d: int) -> int:
    """Parameters of the routed experts of a layer that one token uses."""
    ffn = layer.ffn
    return ffn.routed(d) * ffn.top_k // ffn.num_experts if ffn and ffn.num_experts else 0


def count_layers(layers: Sequence[Layer], d: int) -> dict[str, int]:
    """Parameters of layers by part of the model, for width d."""
    parts: dict[str, int] = dict.fromkeys(
        ("attention", "dense FFN", "routed experts", "routers", "shared experts", "norms"), 0
    )
    for layer in layers:
        parts["attention"] += layer.mixer.parameters(d) if layer.mixer else 0
        for name, size in (layer.ffn.parts(d) if layer.ffn else {}).items():
            parts[name] += size
        parts["norms"] += layer.norms * d
    return parts
