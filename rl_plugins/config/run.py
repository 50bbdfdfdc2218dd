"""Settings of a run: its length, its files and MLflow, its checkpoints, and the signs of divergence."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from omegaconf import MISSING

from rl_plugins.config.settings import (
    ABOVE_0_OR_NULL,
    AT_LEAST_1,
    FOLDER_NAME,
    FROM_0_TO_BELOW_1,
    NODE_OR_NULL,
    NOT_NEGATIVE,
    SEED,
    Range,
    Settings,
    one_of,
)
from rl_plugins.redaction import without_password
from rl_plugins.storage import is_address

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_UNIT_SECONDS = (86_400, 3_600, 60, 1)


def seconds_of(text: str) -> float:
    """Return the seconds of a duration such as `3h50m`; 0 if the text is not a duration.

    Args:
        text: days, hours, minutes and seconds in this order, each a number with a letter. Parts may be left out.
    """
    match = _DURATION.fullmatch(text.strip())
    numbers = match.groups(default="0") if match else ()
    return float(sum(int(number) * unit for number, unit in zip(numbers, _UNIT_SECONDS, strict=False)))


_A_DURATION = Range(
    "write a duration such as 45m, 3h50m or 1d12h", lambda value: value is None or seconds_of(value) > 0
)
LOCAL_FOLDER = Range(
    "must be a folder that all machines of the run see: name the address as run.storage",
    lambda value: not is_address(value),
)
_RESUME = Range("use true, false or auto", lambda value: value in (True, False, "auto"))


@dataclass
class RunConfig(Settings):
    """Run.

    Attributes:
        name: name of the run; its folder is `output_dir/name`.
        output_dir: parent folder of all runs.
        storage: folder with a copy of the run, at an address such as `s3://bucket/runs`: the run is in
            `storage/name`. A resume on another machine begins with this copy. Null copies nothing.
        steps: number of training steps.
        epochs: passes over the rows of the training data, such as 3 or 0.5, which set `steps`; null keeps `steps`. Rows
            dropped as too long count as well. With a mixture or a curriculum, which draw in shares, a pass is as
            many prompts as there are rows.
        dry_run: run all checks, print the size of a step, and exit without a start.
        seed: seed of all random numbers.
        resume: `true` continues the run of this name; `auto` starts the run if there is none, continues the run if
            steps are left, and does nothing if the run is finished; `false` refuses to change an existing run.
        deterministic: bit-for-bit repeatable arithmetic.
        checkpoint_every: steps between checkpoints; the last step always saves one.
        async_checkpoints: write checkpoints in the background. A step waits only for a copy of the states into host
            memory, of the size of the checkpoint, and for the end of the checkpoint before.
        keep_checkpoints: number of newest checkpoints to keep.
        keep_best: number of best checkpoints to keep as well, as `best_<step>`.
        best_metric: metric of the best checkpoints: a metric of validation, such as `val/reward`, or of training steps;
            docs/metrics.md has the names.
        best_mode: `max` or `min`.
        time_limit: largest duration since the start of the command, such as `3h50m`; null for no limit. At the limit,
            after SIGTERM, or when the file `stop` is in the run's folder, the current step is the last, and it is
            saved. The command exits with 75.
        eval_every: steps between validations; 0 for none.
        eval_before: validate before the first step.
        target_reward: stop when a validation reaches this reward; null trains all steps.
        export: write a Hugging Face folder at the end.
        export_lora: export of a model with an adapter: `merged` writes whole weights, `adapter` the adapter alone.
    """

    name: Annotated[str, FOLDER_NAME] = MISSING
    output_dir: Annotated[str, LOCAL_FOLDER] = "outputs"
    storage: str | None = None
    steps: Annotated[int, AT_LEAST_1] = 100
    epochs: Annotated[float | None, ABOVE_0_OR_NULL] = None
    dry_run: bool = False
    seed: Annotated[int, SEED] = 0
    resume: Annotated[bool | str, _RESUME] = False
    deterministic: bool = False
    checkpoint_every: Annotated[int, AT_LEAST_1] = 50
    async_checkpoints: bool = False
    keep_checkpoints: Annotated[int, AT_LEAST_1] = 2
    keep_best: Annotated[int, NOT_NEGATIVE] = 0
    best_metric: str = "val/reward"
    best_mode: Annotated[str, one_of("max", "min")] = "max"
    time_limit: Annotated[str | None, _A_DURATION] = None
    eval_every: Annotated[int, NOT_NEGATIVE] = 20
    eval_before: bool = True
    target_reward: float | None = None
    export: bool = True
    export_lora: Annotated[str, one_of("merged", "adapter")] = "merged"

    @property
    def time_limit_s(self) -> float | None:
        """`time_limit` in seconds."""
        return None if self.time_limit is None else seconds_of(self.time_limit)


@dataclass
class TrackingConfig(Settings):
    """MLflow.

    Attributes:
        enabled: record the run in MLflow; `metrics.jsonl` in the run's folder is always written.
        uri: URI of the tracking store; null is MLFLOW_TRACKING_URI, or an SQLite file in `run.output_dir`.
        experiment: MLflow experiment.
        loggers: further loggers of Lightning: a mapping of names to nodes with `_target_`.
        code: keep the changes to the git commit as `git.diff`, in the run's folder and in MLflow.
        samples: rows of the table of samples of each validation.
        traces: samples of each step to log as traces; each takes some 20 ms of a thread of the first worker.
        system_metrics: record the load of the machines.
        upload_best: number of best checkpoints (`run.keep_best`) to upload as artifacts.
        register_as: name in the model registry under which the exported policy becomes a version; null for none.
        champion_metric: metric of the alias `champion`: a version with a better value on the same data than the model's
            champion gets the alias; docs/metrics.md has the names.
        parent_run: id of the parent MLflow run; null for none.
    """

    enabled: bool = True
    uri: str | None = None
    experiment: str = "rl_plugins"
    loggers: dict[str, Any] = field(default_factory=dict)
    code: bool = True
    samples: Annotated[int, NOT_NEGATIVE] = 32
    traces: Annotated[int, NOT_NEGATIVE] = 0
    system_metrics: bool = True
    upload_best: Annotated[int, NOT_NEGATIVE] = 0
    register_as: str | None = None
    champion_metric: str = "val/reward"
    parent_run: str | None = None


@dataclass
class Bounds(Settings):
    """Bounds on the metrics of a step; None for no bound. A step beyond a bound counts as diverged.

    Attributes:
        kl: largest mean KL divergence from the reference model, in nats.
        ppo_kl: largest mean KL divergence between the sampling policy and the updated policy, in nats.
        entropy_min: smallest mean entropy of the policy, in nats per token. A policy below this bound has collapsed.
        entropy_max: largest mean entropy of the policy, in nats per token. A policy above this bound writes noise.
        rollout_gap: largest mean difference between the log-probs of the trainer and the rollout engine.
        gradient_norm: largest global gradient norm of any model, before clipping.
        reward_drop: largest distance of the reward's moving average below its best value.
        reward_window: approximate number of steps in the moving average.
        finite: True to require a finite loss and finite gradient norms.
    """

    kl: Annotated[float | None, ABOVE_0_OR_NULL] = None
    ppo_kl: Annotated[float | None, ABOVE_0_OR_NULL] = None
    entropy_min: Annotated[float | None, ABOVE_0_OR_NULL] = None
    entropy_max: Annotated[float | None, ABOVE_0_OR_NULL] = None
    rollout_gap: Annotated[float | None, ABOVE_0_OR_NULL] = None
    gradient_norm: Annotated[float | None, ABOVE_0_OR_NULL] = None
    reward_drop: Annotated[float | None, ABOVE_0_OR_NULL] = None
    reward_window: Annotated[int, AT_LEAST_1] = 20
    finite: bool = True


@dataclass
class GuardConfig(Bounds):
    """Signs of divergence, checked after every step; null for no bound.

    Attributes:
        action: `warn`; `stop`, with an error; or `roll_back` to the newest checkpoint, without the data of bad steps.
        max_rollbacks: number of rollbacks after which `roll_back` is `stop`.
    """

    action: Annotated[str, one_of("warn", "stop", "roll_back")] = "stop"
    max_rollbacks: Annotated[int, NOT_NEGATIVE] = 3


@dataclass
class AverageConfig(Settings):
    """Moving average of the trained weights, in float32. Validations and the exported model use the average.

    Attributes:
        keep: share kept in a step, such as 0.99; 0 for no average.
    """

    keep: Annotated[float, FROM_0_TO_BELOW_1] = 0.0


@dataclass
class DebugConfig(Settings):
    """Close inspection of a run.

    Attributes:
        dump_rollouts: number of newest steps whose samples are kept in `rollouts/` of the run's folder; 0 for none.
        replay: folder of kept samples. The run trains on these samples instead of sampling, without a rollout engine;
            null samples.
        profiler: profiler of Lightning as a node with `_target_`; null for none.
    """

    dump_rollouts: Annotated[int, NOT_NEGATIVE] = 0
    replay: str | None = None
    profiler: Annotated[Any, NODE_OR_NULL] = None


def tracking_address(uri: str | None) -> str | None:
    """Return the URI of a tracking store with the user and the password of MLFLOW_TRACKING_URI.

    Files of a run have no passwords, so a command that reads a file takes the password from the environment. The path
    of an SQLite file becomes absolute, because Ray's workers have other working directories.

    Args:
        uri: URI of the store. None stands for MLFLOW_TRACKING_URI.
    """
    of_environment = os.environ.get("MLFLOW_TRACKING_URI") or None
    same = of_environment is not None and uri == without_password(of_environment)
    address = of_environment if same or not uri else uri
    scheme, mark, file = (address or "").partition(":///")
    return f"{scheme}{mark}{Path(file).absolute()}" if scheme == "sqlite" else address
