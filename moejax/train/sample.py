"""Text from a run's newest checkpoint, on one device."""

import contextlib
import dataclasses
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from moejax.config import Config, ContextConfig, MeshConfig, MoEConfig, PipelineConfig
from moejax.data.tokenizer import load_tokenizer
from moejax.errors import UserError
from moejax.model.decoder import Decoder
from moejax.model.generate import generate, make_sampler
from moejax.sharding import is_layout, make_layouts
from moejax.train.checkpoint import Checkpoints
from moejax.train.folder import RunFolder


def on_one_device(config: Config) -> Config:
    """The same model on one device, where nothing is dropped."""
    whole = {"mesh": MeshConfig(), "context": ContextConfig(), "pipeline": PipelineConfig(), "moe": MoEConfig()}
    return dataclasses.replace(config, **whole)


def sample_run(
    config: Config, prompt: str, *, max_tokens: int, temperature: float, top_p: float, seed: int
) -> dict[str, Any]:
    """Continue `prompt` with the model of a run; the window is `data.sequence_length`.

    Returns:
        `step` of the checkpoint and the `text` after the prompt.

    Raises:
        UserError: There is no checkpoint, or it is one of another model.
    """
    config = on_one_device(config)
    decoder, tokenizer = Decoder(config), load_tokenizer(config.data.tokenizer)
    shapes = jax.tree.map(lambda leaf: leaf.shape, decoder.shapes)
    layouts = make_layouts(decoder.dims, shapes, config)
    device = SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=device), decoder.shapes)
    folder = RunFolder(config)
    with contextlib.closing(Checkpoints(folder.checkpoints, read_only=True)) as checkpoints:
        step = checkpoints.newest()
        if step is None:
            raise UserError(f"{folder.path}: holds no complete checkpoint: train first, with moejax train CONFIG")
        params = checkpoints.restore_params(step, abstract)
    weights = jax.tree.map(lambda lay, x: x.astype(lay.dtype(decoder.dtype)), layouts, params, is_leaf=is_layout)
    tokens = generate(
        make_sampler(decoder, tokenizer.vocab_size),
        weights,
        [tokenizer.eod, *(int(token) for token in tokenizer.encode(prompt))],
        max_tokens=max_tokens,
        window=config.data.sequence_length,
        stop=tokenizer.eod,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    return {"step": step, "text": tokenizer.decode(tokens)}
