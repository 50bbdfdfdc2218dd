"""Checks of the algorithm or the loss: types of the options, and a run on made-up samples.

The schema of a recipe cannot know the types, because `_target_` may name any class. The signatures of the algorithm's
functions declare them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, get_type_hints

import torch
from torch import Tensor

from rl_plugins.algorithms.aggregation import GlobalCounts
from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.constraint import costs_as_rewards
from rl_plugins.algorithms.inputs import (
    JUDGED_INPUTS,
    PAIR_INPUTS,
    SCORED_PAIR_INPUTS,
    SCORED_STEP_INPUTS,
    call_with,
    check_inputs,
    required_inputs,
    takes,
)
from rl_plugins.algorithms.preference_losses import PREFERENCE_LOSSES
from rl_plugins.algorithms.regularization import Coefficient
from rl_plugins.algorithms.reward_model_losses import REWARD_MODEL_LOSSES
from rl_plugins.config.models import LoraConfig
from rl_plugins.config.placement import CRITIC_POOLS
from rl_plugins.config.recipe import COLLECTING_STAGES, RecipeConfig
from rl_plugins.config.settings import fits, shown, words_of
from rl_plugins.errors import ConfigError
from rl_plugins.extras import check_installed
from rl_plugins.hub.files import adapter_folder, model_folder
from rl_plugins.launch.argument_errors import RUN_OPTIONS, errors_with_options
from rl_plugins.launch.instantiation import instantiate_node
from rl_plugins.model_json import expert_count, reads_images
from rl_plugins.python_file import nearest
from rl_plugins.stages.model_inputs import MODEL_INPUTS, check_model_inputs
from rl_plugins.stages.off_policy import check_comparable, check_recomputed_routes

_USES = {
    "reference": "raise algorithm.kl.coefficient above 0",
    "teacher": "use algorithm=on_policy_distillation",
}
"""For each model that can follow the policy, an option with a use for the model."""


def check_method(config: RecipeConfig) -> None:
    """Check the algorithm or the loss of the stage. The stage `sft` has neither.

    Raises:
        ConfigError: see `check_algorithm`, `check_use_of_models`, `check_process_reward_model` and `check_loss`.
    """
    if config.stage not in COLLECTING_STAGES:
        check_loss(config)
        return
    check_algorithm(config)
    check_use_of_models(config)
    if config.stage == "prime":
        check_process_reward_model(config)


def check_use_of_models(config: RecipeConfig) -> None:
    """Check if the algorithm uses every pool and every model that follows the policy, and ever trains the policy.

    Raises:
        ConfigError: the algorithm does not use the model, or the critic is trained alone in all steps. The message
            names the option.
    """
    needs = instantiate_node("algorithm", config.algorithm).needs
    for role in ("reference", "teacher", *CRITIC_POOLS):
        is_used, options = bool(MODEL_INPUTS[role] & needs), getattr(config, role)
        actors = getattr(config.placement, role).actors
        if actors and not is_used:
            raise ConfigError(
                f"placement.{role}.actors={actors}: this algorithm uses no {role.replace('_', ' ')}. Leave "
                f"placement.{role}.actors out, or choose another algorithm"
            )
        if role in CRITIC_POOLS:
            # With epochs, a pipeline does not know the steps of its later stages.
            if is_used and options.warmup_steps >= config.run.steps and config.run.epochs is None:
                raise ConfigError(
                    f"{role}.warmup_steps={options.warmup_steps}: the run has run.steps={config.run.steps} and would "
                    f"never train the policy: lower {role}.warmup_steps, or raise run.steps"
                )
        elif options.update_every and not is_used:
            raise ConfigError(
                f"{role}.update_every={options.update_every}: this algorithm uses no {role}: leave it out, or "
                f"{_USES[role]}"
            )


def check_router_options(config: RecipeConfig, policy: Mapping[str, Any]) -> None:
    """Check if the policy has routers for the options of routers, and the updates have use for a replay of routes.

    Args:
        config: configuration of the run.
        policy: content of the policy's config.json.

    Raises:
        ConfigError: the policy is not a mixture of experts, the updates need no old log-probs, or the policy reads
            images, and its routers have losses.
    """
    # The imports load transformers, which takes seconds.
    from rl_plugins.callbacks.router_losses import refuse_images
    from rl_plugins.router_replay import check_routers

    with errors_with_options(RUN_OPTIONS):
        if config.model.router_losses.active:
            check_routers(policy, "router_losses")
            refuse_images(reads_images(policy))
        if config.model.router_replay:
            check_routers(policy, "router_replay")
        if config.model.router_replay == "recompute":
            updates = config.batch.updates_per_step * config.batch.passes_per_step
            check_recomputed_routes(instantiate_node("algorithm", config.algorithm), config.schedule, updates)


def check_expert_parallel(config: RecipeConfig, models: Mapping[str, Mapping[str, Any]]) -> None:
    """Check if the training workers can share the experts of their models.

    Args:
        config: configuration of the run.
        models: path or name of each known model, and the content of its config.json.

    Raises:
        ConfigError: no model has experts, the workers cannot share the experts evenly, or tokens of the family cannot
            travel between workers.
    """
    size, workers = config.strategy.expert_parallel, config.placement.num_workers
    chosen = f"strategy.expert_parallel={size}"
    elsewhere = {"reward", *config.placement.pools}
    local = {option: path for option, path in config.model_paths.items() if option.split(".")[0] not in elsewhere}
    mixtures = 0
    for option, path in local.items():
        model = models.get(path, {})
        number = expert_count(model)
        if not number:
            continue
        mixtures += 1
        if number % size:
            fitting = max(smaller for smaller in range(1, size) if number % smaller == 0 and workers % smaller == 0)
            raise ConfigError(
                f"{chosen}: {size} workers cannot share the {number} experts of {option}={path} evenly: use {fitting}"
            )
        if "auto_map" not in model and (reads_images(model) or not can_divide(model["model_type"])):
            raise ConfigError(
                f"{chosen}: the experts of {option}={path}, a {model['model_type']}, cannot be divided: transformers "
                "has no plan for the exchange of tokens, or the model reads images: set strategy.expert_parallel=1"
            )
    if not mixtures and all(path in models for path in local.values()):
        raise ConfigError(f"{chosen}: model.path={config.model.path} has no experts: set strategy.expert_parallel=1")


def check_adapter(option: str, path: str, lora: LoraConfig, *, trust_remote_code: bool) -> None:
    """Check an adapter in a model without weights: its layers, their 4-bit weights, and the files of a saved adapter.

    Args:
        option: options of the adapter, such as `model.lora`.
        path: folder or Hugging Face name of the model.
        lora: values of the options.
        trust_remote_code: value of `model.trust_remote_code`.

    Raises:
        ConfigError: bitsandbytes is not installed, a layer is not a linear layer, `target_modules` or `exclude_modules`
            does not fit the model, or the saved adapter does not fit the model or the options.
    """
    if lora.quantization:
        check_installed("bitsandbytes", "bitsandbytes", f"{option}.quantization={lora.quantization}")
    if lora.path:
        adapter_folder(lora.path, option=f"{option}.path")
    # The imports load transformers and peft, which takes seconds.
    from transformers import AutoConfig

    from rl_plugins.models.lora import add_adapter
    from rl_plugins.models.saved_adapter import read_settings
    from rl_plugins.vision_language import model_class

    folder = model_folder(path, weights=False, trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    try:
        if lora.path:
            # Before the model, which takes seconds for a large model.
            read_settings(lora)
        with torch.device("meta"):
            add_adapter(model_class(folder).from_config(config, trust_remote_code=trust_remote_code), lora)
    except ConfigError as error:
        if str(error).startswith("LoraConfig: path="):
            raise ConfigError(f"{option}.{str(error).removeprefix('LoraConfig: ')}") from None
        raise ConfigError(f"{option} with {path}: {error}") from None


def can_divide(family: str) -> bool:
    """Return True if transformers has a plan for the exchange of tokens between the ranks of a family's experts."""
    # The import loads transformers, which takes seconds.
    from transformers import CONFIG_MAPPING

    return bool(getattr(CONFIG_MAPPING[family], "base_model_ep_plan", None))


def check_algorithm(config: RecipeConfig) -> None:
    """Build the algorithm, check the types of its options, and run it on two made-up groups of two samples.

    Raises:
        ConfigError: a name or an option is unknown, a value has the wrong type or is outside its range, or the
            algorithm cannot be used with the sampling options.
    """

    algorithm: Algorithm = instantiate_node("algorithm", config.algorithm)
    check_option_types(algorithm)
    check_comparable(algorithm, config.schedule, config.sampling)
    _check_costs(algorithm, config.cost_model.path)
    _check_models(algorithm, config)
    zeros_BT, ones_BT = torch.zeros(4, 2), torch.ones(4, 2)
    per_token = (
        "log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs", "entropy",
        "sum_pi_squared", "values", "cost_values", "process_rewards",
    )  # fmt: skip
    inputs = {f"{name}_BT": zeros_BT for name in per_token} | {
        "scores_B": torch.tensor([0.0, 1.0, 0.0, 1.0]),
        "costs_B": torch.tensor([1.0, 0.0, 0.0, 1.0]),
        "is_positive_B": torch.tensor([False, True, False, True]),
        "baseline_rewards_B": torch.zeros(4),
        "teacher_top_log_probs_BTK": torch.full((4, 2, 2), -1.0),
        "top_log_probs_BTK": torch.full((4, 2, 2), -1.0),
        "component_rewards_BK": torch.rand(4, len(algorithm.reward_components)),
        "response_mask_BT": ones_BT,
        "turns_BT": torch.zeros(4, 2, dtype=torch.int64),
        "states_BT": torch.zeros(4, 2, dtype=torch.int64),
        "response_lengths_B": torch.full((4,), 2),
        "groups_B": torch.tensor([0, 0, 1, 1]),
        "valid_B": torch.ones(4, dtype=torch.bool),
        "ids_B": torch.arange(4),
    }
    if "ref_log_probs_BT" not in algorithm.needs:
        del inputs["ref_log_probs_BT"]
    coefficient, counts = algorithm.kl.coefficient, GlobalCounts(8, 4)
    try:
        algorithm.shaping.shaped(
            **{name: inputs[name] for name in ("scores_B", "response_lengths_B", "groups_B", "valid_B")}
        )
        Coefficient(algorithm.kl).update(0.0, config.batch.prompts_per_step * config.batch.samples_per_prompt)
        _, advantages_BT, _ = algorithm.advantages(inputs, kl_coefficient=coefficient)
        if algorithm.constraint is not None:
            algorithm.advantages(costs_as_rewards(inputs), kl_coefficient=-coefficient)
        inputs["advantages_BT"] = advantages_BT
        selected_BT = algorithm.select(inputs, seed=0, sum_over_ranks=_alone, gather_over_ranks=_alone)
        algorithm.loss(
            algorithm.corrected(inputs if selected_BT is None else {**inputs, "selected_BT": selected_BT}),
            kl_coefficient=coefficient,
            counts=counts,
            positive_counts=counts,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"algorithm: {error}") from None


def _check_costs(algorithm: Algorithm, cost_model: str | None) -> None:
    """Raise a ConfigError for a bound on the mean cost without costs, and for a cost model without a bound."""
    if algorithm.constraint is None and cost_model is not None:
        raise ConfigError(
            f"cost_model.path={cost_model}: this algorithm does not use costs: choose algorithm=safe_rlhf, or leave "
            "cost_model.path out"
        )
    if algorithm.constraint is not None and algorithm.constraint.cost is None and cost_model is None:
        raise ConfigError(
            "algorithm.constraint bounds the mean cost, and there are no costs: name a cost model with cost_model.path "
            "or, with algorithm.constraint.cost, the number of the reward function to be the cost"
        )


def _check_models(algorithm: Algorithm, config: RecipeConfig) -> None:
    """Compare the algorithm with the models and the schedule of the stage, as the stage does at its start."""
    teacher = config.teacher
    chosen = {"reward_model": config.reward_model.path, "process_reward_model": config.stage == "prime"}
    # These models start from the policy, if they have no path of their own.
    available = {"reference", *CRITIC_POOLS, "process_reward_model"}
    available |= {"teacher"} if teacher.path or teacher.paths or teacher.update_every else set()
    available |= {"cost_model"} if config.cost_model.path else set()
    with errors_with_options(RUN_OPTIONS):
        check_model_inputs(
            algorithm, config.schedule, chosen={name for name, is_set in chosen.items() if is_set}, available=available
        )


def _alone(values: Tensor) -> Tensor:
    return values


def check_loss(config: RecipeConfig) -> None:
    """Look up the loss of preferences or of a reward model, check its options, and call it on two made-up examples.

    Raises:
        ConfigError: the name or an option is unknown, a value has the wrong type or is outside its range, or the data
            does not have the inputs of the loss.
    """
    data, options = config.data, config.loss.options
    of_scores = config.stage == "reward_modeling"
    table: Mapping[str, Callable[..., Any]] = REWARD_MODEL_LOSSES if of_scores else PREFERENCE_LOSSES
    name = config.loss.name or ("bradley_terry" if of_scores else "dpo")
    if name not in table:
        raise ConfigError(f"loss.name={name}: use one of {', '.join(table)}")
    function = table[name]
    if of_scores:
        given = SCORED_STEP_INPUTS if name == "process_reward" else SCORED_PAIR_INPUTS
    else:
        given = JUDGED_INPUTS if data.label_key is not None else PAIR_INPUTS | JUDGED_INPUTS
    if computed := sorted(given & options.keys()):
        raise ConfigError(f"loss.options.{computed[0]}: the stage computes this input of the loss: leave it out")
    _check("loss.options", function, options)
    try:
        check_inputs(function, options, given, f"the data of stage={config.stage}")
    except ConfigError as error:
        option = "loss.name" if data.label_key is None or of_scores else f"data.label_key={data.label_key}"
        raise ConfigError(f"{option}: {error}") from None
    every = config.reference.update_every
    if every and not any(needed.startswith("ref") for needed in required_inputs(function, options)):
        raise ConfigError(
            f"reference.update_every={every}: the loss {name} needs no reference: leave it out, or use another loss"
        )
    margins = "margins_B" if of_scores else "margins_N"
    if data.margin_key is not None and not takes(function, margins):
        raise ConfigError(
            f"data.margin_key={data.margin_key}: the loss {name} has no margins: leave data.margin_key out, or train a "
            "reward model"
        )
    inputs = {input_name: torch.zeros((2, 1) if input_name.endswith("_BT") else 2) for input_name in given}
    inputs |= {"reference_point": torch.zeros(())} if "reference_point" in given else {}
    try:
        losses, _ = call_with(function, inputs, options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss.options: {error}") from None
    if not losses.isfinite().all():
        raise ConfigError(f"loss.options={options}: the loss {name} of made-up examples is {losses.tolist()}")


def check_process_reward_model(config: RecipeConfig) -> None:
    """Build the settings of PRIME's process reward model, and check their types.

    Raises:
        ConfigError: the option is not a node for `ProcessRewardConfig`, or a setting is wrong.
    """
    # The import loads transformers, which takes seconds.
    from rl_plugins.stages.process_rewards import ProcessRewardConfig

    if config.process_reward_model is None:
        return
    settings = instantiate_node("process_reward_model", config.process_reward_model)
    if not isinstance(settings, ProcessRewardConfig):
        raise ConfigError(
            f"process_reward_model._target_={config.process_reward_model['_target_']} gives a "
            f"{type(settings).__name__}: name rl_plugins.stages.process_rewards.ProcessRewardConfig"
        )
    _check_fields("process_reward_model", settings)


def check_option_types(algorithm: Algorithm) -> None:
    """Check the fields of the algorithm, and the options of its advantage and its policy loss.

    Raises:
        ConfigError: an option that the function does not take, or a value of the wrong type.
    """
    _check_fields("algorithm", algorithm)
    _check("algorithm.advantage_options", algorithm.advantage_function, algorithm.advantage_options)
    _check("algorithm.policy_loss_options", algorithm.policy_loss_function, algorithm.policy_loss_options)


def _check_fields(where: str, record: Any) -> None:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    _check(where, type(record), values)
    for name, value in values.items():
        if is_dataclass(value):
            _check_fields(f"{where}.{name}", value)


def _check(where: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    if isinstance(function, partial):
        # A node with `_partial_: true` has some of the options.
        _check(where, function.func, {**function.keywords, **options})
        return
    declared = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
    hints, parameters = get_type_hints(declared), inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    with_default = [name for name, parameter in parameters.items() if parameter.default is not parameter.empty]
    for name, value in options.items():
        if name not in parameters and not takes_any:
            raise ConfigError(f"{where}: {declared.__name__} has no option {name!r}{nearest(name, with_default)}")
        if not fits(value, hints.get(name, Any)):
            raise ConfigError(f"{where}.{name}={shown(value)}: must be {words_of(hints[name])}")
