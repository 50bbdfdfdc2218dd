"""Training with a move of memory to the host while the rollout engine samples: all strategies, all precisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed import FileStore, Store
from typing_extensions import override

from rl_plugins.config.models import LoraConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.ranks import Ranks
from rl_plugins.rollout.engine import Generations
from rl_plugins.strategies import memory
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.memory import TrainingMemory
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.patience import patient
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned
from rl_plugins.tests.strategies import fsdp_runs
from rl_plugins.tests.strategies.moving import WatchingRollout, moving, tensors_to_move
from rl_plugins.tests.tiers import tiered

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


@pytest.mark.parametrize(
    ("name", "precision"),
    tiered(
        product(STRATEGIES, ("32-true", "bf16-mixed", "bf16-true")),
        core={("zero-1", "32-true"), ("zero-3", "bf16-mixed"), ("fsdp", "bf16-mixed")},
    ),
)
def test_weights_are_sent_after_the_optimizers_memory_is_freed(tmp_path: Path, name: str, precision: str) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES)
    run_ranks(train, name, tmp_path, {"precision": precision}, world_size=1)


@pytest.mark.parametrize("name", MOVES_FROZEN)
def test_merged_weights_are_sent_after_the_optimizers_memory_is_freed(tmp_path: Path, name: str) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES)
    options = {"precision": "bf16-mixed", "lora": LoraConfig(rank=3)}
    run_ranks(train, name, tmp_path, options, world_size=1)


class RolloutOfTwoRanks(WatchingRollout):
    """One rank's side of a rollout engine on the devices of both ranks. Rank 1 is late.

    Rank 1 moves memory only after rank 0 has gone on to the next wait of the ranks. The store has the bytes that rank 1
    still holds when the engine of rank 0 wakes up.
    """

    def __init__(self, rank: int, store: Store) -> None:
        super().__init__()
        self.rank, self.store, self.met, self.samples = rank, store, 0, False
        self.held_at_wake_up: list[tuple[str, int, int]] = []

    @override
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        (tag,) = tags or ()
        if self.rank == 0:
            optimizer, models = (int(self.store.get(part)) for part in ("optimizer", "models"))
            self.held_at_wake_up.append((tag, optimizer, models))
        super().wake_up(tags)

    @override
    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        self.samples = True
        generations = super().generate(prompts, sampling, seeds)
        self.samples = False
        return generations

    def any(self, ranks: Ranks, flag: bool) -> bool:
        """Agree as `Ranks.any` does. Rank 0 tells rank 1 before the wait."""
        self.met += 1
        if self.rank == 0:
            self.store.set(f"rank 0 waits {self.met}", "")
        return _any(ranks, flag)

    def watch(self, memory: TrainingMemory) -> None:
        """Delay the moves of rank 1, and publish the bytes that rank 1 holds."""
        if self.rank == 0:
            return

        def publish() -> None:
            self.store.set("optimizer", str(memory.optimizer_bytes()))
            self.store.set("models", str(memory.parameter_bytes()))

        def late(move: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                publish()
                if not self.samples:
                    self.store.wait([f"rank 0 waits {self.met + 1}"], timedelta(seconds=patient(60)))
                move()
                publish()

            return run

        for name in ("offload_optimizer", "offload_parameters"):
            setattr(memory, name, late(getattr(memory, name)))


_any = Ranks.any


def train_two_ranks(rank: int, name: str, folder: Path) -> list[tuple[str, int, int]]:
    """Train two steps; return the bytes that rank 1 holds at each wake-up of the engine."""
    engine = RolloutOfTwoRanks(rank, FileStore(str(folder / "store"), 2))
    options: dict[str, Any] = {"rollout": engine, "timeout_s": patient(60)}
    strategy = moving(FSDPStrategy(**options) if name == "fsdp" else ZeroStrategy(stage=int(name[-1]), **options))
    engine.watch(strategy.rollout_phases.memory)
    with patch.object(Ranks, "any", lambda ranks, flag: engine.any(ranks, flag)):
        fsdp_runs.trained(fsdp_runs.TWO, rank, folder, strategy=strategy, precision="32-true")
    assert all(shard.isfinite().all() for _, shard in strategy.shards("policy"))
    return engine.held_at_wake_up


@pytest.mark.parametrize("name", ["zero-3", "fsdp"])
def test_engine_wakes_up_after_the_memory_of_a_late_rank_is_free(tmp_path: Path, name: str) -> None:
    save_tiny_policy(tmp_path / "policy", **fsdp_runs.SIZES)
    (wake_ups, _), _ = run_ranks(train_two_ranks, name, tmp_path)
    assert [tag for tag, _, _ in wake_ups] == ["weights", "kv_cache"] * 2
    for tag, optimizer, models in wake_ups:
        assert optimizer == 0 and (models == 0) == (tag == "kv_cache")


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
