"""flash-linear-attention's model of a configuration's shape, trained as its users train it: what `pdn_train.bench --peer fla` times.

fp32 weights under bf16 autocast, its own fused losses and norms, clipping of the global norm, torch's fused AdamW; the same loader. One
GPU. flash-linear-attention 0.6.0 and transformers are yours to install; it refuses gated recurrences on Hopper with Triton 3.4 to 3.7.0,
and its first step compiles and autotunes for minutes.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from pdn_train.config import Config, ConfigError
from pdn_train.data import Loader
from pdn_train.interchange import to_json
from pdn_train.optim import build_optimizer, learning_rate, set_learning_rate
from pdn_train.profiling import Parts
from pdn_train.world import World


class Peer:
    """Their model, and its steps: in place of `bench.Training`."""

    def __init__(self, config: Config, world: World, loader: Loader):
        self.config, self.world = config, world
        self._model = build(config).to(world.device).train()
        self._optimizer = build_optimizer(self._model.named_parameters(), config.optim)
        self._batches = loader.steps(0)
        self.losses: list[Tensor] = []

    def step(self) -> Parts:
        device, optim = self.world.device, self.config.optim
        parts = Parts(device)
        parts("samples")
        batches, _ = next(self._batches)
        total = torch.zeros((), device=device)
        for batch in batches:
            parts("copy of the batch")
            ids = batch.input_ids.to(device, non_blocking=True)
            parts("forward")
            with torch.autocast(device.type, torch.bfloat16):
                # Their model shifts the labels itself
                loss = self._model(input_ids=ids, labels=ids).loss / len(batches)
            parts("backward")
            loss.backward()
            total += loss.detach()
        parts("gradient norm")
        if optim.clip:
            nn.utils.clip_grad_norm_(self._model.parameters(), optim.clip)
        parts("optimizer")
        set_learning_rate(self._optimizer, learning_rate(len(self.losses), optim, self.config.train.steps))
        self._optimizer.step()
        self._optimizer.zero_grad()
        parts(None)
        self.losses.append(total)
        return parts

    def close(self) -> None:
        self._batches.close()


def require(config: Config, world: World) -> None:
    """Raise ConfigError where the peer cannot train this."""
    if world.size > 1:
        raise ConfigError(f"--peer fla trains on one GPU, and there are {world.size} ranks; leave torchrun out")
    if config.data.reset_at_documents:
        raise ConfigError("--peer fla takes whole samples: set data.reset_at_documents=false")
    missing = [name for name in ("fla", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--peer fla needs flash-linear-attention and transformers; {missing[0]} is not installed")


def build(config: Config) -> nn.Module:
    """Their class for config.model, with its own initial weights, fp32."""
    import fla  # noqa: F401 - registers its classes
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = to_json(config.model, {"seq_len": config.data.seq_len}, None, None)
    for key in ("architectures", "dtype", "pdn_train"):
        settings.pop(key)
    torch.manual_seed(config.train.seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
