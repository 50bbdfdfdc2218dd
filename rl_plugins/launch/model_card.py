"""Model card of an export: recipe, changed options, metrics, and the lineage of the weights, without secrets.

Folders and addresses of the machine are left out, too: a file is named by its last part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_plugins.config.recipe import RecipeConfig, changed_options, read_config
from rl_plugins.hub.names import model_name
from rl_plugins.launch.pinned_versions import PinnedVersions
from rl_plugins.redaction import redacted
from rl_plugins.run_folder import RunFolder, checkpoint_step, read_metrics
from rl_plugins.storage import is_address
from rl_plugins.text_file import REMOVE, read_text
from rl_plugins.tracking.provenance import read_git_state

_PACKAGES = ("rl-plugins", "torch", "transformers", "peft", "lightning", "deepspeed", "ray", "vllm")
_METRICS = ("train/reward", "train/loss", "train/accuracy", "train/kl", "train/entropy", "train/response_length")
# Places of files, and settings without an effect on the weights. The lineage names models and data.
_LEFT_OUT = (
    "run.output_dir", "run.storage", "run.resume", "tracking.", "debug.", "strategy.offload.folder", "data.train_files",
    "data.val_files", "data.mixture", "model.path",
)  # fmt: skip


def model_card(name: str, checkpoint: Path, *, is_adapter: bool) -> str:
    """Return the card of a model, as the content of its README.md.

    Args:
        name: name of the new model on the hub.
        checkpoint: folder of the exported checkpoint in the folder of its run.
        is_adapter: True if the model is an adapter without the weights of its base model.

    Raises:
        ConfigError: a file of the run is damaged.
    """
    run = RunFolder(checkpoint.absolute().parent)
    config = read_config(run.config) if run.config.is_file() else None
    step = checkpoint_step(checkpoint) if checkpoint.name.startswith(("checkpoint_", "best_")) else None
    base = None if config is None else model_name(config.model.path)
    lines = [
        *_metadata(name, None if base is None else base.repository, _data_sets(run), config, is_adapter),
        f"# {name}",
        "",
        "This model was trained with rl_plugins, reinforcement learning for Ray Train and Lightning.",
        "",
        "## Lineage",
        "",
        *(f"- {title}: {value}" for title, value in _lineage(run, config, step)),
    ]
    if metrics := _metrics(run, step):
        lines += ["", "## Metrics", "", "| metric | value | step |", "|---|---|---|"]
        lines += [f"| `{metric}` | {value:.4g} | {at} |" for metric, value, at in metrics]
    if config is not None:
        lines += ["", "## Options", "", "Options that differ from their defaults:", "", "```yaml"]
        lines += [f"{option}: {json.dumps(value)}" for option, value in _options(config)]
        lines += ["```"]
    return redacted("\n".join(lines)) + "\n"


def _metadata(
    name: str, base: str | None, data_sets: Sequence[str], config: RecipeConfig | None, is_adapter: bool
) -> Iterator[str]:
    """Yield the block in front of the card that the hub reads."""
    from huggingface_hub import ModelCardData

    is_policy = config is None or config.generates
    card = ModelCardData(
        model_name=name,
        base_model=base,
        base_model_relation=None if base is None else "adapter" if is_adapter else "finetune",
        datasets=list(data_sets) or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation" if is_policy else "text-classification",
        tags=["rl_plugins", *([] if config is None else [config.stage.replace("_", "-")])],
    )
    yield from ("---", card.to_yaml().strip(), "---", "")


def _lineage(run: RunFolder, config: RecipeConfig | None, step: int | None) -> Iterator[tuple[str, str]]:
    if run.changes.is_file():
        yield "recipe", read_text(run.changes, REMOVE).partition("\n")[0].removeprefix("# recipe: ")
    if config is not None:
        yield "stage", config.stage
        named = config.model_paths | config.adapter_paths
        models = {option: _short(path) for option, path in named.items()}
        yield "base model", models.pop("model.path")
        yield from ((re.sub(r"[._]", " ", option.removesuffix(".path")), path) for option, path in models.items())
        for title, files in (("training data", config.data.training_files), ("validation data", config.data.val_files)):
            if files:
                yield title, ", ".join(map(_short, files))
    for repository, commit in PinnedVersions.of_run(run).known.items():
        if repository.startswith("datasets/"):
            yield "data set of the hub", f"{repository.partition('/')[2]}, commit {commit}"
    if step is not None:
        yield "step", str(step)
    if run.tracking_run.is_file():
        experiment = "" if config is None else f" of the experiment {config.tracking.experiment}"
        yield "MLflow run", f"{read_text(run.tracking_run, REMOVE).strip()}{experiment}"
    if run.git_state.is_file():
        yield "commit of the project", read_git_state(run.git_state)["commit"]
    if versions := _versions(run):
        yield "versions", ", ".join(f"{package} {version}" for package, version in versions.items())


def _data_sets(run: RunFolder) -> list[str]:
    names = (name.partition("@")[0] for name in PinnedVersions.of_run(run).known)
    return sorted({name.removeprefix("datasets/") for name in names if name.startswith("datasets/")})


def _versions(run: RunFolder) -> dict[str, str]:
    """Return the versions of the packages that compute, from the start of the run."""
    lines = read_text(run.installed_packages, REMOVE).splitlines() if run.installed_packages.is_file() else []
    pairs = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
    installed = {package.lower().replace("_", "-"): version for package, _, version in pairs}
    return {package: installed[package] for package in _PACKAGES if package in installed}


def _metrics(run: RunFolder, step: int | None) -> list[tuple[str, float, int]]:
    """Return the last value of each metric at the checkpoint, with its step."""
    found = []
    for metric, points in sorted(read_metrics(run.metrics).items()):
        steps = [at for at in points if step is None or at <= step]
        if steps and (metric.startswith("val/") or metric in _METRICS):
            found.append((metric, points[steps[-1]], steps[-1]))
    return found


def _options(config: RecipeConfig) -> Iterator[tuple[str, Any]]:
    for option, value in sorted(changed_options(config).items()):
        if not option.startswith(_LEFT_OUT):
            yield option, _without_places(value)


def _without_places(value: object) -> Any:
    """Return a value of an option without the places of files and servers."""
    if isinstance(value, Mapping):
        return {key: _without_places(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_without_places(child) for child in value]
    return _short(value) if isinstance(value, str) else value


def _short(path: str) -> str:
    """Return the last part of a path, the kind of an address, or other text unchanged."""
    if is_address(path):
        return f"{path.partition('://')[0]}://..."
    return Path(path).name if path.startswith(("/", "~", ".")) else path
