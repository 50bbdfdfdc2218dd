"""A pool of processes that hold a model, as a training rank sees it: a model that runs elsewhere (`pool_actor.py`).

A rank sends the rows of a micro-batch straight to the actors, spread by their tokens, and puts the numbers that come
back in the order of the rows. An actor with a frozen model that dies is restarted by Ray, which repeats what it was
asked.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from rl_plugins.errors import DeadlineExceeded
from rl_plugins.models.log_probs import ResponseLogProbs
from rl_plugins.models.pool_actor import Arrays, PoolConfig
from rl_plugins.models.remote import RemoteModel


class ModelPool(RemoteModel):
    """What a training rank holds of a pool.

    Args:
        config: the pool, whose actors somebody has started.
        rank: this one.
    """

    def __init__(self, config: PoolConfig, rank: int = 0) -> None:
        super().__init__()
        self.config, self._rank = config, rank
        self._actors: list[Any] = []
        # That of each actor; another one means that the actor died in between.
        self._processes: list[str] = []
        self._restarts, self._turn = 0, rank

    @override
    def position_scores(self, **arguments: Any) -> Tensor:
        return self._run("scores", arguments)["scores"]

    @override
    def response_log_probs(self, **arguments: Any) -> ResponseLogProbs:
        return ResponseLogProbs(**self._run("log_probs", arguments))

    def metrics(self, _: Any = None) -> dict[str, float]:
        """How often an actor died and was replaced, as far as this rank has seen, since it began."""
        return {f"pool/{self.config.role}_restarts": float(self._restarts)}

    def _connect(self) -> None:
        import ray

        if not self._actors:
            self._actors = [ray.get_actor(self.config.label(number)) for number in range(self.config.actors)]
            ready = [(number, actor.ready.remote()) for number, actor in enumerate(self._actors)]
            self._processes = self._wait(ready, self.config.ready_timeout_s, "load its model")

    def _run(self, method: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
        self._connect()
        rows = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        options = {name: value for name, value in arguments.items() if name not in rows}
        lengths_B = rows["attention_mask_BS"].sum(dim=1).tolist()
        # An empty micro-batch, too, has an answer, of its own shapes.
        parts = spread(lengths_B, len(self._actors)) or [[]]
        self._turn += 1
        asked = []
        for place, part in enumerate(parts):
            number = (self._turn + place) % len(self._actors)
            sent = {name: value[part].to("cpu", torch.int32).numpy() for name, value in rows.items()}
            asked.append((number, getattr(self._actors[number], method).remote(sent, options)))
        answers = self._wait(asked, self.config.call_timeout_s, f"compute {method}")
        for (number, _), (process, _) in zip(asked, answers, strict=True):
            self._restarts += process != self._processes[number]
            self._processes[number] = process
        return _in_order(parts, [values for _, values in answers], rows["input_ids_BS"].device)

    def _wait(self, asked: Sequence[tuple[int, Any]], timeout_s: float, what: str) -> list[Any]:
        import ray

        references = [reference for _, reference in asked]
        try:
            answers: list[Any] = ray.get(references, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            done, _ = ray.wait(references, num_returns=len(references), timeout=0)
            late = [self.config.label(number) for number, reference in asked if reference not in done]
            raise DeadlineExceeded(
                f"rank {self._rank} waited {timeout_s:.0f} s for {', '.join(map(repr, late))} of the pool "
                f"{self.config.role} to {what}"
            ) from None
        return answers


def spread(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of at most so many parts of about equally many tokens; the longest row first, to the smallest part."""
    smallest_first = [(0, part) for part in range(parts)]
    indices: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        tokens, part = heapq.heappop(smallest_first)
        indices[part].append(index)
        heapq.heappush(smallest_first, (tokens + lengths[index], part))
    return [sorted(part) for part in indices if part]


def _in_order(parts: Sequence[list[int]], answers: Sequence[Arrays], device: torch.device) -> dict[str, Tensor]:
    """The rows of all parts where they came from."""
    order = torch.tensor([index for part in parts for index in part], dtype=torch.int64)
    result = {}
    for name in answers[0]:
        # Copied: what Ray hands over is read-only.
        values = torch.cat([torch.tensor(answer[name]) for answer in answers])
        result[name] = torch.empty_like(values).index_copy_(0, order, values).to(device)
    return result
