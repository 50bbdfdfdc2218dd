"""One step of reward modelling on fixed pairs or steps, with an optimizer that records its gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from typing_extensions import override

from rl_plugins.config.models import OptimizerConfig
from rl_plugins.data.preferences import PairBatch
from rl_plugins.data.process_rewards import NO_LABEL, ProcessRewardBatch
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.stages.reward_modeling import RewardModeling
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.stages import canned

tokenizer: Any = canned.tokenizer

# Prompt, chosen, rejected, margin.
PAIRS = [
    ("1+1", "2", "twenty-two", 0.0),
    ("12+30", "42.", "4", 1.5),
    ("4+4", "it is eight", "9", 0.25),
    ("100+1", "101", "it is a hundred and two", 0.0),
    ("7", "x", "y", 3.0),
    ("2+2+2", "six", "seven of them", 0.5),
]
# Prompt, and the steps with labels.
STEPS: list[tuple[str, list[tuple[str, float | None]]]] = [
    ("1+1", [("one and one", 1.0), ("is 2", 1.0)]),
    ("12+30", [("42.", 0.0)]),
    ("4+4", [("four", None), ("and four", 0.75), ("is seven", 0.0)]),
    ("100+1", [("a hundred and one", 1.0), ("so", None)]),
]
CASES: dict[str, dict[str, Any]] = {
    "bradley_terry": {"loss_options": {"centering": 0.1}},
    "process_reward": {"loss": "process_reward"},
}


class OwnRewardModel(LightningModule):
    """A tiny float64 model whose head is not 0, and the recording optimizer."""

    def __init__(self) -> None:
        super().__init__()
        model: Any = load_scalar_head(canned.other_model(), dtype=torch.float64)
        torch.nn.init.normal_(model.score.weight, std=0.3, generator=torch.Generator().manual_seed(7))
        self.model = model

    @override
    def configure_optimizers(self) -> canned.Recorder:
        self.recorder = canned.Recorder(self.model.parameters())
        return self.recorder


def pair_batch(rows: list[int]) -> PairBatch:
    chosen = [[*tokenizer.encode(PAIRS[row][1]), tokenizer.eos_token_id] for row in rows]
    rejected = [[*tokenizer.encode(PAIRS[row][2]), tokenizer.eos_token_id] for row in rows]
    return PairBatch(
        prompt_ids=[tokenizer.encode(PAIRS[row][0]) for row in rows],
        chosen_ids=chosen,
        rejected_ids=rejected,
        margins=[PAIRS[row][3] for row in rows],
        rows=rows,
    )


def step_batch(rows: list[int]) -> ProcessRewardBatch:
    responses, labels = [], []
    for row in rows:
        ids: list[int] = []
        of_tokens: list[float] = []
        for text, label in STEPS[row][1]:
            step = tokenizer.encode(text)
            ids += step
            of_tokens += [NO_LABEL] * (len(step) - 1) + [NO_LABEL if label is None else label]
        responses.append(ids)
        labels.append(of_tokens)
    return ProcessRewardBatch([tokenizer.encode(STEPS[row][0]) for row in rows], responses, labels, rows)


def batch_of(case: str, rows: list[int] | None = None) -> Any:
    everything = list(range(len(PAIRS if case == "bradley_terry" else STEPS)))
    return (pair_batch if case == "bradley_terry" else step_batch)(everything if rows is None else rows)


def stage_of(model: Any, case: str, **options: Any) -> RewardModeling:
    arguments = {"tokenizer": tokenizer, "optimizer": OptimizerConfig(gradient_clip=0.0), **CASES[case], **options}
    return RewardModeling(model, **arguments)


def strategy_of(rank: int, world_size: int) -> Any:
    return SingleDeviceRolloutStrategy() if world_size == 1 else canned.AllReduceStrategy(rank, world_size)


def gradients(
    case: str, *, tokens_per_micro_batch: int = 10**6, packing: bool = True, rank: int = 0, world_size: int = 1
) -> tuple[list[Tensor], dict[str, float]]:
    """Return the gradient of one step, and the metrics."""
    own = OwnRewardModel()
    stage = stage_of(own, case, tokens_per_micro_batch=tokens_per_micro_batch, packing=packing)
    metrics = canned.metrics_of(stage)
    trainer = canned.quiet_trainer(strategy_of(rank, world_size), precision="64-true")
    # Rows are dealt to ranks in turn.
    rows = batch_of(case).rows[rank::world_size]
    trainer.fit(stage, canned.loader([batch_of(case, rows)]))
    (gradient,) = own.recorder.gradients
    return gradient, metrics


def validation(case: str, shares: list[list[int]], rank: int = 0, **options: Any) -> dict[str, float]:
    """The metrics of validation, on this rank's share of the rows."""
    trainer = canned.quiet_trainer(strategy_of(rank, len(shares)), precision="64-true")
    loader = canned.loader([batch_of(case, shares[rank])])
    stage = stage_of(OwnRewardModel(), case, **options)
    metrics = canned.metrics_of(stage)
    trainer.validate(stage, loader, verbose=False)
    return metrics


UNEVEN = [[0, 1, 2], []]


def rank_results(rank: int) -> dict[str, Any]:
    """`gradients` and `validation` of every case, as one of two ranks."""
    return {
        case: (
            # Uneven micro-batches: separate budgets of the ranks would give different numbers of micro-batches.
            gradients(case, tokens_per_micro_batch=60, rank=rank, world_size=2),
            validation(case, UNEVEN, rank, tokens_per_micro_batch=60),
        )
        for case in CASES
    }


def run(strategy: Any, path: str, folder: Path) -> dict[str, float]:
    """Two steps, then validation; the metrics, and an export in `folder`."""

    class Exporting(RewardModeling):
        @override
        def on_train_end(self) -> None:
            self.export(folder)

    batch = pair_batch(list(range(len(PAIRS))))
    stage = Exporting(path, optimizer=OptimizerConfig(lr=1e-3), tokens_per_micro_batch=100)
    trainer = canned.quiet_trainer(strategy, precision="32-true", accelerator="cpu", devices=1, val_check_interval=1)
    metrics = canned.metrics_of(stage)
    trainer.fit(stage, canned.loader([batch] * 2), canned.loader([batch]))
    return {name: metrics[name] for name in ("train/loss", "train/margin", "val/loss", "val/margin", "val/accuracy")}


def run_zero(_: int, path: str, folder: Path) -> dict[str, float]:
    """`run` under ZeRO-3."""
    return run(ZeroStrategy(stage=3, timeout_s=60), path, folder)
