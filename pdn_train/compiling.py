"""A run's kernels, compiled side by side before its first step.

A kernel is known only by its launch, and a step launches some 30 one after the other, each of which would wait for its own compilation. So
one micro-batch goes through a model of one block first, as in training and as in validation, inside `kernels.launch.compiling`: products
of matrices run, over memory that nothing has written, and kernels are compiled and not run. What a step of the whole model launches beyond
that (the exchanges of `pdn_train.sequence`) is compiled when it is met.
"""

from __future__ import annotations

import torch

from pdn_train.config import Config
from pdn_train.model import LanguageModel


def compile_kernels(config: Config, device: torch.device) -> None:
    """Of training and validation with this configuration on this GPU. Needs memory for one block, the embedding and the head."""
    if config.model.kernel != "triton":
        return
    from kernels.launch import compiling  # Triton is not on every machine

    with device:
        model = LanguageModel(config.model.model_copy(update={"num_layers": 1}), config.train.activation_checkpoint)
    model.to(torch.bfloat16 if config.train.precision == "bf16" else torch.float32)
    samples, length = config.train.micro_batch, config.data.seq_len // config.parallel.sequence
    ids, cu_seqlens = torch.zeros(samples, length, dtype=torch.int64, device=device), None
    if config.data.reset_at_documents:
        ids, cu_seqlens = ids.view(1, -1), length * torch.arange(samples + 1, dtype=torch.int32)
    with compiling(device), torch.autograd.set_multithreading_enabled(False):  # of this thread: `compiling` knows no other
        (1.0 * model(ids, ids, cu_seqlens)).backward()
        with torch.no_grad():  # validation
            model(ids, ids, cu_seqlens)
    del model
    torch.cuda.empty_cache()  # the whole model is laid out afresh
