"""Settings of a language model as judge, the places of judges in the configuration of rewards, and times of rewards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Annotated, Any
from urllib.parse import urlsplit

from rl_plugins.config.settings import (
    ABOVE_0_OR_NULL,
    AT_LEAST_1,
    NOT_NEGATIVE,
    SECONDS,
    SECONDS_OR_0,
    Range,
    Settings,
    one_of,
    or_null,
    shown,
)
from rl_plugins.errors import ConfigError, config_errors
from rl_plugins.redaction import REMOVED, without_password

JUDGES = ("rl_plugins.rewards.judge.Judge", "rl_plugins.Judge")
"""Values of `_target_` for a judge."""
CODE_TESTS = ("rl_plugins.rewards.code_tests.CodeTests",)
"""Values of `_target_` for tests of programs."""
TOTAL_S = 20.0
"""Default of `total_s`: seconds for all tests of a program."""
ENGINE_KEY = "RL_PLUGINS_JUDGE_KEY"
"""Environment variable with the key of the run's own engines of a judge (`placement.judge`)."""
JUDGE_FILES = ("template_file", "cache")
"""Settings with the path of a file or folder."""
PLACEHOLDER = re.compile(r"\{(\{[a-z_][\w.]*\})\}|\{([a-z_][\w.]*)\}")
"""A name in double braces, which stands for itself in braces; or a name in braces. Other braces are plain text."""
NAMES = ("prompt", "response", "ground_truth", "data_source", "messages", "low", "high")
"""Names for the placeholders of a template, beside `extra_info.KEY`."""
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_EXTRA = re.compile(r"extra_info(\.\w+)+")


def _is_address(value: str) -> bool:
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


_ADDRESS_OR_NULL = or_null(
    Range("must be an address such as http://localhost:8000/v1 or https://api.openai.com/v1", _is_address)
)

_TEXT_OR_NULL = Range("must be a text, or null", lambda value: True)
_VOTES = Range("must be from 1 to 100", lambda value: 1 <= value <= 100)
_MAPPING = Range("must be a mapping of fields to values", lambda value: isinstance(value, Mapping))


@dataclass
class JudgeConfig(Settings):
    """Server, question, reading and limits of a language model as judge (`reward=judge`).

    Attributes:
        url: address of a server with OpenAI's protocol, up to `/v1`, such as `http://localhost:8000/v1`; null with
            engines of the run (`placement.judge.actors`).
        model: name of the model on the server; with engines of the run, folder or name on the hub.
        key_variable: name of the environment variable with the key of the server; null sends no key.
        template: text of the question, with `{prompt}`, `{response}`, `{ground_truth}`, `{data_source}`, `{messages}`,
            `{extra_info.KEY}`, `{low}` and `{high}`; null is a general question about correctness and quality.
        template_file: file with this text, in the place of `template`.
        low: lowest score.
        high: highest score.
        scale: `unit` maps scores from `low` to `high` to 0 to 1, `raw` leaves scores as they are.
        votes: number of answers for each response; several need a temperature above 0.
        combine: `mean` or `median` of the votes.
        response_format: `json_schema` makes the server keep the schema of an answer, `json_object` asks for JSON,
            `none` asks in the template only.
        temperature: temperature of the judge; null leaves the choice to the server.
        max_tokens: longest answer, in tokens.
        request: further fields of a request, such as `{top_p: 0.9}`; null removes a field.
        timeout_s: seconds for one answer.
        retries: further tries after a timeout, an error of the server such as 500, or a body outside OpenAI's protocol.
        wait_s: seconds for which the run waits for a judge without connection, or with the status 429, 502, 503 or 504.
        requests_per_minute: largest number of requests of the whole run in a minute; null is no limit.
        concurrent_requests: largest number of requests of the whole run at a time, at least one for each reward
            process.
        cache: folder with the answers, for several runs; null is no cache.
        price_in: price of a million tokens of questions, for `train/judge/cost`.
        price_out: price of a million tokens of answers.
    """

    url: Annotated[str | None, _ADDRESS_OR_NULL] = None
    model: Annotated[str | None, _TEXT_OR_NULL] = None
    key_variable: str | None = None
    template: Annotated[str | None, _TEXT_OR_NULL] = None
    template_file: Annotated[str | None, _TEXT_OR_NULL] = None
    low: float = 0.0
    high: float = 10.0
    scale: Annotated[str, one_of("unit", "raw")] = "unit"
    votes: Annotated[int, _VOTES] = 1
    combine: Annotated[str, one_of("mean", "median")] = "mean"
    response_format: Annotated[str, one_of("json_schema", "json_object", "none")] = "json_schema"
    temperature: Annotated[float | None, or_null(NOT_NEGATIVE)] = 0.0
    max_tokens: Annotated[int, AT_LEAST_1] = 1024
    request: Annotated[dict[str, Any], _MAPPING] = field(default_factory=dict)
    timeout_s: Annotated[float, SECONDS] = 60.0
    retries: Annotated[int, NOT_NEGATIVE] = 4
    wait_s: Annotated[float, SECONDS_OR_0] = 600.0
    requests_per_minute: Annotated[float | None, ABOVE_0_OR_NULL] = None
    concurrent_requests: Annotated[int, AT_LEAST_1] = 32
    cache: Annotated[str | None, _TEXT_OR_NULL] = None
    price_in: Annotated[float, NOT_NEGATIVE] = 0.0
    price_out: Annotated[float, NOT_NEGATIVE] = 0.0

    def __post_init__(self) -> None:
        """Check all values, and the placeholders of the template.

        Raises:
            ConfigError: a value is out of its range, or two values contradict each other.
        """
        super().__post_init__()
        if self.url is not None and "@" in urlsplit(self.url).netloc:
            raise ConfigError(
                f"url={without_password(self.url)}: the address has a user or a password: name the key's variable with "
                "key_variable"
            )
        # The wrong value may be the key itself, so the message does not show it.
        if self.key_variable is not None and not _VARIABLE.fullmatch(str(self.key_variable)):
            raise ConfigError(
                f"key_variable={REMOVED}: must be the name of an environment variable in capital letters, such as "
                "JUDGE_API_KEY, and never the key itself"
            )
        if self.low >= self.high:
            raise ConfigError(f"low={self.low:g}: must be below high={self.high:g}")
        if self.votes > 1 and self.temperature == 0:
            raise ConfigError(f"votes={self.votes}: with temperature=0 all votes are equal: raise temperature")
        if self.template is not None and self.template_file is not None:
            raise ConfigError(f"template_file={shown(self.template_file)}: template is given, too: leave one out")
        if self.template is not None:
            check_template(self.template, f"template={shown(self.template)}")


def check_template(text: str, option: str) -> None:
    """Check the placeholders of a template.

    Args:
        text: text of the template.
        option: option with the text or with its file, as `name=value`, for messages.

    Raises:
        ConfigError: a name is unknown, or the template has no `{response}`.
    """
    names = [name for _, name in PLACEHOLDER.findall(text) if name]
    for name in names:
        if name not in NAMES and not _EXTRA.fullmatch(name):
            close = get_close_matches(name, NAMES, n=1)
            hint = f"did you mean {{{close[0]}}}?" if close else f"use {', '.join(NAMES)} or extra_info.KEY"
            raise ConfigError(
                f"{option}: there is no {{{name}}}: {hint} (double braces, {{{{{name}}}}}, are the plain text)"
            )
    if not {"response", "messages"} & set(names):
        raise ConfigError(f"{option}: the judge does not see the response: add {{response}}")


def judge_config(options: JudgeConfig | Mapping[str, Any]) -> JudgeConfig:
    """Return the record of a judge.

    Raises:
        ConfigError: an option is unknown, or out of its range.
    """
    if isinstance(options, JudgeConfig):
        return options
    names = [option.name for option in fields(JudgeConfig)]
    for name in options:
        if name not in names:
            close = get_close_matches(str(name), names, n=1)
            raise ConfigError(f"{name}: a judge has no such option" + (f": did you mean {close[0]}?" if close else ""))
    return JudgeConfig(**options)


def judges_of(reward: object) -> Iterator[Mapping[str, Any]]:
    """Return the nodes of all judges in the configuration of rewards, also of judges inside a sum.

    Args:
        reward: one reward, or a mapping from data source to reward.
    """
    return _nodes_of(reward, JUDGES)


def with_judges(reward: Any, judge: JudgeConfig, processes: int) -> Any:
    """Return the configuration of rewards, with the settings of each judge.

    Args:
        reward: one reward, or a mapping from data source to reward.
        judge: settings of judges without a `config` of their own.
        processes: number of processes that share the limits of requests.
    """
    return _with_nodes(reward, lambda node: {"config": judge, **node, "processes": processes})


def with_engines(reward: Any, urls: Sequence[str], model: str | None) -> Any:
    """Return the configuration of rewards, with the engines of the run for each judge without an address.

    Args:
        reward: one reward, or a mapping from data source to reward, with the settings of each judge.
        urls: addresses of the engines; none if the run has no engines.
        model: name of the engines' model.
    """

    def asking(node: Mapping[str, Any]) -> Mapping[str, Any]:
        if not urls or _option(node, "url"):
            return node
        return {**node, "config": replace(judge_config(node["config"]), model=model), "urls": list(urls)}

    return _with_nodes(reward, asking)


def key_variables(reward: object) -> list[str]:
    """Return the names of the variables with the keys of all judges."""
    names = [ENGINE_KEY if node.get("urls") else _option(node, "key_variable") for node in judges_of(reward)]
    return sorted({str(name) for name in names if name})


def asks_engine(reward: object) -> bool:
    """Return True if a judge asks an engine of the run (see `with_engines`)."""
    return any(node.get("urls") for node in judges_of(reward))


def models_of_engines(reward: object) -> list[str | None]:
    """Return the model of each judge without an address."""
    return [_option(node, "model") for node in judges_of(reward) if not _option(node, "url")]


def longest_timeout(reward: object) -> float:
    """Return the largest number of seconds for one answer of a judge; 0 without a judge."""
    return max((float(_option(node, "timeout_s")) for node in judges_of(reward)), default=0.0)


def check_deadline(reward: object, deadline_s: float, option: str) -> None:
    """Check for time in one call of a reward: for all tests of a program, or for the wait for a judge and an answer.

    Args:
        reward: configuration of rewards, with the settings of each judge.
        deadline_s: deadline of one call of a reward, in seconds.
        option: name of the option with the deadline.

    Raises:
        ConfigError: the deadline is too short.
    """
    for node in judges_of(reward):
        wait_s, timeout_s = float(_option(node, "wait_s")), float(_option(node, "timeout_s"))
        if deadline_s < wait_s + timeout_s:
            raise ConfigError(
                f"{option}={deadline_s:g} is below the {wait_s + timeout_s:g} s of reward.judge.wait_s={wait_s:g} and "
                f"reward.judge.timeout_s={timeout_s:g}: raise {option}, or lower reward.judge.wait_s"
            )
    for node in _nodes_of(reward, CODE_TESTS):
        total_s = node.get("total_s", TOTAL_S)
        if isinstance(total_s, int | float) and total_s >= deadline_s:
            raise ConfigError(
                f"{option}={deadline_s:g} is not above total_s={total_s:g} of the reward CodeTests, so a slow program "
                f"would be a failure instead of a score: raise {option}, or lower total_s"
            )


def _with_nodes(reward: Any, changed: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    """Return the configuration of rewards, with a change of the node of each judge."""
    if not isinstance(reward, Mapping):
        return reward
    if _has_target(reward, JUDGES):
        return changed(reward)
    return {name: _with_nodes(child, changed) for name, child in reward.items()}


def _nodes_of(reward: object, targets: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the nodes with one of the values of `_target_`, also inside a sum."""
    if isinstance(reward, Mapping):
        if _has_target(reward, targets):
            yield reward
        else:
            for child in reward.values():
                yield from _nodes_of(child, targets)


def _has_target(reward: Mapping[Any, Any], targets: Sequence[str]) -> bool:
    target = reward.get("_target_")
    name = f"{target.__module__}.{target.__qualname__}" if isinstance(target, type) else target
    return name in targets


def _option(node: Mapping[str, Any], name: str) -> Any:
    with config_errors("reward.functions, config of a judge: "):
        return getattr(judge_config(node.get("config") or {}), name)
