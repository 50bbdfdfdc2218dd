"""Client of a pool of actors with a frozen model (see `pool_actor`), used by a training rank in place of a model.

A rank sends the samples of a micro-batch directly to the actors, balanced by tokens, and puts the results back in the
order of the samples. Ray restarts a dead actor and repeats the interrupted calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_plugins.errors import DeadlineExceeded
from rl_plugins.models.log_probs import ResponseLogProbs
from rl_plugins.models.packing import even_parts
from rl_plugins.models.pool_actor import Arrays, PoolConfig


class ModelPool(nn.Module):
    """`RemoteModel` that the actors of a pool compute.

    Args:
        config: settings of the pool. The actors must have been started (`start_pool`).
        rank: rank of this training process.
    """

    def __init__(self, config: PoolConfig, rank: int = 0) -> None:
        super().__init__()
        self.config, self._rank = config, rank
        self._actors: list[Any] = []
        # Process name of each actor. A new name means a restart of the actor.
        self._processes: list[str] = []
        self._restarts, self._turn = 0, rank

    def position_scores(self, **arguments: Any) -> Tensor:
        """Compute `scalar_head.position_scores` with an actor's model."""
        return self._run("scores", arguments)["scores"]

    def response_log_probs(self, **arguments: Any) -> ResponseLogProbs:
        """Compute `log_probs.response_log_probs` with an actor's model, without a gradient."""
        return ResponseLogProbs(**self._run("log_probs", arguments))

    def metrics(self, _: object = None) -> dict[str, float]:
        """Return the number of actor restarts that this rank has seen since its start."""
        return {f"pool/{self.config.role}_restarts": float(self._restarts)}

    def _connect(self) -> None:
        import ray

        if not self._actors:
            self._actors = [ray.get_actor(self.config.label(number)) for number in range(self.config.actors)]
            ready = [(number, actor.ready.remote()) for number, actor in enumerate(self._actors)]
            self._processes = self._wait(ready, self.config.ready_timeout_s, "load its model")

    def _run(self, method: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
        self._connect()
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        options = {name: value for name, value in arguments.items() if name not in tensors}
        images_B = options.pop("image_inputs_B", None)
        lengths_B = tensors["attention_mask_BS"].sum(dim=1).tolist()
        # An empty micro-batch is sent as well, because its result has shapes of its own.
        parts = spread(lengths_B, len(self._actors)) or [[]]
        self._turn += 1
        calls = []
        for place, part in enumerate(parts):
            number = (self._turn + place) % len(self._actors)
            arrays = {name: value[part].to("cpu", torch.int32).numpy() for name, value in tensors.items()}
            if images_B is not None:
                options = {**options, "image_inputs_B": [images_B[index] for index in part]}
            calls.append((number, getattr(self._actors[number], method).remote(arrays, options)))
        results = self._wait(calls, self.config.call_timeout_s, f"compute {method}")
        for (number, _), (process, _) in zip(calls, results, strict=True):
            self._restarts += process != self._processes[number]
            self._processes[number] = process
        return _in_order(parts, [values for _, values in results], tensors["input_ids_BS"].device)

    def _wait(self, calls: Sequence[tuple[int, Any]], timeout_s: float, task: str) -> list[Any]:
        import ray

        references = [reference for _, reference in calls]
        try:
            results: list[Any] = ray.get(references, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            done, _ = ray.wait(references, num_returns=len(references), timeout=0)
            late = [self.config.label(number) for number, reference in calls if reference not in done]
            raise DeadlineExceeded(
                f"rank {self._rank} waited {timeout_s:.0f} s for {', '.join(map(repr, late))} of the pool "
                f"{self.config.role} to {task}"
            ) from None
        return results


def spread(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Divide samples into parts with about the same number of tokens, and return the sample indices of each part.

    Empty parts are left out, see `even_parts`.

    Args:
        lengths: number of tokens of each sample.
        parts: largest number of parts.
    """
    return [sorted(part) for part in even_parts(lengths, parts) if part]


def _in_order(parts: Sequence[list[int]], results: Sequence[Arrays], device: torch.device) -> dict[str, Tensor]:
    """Join the results of all parts in the order of the samples."""
    order = torch.tensor([index for part in parts for index in part], dtype=torch.int64)
    joined = {}
    for name in results[0]:
        # `torch.tensor` copies, because arrays from Ray are read-only.
        values = torch.cat([torch.tensor(result[name]) for result in results])
        joined[name] = torch.empty_like(values).index_copy_(0, order, values).to(device)
    return joined
