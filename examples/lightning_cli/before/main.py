"""Train with LightningCLI: python main.py fit -c config.yaml. See README.md."""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI
from project import ChatData, ChatModel

if __name__ == "__main__":
    LightningCLI(ChatModel, ChatData)
