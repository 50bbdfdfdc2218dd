"""Checks on a few samples: call the reward, try the chat template, and run the algorithm."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plugins.config.recipe import GIVEN_RESPONSE_STAGES, SAMPLING_STAGES, RecipeConfig
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from rl_plugins.data.parquet import PromptRows, Row
    from rl_plugins.rewards.records import Message

_REWARD_DEADLINE_S = 10.0
_PROMPTS_MEASURED = 1000
# A response without an answer, so that an environment replies.
_NO_ANSWER = "?"


def check_prompts(config: RecipeConfig) -> None:
    """Read every row once, call the reward for one row of each data source, and measure prompts.

    Raises:
        ConfigError: A file or a row is wrong, there are too few rows, a data source has no reward, a reward fails, or a
            prompt is too long or refused by the chat template.
    """
    import numpy as np

    from rl_plugins.data.curriculum import Curriculum
    from rl_plugins.data.orders import build_mixture, load_parts
    from rl_plugins.data.parquet import load_rows

    data, needed = config.data, config.batch.prompts_per_step
    source = training_data(config)
    train_columns, val_columns = columns_of(config)
    train, firsts = load_parts(source, train_columns)
    if len(train) < needed:
        raise ConfigError(
            f"the training data has {len(train)} rows, fewer than batch.prompts_per_step={needed}. Lower "
            "batch.prompts_per_step, or add data"
        )
    if data.mixture or data.curriculum.share:
        size = {"prompts_per_step": needed, "seed": config.run.seed}
        mixture = build_mixture(source, firsts, len(train), **size)
        if data.curriculum.share:
            Curriculum(mixture, data.curriculum, kept=np.arange(len(train)), **size)
    validation = load_rows(data.val_files, val_columns) if data.val_files else None
    # The reward scores the responses to these rows.
    scored = [train] if config.stage in SAMPLING_STAGES else []
    scored += [validation] if validation and config.generates else []
    replies = _check_rewards(config, chain.from_iterable(scored))
    if (Path(config.model.path) / "tokenizer.json").is_file():
        for rows in filter(None, (train, validation)):
            _check_lengths(config, rows, replies)


def columns_of(config: RecipeConfig) -> tuple[Sequence[str], Sequence[str]]:
    """Return the necessary columns of training rows and of validation rows. Only scored rows need a reward."""
    from rl_plugins.data.parquet import COLUMNS, UNSCORED_COLUMNS

    given = config.stage in GIVEN_RESPONSE_STAGES
    return UNSCORED_COLUMNS if given else COLUMNS, COLUMNS if config.generates else UNSCORED_COLUMNS


def training_data(config: RecipeConfig) -> Any:
    """Return the training data for the data module of the stage.

    Raises:
        ConfigError: The recipe names no training data, or the custom data set cannot be built.
    """
    data = config.data
    if data.dataset is not None:
        return instantiate_node("data.dataset", data.dataset)
    if data.mixture:
        return data.mixture
    if not data.train_files:
        raise ConfigError("data.train_files is empty: name one or more parquet files")
    return list(data.train_files)


def instantiate_node(option: str, node: Any) -> Any:
    """Build the object of a `_target_` node.

    Raises:
        ConfigError: The target does not exist, or refuses its arguments. The message begins with the option.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(f"{option} must be a mapping with the key _target_, the path of a class or function")
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        # Hydra's message ends with the key of the inner node, if an inner node failed.
        key = re.search(r"^full_key: (.+)$", str(error), re.MULTILINE)
        where = f"{option}.{key[1]}" if key else option
        raise ConfigError(f"{where}: {' '.join(str(error.__cause__ or error).split())}") from None


def _check_rewards(config: RecipeConfig, rows: Iterable[Row]) -> list[Message]:
    """Call the reward once for each data source.

    Returns:
        Replies of environments to the policy.
    """
    from rl_plugins.rewards.inline import check_reward
    from rl_plugins.rewards.records import ScoringRequest
    from rl_plugins.rewards.routing import check_routes

    first_of_source: dict[str, Row] = {}
    for row in rows:
        first_of_source.setdefault(row["data_source"], row)
    if not first_of_source:
        return []
    replies: list[Message] = []
    check_routes(config.reward.functions, first_of_source)
    for source, row in first_of_source.items():
        ground_truth = row["reward_model"].get("ground_truth")
        # Every reward should be able to read the correct answer.
        request = ScoringRequest(source, str(ground_truth), ground_truth, row["extra_info"], row["prompt"])
        deadline_s = min(config.reward.deadline_s, _REWARD_DEADLINE_S)
        score = check_reward(config.reward.functions, request, deadline_s=deadline_s)
        if config.environment.max_turns > 1:
            first_turn = replace(request, turns_left=config.environment.max_turns - 1)
            for response in (first_turn.solution_str, _NO_ANSWER):
                trial = replace(first_turn, solution_str=response)
                reply = check_reward(config.reward.functions, trial, deadline_s=deadline_s).reply
                replies += [] if reply is None else [reply]
        for option, name in _details_used(config.algorithm):
            if name not in score.details:
                returned = ", ".join(score.details) or "nothing"
                raise ConfigError(
                    f"{option} names {name!r}, but the reward of data_source {source!r} returns {returned} beside its "
                    "score. Choose another reward, such as reward=correct_and_format, or other names"
                )
    return replies


def _details_used(algorithm: Any) -> list[tuple[str, str]]:
    """Return the used details of scores: pairs of an option of the algorithm and the name of a detail."""
    node = algorithm if isinstance(algorithm, Mapping) else {}
    names = [("algorithm.reward_components", name) for name in node.get("reward_components") or ()]
    metric = (node.get("group_filter") or {}).get("metric")
    return [*names, *([("algorithm.group_filter.metric", metric)] if metric else [])]


def _check_lengths(config: RecipeConfig, rows: PromptRows, replies: Iterable[Message]) -> None:
    """Try the chat template, and measure prompts in tokens.

    The template is tried on every order of roles, and on the replies of environments. Only the prompts with the most or
    the fewest characters are measured, to limit the time for a large data set.

    Raises:
        ConfigError: The template refuses messages, or a prompt is too long.
    """
    import numpy as np
    from transformers import PreTrainedTokenizerFast

    from rl_plugins.data.tokenization import (
        TurnTokenizer,
        accepted_messages,
        check_chat_template,
        tokenize_prompts,
        within_limit,
    )

    limit, refuse = config.data.max_prompt_tokens, config.data.overlong_prompts == "error"
    # The import of AutoTokenizer would take several seconds. The token ids are not used.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(config.model.path)
    check_chat_template(tokenizer)
    if config.environment.max_turns > 1:
        turns = TurnTokenizer(tokenizer)
        for reply in replies:
            turns.tokens(reply, tokenizer.eos_token_id, config.environment.max_observation_tokens)

    def measure(numbers: Sequence[int]) -> np.ndarray:
        return tokenize_prompts((rows.rows[number]["prompt"] for number in numbers), tokenizer, {}).lengths

    characters = [_characters(messages) for messages in accepted_messages(rows, tokenizer, {})]
    by_characters = np.argsort(characters, kind="stable").tolist()
    measured = by_characters[-_PROMPTS_MEASURED:] if refuse else by_characters[:_PROMPTS_MEASURED]
    lengths = np.zeros(len(rows), dtype=np.int64)
    lengths[measured] = measure(measured)
    if not refuse:
        if lengths[measured].min() <= limit:
            return
        rest = by_characters[_PROMPTS_MEASURED:]
        lengths[rest] = measure(rest)
    within_limit(
        rows,
        lengths,
        option="data.max_prompt_tokens",
        limit=limit,
        overlong=config.data.overlong_prompts,  # type: ignore[arg-type]
    )


def _characters(messages: Iterable[Mapping[str, Any]]) -> int:
    return sum(len(message["content"]) for message in messages)


def check_pools(config: RecipeConfig) -> None:
    """Check if the algorithm uses every pool.

    Raises:
        ConfigError: The algorithm does not use the model of a pool. The message names the pool.
    """
    needs = instantiate_node("algorithm", config.algorithm).needs
    inputs_of_role = {
        "reference": {"ref_log_probs_BT"},
        "teacher": {"teacher_log_probs_BT", "teacher_top_log_probs_BTK"},
        "critic": {"values_BT"},
    }
    for role, names in inputs_of_role.items():
        actors = getattr(config.placement, role).actors
        if actors and not needs & names:
            raise ConfigError(
                f"placement.{role}.actors={actors}: this algorithm uses no {role}. Leave placement.{role}.actors out, "
                "or choose another algorithm"
            )


def check_algorithm(config: RecipeConfig) -> None:
    """Build the algorithm, check the types of its options, and run it on two made-up groups of two samples.

    Raises:
        ConfigError: A name or an option is unknown, a value has the wrong type or is outside its range, or the
            algorithm cannot be used with the sampling options.
    """
    import torch

    from rl_plugins.algorithms.aggregation import GlobalCounts
    from rl_plugins.algorithms.algorithm import Algorithm
    from rl_plugins.config.sampling import SamplingConfig
    from rl_plugins.launch.algorithm_options import check_option_types
    from rl_plugins.stages.off_policy import check_comparable

    algorithm: Algorithm = instantiate_node("algorithm", config.algorithm)
    check_option_types(algorithm)
    options = config.sampling
    sampling = SamplingConfig(options.max_tokens, top_p=options.top_p, top_k=options.top_k)
    check_comparable(algorithm, config.schedule, sampling)
    zeros_BT, ones_BT = torch.zeros(4, 2), torch.ones(4, 2)
    per_token = (
        "log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs", "entropy",
        "sum_pi_squared", "values", "process_rewards",
    )  # fmt: skip
    inputs = {f"{name}_BT": zeros_BT for name in per_token} | {
        "scores_B": torch.tensor([0.0, 1.0, 0.0, 1.0]),
        "baseline_rewards_B": torch.zeros(4),
        "teacher_top_log_probs_BTK": torch.full((4, 2, 2), -1.0),
        "top_log_probs_BTK": torch.full((4, 2, 2), -1.0),
        "component_rewards_BK": torch.rand(4, len(algorithm.reward_components)),
        "response_mask_BT": ones_BT,
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
        algorithm.kl.controller()
        algorithm.entropy.controller()
        _, advantages_BT, _ = algorithm.advantages(inputs, kl_coefficient=coefficient)
        inputs["advantages_BT"] = advantages_BT
        selected_BT = algorithm.select(inputs, seed=0, sum_over_ranks=_alone, gather_over_ranks=_alone)
        algorithm.loss(
            inputs if selected_BT is None else {**inputs, "selected_BT": selected_BT},
            kl_coefficient=coefficient,
            counts=counts,
            positive_counts=counts,
        )
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"algorithm: {error}") from None


def _alone(values: Tensor) -> Tensor:
    return values
