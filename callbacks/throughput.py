"""Tokens trained and sampled in a second, and how much of the devices' arithmetic training uses (MFU).

Counted are the tokens that really go through the trained engine in passes with a gradient, whatever the stage is.

The arithmetic of a token follows Chowdhery et al., "PaLM" (arXiv:2204.02311), appendix B: 6 N of the matrices and
12 L H Q T of attention over a sample of T tokens, forward and backward, whatever is recomputed. N leaves out the
input embedding, which is looked up; a frozen matrix has no gradient of its own and takes 4 in place of 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from rl_plugins.stages.stage import Stage, clock

PEAK_TFLOPS = {
    "GB200": 2500.0,  # NVIDIA GB200 NVL72 datasheet: 5 PFLOPS a GPU with sparsity
    "B200": 2250.0,  # NVIDIA DGX B200 datasheet: 4.5 PFLOPS with sparsity
    "H200": 989.0,  # NVIDIA H200 datasheet: 1,979 with sparsity
    "H100 NVL": 835.0,  # NVIDIA H100 datasheet: 1,671 with sparsity
    "H100 PCIe": 756.0,  # NVIDIA H100 datasheet: 1,513 with sparsity
    "H100": 989.0,  # NVIDIA H100 datasheet, SXM: 1,979 with sparsity
    "H20": 148.0,  # NVIDIA H20 datasheet
    "A100": 312.0,  # NVIDIA A100 datasheet
    "A800": 312.0,  # the same chip
    "A40": 149.7,  # NVIDIA A40 datasheet: 299.4 with sparsity
    "L40S": 362.0,  # NVIDIA L40S datasheet: 733 with sparsity
    "L40": 181.0,  # NVIDIA L40 datasheet: 362 with sparsity
    "L4": 121.0,  # NVIDIA L4 datasheet: 242 with sparsity
    "4090": 165.2,  # NVIDIA Ada architecture whitepaper, with accumulation in float32
}
"""Dense bfloat16 peak of a device, by a part of its name; the first that fits."""


class Throughput(Callback):
    """Adds `throughput/...` to the metrics of every step.

    `trained_tokens_per_s` counts all ranks over the whole step, a prompt that samples share in a row once;
    `sampled_tokens_per_s` the responses of one training device while the rollout engine samples; and `mfu` is the share
    of the devices' peak in the time of the updates.

    Args:
        peak_tflops: dense peak of a training device in the precision of the run, in 10^12 operations a second; by
            default that of `PEAK_TFLOPS`, and without one there is no `mfu`.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        self._peak_tflops = peak_tflops
        self._hook: RemovableHandle | None = None
        self._strategy: Any = None
        self._counts: list[Tensor] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        clock(pl_module)
        assert isinstance(pl_module, Stage)
        model: nn.Module = pl_module.engine_modules()[pl_module.trained]
        self._matrices, self._attention = flops_per_token(model)
        self._peak_tflops = self._peak_tflops or known_peak(pl_module.device)
        self._strategy, self._devices, self._trained = trainer.strategy, trainer.world_size, pl_module.trained
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)
        pl_module.further_metrics.append(self._of_step)

    def _count(self, model: nn.Module, arguments: Any, inputs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            positions, mask = inputs["position_ids"], inputs.get("attention_mask")
            mask = torch.ones_like(positions) if mask is None else mask.to(positions)
            tokens = mask.sum()
            # The squares of the samples' lengths, from the positions of their tokens.
            self._counts.append(torch.stack([tokens, 2 * (positions * mask).sum() + tokens]))

    def _of_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        counts = torch.stack(self._counts).sum(dim=0).double().cpu() if self._counts else torch.zeros(2).double()
        self._counts.clear()
        tokens, squares = self._strategy.sum_over_ranks(counts).tolist()
        found = {"trained_tokens_per_s": tokens / metrics["time/step"]}
        if "samples_per_s" in metrics and metrics.get("time/rollout"):
            samples = metrics["samples_per_s"] * metrics["time/step"]
            sampled = samples * metrics["train/response_length"]
            found["sampled_tokens_per_s"] = sampled / metrics["time/rollout"] / self._devices
        updating = metrics.get(f"time/update_{self._trained}")
        if self._peak_tflops and updating:
            flops = tokens * self._matrices + squares * self._attention
            found["mfu"] = flops / (updating * self._peak_tflops * 1e12 * self._devices)
        return {f"throughput/{name}": value for name, value in found.items()}

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._hook is not None:
            assert isinstance(pl_module, Stage)
            pl_module.further_metrics.remove(self._of_step)
            self._hook.remove()
            self._hook = None


def flops_per_token(model: nn.Module) -> tuple[float, float]:
    """Operations of a forward and backward pass: of matrices for each token, of attention for each pair of tokens.

    Attention is 0 for a model whose configuration does not tell its layers and heads as transformers' do.
    """
    matrices = 0.0
    looked_up = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    heads = {id(p) for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters()}
    for parameter in model.parameters():
        # An output head may be the input embedding as well.
        if id(parameter) not in looked_up or id(parameter) in heads:
            # Under ZeRO-3 a parameter is empty, and knows its size.
            matrices += getattr(parameter, "ds_numel", parameter.numel()) * (6 if parameter.requires_grad else 4)
    config: Any = getattr(model, "config", None)
    layers, attention_heads = (getattr(config, name, 0) for name in ("num_hidden_layers", "num_attention_heads"))
    if not layers or not attention_heads:
        return matrices, 0.0
    width = getattr(config, "head_dim", None) or config.hidden_size // attention_heads
    return matrices, 12.0 * layers * attention_heads * width


def known_peak(device: torch.device) -> float | None:
    """Dense bfloat16 peak of a device in TFLOPS, where it is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part.lower() in name.lower()), None)
