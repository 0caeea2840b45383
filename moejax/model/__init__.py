"""Flax NNX modules of the decoder, their abstract parameters, and counting them."""
