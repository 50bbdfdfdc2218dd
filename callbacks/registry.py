"""The exported policy in MLflow's model registry: versions of a name, and the alias `champion` for the best of them."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl_plugins.callbacks.mlflow_run import TrackedRun

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models.model import ModelInfo

CHAMPION = "champion"
_DATA_TAG = "evaluated_on"


@dataclass(frozen=True)
class Evaluation:
    """What a policy is judged by.

    Attributes:
        metric: name; more is better.
        value: of the policy; None if the run has not evaluated it.
        data: identifies what it was evaluated on: values on other data are not compared.
    """

    metric: str
    value: float | None
    data: str


def register_policy(run: TrackedRun, policy: Path, name: str, evaluation: Evaluation, example: str) -> str:
    """Log a Hugging Face folder as a model of the run and register it; returns what became of it, in words.

    Args:
        run: the run that made the policy.
        policy: its folder.
        name: of the registered model; made if it is not there.
        evaluation: decides whether the new version becomes the champion.
        example: what a user says, kept as the model's input example.
    """
    from mlflow.exceptions import MlflowException

    client = run.client
    tags = {_DATA_TAG: evaluation.data}
    if evaluation.value is not None:
        tags[evaluation.metric] = repr(evaluation.value)
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    # Another try of a call that was cut off finds what the first one has made.
    versions = client.search_model_versions(f"name='{name}'")
    version = next((one for one in versions if one.run_id == run.run_id and one.tags == tags), None)
    if version is None:
        logged = _log_model(run, policy, example)
        version = client.create_model_version(name, logged.model_uri, run.run_id, tags=tags, model_id=logged.model_id)
    champion = _champion(run, name)
    wins, reason = judge(evaluation, None if champion is None else champion.tags)
    if wins:
        client.set_registered_model_alias(name, CHAMPION, version.version)
    return f"{name} version {version.version}, {'the' if wins else 'not the'} champion: {reason}"


def judge(evaluation: Evaluation, champion: Mapping[str, str] | None) -> tuple[bool, str]:
    """Whether the policy takes the champion's place, and why; the champion is given by the tags of its version."""
    metric, value = evaluation.metric, evaluation.value
    if value is None:
        return False, f"the run has no {metric}"
    if champion is None:
        return True, f"the first one, {metric} {value:.4g}"
    if metric not in champion:
        return False, f"the champion has no {metric} to compare with"
    if champion.get(_DATA_TAG) != evaluation.data:
        return False, f"the champion's {metric} is of other data"
    best = float(champion[metric])
    return value > best, f"{metric} {value:.4g} against {best:.4g}"


def _champion(run: TrackedRun, name: str) -> ModelVersion | None:
    version = run.client.get_registered_model(name).aliases.get(CHAMPION)
    return None if version is None else run.client.get_model_version(name, version)


def _log_model(run: TrackedRun, policy: Path, example: str) -> ModelInfo:
    import mlflow

    # It looks for the model card of every folder on the hub, and warns that there is none.
    logging.getLogger("mlflow.transformers").setLevel(logging.ERROR)
    with mlflow.start_run(run.run_id):
        return mlflow.transformers.log_model(
            # As a name of the hub, a relative path would be asked for there.
            str(policy.absolute()),
            name=policy.name,
            # Messages in, through the chat template with which the policy was trained, and its answer out.
            task="llm/v1/chat",
            input_example={"messages": [{"role": "user", "content": example}]},
            pip_requirements=[f"{name}=={importlib.metadata.version(name)}" for name in ("transformers", "torch")],
        )
