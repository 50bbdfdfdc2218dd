"""Environments of the package verifiers as agents: the policy plays the rollout, and the rubric gives the reward.

environment=agent 'environment.agent={_target_: rl_plugins.environments.verifiers_agent.VerifiersAgent, env: my-env}'

`rl-plugins prepare verifiers --env my-env --output data/my-env` makes the rows.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rl_plugins.data.parquet import prompt_row
from rl_plugins.errors import ConfigError
from rl_plugins.rollout.chat import NoRoom
from rl_plugins.user_code import load_user_code

try:
    import openai
    import verifiers
    from openai.types.chat import ChatCompletion
    from verifiers.clients import OpenAIChatCompletionsClient
except ImportError:
    raise ConfigError(
        "environments of verifiers need a version of the package with load_environment, which 0.4 has no more: "
        "pip install 'rl-plugins[verifiers]'"
    ) from None

Records = list[dict[str, Any]]


class VerifiersAgent:
    """Agent that runs the rollout of an environment of verifiers, and scores the rollout with the rubric.

    The environment is loaded once, and each trajectory runs in a fork. The reward is the weighted sum of the rubric.
    Each function of the rubric adds a number to the metrics.

    An empty answer of the policy is an answer. A call for which a limit of the trajectory leaves no room ends the
    rollout, which the rubric scores. An error of the environment, or of a function of the rubric, fails the trajectory.

    Args:
        env: name for `verifiers.load_environment`.
        args: arguments of the environment's `load_environment`.

    Raises:
        ConfigError: the environment cannot be loaded, scores no single rollout, or is for a policy without messages.
    """

    def __init__(self, env: str, *, args: Mapping[str, Any] | None = None) -> None:
        self._environment = load_environment(env, args or {})
        rubrics = list(_rubrics(self._environment))
        if any(rubric.has_group_rewards for rubric in rubrics):
            raise ConfigError(
                f"env={env}: the rubric compares the rollouts of a group, and a trajectory is scored by itself: choose "
                "an environment whose rubric scores single rollouts"
            )
        if not self._environment.score_rollouts:
            raise ConfigError(f"env={env}: the environment scores no rollouts: leave out score_rollouts=False")
        self._faults: list[Exception] = []
        for rubric in rubrics:
            rubric.funcs[:] = [_keeping_faults(function, self._faults) for function in rubric.funcs]

    async def __call__(self, row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, float]:
        """Run the rollout of a row; return the reward and the results of the functions of the rubric.

        Raises:
            RuntimeError: the rollout ended with an error of the environment.
        """
        environment = self._environment
        # The end of the trajectory, which has a deadline, is also the end of the wait for an answer.
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None) as client:
            state = await environment.rollout(rollout_input(row), _PolicyClient(client), "policy", {})
        if state["error"] is not None:
            raise RuntimeError(f"the rollout ended with {_chain(state['error'])}") from state["error"]
        await environment.rubric.score_rollout(state)
        await environment.rubric.cleanup(state)
        # The package gives a function that raises the result 0.
        if self._faults:
            raise self._faults[0]
        named = {"rubric_score" if name == "score" else name: value for name, value in state["metrics"].items()}
        return {**named, "score": state["reward"]}


class _PolicyClient(OpenAIChatCompletionsClient):
    """Client of the policy, for which an empty answer is an answer, and a full trajectory is no error."""

    async def get_native_response(self, *args: Any, **options: Any) -> ChatCompletion:
        """Return the answer to a call.

        Raises:
            OverlongPromptError: the limits of the trajectory leave no room for the call. The rollout ends.
        """
        try:
            answer: ChatCompletion = await super().get_native_response(*args, **options)
        except openai.BadRequestError as error:
            if error.type == NoRoom.kind:
                raise verifiers.OverlongPromptError(str(error)) from error
            raise
        return answer

    async def raise_from_native_response(self, response: ChatCompletion) -> None:
        """Accept every answer: the endpoint gives one choice, and the rubric scores an empty text."""


def load_environment(env: str, args: Mapping[str, Any]) -> verifiers.Environment:
    """Load an environment.

    Raises:
        ConfigError: the environment is not installed, or its `load_environment` fails.
    """
    return load_user_code(env, "load_environment", lambda: verifiers.load_environment(env, **args), "environment")


def dataset_rows(environment: verifiers.Environment, split: str, limit: int | None = None) -> Records:
    """Return rows of data from the data set of an environment.

    `extra_info["input"]` has all columns of a row but the prompt, as JSON, for `rollout_input`.

    Args:
        environment: the environment.
        split: `train` for the data set, or `test` for the data set of the evaluation.
        limit: largest number of rows; None for all.

    Returns:
        The rows; no rows for a data set that the environment does not have.

    Raises:
        ConfigError: a row has another prompt than messages, or a value that JSON does not have.
    """
    found = environment.build_dataset() if split == "train" else environment.build_eval_dataset()
    count = 0 if found is None else len(found) if limit is None else min(limit, len(found))
    return [_row(environment.env_id, split, index, found[index]) for index in range(count)]


def rollout_input(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the input of a rollout: the row as `dataset_rows` made the row, or a row of any other data.

    A row without `extra_info["input"]` has the ground truth as `answer`, and `extra_info` as `info`.
    """
    extra = row["extra_info"] or {}
    if "input" in extra:
        return {**json.loads(extra["input"]), "prompt": row["prompt"]}
    index = extra.get("index", 0)
    return {"prompt": row["prompt"], "answer": row["ground_truth"], "info": dict(extra), "example_id": index}


def _row(env: str, split: str, index: int, record: Mapping[str, Any]) -> dict[str, Any]:
    place = f"env={env}, {split}, row {index}"
    prompt = record["prompt"]
    if not isinstance(prompt, list):
        raise ConfigError(f"{place}: the prompt is a text, and a policy answers messages: choose a chat environment")
    answer = record.get("answer")
    try:
        columns = json.dumps({name: value for name, value in record.items() if name != "prompt"})
    except TypeError as error:
        raise ConfigError(
            f"{place}: the row has a value that JSON does not have ({error}): leave out its column"
        ) from None
    return prompt_row(
        # A table has all keys of all messages in each message.
        [{key: value for key, value in message.items() if value is not None} for message in prompt],
        str(answer),
        data_source=env,
        ability=str(record.get("task") or "environment"),
        split=split,
        index=index,
        input=columns,
    )


def _rubrics(environment: verifiers.Environment) -> Iterator[verifiers.Rubric]:
    """Yield the rubrics of an environment, also of groups of rubrics and of groups of environments."""
    waiting = [environment.rubric]
    while waiting:
        rubric = waiting.pop()
        yield rubric
        waiting += getattr(rubric, "rubrics", ())
    for part in getattr(environment, "envs", ()):
        yield from _rubrics(part)


def _keeping_faults(function: Callable[..., Any], faults: list[Exception]) -> Callable[..., Any]:
    """Return a function of a rubric that also keeps its exception."""

    @functools.wraps(function)
    async def call(*args: Any, **options: Any) -> Any:
        try:
            value = function(*args, **options)
            return await value if inspect.isawaitable(value) else value
        # The code of the environment may raise any exception, and verifiers replaces the exception by a reward of 0.
        except Exception as error:
            faults.append(error)
            raise

    return call


def _chain(error: BaseException | None) -> str:
    """Return the types and texts of an error and of its causes."""
    found = list[str]()
    while error is not None:
        found.append(": ".join(filter(None, (type(error).__name__, str(error)))))
        error = error.__cause__
    return ", from ".join(found)
