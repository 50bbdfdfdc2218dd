"""Samples of a policy without training: options of its run for `generate` and `evaluate`, and conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_plugins.config.data import DataConfig
from rl_plugins.config.hydra_errors import explain
from rl_plugins.config.recipe import RecipeConfig, public_options, read_config
from rl_plugins.config.sampling import SamplingOptions
from rl_plugins.errors import ConfigError, config_errors
from rl_plugins.redaction import REMOVED
from rl_plugins.run_folder import RunFolder
from rl_plugins.text_file import read_yaml

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_plugins.config.sampling import SamplingConfig
    from rl_plugins.data.parquet import Row
    from rl_plugins.rewards.conversations import Conversations
    from rl_plugins.rollout.engine import Generations, GroupRequest, GroupSampler
    from rl_plugins.stages.sampling import AnyEnvironment


@dataclass(frozen=True)
class ResponseOptions:
    """Options of a run for its samples in training and in validation alike.

    Attributes:
        template_options: further variables of the chat template.
        chat_template: chat template in place of the tokenizer's own; None for the tokenizer's own.
        stop: strings at the end of a response.
        stop_token_ids: tokens at the end of a response, besides the end of the sequence.
    """

    template_options: Mapping[str, Any]
    chat_template: str | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, config: RecipeConfig) -> ResponseOptions:
        """Return the options of a configuration."""
        return cls._of(config.data, config.sampling)

    @classmethod
    def read(cls, file: Path) -> ResponseOptions:
        """Read the options in the configuration of a run. Other options may need secrets, and are not read.

        Raises:
            ConfigError: the file is damaged, or an option is wrong.
        """
        values = read_yaml(file, "name the config.yaml of a run")
        options: Any = OmegaConf.create({"data": DataConfig, "sampling": SamplingOptions})
        try:
            for name in ("data.chat_template_kwargs", "data.chat_template", "sampling.stop", "sampling.stop_token_ids"):
                if (value := OmegaConf.select(values, name)) is not None:
                    OmegaConf.update(options, name, value)
            with config_errors(f"{file}: "):
                return cls._of(OmegaConf.to_object(options.data), OmegaConf.to_object(options.sampling))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{file}: {explain(error)}") from None

    @classmethod
    def _of(cls, data: Any, sampling: Any) -> ResponseOptions:
        return cls(data.chat_template_kwargs, data.chat_template, tuple(sampling.stop), tuple(sampling.stop_token_ids))


def config_of_policy(policy: str) -> Path | None:
    """Return the file with the configuration of the run with an exported policy; None for another policy."""
    folder = Path(policy).absolute()
    run = RunFolder(folder.parent)
    return run.config if run.export == folder and run.config.is_file() else None


def recipe_with_conversations(file: Path) -> RecipeConfig:
    """Read the configuration of a run whose policy has conversations.

    Args:
        file: `config.yaml` of a run, or a file with the same options.

    Raises:
        ConfigError: the file or an option is wrong, the file lacks a secret, or the policy has no conversations.
    """
    with config_errors("--recipe "):
        config = read_config(file, "name the config.yaml of a run")
    options = config.environment
    if not config.generates or not (options.tools or options.scores_itself or options.max_turns > 1):
        raise ConfigError(
            f"--recipe {file}: its policy has no conversations: leave --recipe out, and score single responses with "
            "`rl-plugins evaluate`"
        )
    # The command samples, also with the recipe of a run that measured given responses.
    config.data.validate_on = "prompts"
    if repr(REMOVED) in repr(_used(config)):
        raise ConfigError(
            f"--recipe {file}: files of a run have {REMOVED} in place of a secret: copy the file, and name the "
            "variable with the secret, as in api_key: ${oc.env:SEARCH_KEY}"
        )
    return config


def digest(config: RecipeConfig) -> str:
    """Return a digest of the options on which a conversation depends."""
    return blake2b(dumps(_used(config), sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _used(config: RecipeConfig) -> Mapping[str, Any]:
    options = public_options(config)
    template = options["data"]["chat_template"]
    return {
        "environment": options["environment"],
        "reward": options["reward"],
        "chat_template_kwargs": options["data"]["chat_template_kwargs"],
        **({} if template is None else {"chat_template": template}),
        "stop": options["sampling"]["stop"],
        "stop_token_ids": options["sampling"]["stop_token_ids"],
    }


class ConversationSampler:
    """Samples conversations with the rows of a file.

    Args:
        conversations: conversations with the environment.
        engine: rollout engine.
    """

    def __init__(self, conversations: Conversations, engine: GroupSampler) -> None:
        self._conversations, self._engine = conversations, engine

    def __call__(self, rows: Sequence[Row], requests: list[GroupRequest], sampling: SamplingConfig) -> Generations:
        """Hold `num_samples` conversations with each prompt, and return the conversations prompt by prompt.

        A failed conversation has its failure in place of a score. `rl-plugins evaluate` checks the share of failures.
        """
        from rl_plugins.rewards.conversations import Opening
        from rl_plugins.rewards.records import scoring_request
        from rl_plugins.rollout.engine import Generations

        openings = [
            Opening(**vars(request), about=scoring_request("", row))
            for row, request in zip(rows, requests, strict=True)
        ]
        groups = self._conversations.by(self._engine)
        groups.submit(openings, sampling)
        ended = groups.collect([opening.ticket for opening in openings], 0)
        return Generations.concat([ended[opening.ticket] for opening in openings])


@contextmanager
def open_conversations(
    config: RecipeConfig, environment: AnyEnvironment, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Conversations]:
    """Start the reward of a recipe, if the environment does not return the rewards, and connect the environment.

    Raises:
        ConfigError: the environment does not fit the tokenizer.
    """
    from rl_plugins.config.sampling import SamplingConfig
    from rl_plugins.launch.scorer import scorer_of
    from rl_plugins.stages.sampling import SamplingSetup

    scorer = scorer_of(config)
    try:
        setup = SamplingSetup(scorer, tokenizer, SamplingConfig(), environment, config.run.seed)
        assert setup.conversations is not None, "the recipe has conversations"
        yield setup.conversations
    finally:
        if scorer is not None:
            scorer.close()
