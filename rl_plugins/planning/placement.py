"""Who runs where, and how the trainers divide the policy's states among themselves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """One way to run a step.

    Attributes:
        trainers: training workers, each with a device.
        engines: rollout engines.
        tensor_parallel: devices of an engine.
        colocated: the engines are on the trainers' devices; if not, on their own.
        zero_stage: 1 to 3; 0 is FSDP2.
        accumulate_shards: of FSDP2.
        offload: where trained engines keep their states: `while_sampling`, `stay` or `cpu`.
        sleep: what the engines give back while the workers train: `none`, `kv_cache` or `all`.
        engine_share: share of an accelerator's memory that the engine may take.
        ahead: steps whose samples are drawn while an earlier one trains; needs devices for each.
    """

    trainers: int
    engines: int
    tensor_parallel: int = 1
    colocated: bool = True
    zero_stage: int = 3
    accumulate_shards: bool = False
    offload: str = "while_sampling"
    sleep: str = "kv_cache"
    engine_share: float = 0.4
    ahead: int = 0

    @property
    def devices(self) -> int:
        """How many it takes."""
        return self.trainers + (0 if self.colocated else self.engines * self.tensor_parallel)
