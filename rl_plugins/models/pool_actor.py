"""Frozen models in processes of their own: a pool of Ray actors that each hold the whole model.

The driver starts them and imports neither torch nor a model for it.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

_REPEATS = 2
Arrays = dict[str, "np.ndarray"]


@dataclass(frozen=True)
class PoolConfig:
    """A pool; ranks find its actors by the name.

    Attributes:
        role: of the model, for messages and metrics.
        model: Hugging Face name or folder.
        head: a scalar one, or that of a causal language model.
        dtype: of the parameters, by its name in torch.
        actors: how many processes hold the model.
        device: `cpu` or `cuda`.
        threads: of each process, on CPU.
        ready_timeout_s: deadline for loading the model.
        call_timeout_s: deadline for the numbers of a micro-batch, the waits for other ranks and for a new actor
            included.
        name: of the actors.
    """

    role: str
    model: str
    head: Literal["scalar", "causal_lm"]
    dtype: str = "float32"
    actors: int = 1
    device: str = "cpu"
    threads: int = 1
    ready_timeout_s: float = 300.0
    call_timeout_s: float = 600.0
    name: str = field(default_factory=lambda: f"pool-{uuid.uuid4().hex[:8]}")

    def label(self, actor: int) -> str:
        """Name of an actor."""
        return f"{self.name}-{self.role}-{actor}"


def start_pool(config: PoolConfig, options: Sequence[dict[str, Any]]) -> list[Any]:
    """Start the actors; does not wait for them.

    Args:
        config: the pool.
        options: Ray's for each actor: where it runs, and what it takes.
    """
    import ray

    return [
        ray.remote(ModelActor)
        .options(name=config.label(number), max_restarts=-1, max_task_retries=_REPEATS, **own)
        .remote(config)
        for number, own in enumerate(options)
    ]


def process_name() -> str:
    """That of this process, which no other one has."""
    return f"{os.getpid()}@{socket.gethostname()}"


class ModelActor:
    """Holds the model, and runs what it is sent, one request after the other."""

    def __init__(self, config: PoolConfig) -> None:
        import torch

        from rl_plugins.models.loading import load_causal_lm
        from rl_plugins.models.scalar_head import load_scalar_head

        torch.set_num_threads(config.threads)
        dtype: torch.dtype = getattr(torch, config.dtype)
        model: Any
        if config.head == "scalar":
            model = load_scalar_head(config.model, dtype=dtype, new_head=False)
        else:
            model = load_causal_lm(config.model, dtype=dtype)
        self._model = model.to(config.device).eval().requires_grad_(False)
        self._device = config.device

    def ready(self) -> str:
        """The model is loaded; returns which process has it."""
        return process_name()

    def scores(self, rows: Arrays, options: dict[str, Any]) -> tuple[str, Arrays]:
        """`position_scores` of some rows."""
        import torch

        from rl_plugins.models.scalar_head import position_scores

        with torch.inference_mode():
            scores_BS = position_scores(self._model, **self._inputs(rows), **options)
        return process_name(), {"scores": scores_BS.cpu().numpy()}

    def log_probs(self, rows: Arrays, options: dict[str, Any]) -> tuple[str, Arrays]:
        """`response_log_probs` of some rows: its fields that are there."""
        import torch

        from rl_plugins.models.log_probs import response_log_probs

        with torch.inference_mode():
            result = response_log_probs(self._model, **self._inputs(rows), **options)
        values = {one.name: getattr(result, one.name) for one in fields(result)}
        return process_name(), {name: value.cpu().numpy() for name, value in values.items() if value is not None}

    def _inputs(self, rows: Arrays) -> dict[str, Any]:
        import torch

        # Copied: what Ray hands over is read-only.
        return {name: torch.tensor(values, dtype=torch.int64, device=self._device) for name, values in rows.items()}
