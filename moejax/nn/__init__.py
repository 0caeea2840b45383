"""Pure per-device functions: norms, rotary embedding, attention, dense FFN, cross-entropy."""
