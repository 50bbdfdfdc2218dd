"""Fine-tune the model in one process with LightningCLI: python cli.py fit --config cli.yaml"""

from lightning.pytorch.cli import LightningCLI

import rl_plugins as rl

if __name__ == "__main__":
    LightningCLI(rl.PolicyOptimization, rl.PromptDataModule)
