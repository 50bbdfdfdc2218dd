"""Checks of the data on a few samples: call the reward, try the chat template, and measure prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plugins.config.recipe import GIVEN_RESPONSE_STAGES, SAMPLING_STAGES, RecipeConfig
from rl_plugins.errors import ConfigError
from rl_plugins.launch.instantiation import training_data

if TYPE_CHECKING:
    import numpy as np

    from rl_plugins.data.parquet import PromptRows, Row
    from rl_plugins.rewards.records import Message
    from rl_plugins.rewards.trial import RewardTrial

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


def _check_rewards(config: RecipeConfig, rows: Iterable[Row]) -> list[Message]:
    """Call the reward once for each data source, in a process like a reward worker.

    Rewards with GPUs are called in the reward workers of the cluster only: this machine may have no GPU.

    Returns:
        Replies of environments to the policy.
    """
    from rl_plugins.rewards.routing import check_routes
    from rl_plugins.rewards.trial import DEADLINE_S, RewardTrial

    first_of_source: dict[str, Row] = {}
    for row in rows:
        first_of_source.setdefault(row["data_source"], row)
    if not first_of_source:
        return []
    check_routes(config.reward.functions, first_of_source)
    reward = config.reward
    if reward.gpus and config.launcher == "ray":
        return []
    with RewardTrial(
        reward.functions,
        deadline_s=min(reward.deadline_s, DEADLINE_S),
        load_timeout_s=reward.load_timeout_s,
        gpus=reward.gpus,
        memory_mb=reward.memory_mb,
        pass_env=reward.pass_env,
        in_process=not reward.num_workers,
    ) as trial:
        return _replies(config, first_of_source, trial)


def _replies(config: RecipeConfig, first_of_source: Mapping[str, Row], trial: RewardTrial) -> list[Message]:
    """Call the reward for a row of each data source, and return the replies of environments."""
    from rl_plugins.rewards.records import ScoringRequest

    replies: list[Message] = []
    for source, row in first_of_source.items():
        ground_truth = row["reward_model"].get("ground_truth")
        # Every reward should be able to read the correct answer.
        request = ScoringRequest(source, str(ground_truth), ground_truth, row["extra_info"], row["prompt"])
        score = trial.score(request)
        if config.environment.max_turns > 1:
            first_turn = replace(request, turns_left=config.environment.max_turns - 1)
            for response in (first_turn.solution_str, _NO_ANSWER):
                reply = trial.score(replace(first_turn, solution_str=response)).reply
                replies += [] if reply is None else [reply]
        for option, name in _details_used(config.algorithm):
            if name not in score.details:
                returned = ", ".join(score.details) or "nothing"
                raise ConfigError(
                    f"{option} names {name!r}, but the reward of data_source {source!r} returns {returned} beside its "
                    "score. Choose another reward, such as reward=correct_and_format, or other names"
                )
    return replies


def _details_used(algorithm: object) -> list[tuple[str, str]]:
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
        overlong="error" if refuse else "filter",
    )


def _characters(messages: Iterable[Mapping[str, Any]]) -> int:
    return sum(len(message["content"]) for message in messages)
