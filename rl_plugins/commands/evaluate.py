"""Score samples, print measures for each data source, and compare two policies.

Each argument is a file from `rl-plugins generate`, or a policy. A policy is sampled first, which needs
--data and --output, and takes the sampling options of `generate`. The measures are mean, best@k, maj@k and pass@k, with
95 % bootstrap intervals over prompts. They are printed, and written as JSON beside the samples. With two arguments, the
second is compared with the first, prompt by prompt. A policy that is not in the folder of a run is sampled like the
other policy (see --like).

  rl-plugins evaluate samples.parquet --reward gsm8k
  rl-plugins evaluate base.parquet trained.parquet --reward my_rewards.py:score
  rl-plugins evaluate outputs/run/policy --data test.parquet --output evaluation --samples 16 --reward math_verify
  rl-plugins evaluate MODEL outputs/run/policy --data test.parquet --output evaluation --reward outputs/run/config.yaml

Conversations (--recipe, see `generate`) have the scores of their environment, and take no --reward. For other samples,
--reward names a built-in scorer (exact_match, gsm8k, math_verify, correct_and_format, code_tests), a function in a file
or in a module, or the config.yaml of a run, which has rewards for each data source.
"""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plugins.commands.generate import add_sampling_arguments
from rl_plugins.commands.main import number, output_path
from rl_plugins.config.judge import JudgeConfig, check_deadline, judge_config, with_judges
from rl_plugins.config.settings import AT_LEAST_1, FINITE, FROM_0_TO_1, PROCESSES, SECONDS, fits
from rl_plugins.control_characters import json_without_controls
from rl_plugins.errors import ConfigError, RewardError, config_errors
from rl_plugins.redaction import REMOVED
from rl_plugins.signals import ending_signals
from rl_plugins.text_file import read_yaml
from rl_plugins.whole_file import storage_errors, write_whole_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rl_plugins.data.parquet import PromptRows, Row
    from rl_plugins.evaluation.measures import Summary
    from rl_plugins.evaluation.results import PolicyComparison, Results
    from rl_plugins.rewards.inline import InlineScorer
    from rl_plugins.rewards.pool import RewardPool

_NO_REWARD = "name the reward of single responses with --reward, or the recipe of conversations with --recipe"
_SAMPLING_OPTIONS = ("samples", "max_tokens", "temperature", "top_p", "seed", "engine", "device", "dtype", "save_every")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("inputs", nargs="+", metavar="SAMPLES_OR_POLICY", help="one input, or two to compare")
    parser.add_argument("--reward", help="scorer, function or config.yaml, see above")
    parser.add_argument(
        "--right-from",
        type=number(float, FINITE),
        default=1.0,
        help="lowest score of a passing sample (default: %(default)s)",
    )
    parser.add_argument(
        "--answer", help="function that returns the answer in a response, for maj@k: file.py:name or module.name"
    )
    parser.add_argument(
        "--workers", type=number(int, PROCESSES), default=1, help="processes that score, 0 for this one (default: 1)"
    )
    parser.add_argument(
        "--deadline", type=number(float, SECONDS), default=30.0, help="seconds for one call of the reward (default: 30)"
    )
    parser.add_argument(
        "--max-failure-rate",
        type=number(float, FROM_0_TO_1),
        default=0.1,
        help="largest share of failed rewards (default: 0.1)",
    )
    parser.add_argument(
        "--load-timeout",
        type=number(float, SECONDS),
        default=12.0,
        help="seconds for a process to load the reward (default: 12)",
    )
    parser.add_argument(
        "--memory-mb",
        type=number(int, AT_LEAST_1),
        help="memory for the reward in MiB (default: half of the free memory)",
    )
    parser.add_argument(
        "--pass-env", nargs="+", default=[], metavar="NAME", help="environment variables with secrets that it needs"
    )
    policies = parser.add_argument_group("sampling from policies")
    policies.add_argument("--data", nargs="+", default=[], help="parquet files of prompts")
    policies.add_argument("--output", type=output_path, help="folder for the samples")
    add_sampling_arguments(parser)


def run(arguments: Namespace) -> int:
    """Score all inputs, print and write the measures, and compare two inputs.

    Raises:
        ConfigError: an argument is wrong, or too many rewards failed.
    """
    from rl_plugins.commands.terminal import Terminal
    from rl_plugins.data.parquet import COLUMNS, load_rows
    from rl_plugins.evaluation.results import check_sources, compare, evaluate, load_samples

    if len(arguments.inputs) > 2:
        raise ConfigError(f"there are {len(arguments.inputs)} inputs: give one, or two to compare")
    has_policy = not all(name.endswith(".parquet") for name in arguments.inputs)
    if arguments.reward is None and arguments.recipe is None and has_policy:
        raise ConfigError(_NO_REWARD)
    if arguments.reward is not None and arguments.recipe is not None and has_policy:
        raise ConfigError(
            "--recipe and --reward: conversations have the scores of their environment: leave --reward out"
        )
    reward = None if arguments.reward is None else reward_config(arguments.reward)
    answer_of = _answer_function(arguments.answer)
    given = {name: load_samples(Path(name)) for name in arguments.inputs if name.endswith(".parquet")}
    for samples in given.values():
        if samples.is_scored and reward is not None:
            raise ConfigError(
                f"{samples.path} has conversations with the scores of their environment: leave --reward out"
            )
        if not samples.is_scored and reward is None:
            raise ConfigError(f"{samples.path}: {_NO_REWARD}")
    if has_policy and (not arguments.data or arguments.output is None):
        name = next(name for name in arguments.inputs if name not in given)
        raise ConfigError(f"{name} is no parquet file, so it is a policy: give --data and --output to sample from it")
    files = [samples.rows for samples in given.values()]
    if has_policy:
        # Sampling may take hours.
        prompts = load_rows(arguments.data, COLUMNS)
        check_sources(f"--data {' '.join(arguments.data)}", {row["data_source"] for row in prompts})
        files.append(prompts)
    if reward is not None:
        reward = _checked_reward(reward, files, arguments)
    all_samples = [given.get(name) or load_samples(_sampled_file(name, arguments)) for name in arguments.inputs]
    console, results = Terminal(), []
    with nullcontext() if reward is None else closing(_build_scorer(reward, arguments)) as scorer:
        for samples in all_samples:
            try:
                result = evaluate(
                    samples,
                    None if scorer is None else scorer.score,
                    answer_of,
                    right_from=arguments.right_from,
                    max_failure_rate=arguments.max_failure_rate,
                )
            except RewardError as error:
                option = f"--reward {arguments.reward}: " if arguments.reward else ""
                raise ConfigError(f"{samples.path}: {option}{error}") from None
            results.append(result)
            _print_results(console, result)
    comparison = compare(*results) if len(results) == 2 else None
    if comparison is not None:
        _print_comparison(console, comparison, arguments.inputs)
    for result in results:
        content = {"reward": arguments.reward or "environment", **result.plain()}
        if comparison is not None and result is results[-1]:
            content["against"] = {"samples": str(results[0].path), **comparison.plain()}
        target = result.path.with_suffix(".evaluation.json")
        write_whole_text(target, json_without_controls(content) + "\n")
        print(f"written: {target}")
    return 0


def reward_config(name: str) -> Mapping[str, Any]:
    """Return the value of `reward.functions` for --reward: one reward, or rewards by data source.

    Raises:
        ConfigError: there is no such reward, or its file lacks a secret.
    """
    from omegaconf.errors import OmegaConfBaseException

    from rl_plugins.config.hydra_errors import CONFIG_FOLDER, explain

    folder = CONFIG_FOLDER / "reward"
    built_in = {path.stem: path for path in folder.glob("*.yaml") if path.stem not in ("file", "environment")}
    if name in built_in or name.endswith((".yaml", ".yml")):
        file = built_in.get(name, Path(name))
        if not file.is_file():
            raise ConfigError(f"--reward {name}: there is no such file")
        with config_errors("--reward "):
            content: Any = read_yaml(file, "name a file with `reward.functions`, such as the config.yaml of a run")
        try:
            group = content.get("reward") or content
            functions, judge = _plain(group, "functions"), _plain(group, "judge")
            turns = _plain(content.get("environment"), "max_turns")
        except OmegaConfBaseException as error:
            raise ConfigError(f"--reward {name}: {explain(error)}") from None
        if not isinstance(functions, Mapping) or not functions:
            raise ConfigError(f"--reward {name}: the file has no `reward.functions`")
        if not isinstance(judge, Mapping | None):
            raise ConfigError(f"--reward {name}: reward.judge is a group of options, not {judge!r}")
        if repr(REMOVED) in str(functions):
            raise ConfigError(
                f"--reward {name}: files of a run have {REMOVED} in place of a secret: copy the file, and name the "
                "variable with the secret, as in api_key: ${oc.env:JUDGE_KEY}"
            )
        if turns is not None and (not fits(turns, int) or turns > 1):
            raise ConfigError(
                f"--reward {name}: its run has conversations (environment.max_turns={turns}): sample them with "
                f"--recipe {name}, and leave --reward out"
            )
        with config_errors(f"--reward {name}: judge."):
            judge_of_run = judge_config(judge or {})
        return dict(with_judges(functions, judge_of_run, 1))
    if ":" not in name and "." not in name:
        raise ConfigError(f"--reward {name}: use one of {', '.join(sorted(built_in))}, file.py:name, or module.name")
    return _function(name)


def _plain(group: Any, name: str) -> Any:
    """Return the value of an option without interpolations; None without the option, or if the group is no mapping."""
    from omegaconf import OmegaConf

    value = group.get(name) if isinstance(group, Mapping) else None
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _function(name: str) -> dict[str, str]:
    path, colon, attribute = name.rpartition(":")
    return {"path": path, "name": attribute} if colon else {"_target_": name}


def _answer_function(name: str | None) -> Callable[[str], str]:
    from rl_plugins.evaluation.measures import final_answer
    from rl_plugins.rewards.loading import load_callable

    return final_answer if name is None else load_callable(_function(name), "reward")[1]


def _sample_names(inputs: Sequence[str]) -> dict[str, str]:
    """Return the name of the file of samples of each input, without its ending.

    The names have the last three parts of the inputs. Two inputs with the same parts also have a digest.
    """
    parts = {name: [part for part in name.replace(":", "/").split("/")[-3:] if part.strip(".")] for name in inputs}
    names = {name: "-".join(last) for name, last in parts.items()}
    if len(set(names.values())) == len(names):
        return names
    return {name: f"{stem}-{sha256(os.path.abspath(name).encode()).hexdigest()[:8]}" for name, stem in names.items()}


def _sampled_file(name: str, arguments: Namespace) -> Path:
    """Sample from a policy, and return the file of samples.

    Args:
        name: name of the policy.
        arguments: arguments of the command.
    """
    from rl_plugins.launch.policy_samples import config_of_policy

    path: Path = arguments.output / f"{_sample_names(arguments.inputs)[name]}.parquet"
    with storage_errors(arguments.output):
        arguments.output.mkdir(parents=True, exist_ok=True)
    options = [
        word
        for option in _SAMPLING_OPTIONS
        if (value := getattr(arguments, option)) is not None
        for word in (f"--{option.replace('_', '-')}", str(value))
    ]
    # A rollout engine needs a separate process, and ends with the process.
    command = [sys.executable, "-m", "rl_plugins", "generate", name, "--data", *arguments.data, "--output", str(path)]
    options += ["--trust-remote-code"] if arguments.trust_remote_code else []
    options += ["--recipe", str(arguments.recipe)] if arguments.recipe is not None else []
    like = arguments.like
    if arguments.recipe is None and config_of_policy(name) is None:
        # Two policies are compared over equal prompts.
        like = like or next(filter(None, map(config_of_policy, arguments.inputs)), None)
    options += ["--like", str(like)] if like is not None else []
    with ending_signals() as signals:
        try:
            # SIGTERM raises KeyboardInterrupt, and `run` ends the process of the rollout engine.
            status = subprocess.run([*command, *options]).returncode
        except KeyboardInterrupt:
            print(f"interrupted by {signals.name}", file=sys.stderr)
            sys.exit(signals.status)
    if status:
        raise ConfigError(f"sampling from {name} ended with status {status}, see above; the same command continues")
    return path


def _try_reward(reward: Mapping[str, Any], sources: Mapping[str, Row], arguments: Namespace) -> None:
    """Call the reward for the right answer of one row of each data source, as a recipe does before its start."""
    from rl_plugins.rewards.records import scoring_request
    from rl_plugins.rewards.trial import RewardTrial, trial_deadline_s

    with RewardTrial(
        reward,
        deadline_s=trial_deadline_s(reward, arguments.deadline),
        load_timeout_s=arguments.load_timeout,
        memory_mb=arguments.memory_mb,
        pass_env=arguments.pass_env,
        in_process=not arguments.workers,
    ) as trial:
        for row in sources.values():
            trial.score(scoring_request(str(row["reward_model"]["ground_truth"]), row))


def _checked_reward(reward: Mapping[str, Any], files: Sequence[PromptRows], arguments: Namespace) -> Mapping[str, Any]:
    """Check and try a reward, and return the reward with its judges.

    Args:
        reward: value of `reward.functions`.
        files: rows of each file of samples or prompts.
        arguments: arguments of the command.
    """
    from rl_plugins.rewards.calling import check_routes

    reward = with_judges(reward, JudgeConfig(), max(1, arguments.workers))
    check_deadline(reward, arguments.deadline, "--deadline")
    sources = {row["data_source"]: row for rows in files for row in rows}
    check_routes(reward, sources.keys())
    _try_reward(reward, sources, arguments)
    return reward


def _build_scorer(reward: Mapping[str, Any], arguments: Namespace) -> InlineScorer | RewardPool:
    from rl_plugins.rewards.child_process import START_S
    from rl_plugins.rewards.inline import InlineScorer
    from rl_plugins.rewards.pool import RewardPool

    # The scorer gets the samples in parts and accepts all failures. `evaluate` checks the rate over all samples.
    options = {"deadline_s": arguments.deadline, "max_failure_rate": 1.0}
    if not arguments.workers:
        return InlineScorer(reward, **options)
    return RewardPool(
        reward,
        num_workers=arguments.workers,
        start_timeout_s=START_S + arguments.load_timeout,
        memory_mb=arguments.memory_mb,
        pass_env=arguments.pass_env,
        **options,
    )


def _print_results(console: Console, results: Results) -> None:
    failed = ", ".join(f"{count} {kind}" for kind, count in results.failures.items()) or "none"
    console.print(
        f"\n{results.path}: {len(results.prompts)} prompts x {results.samples_per_prompt} samples, "
        f"{results.response_length:.0f} tokens each, {results.truncated:.1%} cut off; failed rewards: {failed}",
    )
    console.print(_build_table(results.summary))


def _build_table(summary: Summary) -> Table:
    from rich.table import Table

    table = Table("data source", "measure", show_edge=False)
    for column in ("value", "95 % interval", "prompts"):
        table.add_column(column, justify="right")
    for source, measures in summary.items():
        for position, (name, measure) in enumerate(measures.items(), start=1):
            table.add_row(
                source if position == 1 else "",
                name,
                f"{measure.value:.3f}",
                f"{measure.low:.3f}..{measure.high:.3f}",
                str(measure.prompts),
                end_section=position == len(measures),
            )
    return table


def _print_comparison(console: Console, comparison: PolicyComparison, names: Sequence[str]) -> None:
    from rich.table import Table

    console.print("\nsecond less first, prompt by prompt")
    table = Table("measure", show_edge=False)
    for column in ("difference", "95 % interval", "prompts"):
        table.add_column(column, justify="right")
    for name, measure in comparison.summary.items():
        interval = f"{measure.low:+.3f}..{measure.high:+.3f}"
        table.add_row(name, f"{measure.value:+.3f}", interval, str(measure.prompts))
    console.print(table)
    if comparison.unpaired:
        console.print(f"{comparison.unpaired} prompts are in only one of the two files, and were left out")
    console.print(comparison.sentence(*names), style="bold")
