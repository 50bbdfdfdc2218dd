"""Fine-tune a causal language model with Lightning on Ray Train. See README.md."""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from data import QuestionAnswerData
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from model import LanguageModel
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer

import rl_plugins as rl


class StepTimer(Callback):
    """Logs the seconds that a training step takes."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        pl_module.log("seconds_per_step", time.perf_counter() - self.start)


def right_answer(solution_str: str, ground_truth: str) -> float:
    return float(solution_str.strip() == ground_truth)


def train(config: dict[str, Any]) -> None:
    """What each worker runs."""
    seed_everything(config["seed"])
    output = Path(config["output"])
    model = LanguageModel(config["model"], lr=config["lr"])
    per_worker = config["batch_size"] // config["workers"]
    data = QuestionAnswerData(config["train_file"], config["val_file"], config["model"], per_worker)
    sampling = rl.SamplingConfig(max_tokens=6, num_samples=8)
    model = rl.PolicyOptimization(model, scorer=right_answer, sampling=sampling)
    data = rl.PromptDataModule(
        data.train_file, data.val_file, tokenizer=data.tokenizer, prompts_per_step=config["batch_size"]
    )
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


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face name or folder")
    parser.add_argument("--train-file", required=True, type=os.path.abspath, help="parquet, see README.md")
    parser.add_argument("--val-file", required=True, type=os.path.abspath, help="the same, held out")
    parser.add_argument("--output", default="outputs", type=os.path.abspath, help="folder for all results")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--val-every", type=int, default=50, help="steps between validations and checkpoints")
    parser.add_argument("--batch-size", type=int, default=32, help="examples of a step, over all workers")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    config = vars(parser.parse_args())
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
