"""Names of mesh axes and of tensor dims. An *axis* belongs to the mesh, a *dim* to a tensor."""

STAGE, DATA, CONTEXT, EXPERT, MODEL = "stage", "data", "context", "expert", "model"

AXES = (STAGE, DATA, CONTEXT, EXPERT, MODEL)
"""All mesh axes, outermost first. All always exist, with size 1 when unused."""

BATCH_AXES = (DATA, EXPERT)
"""Axes over which the batch dim (sequences) is sharded."""

TOKEN_AXES = (DATA, CONTEXT, EXPERT)
"""Axes over which tokens differ, so gradients of replicated weights are summed over them."""

DIMS = {
    "layers": "stacked layers of one pattern position",
    "vocab": "vocabulary",
    "embed": "model width of dense tensors",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "head_dim": "width of one head",
    "mlp": "hidden width of dense and shared FFNs",
    "router": "router outputs, one per expert",
    "experts": "routed experts",
    "expert_embed": "model width of expert tensors",
    "expert_mlp": "hidden width of routed experts",
    "latent": "width that the experts of a latent MoE see",
    "gate_up": "the gate and the up projection, side by side",
    "joined": "hidden state and embedding of a token, side by side",
    "norm": "width of a normalisation scale",
}
"""Logical dims of parameters, with what they count. Sharding rules are keyed by these names."""
