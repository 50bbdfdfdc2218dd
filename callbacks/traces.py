"""Some rollouts of each step as traces, which MLflow's pages show with prompt, response and reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.callbacks.mlflow import MLflowTracking
from rl_plugins.callbacks.mlflow_run import TrackedRun
from rl_plugins.stages.sampling import SamplingStage


class RolloutTraces(Callback):
    """Logs the first samples of rank 0 of every step as traces of the run.

    Args:
        count: samples of a step.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, SamplingStage) and trainer.is_global_zero:
            pl_module.shown_samples = self._count

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not isinstance(pl_module, SamplingStage):
            return
        step = pl_module.step
        for row in pl_module.training_samples:
            for logger in trainer.loggers:
                if isinstance(logger, MLflowTracking):
                    logger.submit(lambda run, row=row: log_trace(run, step, row))  # type: ignore[misc]


def log_trace(run: TrackedRun, step: int, row: Mapping[str, Any]) -> None:
    """One rollout: the prompt went in, the response came out, its reward and the rest are attributes."""
    import mlflow

    attributes: dict[str, Any] = {
        key: value for key, value in row.items() if key not in ("prompt", "response") and value is not None
    }
    attributes["step"] = step
    span = mlflow.start_span_no_context(
        "rollout",
        span_type="LLM",
        inputs={"prompt": row["prompt"]},
        attributes=attributes,
        tags={"step": str(step), "score": str(row["score"])},
        metadata={"mlflow.sourceRun": run.run_id},
        experiment_id=run.experiment_id,
    )
    span.end(outputs={"response": row["response"]})
