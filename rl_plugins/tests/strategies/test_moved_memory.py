"""Training with a move of memory to the host while the rollout engine samples: all strategies, all precisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typing_extensions import override

from rl_plugins.config.models import LoraConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.rollout.engine import Generations
from rl_plugins.strategies import memory
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned
from rl_plugins.tests.strategies import fsdp_runs
from rl_plugins.tests.strategies.moving import WatchingRollout, moving, tensors_to_move

STRATEGIES = ("zero-1", "zero-2", "zero-3", "fsdp")
# Under stages 1 and 2, frozen models are memory-mapped files on CPU, which cannot be freed.
MOVES_FROZEN = STRATEGIES[2:]


def strategy_named(name: str) -> Any:
    """The strategy `zero-1` to `zero-3`, or `fsdp`, with a rollout engine for the weights."""
    place = "while_sampling" if name in MOVES_FROZEN else "stay"
    options: dict[str, Any] = {"rollout": WatchingRollout(), "timeout_s": 60, "offload": {"reference": place}}
    return FSDPStrategy(**options) if name == "fsdp" else ZeroStrategy(stage=int(name[-1]), **options)


def train(rank: int, name: str, folder: Path, options: dict[str, Any]) -> None:
    """Train two steps. The rollout engine compares the weights of each update with the policy."""
    strategy = moving(strategy_named(name))
    module = fsdp_runs.trained(fsdp_runs.ALONE, rank, folder, strategy=strategy, **options)
    engine = strategy.rollout_phases.engine
    updates = [call for call in engine.calls if call.startswith("update_weights")]
    assert updates == ["update_weights 0", "update_weights 1"]
    # The last optimizer step waited for the optimizer states.
    assert all(shard.isfinite().all() for _, shard in strategy.shards("policy"))
    moved = ["policy", "critic", "reference"] if name in MOVES_FROZEN else ["policy", "critic"]
    assert sorted(engine.on_host) == sorted(set(moved) & module.named_models().keys())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_weights_are_sent_after_the_optimizers_memory_is_freed(tmp_path: Path, name: str, precision: str) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES)
    run_ranks(train, name, tmp_path, {"precision": precision}, world_size=1)


@pytest.mark.parametrize("name", MOVES_FROZEN)
def test_merged_weights_are_sent_after_the_optimizers_memory_is_freed(tmp_path: Path, name: str) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES)
    options = {"precision": "bf16-mixed", "lora": LoraConfig(rank=3)}
    run_ranks(train, name, tmp_path, options, world_size=1)


class RoomyRollout(WatchingRollout):
    """A rollout engine with a small share of a roomy device: the models and optimizers keep their memory."""

    gpu_share = 0.1

    @override
    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        training = self.strategy.rollout_phases.memory
        assert not training.crowded and not tensors_to_move(training)
        return canned.CannedRollout.generate(self, prompts, sampling, seeds)


def train_with_room(rank: int, name: str, folder: Path) -> None:
    options: dict[str, Any] = {"rollout": RoomyRollout(), "timeout_s": 60}
    strategy = moving(FSDPStrategy(**options) if name == "fsdp" else ZeroStrategy(stage=int(name[-1]), **options))
    with patch.object(memory, "_has_room", lambda device, share: share == pytest.approx(0.15)):
        fsdp_runs.trained(fsdp_runs.ALONE, rank, folder, strategy=strategy, precision="32-true")
    assert strategy.rollout_phases.engine.calls.count("update_weights 1") == 1


@pytest.mark.parametrize("name", ["zero-2", "fsdp"])
def test_states_stay_on_a_device_with_room_for_the_rollout_engine(tmp_path: Path, name: str) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES)
    run_ranks(train_with_room, name, tmp_path, world_size=1)
