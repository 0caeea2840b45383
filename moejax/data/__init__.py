"""Text to token files to batches: corpora, tokenizers, preparation, packing, loader. No JAX of its own."""
