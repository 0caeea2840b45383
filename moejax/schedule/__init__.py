"""How microbatches become gradients."""
