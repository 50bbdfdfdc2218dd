"""Settings of sampling: how responses are drawn, conversations, validation, and how far sampling runs ahead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated, Any

from rl_plugins.config.settings import (
    ABOVE_0,
    ABOVE_0_OR_NULL,
    ABOVE_0_TO_1,
    AT_LEAST_1,
    FROM_0_TO_1,
    NOT_NEGATIVE,
    SECONDS,
    Range,
    Settings,
    check_ranges,
    fits,
    one_of,
)
from rl_plugins.errors import ConfigError

OWN_SAMPLING_ARGUMENTS = {
    "n": "batch.samples_per_prompt",
    "max_tokens": "sampling.max_tokens",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "stop": "sampling.stop",
    "stop_token_ids": "sampling.stop_token_ids",
    "seed": "run.seed",
}
"""Arguments of vLLM's `SamplingParams` that the package sets, with the option for the argument."""
_PENALTY = Range("must be from -2 to 2", lambda value: -2 <= value <= 2)
_BIASES = Range(
    "must map token ids to numbers from -100 to 100",
    lambda value: (
        isinstance(value, Mapping)
        and bool(value)
        and all(str(token).isdigit() and fits(bias, float) and abs(bias) <= 100 for token, bias in value.items())
    ),
)
_TOKEN_IDS = Range(
    "must be a list of token ids",
    lambda value: isinstance(value, list) and bool(value) and all(fits(token, int) and token >= 0 for token in value),
)
_WORDS = Range(
    "must be a list of texts",
    lambda value: isinstance(value, list) and all(isinstance(word, str) and word for word in value),
)
_STOPS = Range("must be a list of texts, none empty", lambda value: fits(value, list[str]) and all(value))
_STOP_IDS = Range(
    "must be a list of token ids, 0 or more",
    lambda value: fits(value, list[int]) and all(token >= 0 for token in value),
)
_MAPPING = Range("must be a mapping", lambda value: isinstance(value, Mapping))
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_STRUCTURE = Range(
    f"must be a mapping with exactly one of {', '.join(_CONSTRAINTS)}",
    lambda value: isinstance(value, Mapping) and len(value.keys() & set(_CONSTRAINTS)) == 1,
)
VLLM_SAMPLING_ARGUMENTS: Mapping[str, tuple[type, Range]] = {
    "presence_penalty": (float, _PENALTY),
    "frequency_penalty": (float, _PENALTY),
    "repetition_penalty": (float, ABOVE_0),
    "min_tokens": (int, NOT_NEGATIVE),
    "logit_bias": (object, _BIASES),
    "allowed_token_ids": (object, _TOKEN_IDS),
    "bad_words": (object, _WORDS),
    "structured_outputs": (object, _STRUCTURE),
    "thinking_token_budget": (int, NOT_NEGATIVE),
    "extra_args": (object, _MAPPING),
}
"""Arguments of vLLM's `SamplingParams` for `sampling.vllm`, each with its type and range. All of these arguments change
the distribution of the tokens."""
_WHOLE = "the package reads responses when they are complete"
_OWN_TEXT = "the package makes the texts of responses from token ids"
_LOG_PROBS = "training reads the log-prob of each sampled token and no other log-probs"
REFUSED_SAMPLING_ARGUMENTS: Mapping[str, str] = {
    "ignore_eos": "a response ends with the end-of-sequence token",
    "logprobs": _LOG_PROBS,
    "flat_logprobs": _LOG_PROBS,
    "logprob_token_ids": _LOG_PROBS,
    "prompt_logprobs": _LOG_PROBS,
    "prompt_logprob_token_ids": _LOG_PROBS,
    "prompt_logprob_start": _LOG_PROBS,
    "detokenize": _OWN_TEXT,
    "skip_special_tokens": _OWN_TEXT,
    "spaces_between_special_tokens": _OWN_TEXT,
    "include_stop_str_in_output": _OWN_TEXT,
    "output_kind": _WHOLE,
    "stream_interval": _WHOLE,
    "repetition_detection": "training does not know this end of a response",
    "watermarking": "samples with a watermark do not follow the policy",
    "trace_decode_token_ids": "the policy would not sample these tokens",
    "routed_experts_prompt_start": "model.router_replay needs the experts of all tokens",
    "skip_reading_prefix_cache": "rollout.prefix_caching=false switches the cache off",
    "skip_clone": "vLLM sets this argument for itself",
    "output_text_buffer_length": "vLLM sets this argument for itself",
}
"""Arguments of vLLM's `SamplingParams` that training does not take, with the reason."""
TEMPERATURE = Range("must be 0, or 0.01 or more", lambda value: value == 0 or value >= 0.01)
"""vLLM samples at 0.01 if the temperature is lower, and the policy's log-probs would be of another distribution."""
_TOP_K = Range("must be at least 1, or -1 to keep all", lambda value: value == -1 or value >= 1)


@dataclass
class SamplingOptions(Settings):
    """Distribution and length of responses.

    Options other than `temperature` that change the distribution exclude tokens or move probability. These options must
    have their defaults if the policy is compared with the sampling policy: with `schedule.max_staleness`,
    `algorithm.correction` or `algorithm.modifiers.off_policy_mask`.

    Attributes:
        max_tokens: longest response, in tokens.
        temperature: divisor of the logits of training samples, 0.01 or more; 0 is greedy. `validation` has its own.
        top_p: probability mass of the kept tokens (nucleus sampling); 1 keeps all tokens.
        top_k: number of most likely tokens kept; -1 keeps all tokens.
        min_p: least probability of the kept tokens, as a share of the largest probability; 0 keeps all tokens.
        stop: strings that end a response, besides the tokenizer's end-of-sequence token.
        stop_token_ids: tokens that end a response, besides the end-of-sequence token; part of the response.
        vllm: further arguments of vLLM's `SamplingParams` for training samples: `presence_penalty`,
            `frequency_penalty`, `repetition_penalty`, `min_tokens`, `logit_bias`, `allowed_token_ids`, `bad_words`,
            `structured_outputs`, `thinking_token_budget` or `extra_args`.
    """

    max_tokens: Annotated[int, AT_LEAST_1] = 256
    temperature: Annotated[float, TEMPERATURE] = 1.0
    top_p: Annotated[float, ABOVE_0_TO_1] = 1.0
    top_k: Annotated[int, _TOP_K] = -1
    min_p: Annotated[float, FROM_0_TO_1] = 0.0
    stop: Annotated[tuple[str, ...], _STOPS] = ()
    stop_token_ids: Annotated[tuple[int, ...], _STOP_IDS] = ()
    # Settings with different arguments may have the same hash.
    vllm: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Check all values.

        Raises:
            ConfigError: a value is out of its range, or `vllm` has an argument that training does not support.
        """
        super().__post_init__()
        _check_vllm_arguments(self.vllm)

    @property
    def reshaping(self) -> list[str]:
        """Options that change the distribution, beside the temperature, as `name=value`."""
        changed = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        own = [f"{name}={getattr(self, name):g}" for name, is_set in changed.items() if is_set]
        return [*own, *(f"vllm.{name}={value}" for name, value in self.vllm.items())]


def _check_vllm_arguments(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if name in OWN_SAMPLING_ARGUMENTS:
            raise ConfigError(f"vllm.{name}: the package sets this argument: use {OWN_SAMPLING_ARGUMENTS[name]}")
        if reason := REFUSED_SAMPLING_ARGUMENTS.get(name):
            raise ConfigError(f"vllm.{name}: {reason}: leave the argument out")
        if name not in VLLM_SAMPLING_ARGUMENTS:
            close = get_close_matches(name, VLLM_SAMPLING_ARGUMENTS, n=1)
            raise ConfigError(
                f"vllm.{name}: training takes no such argument of vllm.SamplingParams: "
                + (f"did you mean {close[0]}?" if close else f"use one of {', '.join(VLLM_SAMPLING_ARGUMENTS)}")
            )
        check_ranges(*VLLM_SAMPLING_ARGUMENTS[name], **{f"vllm.{name}": value})


# Engines group requests by their options, so the options have a hash.
@dataclass(unsafe_hash=True)
class SamplingConfig(SamplingOptions):
    """Options of sampling. Log-probs belong to the sampled distribution (after temperature, top-p and all others).

    Attributes:
        num_samples: responses per prompt.
    """

    num_samples: Annotated[int, AT_LEAST_1] = 1

    def __post_init__(self) -> None:
        """Check all values.

        Raises:
            ConfigError: a value is out of its range.
        """
        super().__post_init__()
        self.stop, self.stop_token_ids = tuple(self.stop), tuple(self.stop_token_ids)


@dataclass
class ConversationLimits(Settings):
    """Limits of conversations with a reward function, which may reply before it returns a score.

    Attributes:
        max_turns: largest number of responses of the policy in a conversation; 1 is a response without a conversation.
            `sampling.max_tokens` is the limit of a whole conversation.
        max_observation_tokens: largest number of tokens of one reply of a reward function or a stateful environment; a
            longer reply is cut at the end.
    """

    max_turns: Annotated[int, AT_LEAST_1] = 1
    max_observation_tokens: Annotated[int, AT_LEAST_1] = 256


@dataclass
class EnvironmentOptions(ConversationLimits):
    """Conversations of the policy: with tools, a stateful environment, an agent, or a reward function that replies.

    Attributes:
        tools: tools that the policy calls: dotted names of functions, or mappings: `_target_`, or `path` and `name`, or
            `mcp` with the command or the address of an MCP server.
        parser: reader of calls: the name of a tool parser of vLLM, such as `hermes`, `llama3_json` or `qwen3_xml`; or
            the dotted name of a function from the text of a response to a list of calls.
        stateful: class with an object for each conversation: its dotted name, or a mapping: `_target_`, or `path` and
            `name`, and the arguments of the constructor. Null is no stateful environment.
        agent: function of an agent that calls the policy through an endpoint: its dotted name, or a mapping:
            `_target_`, or `path` and `name`, and further arguments of the function. Null is no agent.
        max_sequences: largest number of sequences of an agent's trajectory: a call that does not continue an earlier
            call begins a sequence.
        max_objects: largest number of objects of a stateful environment, or of agents, at once for each worker.
        deadline_s: deadline of one call of a tool, of a method of a stateful environment, or of an agent without the
            time in which the policy answers, in seconds.
        max_characters: largest number of characters of a result of a tool.
        left_out: part left out of a longer result of a tool: `beginning`, `middle` or `end`. A mark takes the place of
            the part.
        load_timeout_s: seconds for the start of an MCP server, or for loading a stateful environment or an agent.
        memory_mb: memory of the process of the tools, of an object of a stateful environment, or of an agent, in MiB,
            beyond the process itself; null is half of the free memory.
        pass_env: names of environment variables with secrets that the environment gets; other secrets are removed.
        endpoint_host: address of the machine on which the endpoint for agents listens.
    """

    tools: list[Any] = field(default_factory=list)
    parser: Any = "hermes"
    stateful: Any = None
    agent: Any = None
    max_sequences: Annotated[int, AT_LEAST_1] = 8
    max_objects: Annotated[int, AT_LEAST_1] = 64
    deadline_s: Annotated[float, SECONDS] = 10.0
    max_characters: Annotated[int, AT_LEAST_1] = 2000
    left_out: Annotated[str, one_of("beginning", "middle", "end")] = "middle"
    load_timeout_s: Annotated[float, SECONDS] = 30.0
    memory_mb: Annotated[int | None, ABOVE_0_OR_NULL] = None
    pass_env: list[str] = field(default_factory=list)
    endpoint_host: str = "127.0.0.1"

    @property
    def scores_itself(self) -> bool:
        """True if the environment returns the rewards, so there is no reward function."""
        return self.stateful is not None or self.agent is not None


@dataclass
class EnvironmentConfig(ConversationLimits):
    """Limits and chat template of conversations.

    Attributes:
        template_options: further arguments of the chat template.
    """

    template_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class ValidationConfig(Settings):
    """Sampling of validation, by default the most likely response to each prompt.

    Attributes:
        samples_per_prompt: responses to each prompt; with several, mean@k, best@k and maj@k are logged by data source.
        temperature: divisor of the logits, 0.01 or more; 0 is greedy.
        top_p: probability mass of the kept tokens (nucleus sampling).
        top_k: number of most likely tokens kept; -1 keeps all tokens.
    """

    samples_per_prompt: Annotated[int, AT_LEAST_1] = 1
    temperature: Annotated[float, TEMPERATURE] = 0.0
    top_p: Annotated[float, ABOVE_0_TO_1] = 1.0
    top_k: Annotated[int, _TOP_K] = -1


@dataclass
class Schedule(Settings):
    """Bounds on sampling ahead of training. A group is in flight from its start until a step trains on the group.

    - `max_staleness`: sampling of a trained group began at most `max_staleness` policies ago. A step waits for a group
      before the group becomes older.
    - `ahead`: bound on the number of groups in flight.

    If both bounds are equal, a step trains on the groups submitted `max_staleness` steps before, first in,
    first out. If `ahead` is smaller, slow groups are left for a later step. With `max_staleness=0`, no group outlives
    the step: the step drops the remaining groups as soon as enough groups have finished.

    Attributes:
        max_staleness: largest number of RL steps between the policy that began to sample a group and the policy that is
            trained on the group. 0 is synchronous: each step samples, then trains. From 1 on, engines sample for later
            steps while the workers train, and weights change in flight; engines that sleep pause unfinished groups and
            continue them in the next step. The ratios of the loss are then ratios to the sampling policies, unless
            `algorithm.correction` is another correction.
        ahead: extra groups in flight, in multiples of the groups of a step, rounded up on each worker; null means
            `max_staleness`.
        max_token_age: largest age, in RL steps, of the policy that sampled a trained token. Older tokens stay in the
            response and are masked. Null masks no token.
    """

    max_staleness: Annotated[int, NOT_NEGATIVE] = 0
    ahead: float | None = None
    max_token_age: int | None = None

    def __post_init__(self) -> None:
        """Check the bounds.

        Raises:
            ConfigError: a bound is negative, or `ahead` or `max_token_age` is above `max_staleness`.
        """
        super().__post_init__()
        if self.ahead is not None and not 0 <= self.ahead <= max(self.max_staleness, 1):
            raise ConfigError(
                f"ahead={self.ahead}: must be from 0 to max_staleness={self.max_staleness}, or from 0 to 1 if "
                "max_staleness is 0 (extra groups are then dropped)"
            )
        age = self.max_token_age
        if age is not None and not 0 <= age <= self.max_staleness:
            raise ConfigError(
                f"max_token_age={age}: must be from 0 to max_staleness={self.max_staleness}, because no token is older"
            )

    @property
    def active(self) -> bool:
        """True if groups beyond the groups of a step are in flight."""
        return self.max_staleness > 0 or bool(self.ahead)

    def in_flight(self, groups: int) -> int:
        """Return the number of groups in flight at the start of a step that trains on `groups` groups."""
        extra = groups * (self.max_staleness if self.ahead is None else self.ahead)
        # Rounded up, but for an error of rounding: a rank may have only one or two groups.
        return groups + math.ceil(extra - 1e-9)

    @property
    def keeps_order(self) -> bool:
        """True if steps train on groups in the order of submission, because both bounds are equal."""
        return self.ahead is None or self.ahead == self.max_staleness

    @property
    def drops(self) -> bool:
        """True if the unfinished groups at the end of a step are dropped."""
        return self.max_staleness == 0 and bool(self.ahead)
