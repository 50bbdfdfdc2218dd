"""Optimizer and schedule of each trained model: from settings, or from `configure_optimizers` of a LightningModule."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from hydra.utils import get_object
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from rl_plugins.config.models import SCHEDULES, OptimizerConfig
from rl_plugins.errors import ConfigError
from rl_plugins.models.muon import MuonAndAdamW
from rl_plugins.vision_language import vision_tower

SCHEDULE_STATE = {"options", "steps", "schedule"}
"""Keys of the state of a `ResumableSchedule`."""
MicroBatchLoss = tuple[Tensor, bool]
"""Scalar loss of a micro-batch, and True for the last micro-batch of an optimizer step."""
Optimize = Callable[[Iterable[MicroBatchLoss], str], None]
"""Function that takes one optimizer step of the named model: `Stage.optimize`."""
_OF_THE_STATES = {"params", "foreach", "fused", "capturable", "differentiable"}
"""Arguments of an optimizer with the states of a checkpoint: the number of a step is on the device for some kernels."""


class FurtherLoss(Protocol):
    """Function that returns a further loss of a micro-batch, or None."""

    def __call__(self, name: str, *, last: bool) -> Tensor | None:
        """Return the loss of the last forward pass of model `name`; `last` is True before an optimizer step."""


def with_further(loss: Tensor, further: Sequence[FurtherLoss], name: str, *, last: bool) -> Tensor:
    """Return the loss of a micro-batch with the further losses."""
    added = [function(name, last=last) for function in further]
    return sum((one for one in added if one is not None), loss)


def optimizer_of_module(module: LightningModule, trainer: Trainer, optimizer_steps: int | None) -> dict[str, Any]:
    """Return the optimizer of a module's own `configure_optimizers`.

    Args:
        module: the module.
        trainer: trainer of the stage. The method may read the number of steps from the trainer.
        optimizer_steps: optimizer steps of one step of the stage; None if the number changes.

    Raises:
        ConfigError: see `_as_one_optimizer`.
    """
    module.trainer = trainer
    built = _as_one_optimizer(module.configure_optimizers(), module)
    if built.get("lr_scheduler") is not None and trainer.max_steps != -1 and optimizer_steps != 1:
        rank_zero_warn(
            f"{type(module).__name__}.configure_optimizers has a schedule, which moves once in a step of the stage, "
            f"and Trainer(max_steps={trainer.max_steps}) counts optimizer steps, of which a step has several: a "
            "schedule of trainer.estimated_stepping_batches steps does not come to its end. Bound the training by "
            "max_epochs, or by max_steps of the stage"
        )
    return built


def step_schedules(
    configs: Iterable[LRSchedulerConfig], interval: str, count: int, is_trained: Callable[[Optimizer], bool]
) -> None:
    """Step the schedules of an interval, as Lightning does in automatic optimization.

    Args:
        configs: all schedules.
        interval: `step` or `epoch`.
        count: number of finished steps or epochs.
        is_trained: returns True for an optimizer that took a step. The schedule of an untrained model (a policy whose
            critic warms up) waits.
    """
    for config in configs:
        scheduler: Any = config.scheduler
        is_due = config.interval == interval and count % config.frequency == 0
        if is_due and (interval == "epoch" or is_trained(scheduler.optimizer)):
            scheduler.step()


def _as_one_optimizer(configured: object, owner: object) -> dict[str, Any]:
    """Convert the result of `configure_optimizers`, in any of Lightning's forms, to a dict of one optimizer.

    Raises:
        ConfigError: there is no optimizer, more than one optimizer or scheduler, or a schedule that needs a metric.
    """
    schedulers: Any = []
    if isinstance(configured, list | tuple) and len(configured) == 2 and isinstance(configured[0], list | tuple):
        configured, schedulers = configured
    optimizers = list(configured) if isinstance(configured, list | tuple) else [configured]
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer | dict) or len(schedulers) > 1:
        raise ConfigError(
            f"{type(owner).__name__}.configure_optimizers must return one optimizer with at most one scheduler: "
            "each trained model has one optimizer"
        )
    single = optimizers[0] if isinstance(optimizers[0], dict) else {"optimizer": optimizers[0]}
    single = {**single, "lr_scheduler": schedulers[0]} if schedulers else single
    scheduler = single.get("lr_scheduler")
    if isinstance(scheduler.get("scheduler") if isinstance(scheduler, dict) else scheduler, ReduceLROnPlateau):
        raise ConfigError(
            f"{type(owner).__name__}.configure_optimizers returns a ReduceLROnPlateau: a stage steps schedules by its "
            "clock, without a metric: return a schedule of steps, such as torch.optim.lr_scheduler.LambdaLR"
        )
    return single


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> dict[str, Any]:
    """Return the optimizer of a model and its schedule in the form of Lightning's `configure_optimizers`.

    Raises:
        ConfigError: a name does not exist, an optimizer or schedule refuses its arguments or needs a closure or a
            metric, an option has no effect, or a model without a vision tower has a rate for the tower.
    """
    make, arguments = _optimizer_class(config)
    trained: Any = model if make is MuonAndAdamW else _groups(config, model)
    known = inspect.signature(make).parameters
    defaults, has_any = OptimizerConfig(), any(known[name].kind is inspect.Parameter.VAR_KEYWORD for name in known)
    given: dict[str, Any] = {"lr": config.lr}
    for name, value in {"betas": tuple(config.betas), "weight_decay": config.weight_decay}.items():
        is_changed = value != getattr(defaults, name)
        if name in known or (is_changed and has_any):
            given[name] = value
        elif is_changed:
            raise ConfigError(f"{name}={value}: {make.__name__} has no such argument: leave {name} out")
    if make is AdamW:
        given["fused"] = True
    optimizer = _called(make, trained, {**given, **arguments, **config.options}, "name", "options")
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"name={config.name}: the result is a {type(optimizer).__name__}, and no optimizer")
    if _needs_argument(optimizer.step):
        raise ConfigError(f"name={config.name}: {type(optimizer).__name__}.step needs a closure: use another optimizer")
    schedule = ResumableSchedule(config, optimizer, partial(_schedule, config))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ResumableSchedule:
    """Schedule of torch with the interface of torch, and with the rates of the run's own options after a resume.

    A checkpoint has the rates, the weight decay and the other options of its optimizer. If the options of a resumed run
    are equal, the state of the checkpoint is restored. Otherwise a new schedule of the new options takes as many steps
    as the schedule of the checkpoint: rates are a function of the options and of the number of steps.

    Args:
        config: options of the optimizer and the schedule.
        optimizer: optimizer without a schedule.
        make: function that makes the schedule of torch.

    Attributes:
        optimizer: the optimizer.
        schedule: the schedule of torch.
    """

    def __init__(self, config: OptimizerConfig, optimizer: Optimizer, make: Callable[[Optimizer], Any]) -> None:
        names = {*config.options, *_argument_names(optimizer)}
        given = [{name: group[name] for name in names & group.keys()} for group in optimizer.param_groups]
        # A rate may be a tensor, which a schedule changes in place.
        self._given = deepcopy(given)
        self._options, self._make, self._steps = repr(config), make, 0
        self.optimizer, self.schedule = optimizer, make(optimizer)

    def step(self) -> None:
        """Set the rates of the next step."""
        self.schedule.step()
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the options of the optimizer, the number of steps, and the state of the schedule."""
        return {"options": self._options, "steps": self._steps, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a schedule. The optimizer has the options and the states of the checkpoint already.

        Args:
            state: result of `state_dict` in a run with equal or other options.

        Raises:
            ConfigError: a schedule of the new options has fewer steps.
        """
        if state["options"] == self._options:
            self.schedule.load_state_dict(state["schedule"])
            self._steps = state["steps"]
            return
        for group, given in zip(self.optimizer.param_groups, self._given, strict=True):
            # A schedule would begin with this rate of an earlier schedule.
            group.pop("initial_lr", None)
            group.update(deepcopy(given))
        self._steps = 0
        with warnings.catch_warnings():
            # The schedule of torch warns about steps without a step of the optimizer.
            warnings.simplefilter("ignore", UserWarning)
            self.schedule = self._make(self.optimizer)
            try:
                while self._steps < state["steps"]:
                    self.step()
            except ValueError as error:
                name = type(self.schedule).__name__
                raise ConfigError(
                    f"schedule={name}: the checkpoint has taken {state['steps']} steps, and {name} has fewer "
                    f"({error}): give the schedule more steps"
                ) from None


def _argument_names(optimizer: Optimizer) -> set[str]:
    """Return the names of the arguments of an optimizer. Groups may hold numbers of the states, too."""
    # A class may hand its arguments on to its base class.
    signatures = [inspect.signature(kind) for kind in type(optimizer).__mro__]
    return {name for signature in signatures for name in signature.parameters} - _OF_THE_STATES


def print_rates(optimizer: Optimizer, name: str, owner: LightningModule | None, *, trained: bool) -> None:
    """Print the class and the rates of an optimizer, and the place where a user changes the rates.

    Args:
        optimizer: optimizer of a model.
        name: name of the model.
        owner: module whose `configure_optimizers` made the optimizer; None for an optimizer made from settings.
        trained: True for the model that the stage trains, False for a further model such as a critic.
    """
    # A schedule may have lowered the rate for warm-up.
    rates = dict.fromkeys(f"{group.get('initial_lr', group['lr']):g}" for group in optimizer.param_groups)
    if owner is not None:
        place = f"from {type(owner).__name__}.configure_optimizers"
    elif trained:
        place = "change the rate with optimizer=OptimizerConfig(lr=...), in a recipe optimizer.lr"
    else:
        place = f"change the rate with {name}=...(optimizer=OptimizerConfig(lr=...)), in a recipe {name}.optimizer.lr"
    default = f"{OptimizerConfig().lr:g}"
    if owner is None and default in rates:
        place += f"; {default} suits models of billions of parameters, and a small model needs more, such as 1e-4"
    rank_zero_info(f"{name}: {type(optimizer).__name__}, lr={', '.join(rates)} ({place})")


def _groups(config: OptimizerConfig, model: nn.Module) -> list[Any]:
    """Return the trained parameters, in groups if the vision tower has a rate of its own.

    Raises:
        ConfigError: there is a rate for the vision tower, and the model has no tower or does not train the tower.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not config.vision_lr:
        return trained
    of_tower = {id(p) for p in vision_tower(model).parameters()}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if id(p) not in of_tower]},
        {"params": [p for p in trained if id(p) in of_tower], "lr": config.vision_lr},
    ]
    if not groups[1]["params"]:
        raise ConfigError(
            f"vision_lr={config.vision_lr:g}: no parameter of the vision tower is trained, because the adapter leaves "
            "the tower out, or the module has frozen the tower: leave vision_lr out"
        )
    return [group for group in groups if group["params"]]


def try_optimizer(config: OptimizerConfig) -> None:
    """Build an optimizer and its schedule for a small model.

    Raises:
        ConfigError: see `build_optimizer`.
    """
    _optimizer_class(config)
    # The small model has no vision tower.
    build_optimizer(replace(config, vision_lr=None), nn.Linear(2, 2))


def _optimizer_class(config: OptimizerConfig) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the class or function of the optimizer, and the arguments of its node."""
    make, arguments = _named(config.name, "torch.optim", "name")
    if make is not Muon:
        return make, arguments
    if config.vision_lr:
        raise ConfigError("vision_lr: Muon has one rate for all parameters: use 0, or another optimizer")
    return MuonAndAdamW, arguments


def _schedule(config: OptimizerConfig, optimizer: Optimizer) -> Any:
    if config.schedule in SCHEDULES:
        return LambdaLR(optimizer, config.factor)
    make, arguments = _named(config.schedule, "torch.optim.lr_scheduler", "schedule")
    options = {**arguments, **config.schedule_options}
    schedule = _called(make, optimizer, options, "schedule", "schedule_options")
    if not callable(getattr(schedule, "step", None)) or _needs_argument(schedule.step):
        raise ConfigError(
            f"schedule={config.schedule}: the step of {type(schedule).__name__} needs a metric, or does not exist: use "
            "a schedule of steps"
        )
    return schedule


def _named(value: object, module: str, field: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the class or function of a name, a dotted path or a node, and the arguments of a node."""
    node = dict(value) if isinstance(value, Mapping) else {"_target_": value}
    path = str(node.pop("_target_"))
    try:
        return get_object(path if "." in path else f"{module}.{path}"), node
    except ImportError as error:
        names = [name for name in dir(import_module(module)) if name[0].isupper()]
        close = get_close_matches(path, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use a class of {module}, or a dotted path"
        raise ConfigError(f"{field}={path}: {' '.join(str(error).split())}: {hint}") from None


def _called(make: Callable[..., Any], first: object, options: Mapping[str, Any], field: str, group: str) -> Any:
    known = inspect.signature(make).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        for name in options:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join([*known][1:])}"
                raise ConfigError(f"{group}.{name}: {make.__name__} has no such argument: {hint}")
    try:
        return make(first, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{field}={make.__name__}: {error}") from None


def _needs_argument(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
