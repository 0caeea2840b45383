"""Tiny configurations and batches for tests."""

import dataclasses
from typing import Any

import jax
import numpy as np

from moejax.config import (
    AttentionConfig,
    Config,
    DataConfig,
    LayerGroup,
    LayerSpec,
    MeshConfig,
    ModelConfig,
    MoEModelConfig,
    ShardingConfig,
    TrainConfig,
)
from moejax.sharding import make_mesh
from moejax.train.program import Program

MODEL = ModelConfig(
    vocab_size=264,
    d_model=32,
    mlp_dim=40,
    layers=(LayerGroup(1, (LayerSpec("dense", window=5),)), LayerGroup(2)),
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8),
    moe=MoEModelConfig(num_experts=8, top_k=2, expert_dim=24, shared_dim=16),
    init_std=0.1,
    dtype="float32",
)


def config(data: int = 1, expert: int = 1, microbatches: int = 1, **sections: Any) -> Config:
    """A float32 run of a tiny model: 8 sequences of 16 tokens; sections replace whole sections of the configuration."""
    base = Config(
        mesh=MeshConfig(data=data, expert=expert),
        model=MODEL,
        sharding=ShardingConfig(replicate_below=300),
        data=DataConfig(batch_size=32, sequence_length=16),
        train=TrainConfig(steps=20, microbatches=microbatches),
    )
    return dataclasses.replace(base, **sections)


def program(run: Config) -> Program:
    """Program on the first devices of the eight."""
    return Program(run, make_mesh(run.mesh, jax.devices()[: run.mesh.size]))


def batch(run: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tokens in up to three documents a row; row 1 is half padding, row 5 all padding."""
    rng = np.random.default_rng(seed)
    shape = (run.data.batch_size, run.data.sequence_length)
    segments = np.sort(rng.integers(1, 4, shape), axis=1).astype(np.int32)
    segments[1, shape[1] // 2 :] = 0
    segments[5] = 0
    same = np.concatenate([np.zeros((shape[0], 1), bool), segments[:, 1:] == segments[:, :-1]], axis=1)
    positions = np.zeros(shape, np.int32)
    for s in range(1, shape[1]):
        positions[:, s] = np.where(same[:, s], positions[:, s - 1] + 1, 0)
    tokens, targets = (rng.integers(0, run.model.vocab_size, shape).astype(np.int32) for _ in range(2))
    return {"tokens": tokens, "targets": targets, "segments": segments, "positions": positions}
