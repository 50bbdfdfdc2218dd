"""What senders of weights ask of an engine's actor, each call with a deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_plugins.rollout.vllm.fleet import Fleet


class WeightSyncClient:
    """vLLM's `VLLMWeightSyncClient` protocol over the actor, with deadlines."""

    def __init__(self, fleet: Fleet, engine: int) -> None:
        self._fleet, self._engine = fleet, engine

    def _call(self, method: str, *arguments: Any) -> None:
        timeout_s, phase = self._fleet.config.update_timeout_s, f"weight update ({method})"
        self._fleet.begin(self._engine, method, *arguments, timeout_s=timeout_s, phase=phase)()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Open the transport."""
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        """Begin."""
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Send one chunk."""
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Complete."""
        self._call("finish_weight_update", weight_version)

    def set_policy_version(self, version: int) -> None:
        """Name the version that samples carry from now on."""
        self._call("set_policy_version", version)


class Receivers:
    """What rank 0 asks of an actor in an update that the processes of its engine take in one call."""

    def __init__(self, fleet: Fleet, engine: int) -> None:
        self._fleet, self._engine = fleet, engine

    def init(self, init_info: dict[str, Any]) -> None:
        """See `shared_memory.Engine`."""
        self._begin("init_weight_transfer_engine", {"expect": init_info})()

    def load(self, version: int) -> Callable[[], None]:
        """See `shared_memory.Engine`."""
        return self._begin("load_weights", version)

    def _begin(self, method: str, *arguments: Any) -> Callable[[], None]:
        timeout_s, phase = self._fleet.config.update_timeout_s, f"weight update ({method})"
        return self._fleet.begin(self._engine, method, *arguments, timeout_s=timeout_s, phase=phase)
