"""One decoder layer: attention and an FFN, each behind an RMSNorm and added to the residual."""

import jax
from flax import nnx

from moejax.config import Config, LayerSpec
from moejax.model.attention import Attention, RMSNorm
from moejax.model.feedforward import MLP, MoE
from moejax.model.tokens import Tokens
from moejax.moe.statistics import Statistics


class Block(nnx.Module):
    """One layer."""

    def __init__(self, config: Config, spec: LayerSpec):
        model = config.model
        self.attention_norm = RMSNorm(model.d_model, model.norm_eps)
        self.attention = Attention(config, spec.window)
        self.ffn_norm = RMSNorm(model.d_model, model.norm_eps)
        self.ffn = MoE(config) if spec.ffn == "moe" else MLP(config, model.mlp_dim)
        branch = model.moe.dense_dim if spec.ffn == "moe" else 0
        self.dense_norm = RMSNorm(model.d_model, model.norm_eps) if branch else None
        self.dense = MLP(config, branch) if branch else None

    def __call__(self, x_BSD: jax.Array, tokens: Tokens) -> tuple[jax.Array, Statistics | None]:
        """Return hidden states and, for MoE layers, statistics. If not live, hidden states pass as they are."""

        def attend(x_BSD: jax.Array) -> jax.Array:
            return self.attention(self.attention_norm(x_BSD), tokens)

        with jax.named_scope("attention"):
            x_BSD = x_BSD + tokens.when_live(attend, x_BSD, self.attention.apart)
        with jax.named_scope("ffn"):
            y_BSD, statistics = self.ffn(self.ffn_norm(x_BSD), tokens)
        if self.dense is not None and self.dense_norm is not None:
            with jax.named_scope("dense"):
                y_BSD = y_BSD + self.dense(self.dense_norm(x_BSD), tokens)[0]
        return x_BSD + y_BSD, statistics
