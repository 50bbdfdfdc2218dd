"""Says once, where the run can be watched, how many prompts were left out because they are too long."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class DataReport(Callback):
    """Prints a line for each split that lost prompts.

    Args:
        label: what stands before the line.
    """

    def __init__(self, label: str) -> None:
        self._label = label

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        # The trainer has the attribute, which its types do not know.
        data = getattr(trainer, "datamodule", None)
        dropped: dict[str, int] = getattr(data, "dropped_prompts", {})
        for split, count in dropped.items():
            if count:
                print(f"{self._label}: {split}: {count} prompts are longer than the limit and left out", flush=True)
