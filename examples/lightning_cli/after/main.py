"""Train with LightningCLI: python main.py fit -c config.yaml. See README.md."""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI

import rl_plugins as rl

if __name__ == "__main__":
    LightningCLI(rl.PolicyOptimization, rl.PromptDataModule)
