"""Token embedding, whole or sharded over the vocabulary."""

import jax
import jax.numpy as jnp
from jax import lax


def _local(tokens: jax.Array, rows: int, axes: tuple[str, ...]) -> jax.Array:
    """Rows of this device's shard; `rows` for a token that another shard has."""
    local = tokens - lax.axis_index(axes) * rows if axes else tokens
    return jnp.where((local >= 0) & (local < rows), local, rows)


def embed(table_VD: jax.Array, tokens_BS: jax.Array, axes: tuple[str, ...] = ()) -> jax.Array:
    """Rows of the embedding [B, S, D].

    Args:
        table_VD: The embedding, or this device's shard of the vocabulary.
        tokens_BS: Token ids, the same along `axes`.
        axes: Mesh axes that shard the vocabulary.
    """
    if not axes:
        return jnp.take(table_VD, tokens_BS, axis=0)
    local_BS = _local(tokens_BS, table_VD.shape[0], axes)
    return lax.psum(jnp.take(table_VD, local_BS, axis=0, mode="fill", fill_value=0), axes)


def add_gradient(total_VD: jax.Array, tokens_BS: jax.Array, dx_BSD: jax.Array, axes: tuple[str, ...] = ()) -> jax.Array:
    """A gradient of the embedding with that of `embed` added in place, in the type of `total_VD`."""
    local_BS = _local(tokens_BS, total_VD.shape[0], axes)
    return total_VD.at[local_BS].add(dx_BSD.astype(total_VD.dtype), mode="drop")
