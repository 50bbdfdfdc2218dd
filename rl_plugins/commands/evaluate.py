"""Score samples, sum them up by data source, and compare two policies.

Given are files that `rl-plugins generate` made, or policies, which are sampled from first (--data, --output, and how
to sample: as of `generate`). Printed are mean, best@k, maj@k and pass@k with 95 % bootstrap intervals over prompts;
they are written as JSON beside the samples. Of two, the second is compared with the first, prompt by prompt.

  rl-plugins evaluate samples.parquet --reward gsm8k
  rl-plugins evaluate base.parquet trained.parquet --reward my_rewards.py:score
  rl-plugins evaluate outputs/run/policy --data test.parquet --output evaluation --samples 16 --reward math_verify
  rl-plugins evaluate MODEL outputs/run/policy --data test.parquet --output evaluation --reward outputs/run/config.yaml

--reward names a built-in scorer (exact_match, gsm8k, math_verify, correct_and_format), a function in a file or in a
module, or a run's config.yaml, whose rewards by data source it takes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_plugins.commands.generate import add_sampling_arguments
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from rl_plugins.evaluation.measures import Summary
    from rl_plugins.evaluation.results import PolicyComparison, Results
    from rl_plugins.rewards.inline import InlineScorer
    from rl_plugins.rewards.pool import RewardPool

_SAMPLING = ("samples", "max_tokens", "temperature", "top_p", "seed", "engine", "device", "dtype", "save_every")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("given", nargs="+", metavar="SAMPLES_OR_POLICY", help="one, or two that are compared")
    parser.add_argument("--reward", required=True, help="what scores a response, see above")
    parser.add_argument(
        "--right-from", type=float, default=1.0, help="score from which a sample passes (default: %(default)s)"
    )
    parser.add_argument("--answer", help="file.py:name or module.name of what gives a response's answer, for maj@k")
    parser.add_argument("--workers", type=int, default=0, help="score in so many processes of Ray (default: in this)")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds for one call of the reward (default: 30)")
    parser.add_argument(
        "--max-failure-rate", type=float, default=0.1, help="share of failed rewards that is borne (default: 0.1)"
    )
    policies = parser.add_argument_group("to sample from policies")
    policies.add_argument("--data", nargs="+", default=[], help="parquet files of prompts")
    policies.add_argument("--output", type=Path, help="folder for the samples")
    add_sampling_arguments(parser)


def run(arguments: Namespace) -> int:
    """Evaluate."""
    from rich.console import Console

    from rl_plugins.evaluation.results import compare, evaluate, load_samples
    from rl_plugins.rewards.failures import RewardFailureError
    from rl_plugins.rewards.routing import check_routes

    if len(arguments.given) > 2:
        raise ConfigError(f"{len(arguments.given)} are given: evaluate one, or two to compare them")
    reward, answer_of = reward_config(arguments.reward), _answer_function(arguments.answer)
    files = [_samples_of(given, arguments) for given in arguments.given]
    console, results = Console(), []
    samples = [load_samples(path) for path in files]
    check_routes(reward, frozenset().union(*(one.sources for one in samples)))
    with closing(_scorer(reward, arguments)) as scorer:
        for of_policy in samples:
            try:
                result = evaluate(
                    of_policy,
                    scorer.score,
                    answer_of,
                    right_from=arguments.right_from,
                    max_failure_rate=arguments.max_failure_rate,
                )
            except RewardFailureError as error:
                raise ConfigError(f"{of_policy.path}: --reward {arguments.reward}: {error}") from None
            results.append(result)
            _print(console, result)
    comparison = compare(*results) if len(results) == 2 else None
    if comparison is not None:
        _print_comparison(console, comparison, arguments.given)
    for path, of in zip(files, results, strict=True):
        content = {"reward": arguments.reward, **of.plain()}
        if comparison is not None and of is results[-1]:
            content["against"] = {"samples": str(files[0]), **comparison.plain()}
        target = path.with_suffix(".evaluation.json")
        target.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"written: {target}")
    return 0


def reward_config(name: str) -> Mapping[str, Any]:
    """What `--reward` names, as rewards are configured.

    Raises:
        ConfigError: there is no such reward.
    """
    from omegaconf import OmegaConf

    from rl_plugins.launch.hydra_errors import CONFIG_FOLDER

    folder = CONFIG_FOLDER / "reward"
    built_in = {path.stem: path for path in folder.glob("*.yaml") if path.stem != "file"}
    if name in built_in or name.endswith((".yaml", ".yml")):
        file = built_in.get(name, Path(name))
        if not file.is_file():
            raise ConfigError(f"--reward {name}: there is no such file")
        content: Any = OmegaConf.to_container(OmegaConf.load(file))
        functions = (content.get("reward") or content).get("functions")
        if not functions:
            raise ConfigError(f"--reward {name}: it has no `reward.functions`")
        turns = (content.get("environment") or {}).get("max_turns", 1)
        if turns > 1:
            raise ConfigError(
                f"--reward {name}: its run has conversations (environment.max_turns={turns}), and samples are single "
                "responses: validate the policy in a recipe with model.path and run.eval_before=true"
            )
        return dict(functions)
    if ":" not in name and "." not in name:
        raise ConfigError(f"--reward {name}: use one of {', '.join(sorted(built_in))}, file.py:name, or module.name")
    return _function(name)


def _function(name: str) -> dict[str, str]:
    path, colon, attribute = name.rpartition(":")
    return {"path": path, "name": attribute} if colon else {"_target_": name}


def _answer_function(name: str | None) -> Callable[[str], str]:
    from rl_plugins.evaluation.measures import final_answer
    from rl_plugins.rewards.loading import load_reward

    return final_answer if name is None else load_reward(_function(name))[1]


def _samples_of(given: str, arguments: Namespace) -> Path:
    """The file of samples that is given, or that of the policy."""
    if given.endswith(".parquet"):
        return Path(given)
    if not arguments.data or arguments.output is None:
        raise ConfigError(f"{given} is no parquet file, so it is a policy: give --data and --output to sample from it")
    name = "-".join(part for part in given.replace(":", "/").split("/")[-3:] if part not in ("", ".", ".."))
    path: Path = arguments.output / f"{name}.parquet"
    arguments.output.mkdir(parents=True, exist_ok=True)
    options = [
        word
        for option in _SAMPLING
        if (value := getattr(arguments, option)) is not None
        for word in (f"--{option.replace('_', '-')}", str(value))
    ]
    # An engine has its process to itself, and ends with it.
    command = [sys.executable, "-m", "rl_plugins", "generate", given, "--data", *arguments.data, "--output", str(path)]
    status = subprocess.run([*command, *options]).returncode
    if status:
        raise ConfigError(f"sampling from {given} ended with status {status}, see above; the same command goes on")
    return path


def _scorer(reward: Mapping[str, Any], arguments: Namespace) -> InlineScorer | RewardPool:
    from rl_plugins.rewards.inline import InlineScorer
    from rl_plugins.rewards.pool import RewardPool

    # It sees a part of the samples at a time; `evaluate` judges them all.
    options = {"deadline_s": arguments.deadline, "max_failure_rate": 1.0}
    if not arguments.workers:
        return InlineScorer(reward, **options)
    import logging

    import ray

    ray.init(address="local", include_dashboard=False, logging_level=logging.ERROR)
    return RewardPool(reward, num_workers=arguments.workers, **options)


def _print(console: Any, results: Results) -> None:
    failed = ", ".join(f"{count} {kind}" for kind, count in results.failures.items()) or "none"
    console.print(
        f"\n{results.path}: {len(results.prompts)} prompts x {results.samples_per_prompt} samples, "
        f"{results.response_length:.0f} tokens each, {results.truncated:.1%} cut off; failed rewards: {failed}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    console.print(_table(results.summary))


def _table(summary: Summary) -> Any:
    from rich.table import Table

    table = Table("data source", "measure", show_edge=False)
    for column in ("value", "95 % interval", "prompts"):
        table.add_column(column, justify="right")
    for source, measures in summary.items():
        for position, (name, of) in enumerate(measures.items(), start=1):
            table.add_row(
                source if position == 1 else "",
                name,
                f"{of.value:.3f}",
                f"{of.low:.3f}..{of.high:.3f}",
                str(of.prompts),
                end_section=position == len(measures),
            )
    return table


def _print_comparison(console: Any, comparison: PolicyComparison, names: Sequence[str]) -> None:
    from rich.table import Table

    console.print("\nsecond less first, prompt by prompt")
    table = Table("measure", show_edge=False)
    for column in ("difference", "95 % interval", "prompts"):
        table.add_column(column, justify="right")
    for name, of in comparison.summary.items():
        table.add_row(name, f"{of.value:+.3f}", f"{of.low:+.3f}..{of.high:+.3f}", str(of.prompts))
    console.print(table)
    if comparison.unpaired:
        console.print(f"{comparison.unpaired} prompts are in one of the two files only, and were left out")
    console.print(comparison.sentence(*names), style="bold", markup=False, highlight=False, soft_wrap=True)
