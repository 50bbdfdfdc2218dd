"""A run's folder as MLflow should have it, sent after the run."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from rl_plugins.callbacks.samples import log_samples
from rl_plugins.launch.config import parse_config
from rl_plugins.launch.preflight import check_tracking, tracking_uri
from rl_plugins.launch.tracking import best_upload, tracking_logger
from rl_plugins.run_folder import RunFolder, read_metrics


def sync(path: Path, uri: str | None, deadline_s: float) -> bool:
    """Send what is missing; returns whether the store has everything.

    Args:
        path: of the run's folder.
        uri: of a store that is not the run's own.
        deadline_s: seconds for all.

    Raises:
        ConfigError: the configuration in the folder is broken, or the store does not answer.
    """
    folder = RunFolder(path)
    config = parse_config(OmegaConf.load(folder.config))
    if uri is not None and uri != tracking_uri(config):
        config.tracking.uri = uri
        config.tracking.parent_run = None
        folder.config.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)), encoding="utf-8")
        folder.tracking_run.unlink(missing_ok=True)
    check_tracking(tracking_uri(config))
    tracking = tracking_logger(config, folder)
    tracking.log_metrics({})
    for file in sorted(folder.samples.glob("*.json")):
        log_samples(tracking, file)
    if config.tracking.upload_best:
        tracking.submit(best_upload(config, folder).send)
    steps = max((step for points in read_metrics(folder.metrics).values() for step in points), default=0)
    tracking.finalize("FINISHED" if steps >= config.run.steps else "KILLED", deadline_s)
    if tracking.all_sent():
        print(f"{tracking_uri(config)} has all of {path}, {steps} steps", flush=True)
    return tracking.all_sent()
