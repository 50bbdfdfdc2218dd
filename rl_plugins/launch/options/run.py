"""Options of a run: how long, what it writes, what it watches."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from rl_plugins.callbacks.guard_bounds import Bounds


@dataclass
class RunConfig:
    """The run.

    Attributes:
        name: of the run; its folder is `output_dir/name`.
        output_dir: where runs live.
        steps: steps of training.
        seed: of everything.
        resume: continue the run of this name; false refuses to touch an existing one.
        deterministic: bit-for-bit repeatable arithmetic.
        checkpoint_every: steps between checkpoints; the last step always makes one.
        keep_checkpoints: newest checkpoints that are kept.
        keep_best: best checkpoints that are kept besides, as `best_<step>`.
        best_metric: by which they are the best: one of validation, such as `val/reward`, or of training steps.
        best_mode: `max` or `min`.
        time_limit: from the start of the command, such as `3h50m`: the step that runs then is the last, and is saved;
            null for no limit. SIGTERM and the file `stop` in the run's folder do the same. The command exits with 75.
        eval_every: steps between validations; 0 for none.
        eval_before: validate before the first step.
        target_reward: stop when a validation reaches this reward; null trains all steps.
        export: write a Hugging Face folder at the end.
        export_lora: of a model with an adapter: `merged` writes whole weights, `adapter` the adapter alone.
    """

    name: str = MISSING
    output_dir: str = "outputs"
    steps: int = 100
    seed: int = 0
    resume: bool = False
    deterministic: bool = False
    checkpoint_every: int = 50
    keep_checkpoints: int = 2
    keep_best: int = 0
    best_metric: str = "val/reward"
    best_mode: str = "max"
    time_limit: str | None = None
    eval_every: int = 20
    eval_before: bool = True
    target_reward: float | None = None
    export: bool = True
    export_lora: str = "merged"


@dataclass
class TrackingConfig:
    """MLflow.

    Attributes:
        enabled: record the run in MLflow; `metrics.jsonl` in the run's folder is always written.
        uri: of the tracking store; null is MLFLOW_TRACKING_URI, or an SQLite file in `run.output_dir`.
        experiment: MLflow experiment.
        samples: rows of the table of samples that each validation logs.
        traces: samples of each step that become traces; each takes some 20 ms of a thread of the first worker.
        system_metrics: record how busy the machines are.
        upload_best: how many of the best checkpoints (`run.keep_best`) MLflow has a copy of, as artifacts.
        register_as: name in the model registry under which the exported policy becomes a version; null for none.
        champion_metric: a version that is better in it than the model's `champion`, on the same data, takes the alias.
        parent_run: id of the MLflow run that this one belongs to; null for none.
    """

    enabled: bool = True
    uri: str | None = None
    experiment: str = "rl_plugins"
    samples: int = 32
    traces: int = 0
    system_metrics: bool = True
    upload_best: int = 0
    register_as: str | None = None
    champion_metric: str = "val/reward"
    parent_run: str | None = None


@dataclass
class GuardOptions(Bounds):
    """Signs that training diverges, looked for after every step; null for no bound.

    Attributes:
        action: `warn`; `stop`, with an error; or `roll_back` to the newest checkpoint, past the data of bad steps.
        max_rollbacks: after so many, `roll_back` is `stop`.
    """

    action: str = "stop"
    max_rollbacks: int = 3


@dataclass
class AverageOptions:
    """A moving average of the trained weights, in float32: validations are its, and so is the exported model.

    Attributes:
        keep: share that a step keeps, such as 0.99; 0 for no average.
    """

    keep: float = 0.0


@dataclass
class DebugOptions:
    """To look at a run closely.

    Attributes:
        dump_rollouts: newest steps whose samples are kept in `rollouts/` of the run's folder; 0 for none.
        replay: such a folder: the run trains on its samples in place of sampling, without a rollout engine; null
            samples.
    """

    dump_rollouts: int = 0
    replay: str | None = None
