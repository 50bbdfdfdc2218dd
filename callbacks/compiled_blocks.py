"""Compilation of the blocks of models with `torch.compile`.

Attention over rows stays outside of the compiled code, because attention is one kernel already. Norms, rotary
positions, activations and the linear layers between them become few kernels. Code for one block serves all blocks of a
model, and rows of any length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.errors import ConfigError
from rl_plugins.strategies.blocks import named_blocks
from rl_plugins.strategies.contract import HasNamedModels


class CompiledBlocks(Callback):
    """Compiles the blocks of all models of a stage at the start of training.

    Args:
        backend: name of a backend of `torch.compile`, or a function that is one.
    """

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        self._backend = backend

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, HasNamedModels)
        for name, model in pl_module.named_models().items():
            blocks = named_blocks(model)
            if not blocks:
                raise ConfigError(
                    f"CompiledBlocks: the {name}, a {type(model).__name__}, does not name the classes of its "
                    "blocks (_no_split_modules): leave CompiledBlocks out"
                )
            for block in blocks:
                block.compile(dynamic=True, backend=self._backend)
