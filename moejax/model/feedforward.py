"""Feed-forward networks of a decoder layer: dense, and a mixture of experts."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.config import Config, ModelConfig
from moejax.errors import UserError
from moejax.model.attention import RMSNorm
from moejax.model.parameters import ZEROS, weight
from moejax.model.tokens import Tokens
from moejax.moe.exchange import make_exchange
from moejax.moe.experts import ExpertWeights
from moejax.moe.layer import moe_layer
from moejax.moe.router import RouterWeights
from moejax.moe.statistics import Statistics
from moejax.nn.activations import activate, num_inner
from moejax.nn.linear import linear
from moejax.sharding import compute_axes
from moejax.varying import vary


def _total(y: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum of the shares of devices that each have some of the hidden width."""
    with jax.named_scope("tensor"):
        return lax.psum(y, axes) if axes else y


class MLP(nnx.Module):
    """Dense FFN; its hidden width may be sharded over devices."""

    def __init__(self, config: Config, hidden: int, activation: str = "swiglu"):
        model, self.activation, self.axes = config.model, activation, compute_axes(config, "mlp")
        inner, out_std = num_inner(activation), model.init_std / (2 * model.num_layers) ** 0.5
        self.gate_up = weight((model.d_model, inner, hidden), ("embed", "gate_up", "mlp"), model.init_std)
        self.down = weight((hidden, model.d_model), ("mlp", "embed"), out_std)

    def __call__(self, x_BSD: jax.Array, tokens: Tokens) -> tuple[jax.Array, None]:
        """Apply to every token."""

        def run(x_BSD: jax.Array) -> jax.Array:
            hidden = checkpoint_name(linear(vary(x_BSD, self.axes), self.gate_up[...]), "hidden")
            hidden = activate(hidden.reshape(-1, *hidden.shape[2:]), self.activation)
            return _total(linear(hidden, self.down[...]).reshape(x_BSD.shape), self.axes)

        return tokens.when_live(run, x_BSD, apart=not self.axes), None


def _values(*params: nnx.Param | None) -> list[Any]:
    return [None if param is None else param[...] for param in params]


class Latent(nnx.Module):
    """Projections around the experts of a latent MoE."""

    def __init__(self, model: ModelConfig):
        width, latent = model.d_model, model.moe.latent_dim
        self.down = weight((width, latent), ("embed", "latent"), model.init_std)
        self.up = weight((latent, width), ("latent", "embed"), model.init_std / (2 * model.num_layers) ** 0.5)
        self.norm = RMSNorm(latent, model.norm_eps) if model.moe.latent_norm else None

    def enter(self, x_BSD: jax.Array) -> jax.Array:
        """To the width of the experts."""
        x_BSL = linear(x_BSD, self.down[...])
        return x_BSL if self.norm is None else self.norm(x_BSL)

    def leave(self, y_BSL: jax.Array) -> jax.Array:
        """Back to the width of the model."""
        return linear(y_BSL, self.up[...])


class MoE(nnx.Module):
    """Routed experts, and a shared expert that every token passes."""

    def __init__(self, config: Config):
        model, m = config.model, config.model.moe
        self.config, self.exchange, self.axes = config, make_exchange(config), compute_axes(config, "expert_mlp")
        if m.expert_bias and self.axes:
            raise UserError(
                f"model.moe.expert_bias=true with experts' width on {list(self.axes)}: set "
                f"sharding.compute.expert_mlp=[], so that biases are added once"
            )
        self.router = weight((model.d_model, m.num_experts), ("embed", "router"), model.init_std)
        self.router_bias = weight((m.num_experts,), ("router",), ZEROS) if m.router_bias else None
        self.router_scale = weight((model.d_model,), ("norm",), 0.0) if m.router_scale else None
        self.selection_bias = weight((m.num_experts,), ("router",), ZEROS) if m.selection_bias else None
        self._make_experts(model)
        self.latent = Latent(model) if m.latent_dim else None
        self.shared = MLP(config, m.shared_dim, m.activation) if m.shared_dim else None
        self.shared_gate = weight((model.d_model,), ("embed",), model.init_std) if m.shared_gate else None

    def _make_experts(self, model: ModelConfig) -> None:
        m, width = model.moe, model.moe.latent_dim or model.d_model
        count, inner, hidden = m.num_experts, num_inner(m.activation), m.expert_dim
        out_std = model.init_std / (2 * model.num_layers) ** 0.5
        dims = ("experts", "expert_embed", "gate_up", "expert_mlp")
        self.gate_up = weight((count, width, inner, hidden), dims, model.init_std)
        self.down = weight((count, hidden, width), ("experts", "expert_mlp", "expert_embed"), out_std)
        biased = m.expert_bias
        self.gate_up_bias = weight((count, inner * hidden), ("experts", "expert_mlp"), ZEROS) if biased else None
        self.down_bias = weight((count, width), ("experts", "expert_embed"), ZEROS) if biased else None

    def __call__(self, x_BSD: jax.Array, tokens: Tokens) -> tuple[jax.Array, Statistics]:
        """Apply to every token that exists."""
        inner = vary(x_BSD if self.latent is None else self.latent.enter(x_BSD), self.axes)
        router = RouterWeights(*_values(self.router, self.router_bias, self.router_scale, self.selection_bias))
        weights = ExpertWeights(*_values(self.gate_up, self.down, self.gate_up_bias, self.down_bias))
        y_BSD, statistics = moe_layer(x_BSD, inner, tokens.valid, router, weights, self.config, self.exchange)
        y_BSD = _total(y_BSD, self.axes)
        if self.latent is not None:
            y_BSD = self.latent.leave(y_BSD)
        if self.shared is not None:
            with jax.named_scope("shared"):
                y_BSD = y_BSD + self._shared(x_BSD, tokens)
        return y_BSD, statistics

    def _shared(self, x_BSD: jax.Array, tokens: Tokens) -> jax.Array:
        assert self.shared is not None
        gain = jnp.asarray(self.config.model.moe.shared_gain, x_BSD.dtype)
        if self.shared_gate is not None:
            gain = gain * jax.nn.sigmoid(x_BSD @ self.shared_gate[...])[..., None]
        return self.shared(x_BSD, tokens)[0] * gain
