"""What backward finds saved, and what it computes again."""

from collections.abc import Callable
from typing import Any

import jax

from moejax.config.parallel import RematPolicy

SAVED: dict[str, tuple[str, ...]] = {
    "attention": ("route", "plan", "exchange", "hidden", "experts"),
    "experts": ("route", "plan", "exchange", "attention", "qkv", "hidden"),
    "save_exchange": ("route", "plan", "exchange", "attention"),
    "full": ("route",),
}
"""Named values that each policy keeps besides the inputs of a repetition: `route` (chosen experts, so that a tie cannot
break another way the second time), `plan` (places of routes), `exchange` (rows as they arrived, here and back, and keys
and values of other context shards), `attention` (its output), `qkv`, `hidden` (of dense FFNs, before the activation)
and `experts` (the same of routed experts)."""

_OF_WEIGHTS = {"all_gather", "convert_element_type", "copy", "pcast", "pvary", "reshape", "squeeze", "transpose"}
"""Primitives that make gathered weights, or another form of them."""


def policy(name: RematPolicy) -> Callable[..., Any]:
    """The policy as `jax.checkpoint` takes it; that of `none` keeps everything but forms of weights."""
    if name == "none":
        return lambda primitive, *_, **__: primitive.name not in _OF_WEIGHTS
    if name == "offload":
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["route", "plan"],
            names_which_can_be_offloaded=["exchange", "attention"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return jax.checkpoint_policies.save_only_these_names(*SAVED[name])
