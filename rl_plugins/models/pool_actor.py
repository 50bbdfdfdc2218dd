"""Pool of Ray actors with a frozen model. Each actor holds the whole model in a process of its own.

The driver starts the actors, and imports neither torch nor a model.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from rl_plugins.garbage_collection import garbage_collector_off

if TYPE_CHECKING:
    import numpy as np

_REPEATS = 2
Arrays = dict[str, "np.ndarray"]


@dataclass(frozen=True)
class PoolConfig:
    """Settings of a pool. Training ranks find the actors by name.

    Attributes:
        role: role of the model (such as `critic`), for messages and metrics.
        model: Hugging Face name or folder.
        head: kind of output head: a scalar head, or the head of a causal language model.
        dtype: data type of the parameters, by its name in torch.
        attention: attention of transformers, see `LoadingOptions`.
        trust_remote_code: see `LoadingOptions`.
        actors: number of actor processes.
        device: device of the model, `cpu` or `cuda`.
        threads: number of CPU threads of each process.
        ready_timeout_s: seconds for an actor to load the model, and to read the critic's state of a checkpoint.
        call_timeout_s: seconds for the results of a micro-batch. The time includes the wait for calls of other ranks
            and for the restart of an actor.
        name: prefix of the actor names.
    """

    role: str
    model: str
    head: Literal["scalar", "causal_lm"]
    dtype: str = "float32"
    attention: str | None = None
    trust_remote_code: bool = False
    actors: int = 1
    device: str = "cpu"
    threads: int = 1
    ready_timeout_s: float = 300.0
    call_timeout_s: float = 600.0
    name: str = field(default_factory=lambda: f"pool-{uuid.uuid4().hex[:8]}")

    def label(self, actor: int) -> str:
        """Return the name of an actor."""
        return f"{self.name}-{self.role}-{actor}"


def start_pool(config: PoolConfig, options: Sequence[dict[str, Any]]) -> list[Any]:
    """Start the actors, and return before they are ready.

    Args:
        config: settings of the pool.
        options: Ray options of each actor, such as resources and placement.
    """
    import ray

    return [
        ray.remote(ModelActor)
        .options(name=config.label(number), max_restarts=-1, max_task_retries=_REPEATS, **actor_options)
        .remote(config)
        for number, actor_options in enumerate(options)
    ]


def process_name() -> str:
    """Return a name of this process that is unique in the cluster."""
    return f"{os.getpid()}@{socket.gethostname()}"


class ModelActor:
    """Actor that holds the model and runs one call at a time."""

    @garbage_collector_off()
    def __init__(self, config: PoolConfig) -> None:
        import torch

        from rl_plugins.models.loading import LoadingOptions, load_causal_lm
        from rl_plugins.models.scalar_head import load_scalar_head

        torch.set_num_threads(config.threads)
        if config.device == "cuda":
            # TF32 for products of float32 numbers.
            torch.set_float32_matmul_precision("high")
        dtype: torch.dtype = getattr(torch, config.dtype)
        loading: LoadingOptions = {"attention": config.attention, "trust_remote_code": config.trust_remote_code}
        model: Any
        if config.head == "scalar":
            model = load_scalar_head(config.model, dtype=dtype, new_head=False, **loading)
        else:
            model = load_causal_lm(config.model, dtype=dtype, **loading)
        self._model = model.to(config.device).eval().requires_grad_(False)
        self._device = config.device

    def ready(self) -> str:
        """Return the name of the process. The call returns after the model is loaded."""
        return process_name()

    def scores(self, tensors: Arrays, options: dict[str, Any]) -> tuple[str, Arrays]:
        """Compute `position_scores` of some samples."""
        import torch

        from rl_plugins.models.scalar_head import position_scores

        with torch.inference_mode():
            scores_BS = position_scores(self._model, **self._inputs(tensors), **options)
        return process_name(), {"scores": scores_BS.cpu().numpy()}

    def log_probs(self, tensors: Arrays, options: dict[str, Any]) -> tuple[str, Arrays]:
        """Compute `response_log_probs` of some samples, and return the fields that are not None."""
        import torch

        from rl_plugins.models.log_probs import response_log_probs

        with torch.inference_mode():
            result = response_log_probs(self._model, **self._inputs(tensors), **options)
        values = {entry.name: getattr(result, entry.name) for entry in fields(result)}
        return process_name(), {name: value.cpu().numpy() for name, value in values.items() if value is not None}

    def _inputs(self, tensors: Arrays) -> dict[str, Any]:
        import torch

        # `torch.tensor` copies, because arrays from Ray are read-only.
        samples = {name: torch.tensor(values, dtype=torch.int64) for name, values in tensors.items()}
        return {**samples, "device": torch.device(self._device)}
