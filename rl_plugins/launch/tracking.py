"""MLflow for a recipe's run: the logger, the description of the run, and the registration of the policy."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rl_plugins.callbacks.checkpoint_artifacts import BestUpload
from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.launch.preflight import tracking_uri
from rl_plugins.report.summary import read_samples
from rl_plugins.run_folder import RunFolder, read_metrics
from rl_plugins.tracking.loggers import MLflowTracking
from rl_plugins.tracking.provenance import describe_file, git_tags
from rl_plugins.tracking.registry import Evaluation, register_policy
from rl_plugins.tracking.run import RunDescription, TrackedRun
from rl_plugins.tracking.sender import FINISH_TIMEOUT_S, Call

_REGISTER_TIMEOUT_S = 1800.0
# The other workers wait during the upload of the first worker.
_UPLOAD_TIMEOUT_S = 600.0


def tracking_logger(config: RecipeConfig, folder: RunFolder) -> MLflowTracking:
    """Return the MLflow logger of a run."""
    return MLflowTracking(
        uri=tracking_uri(config),
        experiment=config.tracking.experiment,
        folder=folder,
        description=describe_run(config, folder),
        finish_timeout_s=_UPLOAD_TIMEOUT_S if config.tracking.upload_best else FINISH_TIMEOUT_S,
    )


def describe_run(config: RecipeConfig, folder: RunFolder) -> RunDescription:
    """Return the description of a run, with the parameters for the comparison of runs in a table."""
    algorithm = config.algorithm if isinstance(config.algorithm, dict) else {}
    params = {
        "stage": config.stage,
        "model": config.model.path,
        "advantage": algorithm.get("advantage", algorithm.get("_target_")),
        "loss": algorithm.get("policy_loss", config.loss.name),
        "lr": config.optimizer.lr,
        "lora_rank": config.model.lora.rank or None,
        "prompts_per_step": config.batch.prompts_per_step,
        "samples_per_prompt": config.batch.samples_per_prompt,
        "max_tokens": config.sampling.max_tokens,
        "temperature": config.sampling.temperature,
        "steps": config.run.steps,
        "seed": config.run.seed,
        "workers": 1 if config.launcher == "local" else config.placement.num_workers,
    }
    mixed = [path for part in config.data.mixture.values() for path in part.files]
    return RunDescription(
        params={key: value for key, value in params.items() if value is not None},
        tags={"run_folder": str(folder.path), **git_tags(folder)},
        files=(folder.config, folder.environment, folder.git_state, folder.git_diff),
        data={
            "training": [Path(path) for path in [*config.data.train_files, *mixed]],
            "validation": [Path(path) for path in config.data.val_files],
        },
        parent_run=config.tracking.parent_run,
    )


def best_upload(config: RecipeConfig, folder: RunFolder) -> BestUpload:
    """Return the callback that uploads the best checkpoints."""
    run = config.run
    return BestUpload(folder.path, metric=run.best_metric, mode=run.best_mode, count=config.tracking.upload_best)


def register(config: RecipeConfig, folder: RunFolder, tracking: MLflowTracking) -> None:
    """Register the exported policy, and wait until MLflow has the policy."""
    tracking.submit(registration(config, folder))
    tracking.finalize("success", _REGISTER_TIMEOUT_S)


def registration(config: RecipeConfig, folder: RunFolder) -> Call:
    """Return a call that registers the exported policy as `tracking.register_as`, and prints the outcome."""
    name, metric = str(config.tracking.register_as), config.tracking.champion_metric

    def send(run: TrackedRun) -> None:
        values = list(read_metrics(folder.metrics).get(metric, {}).values())
        digests = [describe_file(Path(path)).digest for path in config.data.val_files]
        data = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]
        evaluation = Evaluation(metric, values[-1] if values else None, data)
        outcome = register_policy(run, folder.export, name, evaluation, _example_prompt(folder))
        print(f"{config.run.name}: {outcome}", flush=True)

    return send


def _example_prompt(folder: RunFolder) -> str:
    """Return the first validation prompt, as the example for the registered model."""
    files = folder.sample_files()
    samples = read_samples(files[-1]) if files else None
    return str(samples[0]["prompt"]) if samples else "Hello"
