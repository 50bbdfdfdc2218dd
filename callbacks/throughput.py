"""Throughput: trained and sampled tokens per second, and model FLOPs utilization (MFU).

The callback counts the tokens in the trained model's forward passes with gradient, in every kind of stage.

The operations per token follow Chowdhery et al., "PaLM" (arXiv:2204.02311), appendix B, for the forward and backward
pass: 6 N for matrices, and 12 L H Q T for attention over a sample of T tokens. Recomputed activations do not count. N
leaves out the input embedding, because an embedding is a lookup. A frozen matrix takes 4 operations per weight in place
of 6, because it has no weight gradient.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from transformers import PreTrainedConfig
from typing_extensions import override

from rl_plugins.model_json import chosen_experts, expert_count
from rl_plugins.models.four_bit import CODES, four_bit_layers
from rl_plugins.ranks import Ranks
from rl_plugins.stages.clock import clock
from rl_plugins.stages.stage import Stage
from rl_plugins.vision_language import is_vision_language

PEAK_TFLOPS = {
    "GB200": 2500.0,  # NVIDIA GB200 NVL72 datasheet: 5 PFLOPS a GPU with sparsity
    "B200": 2250.0,  # NVIDIA DGX B200 datasheet: 4.5 PFLOPS with sparsity
    "GH200": 989.0,  # NVIDIA GH200 datasheet: 1,979 with sparsity
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
"""Dense bfloat16 peak of a device in TFLOPS, by a word of its name. The first match counts.

Lightning's table (`lightning.fabric.utilities.throughput`) is not used: in version 2.6 it has no entry for the names
that an H200 or a B200 reports, takes an L40S for an L4, and has the peak with sparsity for some devices.
"""


class Throughput(Callback):
    """Add `throughput/...` to the metrics of every step.

    - `trained_tokens_per_s`: trained tokens of all ranks, per second of the whole step. A prompt that several samples
      share in a packed row counts once.
    - `sampled_tokens_per_s`: response tokens, with the observations of conversations, per second of sampling and per
      training device.
    - `mfu`: operations of the update, as a fraction of the devices' peak in the time of the update.

    Args:
        peak_tflops: dense peak of a training device in the run's precision, in 10^12 operations per second. The default
            is the value in `PEAK_TFLOPS`. Without a value, and for a vision-language model, there is no `mfu`.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        self._peak_tflops = peak_tflops
        self._installed = ExitStack()
        self._ranks = Ranks()
        self._counts: list[Tensor] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        clock(pl_module)
        assert isinstance(pl_module, Stage)
        # A run that ended with an error had no teardown.
        self._installed.close()
        self._counts.clear()
        model = pl_module.named_models()[pl_module.trained]
        self._flops_per_token, self._flops_per_pair = flops_per_token(model)
        # The operations of a vision tower depend on the images.
        self._peak_of_run = None if is_vision_language(model) else self._peak_tflops or known_peak(pl_module.device)
        self._ranks, self._devices, self._trained = pl_module.strategy.ranks, trainer.world_size, pl_module.trained
        self._installed.enter_context(model.register_forward_pre_hook(self._count, with_kwargs=True))
        pl_module.further_metrics.append(self._metrics_of_step)
        self._installed.callback(pl_module.further_metrics.remove, self._metrics_of_step)

    def _count(self, model: nn.Module, arguments: tuple[object, ...], inputs: dict[str, Tensor]) -> None:
        if torch.is_grad_enabled():
            positions, mask = inputs["position_ids"], inputs.get("attention_mask")
            if positions.ndim == 3:
                # The first are the positions in the text; the others are places in an image.
                positions = positions[0]
            mask = torch.ones_like(positions) if mask is None else mask.to(positions)
            tokens = mask.sum()
            # The sum of the squared sample lengths: the positions 0 .. T-1 add up to (T^2 - T) / 2.
            pairs = 2 * (positions * mask).sum() + tokens
            self._counts.append(torch.stack([tokens, pairs]))

    def _metrics_of_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        counts = torch.stack(self._counts).sum(dim=0).double().cpu() if self._counts else torch.zeros(2).double()
        self._counts.clear()
        tokens, pairs = self._ranks.sum(counts).tolist()
        rates = {"trained_tokens_per_s": tokens / metrics["time/step"]}
        if "samples_per_s" in metrics and metrics.get("time/rollout"):
            samples = metrics["samples_per_s"] * metrics["time/step"]
            sampled = samples * metrics["train/response_length"]
            # With a schedule ahead, the trainer waits for less than the time of sampling.
            busy_s = (1 - metrics.get("idle/engine", 1.0)) * metrics["time/step"]
            rates["sampled_tokens_per_s"] = sampled / max(metrics["time/rollout"], busy_s) / self._devices
        updating = metrics.get(f"time/update_{self._trained}")
        if self._peak_of_run and updating:
            flops = tokens * self._flops_per_token + pairs * self._flops_per_pair
            rates["mfu"] = flops / (updating * self._peak_of_run * 1e12 * self._devices)
        return {f"throughput/{name}": value for name, value in rates.items()}

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._installed.close()


def flops_per_token(model: nn.Module) -> tuple[float, float]:
    """Return the operations of a forward and backward pass.

    Returns:
        Operations of the matrices per token, and operations of attention per pair of tokens. The second number is 0
        for a model without the configuration of a transformers model.
    """
    matrices = 0.0
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    linear = {id(p) for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters()}
    codes = {id(layer.weight) for layer in four_bit_layers(model).values()}
    config: Any = getattr(model, "config", None)
    text: dict[str, Any] = config.get_text_config().to_dict() if isinstance(config, PreTrainedConfig) else {}
    experts, chosen = expert_count(text), chosen_experts(text)
    for name, parameter in model.named_parameters():
        # A tied output head is an input embedding as well, and does count.
        if id(parameter) not in embeddings or id(parameter) in linear:
            # Under ZeRO-3 a parameter is empty, and `ds_numel` is its whole size.
            numel = getattr(parameter, "ds_numel", parameter.numel()) * (CODES if id(parameter) in codes else 1)
            if experts and chosen and ".experts." in name:
                # The experts of a layer are one tensor, of which expert parallelism gives a rank a part.
                is_stack = re.search(r"\.experts\.(base_layer\.)*\w+$", name)
                numel *= chosen / (getattr(parameter, "ds_shape", parameter.shape)[0] if is_stack else experts)
            matrices += numel * (6 if parameter.requires_grad else 4)
    layers, attention_heads = (getattr(config, name, 0) for name in ("num_hidden_layers", "num_attention_heads"))
    if not layers or not attention_heads:
        return matrices, 0.0
    width = getattr(config, "head_dim", None) or config.hidden_size // attention_heads
    return matrices, 12.0 * layers * attention_heads * width


def known_peak(device: torch.device) -> float | None:
    """Return the dense bfloat16 peak of a device in TFLOPS; None for a device that is not in `PEAK_TFLOPS`."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", name, re.IGNORECASE)), None)
