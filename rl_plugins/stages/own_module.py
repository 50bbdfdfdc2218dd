"""A user's model, alone or in a LightningModule: its tokenizer, and the module's hooks and hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from transformers import PretrainedConfig

from rl_plugins.config.models import LoraConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.chat_template import check_of_transformers
from rl_plugins.data.image_prompts import Processor, load_tokenizer_or_processor, tokenizer_of
from rl_plugins.data.tokenization import completed
from rl_plugins.errors import CheckpointError, ConfigError
from rl_plugins.hub.files import model_folder
from rl_plugins.model_json import context_window, read_model_config
from rl_plugins.models.export import SavesPretrained
from rl_plugins.models.lora import adapted_layers, has_adapter
from rl_plugins.stages.optimizer import SCHEDULE_STATE
from rl_plugins.stages.trainer_flags import check_not_compiled

_CALLED = (
    "configure_callbacks", "setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end",
    "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_save_checkpoint", "on_load_checkpoint",
)  # fmt: skip
_WAY_OUT = {
    "configure_gradient_clipping": "set Trainer(gradient_clip_val=...)",
    "lr_scheduler_step": "return a schedule of steps or epochs from configure_optimizers",
    "optimizer_step": "move the code to on_before_optimizer_step",
    "optimizer_zero_grad": "move the code to on_before_optimizer_step",
    "on_before_zero_grad": "move the code to on_before_optimizer_step",
    "backward": "move the code to on_before_backward",
}
"""Methods that change an optimizer step, which a stage takes by itself."""
_MAKE_MODELS = ("setup", "configure_model")
"""Hooks that may set `.model` after the constructor."""
_LEFT_OUT = ("on_validation_", "on_test_", "on_predict_")
"""Beginnings of the names of hooks around the module's own steps."""


class OwnModel:
    """The model that a stage trains, as the user passed the model: a name, a module or a LightningModule.

    Args:
        source: Hugging Face name or folder; a module; or a LightningModule with the model as `.model`.
        lora: settings of an adapter, for a model that is loaded by name.
        stage: class of the stage, for messages.
        compares_log_probs: True if the stage compares log-probs of the model with other log-probs.

    Attributes:
        path: name or folder; None for a module.
        lightning_module: the LightningModule, if there is one.

    Raises:
        ConfigError: the model is compiled; the LightningModule has no model and does not make one later, or has the
            hyperparameters of another class; or the adapter is for a model that is not loaded by name, or has dropout
            in a stage that compares log-probs.
    """

    def __init__(
        self, source: str | nn.Module, lora: LoraConfig | None, stage: str, *, compares_log_probs: bool
    ) -> None:
        check_not_compiled(source)
        if isinstance(source, LightningModule):
            _check_hyperparameters(source)
        if isinstance(source, LightningModule) and not any(is_overridden(hook, source) for hook in _MAKE_MODELS):
            model_of(source)
        if lora is not None and lora.rank and not isinstance(source, str):
            raise ConfigError(
                f"lora needs a model that is loaded by name, and the model is a {type(source).__name__}: leave lora "
                "out and wrap the model with peft.get_peft_model"
            )
        if lora is not None and lora.rank and lora.dropout and compares_log_probs:
            raise ConfigError(
                f"lora.dropout={lora.dropout:g}: {stage} compares log-probs, and dropout would change one side of the "
                "comparison: leave lora.dropout out"
            )
        self._source, self.lora = source, lora
        self.path = source if isinstance(source, str) else None
        self.lightning_module = source if isinstance(source, LightningModule) else None

    @property
    def saved_adapter(self) -> LoraConfig | None:
        """Settings of the adapter if training starts with a saved adapter, which is a part of the reference."""
        return self.lora if self.lora is not None and self.lora.path else None

    @property
    def comes_with_adapter(self) -> bool:
        """True if the model has an adapter before `configure_model`."""
        inner = self._source if self.lightning_module is None else getattr(self._source, "model", None)
        return isinstance(inner, nn.Module) and has_adapter(inner)

    @property
    def optimizer_owner(self) -> LightningModule | None:
        """The LightningModule, if the module brings its own optimizer."""
        module = self.lightning_module
        return module if module is not None and is_overridden("configure_optimizers", module) else None

    def module(self, trainer: Trainer, sharded_init: Callable[[], AbstractContextManager[None]]) -> nn.Module:
        """Return the module to train, and let a LightningModule make the module first.

        Args:
            trainer: trainer of the stage.
            sharded_init: function that returns a context in which models are sharded.

        Raises:
            ConfigError: see `model_of`; or the model has an adapter that is not supported.
        """
        source: Any = self._source
        if self.lightning_module is not None:
            # Its configure_optimizers may read the number of steps from the trainer.
            source.trainer = trainer
            with sharded_init():
                source.configure_model()
        model = model_of(source)
        if has_adapter(model):
            # Refuse unsupported adapters before training.
            adapted_layers(model)
        return model

    def tokenizer(self, given: str | Processor | None, trust_remote_code: bool) -> Processor:
        """Return the tokenizer for the model, or the processor of a vision-language model.

        Args:
            given: tokenizer or processor, or the folder or hub name to load it from; by default the folder of the
                model.
            trust_remote_code: run Python code that the folder's configuration names, with all rights of the user.

        Raises:
            ConfigError: there is no tokenizer in the folder, or no folder; the given tokenizer is not of transformers,
                or has no end-of-sequence token.
        """
        if not isinstance(given, str | None):
            check_of_transformers(given)
            completed(tokenizer_of(given))
            return given
        inner = getattr(self._source, "model", self._source)
        name = given or self.path or getattr(inner, "name_or_path", None)
        if not name:
            raise ConfigError(
                f"{type(self._source).__name__} has no name_or_path to load a tokenizer from: pass tokenizer=... to "
                "the stage"
            )
        return load_tokenizer_or_processor(name, trust_remote_code=trust_remote_code)

    def log_hyperparameters(self, trainer: Trainer) -> None:
        """Send the hyperparameters of a LightningModule to all loggers, unless the module keeps them from loggers."""
        module = self.lightning_module
        if module is not None and module._log_hyperparams:
            for logger in trainer.loggers:
                logger.log_hyperparams(dict(module.hparams_initial))


def call_hooks_of(module: LightningModule, stage: LightningModule) -> None:
    """Let a stage call the hooks of training that a module overrides, each after the stage's own hook.

    Steps, data loaders, and the hooks of validation, test and prediction belong to the module's own steps, and are not
    called. A warning names these hooks.

    Args:
        module: module whose model the stage trains.
        stage: stage in its constructor.

    Raises:
        ConfigError: the module overrides a method that changes an optimizer step.
    """
    for name, way_out in _WAY_OUT.items():
        if is_overridden(name, module):
            raise ConfigError(
                f"{type(module).__name__}.{name} is not called, because a stage takes optimizer steps by itself: "
                f"{way_out}, or pass the .model of the module"
            )
    hooks = [name for name in dir(LightningModule) if name.startswith(_LEFT_OUT)]
    if left_out := [name for name in hooks if is_overridden(name, module)]:
        rank_zero_warn(
            f"{type(module).__name__}: {', '.join(left_out)} will not be called, because a stage validates, tests and "
            "predicts by itself: move the code to a callback in Trainer(callbacks=[...])"
        )
    for name in _CALLED:
        if is_overridden(name, module):
            setattr(stage, name, partial(_call_both, module, stage, getattr(stage, name), getattr(module, name)))


def _call_both(
    module: LightningModule,
    stage: LightningModule,
    of_stage: Callable[..., Any],
    of_module: Callable[..., Any],
    *args: object,
    **kwargs: object,
) -> Any:
    module.trainer, module._device = stage.trainer, stage.device
    # `self.log` of the module asks for the current hook.
    module._current_fx_name = stage._current_fx_name
    result = of_stage(*args, **kwargs)
    own = of_module(*args, **kwargs)
    return result if own is None else own


def check_schedules(checkpoint: Mapping[str, Any], count: int, own: int) -> None:
    """Check the schedules of a checkpoint of Lightning, unless the checkpoint is of other models.

    Args:
        checkpoint: checkpoint of a stage.
        count: number of models whose optimizer is made from settings.
        own: number of models whose optimizer is of a LightningModule's own `configure_optimizers`.

    Raises:
        CheckpointError: the checkpoint has another number of schedules made from settings.
    """
    saved = sum(state.keys() >= SCHEDULE_STATE for state in checkpoint.get("lr_schedulers", ()))
    # The strategy names the weights of a checkpoint with more or fewer models.
    if saved != count and len(checkpoint.get("optimizer_states", ())) == count + own:
        raise CheckpointError(
            f"the checkpoint has {saved} schedules made from settings (OptimizerConfig), and the stage makes {count}: "
            "the optimizers were of another configure_optimizers, or of another version of this package: resume with "
            "the optimizers of the checkpoint, or export the policy (rl-plugins export) for a new run"
        )


def stage_name(stage: LightningModule) -> str:
    """Return the name of the package's class of a stage, also for a class derived from it."""
    return next(kind.__name__ for kind in type(stage).__mro__ if kind.__module__.startswith(f"{__package__}."))


def state_of_stage(checkpoint: Mapping[str, Any], stage: LightningModule) -> Mapping[str, Any]:
    """Return the state of the stage in a checkpoint of Lightning.

    Raises:
        CheckpointError: a module without a stage, or another stage, has saved the checkpoint.
    """
    if "stage" not in checkpoint:
        raise CheckpointError(
            "the checkpoint is of a LightningModule without a stage, and a stage continues checkpoints of stages: "
            "leave ckpt_path out, and load the weights with load_from_checkpoint(...) of the module's class, before "
            "the stage gets the module"
        )
    state: Mapping[str, Any] = checkpoint["stage"]
    own = stage_name(stage)
    if (other := state["stage"]) != own:
        raise CheckpointError(
            f"the checkpoint is of the stage {other}, and {own} cannot continue it: leave ckpt_path out, and start "
            "from the weights (stage.export or rl-plugins export writes the folder of a model)"
        )
    return state


def model_of(source: nn.Module) -> nn.Module:
    """Return the model to train: `.model` of a LightningModule, or the module itself.

    Raises:
        ConfigError: the LightningModule has no model, or a compiled model.
    """
    model = getattr(source, "model", None) if isinstance(source, LightningModule) else source
    check_not_compiled(model)
    if not isinstance(model, nn.Module):
        named = (name for name, child in source.named_children() if isinstance(child, SavesPretrained))
        line = f"self.model = self.{next(named, '...')}"
        raise ConfigError(
            f"{type(source).__name__}.model is not an nn.Module, and a stage trains this attribute: add `{line}` to "
            "the constructor or to configure_model"
        )
    return model


def check_max_tokens(model: str | nn.Module, *settings: SamplingConfig | None) -> None:
    """Check that a model has positions for the longest responses, before the model is loaded.

    Args:
        model: name, folder or module.
        *settings: settings of sampling for training and for validation; None for settings that a stage has not.

    Raises:
        ConfigError: a response with its prompt may be longer than the model's positions.
    """
    positions = context_window(_config_of(model))
    for sampling in settings:
        if positions is not None and sampling is not None and sampling.max_tokens >= positions:
            raise ConfigError(
                f"max_tokens={sampling.max_tokens}: the model has {positions} positions for a prompt and its response: "
                "lower max_tokens"
            )


def _config_of(model: str | nn.Module) -> Mapping[str, Any]:
    """Return the content of a model's config.json; an empty mapping for a model without a configuration."""
    if isinstance(model, str):
        file = Path(model_folder(model, weights=False)) / "config.json"
        return read_model_config(file) if file.is_file() else {}
    config: Any = getattr(getattr(model, "model", model), "config", getattr(model, "config", None))
    return config.to_dict() if isinstance(config, PretrainedConfig) else {}


def _check_hyperparameters(module: LightningModule) -> None:
    """Check that the hyperparameters of a module are its own.

    `LightningCLI()` without classes gives the hyperparameters of the outermost module to each module inside.

    Raises:
        ConfigError: the hyperparameters are those of another class.
    """
    owner = str(module.hparams.get("_class_path", "")).rpartition(".")[2]
    if owner not in ("", type(module).__name__):
        raise ConfigError(
            f"{type(module).__name__}.hparams has the options of {owner}, because LightningCLI() without classes gives "
            f"these to each module inside: name the classes, LightningCLI(rl.{owner}, rl.PromptDataModule), and leave "
            "`class_path` of model and data out of the YAML file"
        )
