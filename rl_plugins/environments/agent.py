"""Agents of the user as environments: `AgentEnvironment(solve)`, with an endpoint of OpenAI's protocol for the policy.

The function runs once per trajectory, in a process of its own. It calls the policy through an endpoint of this process,
and returns the reward. A function that raises, hangs or dies is a failed reward of its own trajectory, which is counted
by kind and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_plugins.config.data import DataConfig
from rl_plugins.config.models import RewardConfig
from rl_plugins.config.sampling import EnvironmentOptions
from rl_plugins.data.chat_template import check_chat_template
from rl_plugins.environments.agent_process import AgentTask
from rl_plugins.environments.endpoint import Endpoint, check_host
from rl_plugins.environments.object_host import ObjectHost
from rl_plugins.environments.tools import Parser, load_parser
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.limits import WorkerLimits
from rl_plugins.rewards.loading import name_of, plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_plugins.environments.agent_conversations import AgentConversations


class AgentEnvironment:
    """Agent of the user, called once per trajectory in a process of its own.

    The agent is a function `solve(row, base_url, api_key)`, plain or async. It calls the policy as a client of
    OpenAI's protocol at `base_url` with the key `api_key`, and returns the reward of the trajectory: a number, or a
    mapping with `score` and further numbers. The row has `prompt`, `data_source`, `ground_truth`, `extra_info` and
    `seed`, which is equal for all samples of a group.

    A call with the messages of an earlier call, the answer and new messages continues the earlier call. Any other call
    begins a sequence of its own, as after a summary of the history. All sequences of a trajectory share its reward, and
    count as one sample.

    Example:
        async def solve(row, base_url, api_key):
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
                answer = await client.chat.completions.create(model="policy", messages=row["prompt"])
            return float(answer.choices[0].message.content == row["ground_truth"])

        stage = rl.PolicyOptimization(..., environment=rl.AgentEnvironment(solve))

    Args:
        agent: the function; its dotted name; or a mapping: `_target_`, or `path` and `name`, and further arguments of
            the function.
        parser: reader of calls of tools: the name of a tool parser of vLLM, or a function, or its dotted name, from the
            text of a response to a list of calls, which are mappings with `name` and `arguments`.
        max_turns: largest number of answers of the policy in a trajectory.
        max_sequences: largest number of sequences of a trajectory. A call that would begin a further sequence is
            refused.
        max_objects: largest number of agents at once; further agents wait.
        deadline_s: seconds for an agent, without the time in which the policy answers.
        load_timeout_s: seconds for loading the function.
        memory_mb: memory of an agent, in MiB, beyond the loaded function; None is half of the free memory.
        pass_env: names of environment variables with secrets for the agents.
        endpoint_host: address of this machine on which the endpoint listens.
        max_prompt_tokens: largest number of tokens of the messages of the first call.
        max_failure_rate: share of failed trajectories above which the run ends.
        template_options: further variables of the chat template.

    Attributes:
        name: name of the function for messages.
        host: processes of the agents.

    Raises:
        ConfigError: an option is out of range, or the function cannot be loaded or takes other arguments.
    """

    def __init__(
        self,
        agent: Callable[..., Any] | str | Mapping[str, Any],
        *,
        parser: Parser = "hermes",
        max_turns: int = 16,
        max_sequences: int = 8,
        max_objects: int = 64,
        deadline_s: float = 300.0,
        load_timeout_s: float = 30.0,
        memory_mb: int | None = None,
        pass_env: Sequence[str] = (),
        endpoint_host: str = "127.0.0.1",
        max_prompt_tokens: int = 512,
        max_failure_rate: float = RewardConfig.max_failure_rate,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        EnvironmentOptions.check_fields(
            max_turns=max_turns,
            max_sequences=max_sequences,
            max_objects=max_objects,
            deadline_s=deadline_s,
            load_timeout_s=load_timeout_s,
        )
        DataConfig.check_fields(max_prompt_tokens=max_prompt_tokens)
        RewardConfig.check_fields(max_failure_rate=max_failure_rate)
        check_host(endpoint_host)
        if not isinstance(agent, str | Mapping) and not callable(agent):
            raise ConfigError(
                f"agent: a value of type {type(agent).__name__} is no function: give a function, or its dotted name"
            )
        self.max_turns, self.max_sequences = max_turns, max_sequences
        self.max_failure_rate, self.max_prompt_tokens = max_failure_rate, max_prompt_tokens
        self.parser, self.template_options = load_parser(parser), dict(template_options or {})
        self._endpoint_host = endpoint_host
        self._endpoint: Endpoint | None = None
        limits = WorkerLimits.of(pass_env, memory_mb, option="pass_env")
        config = plain(agent) if isinstance(agent, Mapping) else {"_target_": agent}
        self.name = name_of(config)
        self.host = ObjectHost(AgentTask(config, limits, deadline_s), max_objects, load_timeout_s, grace_s=0.0)

    def connect(self, tokenizer: PreTrainedTokenizerBase) -> AgentConversations:
        """Start the endpoint, and return the environment of the trajectories of a policy.

        Args:
            tokenizer: tokenizer of the policy.

        Raises:
            ConfigError: the tokenizer has no chat template, vLLM is not installed or has no such parser, or the
                endpoint cannot listen on its address.
        """
        check_chat_template(tokenizer)
        try:
            from rl_plugins.rollout.vllm.chat_protocol import error_body, models
            from rl_plugins.rollout.vllm.tool_parser import check_name
        except ImportError as error:
            raise ConfigError(
                f"agent: the endpoint has the classes of vLLM's server, which cannot be imported ({error}): "
                "pip install 'rl-plugins[cpu]' or 'rl-plugins[gpu]'"
            ) from None
        if isinstance(self.parser, str):
            check_name(self.parser)
        from rl_plugins.environments.agent_conversations import AgentConversations

        if self._endpoint is None:
            self._endpoint = Endpoint(self._endpoint_host, models(), error_body)
        return AgentConversations(self.host, self._endpoint, tokenizer, self)

    def close(self) -> None:
        """End all agents, their processes and the endpoint."""
        self.host.close()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
