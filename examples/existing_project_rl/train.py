"""Fine-tune a causal language model with Lightning on Ray Train. See README.md."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import hydra
from data import QuestionAnswerData
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from model import LanguageModel
from omegaconf import DictConfig
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer

import rl_plugins as rl


class StepTimer(Callback):
    """Callback that logs the seconds of each training step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        pl_module.log("seconds_per_step", time.perf_counter() - self.start)


def right_answer(solution_str: str, ground_truth: str) -> float:
    return float(solution_str.strip() == ground_truth)


def train(config: dict[str, Any]) -> None:
    """Train in one worker."""
    seed_everything(config["seed"])
    output = Path(config["output"])
    model = LanguageModel(config["model"], lr=config["lr"])
    per_worker = config["batch_size"] // config["workers"]
    data = QuestionAnswerData(config["train_file"], config["val_file"], config["model"], per_worker)
    sampling = rl.SamplingConfig(max_tokens=6, num_samples=8)
    model = rl.PolicyOptimization(model, scorer=right_answer, sampling=sampling)
    data = rl.PromptDataModule(data.train_file, data.val_file, prompts_per_step=config["batch_size"])
    rollout = rl.VLLMRollout(rl.VLLMConfig(model=config["model"], max_model_len=64))
    trainer = Trainer(
        max_steps=config["steps"],
        accelerator="auto",
        devices="auto",
        strategy=rl.RayZeroStrategy(rollout=rollout),
        plugins=[RayLightningEnvironment()],
        logger=CSVLogger(output, name="logs", flush_logs_every_n_steps=1),
        callbacks=[
            LearningRateMonitor("step"),
            ModelCheckpoint(output / "checkpoints", every_n_train_steps=config["val_every"]),
            StepTimer(),
        ],
        val_check_interval=config["val_every"],
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    trainer = prepare_trainer(trainer)
    trainer.fit(model, datamodule=data)
    model.export(output / "model")


@hydra.main(version_base="1.3", config_path=".", config_name="config")
def main(options: DictConfig) -> None:
    config: dict[str, Any] = {str(key): value for key, value in options.items()}
    # Each worker has its own working folder.
    config |= {key: os.path.abspath(config[key]) for key in ("train_file", "val_file", "output")}
    if os.path.isdir(config["model"]):
        config["model"] = os.path.abspath(config["model"])
    TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=config["workers"]),
        run_config=RunConfig(name="ray", storage_path=config["output"]),
    ).fit()


if __name__ == "__main__":
    main()
