"""Checks of the data: read every row, call the reward, try the chat template, and measure prompts and responses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plugins.config.data import DataConfig
from rl_plugins.config.judge import asks_engine, with_engines
from rl_plugins.config.recipe import SAMPLING_STAGES, RecipeConfig
from rl_plugins.errors import ConfigError, config_errors
from rl_plugins.launch.instantiation import training_data
from rl_plugins.launch.measured_rows import MeasuredRows, kinds_of, options_in_errors
from rl_plugins.launch.task_environment import try_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_plugins.data.image_prompts import ImagePromptEncoder
    from rl_plugins.data.orders import Source
    from rl_plugins.data.parquet import PromptRows, Row
    from rl_plugins.rewards.records import Message
    from rl_plugins.rewards.trial import RewardTrial

# A response without an answer, so that an environment replies.
_NO_ANSWER = "?"
_NO_SERVER = "http://127.0.0.1:9/v1"
"""Address for a judge that is loaded and not called."""


def set_steps(config: RecipeConfig) -> None:
    """Set `run.steps` to the steps of `run.epochs`, if the option is given.

    Raises:
        ConfigError: the training data is missing.
    """
    if (epochs := config.run.epochs) is None:
        return
    rows, _ = _loaded(training_data(config), kinds_of(config)[0], config, config.data.max_train_rows)
    config.run.steps = max(1, round(epochs * (len(rows) // config.prompts_drawn)))


def check_data(config: RecipeConfig, models: Mapping[str, Mapping[str, Any]]) -> None:
    """Read every row, call the reward for one row of each data source, and measure prompts and responses.

    Args:
        config: configuration of the run.
        models: path or name of each model, and the content of its config.json.

    Raises:
        ConfigError: a file or a row is wrong, there are too few rows, a data source has no reward, a reward fails,
            transformers does not have a model, a prompt is refused by the chat template, or texts are too long.
    """
    import numpy as np

    from rl_plugins.data.curriculum import Curriculum
    from rl_plugins.data.formats import CONVERSATIONS
    from rl_plugins.data.images import UNSEEN, any_has_images
    from rl_plugins.data.orders import build_mixture
    from rl_plugins.data.validation import compared_column
    from rl_plugins.model_json import reads_images
    from rl_plugins.models.folder import check_model_type

    data, needed = config.data, config.prompts_drawn
    source = training_data(config)
    train_kind, val_kind = kinds_of(config)
    train, firsts = _loaded(source, train_kind, config, data.max_train_rows)
    if len(train) < needed:
        limit = data.max_train_rows
        more = "add data" if limit is None or limit >= needed else f"raise data.max_train_rows={limit}"
        raise ConfigError(
            f"the training data has {len(train)} rows, fewer than {config.size_of_step}. Lower "
            f"batch.prompts_per_step, or {more}"
        )
    if data.mixture or data.curriculum.share:
        size = {"prompts_per_step": needed, "seed": config.run.seed}
        mixture = build_mixture(source, firsts, len(train), **size)
        if data.curriculum.share:
            Curriculum(mixture, data.curriculum, kept=np.arange(len(train)), **size)
    training = MeasuredRows(train, train_kind, needed, config)
    if train_kind == CONVERSATIONS:
        _check_tools_key(train, data.tools_key)
    validation = None
    if data.val_files:
        validation = MeasuredRows(_loaded(data.val_files, val_kind, config, data.max_val_rows)[0], val_kind, 1, config)
        # Conversations are compared with prompts by their prompts.
        compared = compared_column(train_kind) if train_kind == val_kind else "prompt"
        _warn_of_shared_prompts(config, train, validation.rows, compared)
    all_rows = [measured.rows for measured in (training, validation) if measured is not None]
    if config.environment.scores_itself and any(map(any_has_images, all_rows)):
        raise ConfigError(UNSEEN)
    # The reward scores the responses to these rows.
    first_of_source = _first_of_source(train) if config.stage in SAMPLING_STAGES else {}
    if config.teacher.paths and not config.teacher.weights:
        _check_teachers(config, first_of_source)
    if validation and config.scores:
        for name, row in _first_of_source(validation.rows).items():
            first_of_source.setdefault(name, row)
    # Loads transformers.
    for path, model in models.items():
        check_model_type(path, model)
    tokenizer = _load_tokenizer(config)
    if not config.environment.scores_itself:
        replies = _check_rewards(config, first_of_source, tokenizer)
        _check_replies(config, replies, tokenizer)
    template_options = try_environment(config, first_of_source, tokenizer)
    if tokenizer is None:
        return
    for rows in filter(None, (training, validation)):
        with_images = reads_images(models.get(config.model.path, {})) and any_has_images(rows.rows)
        if with_images:
            _check_images_are_read(config, models)
        rows.check_lengths(tokenizer, template_options, _image_prompts(config) if with_images else None)


def _loaded(source: Source, kind: str, config: RecipeConfig, limit: int | None) -> tuple[PromptRows, list[int]]:
    """Return the rows of a format, and the number of the first row of each part; see `load_parts`."""
    from rl_plugins.data.formats import FORMATS
    from rl_plugins.data.orders import load_parts

    try:
        with options_in_errors():
            return load_parts(source, FORMATS[kind].columns, FORMATS[kind].form_of(config.data), limit=limit)
    except ConfigError as error:
        if config.stage != "sft" or "column 'prompt' is missing" not in str(error):
            raise
        option = "data.messages_key" if config.data.messages_key is None else "data.validate_on=responses"
        raise ConfigError(f"{error}. For conversations, use {option}") from None


def _check_tools_key(conversations: PromptRows, key: str) -> None:
    """Refuse a key in no conversation: the policy would learn calls without tools."""
    from rl_plugins.data.conversations import TOOLS

    if key != DataConfig.tools_key and not any(row[TOOLS] for row in conversations):
        raise ConfigError(
            f"data.tools_key={key}: no row of the training data has tools there: correct the key, or leave it out"
        )


def _warn_of_shared_prompts(config: RecipeConfig, train: PromptRows, held_out: PromptRows, compared: str) -> None:
    """Print a line if prompts of validation are also prompts of training."""
    from rl_plugins.data.validation import shared_prompts

    # The task of such an environment is not in the prompt, and all prompts may be the same.
    if config.environment.scores_itself or not (shared := shared_prompts(train, held_out, compared)):
        return
    row, trained = next(iter(shared.items()))
    rows = f"{len(shared)} of {len(held_out)} validation rows have the prompt of a training row"
    places = f"such as {held_out.location(row)}, and {train.location(trained)}"
    print(f"{config.run.name}: {rows}, {places}: their scores say little about new prompts", flush=True)


def _check_images_are_read(config: RecipeConfig, models: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that all models of the training workers read images.

    Raises:
        ConfigError: a model reads text alone.
    """
    from rl_plugins.model_json import reads_images

    for option, path in config.model_paths.items():
        # The judge's engine gets texts from a reward.
        if option != "reward.judge.model" and path in models and not reads_images(models[path]):
            raise ConfigError(
                f"{option}={path}: the rows have images, and this model reads text alone: name a vision-language model "
                "with the tokens of the policy"
            )


def _image_prompts(config: RecipeConfig) -> ImagePromptEncoder:
    """Load the processor of the policy, for rows with images.

    Raises:
        ConfigError: the processor cannot be loaded.
    """
    from rl_plugins.data.image_prompts import ImagePromptEncoder, load_tokenizer_or_processor

    model, template = config.model, config.data.chat_template
    processor: Any = load_tokenizer_or_processor(
        model.path, trust_remote_code=model.trust_remote_code, chat_template=template
    )
    bad_images: Any = config.data.bad_images
    return ImagePromptEncoder(processor, bad_images)


def _policy_folder(config: RecipeConfig) -> Path:
    """Return the folder with the configuration and the tokenizer of the policy."""
    from rl_plugins.hub.files import model_folder

    model = config.model
    return Path(model_folder(model.path, option="model.path", weights=False, trust_remote_code=model.trust_remote_code))


def _check_teachers(config: RecipeConfig, sources: Iterable[str]) -> None:
    for source in sorted(sources):
        with config_errors("teacher.paths: "):
            config.teacher.teacher_of(source)


def _first_of_source(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the first row of each data source."""
    first_of_source: dict[str, Row] = {}
    for row in rows:
        first_of_source.setdefault(row["data_source"], row)
    return first_of_source


def _check_rewards(
    config: RecipeConfig, first_of_source: Mapping[str, Row], tokenizer: PreTrainedTokenizerBase | None
) -> list[Message]:
    """Call the reward once for each data source, in a process like a reward worker.

    Rewards with GPUs are called in the reward workers of the cluster only: this machine may have no GPU. Rewards that
    ask an engine of the run are loaded and not called: the engine does not run yet.

    Returns:
        Replies of environments to the policy.
    """
    from rl_plugins.rewards.calling import check_routes, route_of
    from rl_plugins.rewards.trial import RewardTrial, trial_deadline_s

    if not first_of_source:
        return []
    reward, judges = config.reward, config.placement.judge.actors
    rewards = with_engines(config.rewards, [_NO_SERVER] * judges, reward.judge.model)
    check_routes(rewards, first_of_source)
    if reward.gpus and config.launcher == "ray":
        return []
    with RewardTrial(
        rewards,
        deadline_s=trial_deadline_s(rewards, reward.deadline_s),
        load_timeout_s=reward.load_timeout_s,
        gpus=reward.gpus,
        memory_mb=reward.memory_mb,
        pass_env=reward.pass_env,
        in_process=not reward.num_workers,
    ) as trial:
        called = {source: row for source, row in first_of_source.items() if not asks_engine(route_of(rewards, source))}
        return _replies(config, called, trial, tokenizer)


def _replies(
    config: RecipeConfig,
    first_of_source: Mapping[str, Row],
    trial: RewardTrial,
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[Message]:
    """Call the reward for a row of each data source, and return the replies of environments."""
    from rl_plugins.rewards.records import scoring_request

    def encode(text: str) -> list[int]:
        # Without a tokenizer here, the bytes of the text stand for tokens.
        return list(text.encode()) if tokenizer is None else tokenizer.encode(text, add_special_tokens=False)

    replies: list[Message] = []
    for source, row in first_of_source.items():
        # Every reward should be able to read the correct answer.
        text = str(row["reward_model"].get("ground_truth"))
        request = scoring_request(text, row, encode(text))
        score = trial.score(request)
        # With tools, the reward gets finished conversations only.
        if _replies_of_reward(config):
            first_turn = replace(request, turns_left=config.environment.max_turns - 1)
            no_answer = replace(first_turn, solution_str=_NO_ANSWER, token_ids=encode(_NO_ANSWER))
            for turn in (first_turn, no_answer):
                reply = trial.score(turn).reply
                replies += [] if reply is None else [reply]
        for option, name in _details_used(config.algorithm):
            if name not in score.details:
                returned = ", ".join(score.details) or "nothing"
                raise ConfigError(
                    f"{option} names {name!r}, but the reward of data_source {source!r} returns {returned} beside its "
                    "score. Choose another reward, such as reward=correct_and_format, or other names"
                )
    return replies


def _replies_of_reward(config: RecipeConfig) -> bool:
    """Return True if the reward function may reply."""
    environment = config.environment
    return environment.max_turns > 1 and not environment.tools and not environment.scores_itself


def _details_used(algorithm: object) -> list[tuple[str, str]]:
    """Return the used details of scores: pairs of an option of the algorithm and the name of a detail."""
    node = algorithm if isinstance(algorithm, Mapping) else {}
    names = [("algorithm.reward_components", name) for name in node.get("reward_components") or ()]
    for group, option in (("group_filter", "metric"), ("constraint", "cost")):
        options = node.get(group)
        name = options.get(option) if isinstance(options, Mapping) else None
        names += [(f"algorithm.{group}.{option}", name)] if name else []
    return names


def _load_tokenizer(config: RecipeConfig) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of the policy; return None if the policy has no file with a fast tokenizer.

    Raises:
        ConfigError: the tokenizer cannot be read, or has no chat template or no end-of-sequence token; or the template
            does not know an option.
    """
    from transformers import PreTrainedTokenizerFast

    from rl_plugins.data.chat_template import check_chat_template, check_template_options, template_of_processor
    from rl_plugins.data.tokenization import load_tokenizer

    path = config.model.path
    if not (_policy_folder(config) / "tokenizer.json").is_file():
        return None
    try:
        # The import of AutoTokenizer would take several seconds.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(_policy_folder(config))
    # The library tokenizers raises plain exceptions.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.path={path}: its tokenizer cannot be read ({reason}): download or export the model again"
        ) from None
    if tokenizer.eos_token_id is None:
        # The class that AutoTokenizer chooses may have an end of its own.
        tokenizer = load_tokenizer(str(_policy_folder(config)), trust_remote_code=config.model.trust_remote_code)
    tokenizer.chat_template = (
        config.data.chat_template or tokenizer.chat_template or template_of_processor(_policy_folder(config))
    )
    check_chat_template(tokenizer)
    with config_errors("data."):
        check_template_options(tokenizer, config.data.chat_template_kwargs)
    return tokenizer


def _check_replies(config: RecipeConfig, replies: Iterable[Message], tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Try the chat template on the replies of environments.

    Raises:
        ConfigError: the template refuses a reply.
    """
    from rl_plugins.data.following_messages import TurnTokenizer

    if tokenizer is not None and _replies_of_reward(config):
        turns = TurnTokenizer(tokenizer, config.data.chat_template_kwargs)
        for reply in replies:
            turns.tokens([reply], tokenizer.eos_token_id, config.environment.max_observation_tokens)
