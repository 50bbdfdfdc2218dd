"""Convert a checkpoint of a run into a Hugging Face folder, for transformers, vLLM and other programs.

The folder contains the policy, or the reward model if the run trains one. The command needs no cluster, no GPU and
only one process, and joins the shards of FSDP2 or of any ZeRO stage, for any number of workers. If the run has
`average.keep`, the folder contains the moving average. A run writes its last policy itself (`policy/`). This command is
for earlier checkpoints.

  rl-plugins export outputs/run/checkpoint_00000050 outputs/step_50
  rl-plugins export outputs/run/checkpoint_00000050 outputs/adapter --lora adapter
  rl-plugins export outputs/run/checkpoint_00000050 outputs/step_50 --push OWNER/NAME
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_plugins.commands.main import output_path
from rl_plugins.config.precision import dtype_of_passes
from rl_plugins.errors import CheckpointError, ConfigError
from rl_plugins.hub.files import model_folder
from rl_plugins.hub.push import PushTarget
from rl_plugins.launch.model_card import model_card
from rl_plugins.manifest import find_damage
from rl_plugins.run_folder import RunFolder
from rl_plugins.storage import local_path
from rl_plugins.text_file import REPLACE, read_yaml
from rl_plugins.whole_file import write_whole_text

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

    from rl_plugins.config.models import LoraConfig
    from rl_plugins.data.image_prompts import Processor
    from rl_plugins.models.lora import MergedWeightSource


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("checkpoint", type=Path, help="folder of the checkpoint, such as RUN/checkpoint_00000050")
    parser.add_argument("output", type=output_path, help="Hugging Face folder to write; must not exist")
    parser.add_argument("--model", help="Hugging Face name or folder of the architecture (default: the run's own)")
    parser.add_argument(
        "--lora",
        choices=("merged", "adapter"),
        help="for a run with an adapter: merged weights, or the adapter alone (default: run.export_lora of the run)",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that the model's config.json names"
    )
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="send the folder with a model card to the Hugging Face hub (HF_TOKEN)"
    )
    parser.add_argument("--public", action="store_true", help="make a new repository public (default: private)")


def run(arguments: Namespace) -> int:
    """Export the checkpoint.

    Raises:
        ConfigError: `--public` without `--push`.
    """
    if arguments.public and arguments.push is None:
        raise ConfigError("--public is for a new repository on the hub: add --push OWNER/NAME, or leave it out")
    pushed = export_checkpoint(
        arguments.checkpoint,
        arguments.output,
        arguments.model,
        lora=arguments.lora,
        trust_remote_code=arguments.trust_remote_code,
        push=arguments.push,
        public=arguments.public,
    )
    print(f"{arguments.checkpoint} is now {arguments.output}")
    if pushed is not None:
        print(f"{arguments.output} is now {pushed}")
    return 0


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    model: str | None = None,
    *,
    lora: Literal["merged", "adapter"] | None = None,
    trust_remote_code: bool = False,
    push: str | None = None,
    public: bool = False,
) -> str | None:
    """Write the trained model of a checkpoint as a Hugging Face folder, in the dtype of the exports of the run.

    Args:
        checkpoint: folder of the checkpoint, such as `checkpoint_00000050` of a run.
        out: new folder to write.
        model: Hugging Face name or folder of the architecture and the tokenizer. By default the run's `model.path`.
        lora: for a run with an adapter, write the merged model or the adapter alone. By default `run.export_lora` of
            the run.
        trust_remote_code: run Python code that the model's config.json names (`auto_map`). The config.yaml beside the
            checkpoint cannot allow such code, because the folder may come from somebody else.
        push: repository of the Hugging Face hub, `OWNER/NAME`, that gets the folder with a model card.
        public: make a new repository public.

    Returns:
        Address of the commit on the hub; None without `push`.

    Raises:
        CheckpointError: a file of `checkpoint` is missing or damaged, or a weight is NaN or infinite.
        ConfigError: `checkpoint` is not a checkpoint, or its weights are those of another model; the architecture
            cannot be found; an adapter is requested from a run without one; the average is stored in parts of tensors;
            `out` exists or is an address; or the hub refuses the push.
    """
    if local_path("out", out).exists():
        raise ConfigError(f"{out} exists: give another folder, or remove it")
    state = checkpoint / "state"
    if not state.exists():
        raise ConfigError(f"{checkpoint} is not a checkpoint of a run: it has no {state.name}")
    trained = _read_trained_model(checkpoint, model, trust_remote_code)
    if (damage := find_damage(checkpoint)) is not None:
        raise CheckpointError(f"{damage}: export another checkpoint")
    as_adapter = trained.exports_adapter if lora is None else lora == "adapter"
    if lora == "adapter" and trained.lora is None:
        raise ConfigError(f"{checkpoint} is of a run without an adapter (model.lora.rank=0): leave --lora out")
    if push is None:
        _write_folder(checkpoint, out, trained, as_adapter=as_adapter)
        return None
    # Before hours of work: a file of the run may be damaged, or name a variable of another shell.
    card = model_card(push, checkpoint, is_adapter=trained.lora is not None and as_adapter)
    target = PushTarget.open(push, public=public)
    _write_folder(checkpoint, out, trained, as_adapter=as_adapter)
    write_whole_text(out / "README.md", card)
    return target.push(out, f"{checkpoint.name} of {checkpoint.absolute().parent.name}")


def _write_folder(checkpoint: Path, out: Path, trained: _TrainedModel, *, as_adapter: bool) -> None:
    state = checkpoint / "state"

    # transformers imports DeepSpeed, which would look for a device and print the result.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from rl_plugins.callbacks.averages import read_average
    from rl_plugins.launch.terminal import quiet_libraries
    from rl_plugins.models.export import save_adapter, save_policy, saved_buffers, write_policy

    quiet_libraries()
    read_weights = _read_sharded_weights if state.is_dir() else _read_unsharded_weights
    weights = read_weights(state, trained.engine)
    weights |= read_average(checkpoint, {name: tensor.shape for name, tensor in weights.items()})
    description, processor = f"{trained.path} ({state})", trained.load_processor()
    if trained.lora is None:
        policy = _build_architecture(trained)
        tensors = {**dict(policy.named_parameters()), **saved_buffers(policy)}
        weights = _select_weights(weights, tensors, description)
        write_policy(policy, weights, processor, out)
        return
    adapted, source = _build_adapted_model(trained, trained.lora, weights, description)
    if as_adapter:
        save_adapter(adapted, source.adapter(), processor, out, is_writer=True)
    else:
        save_policy(adapted, source, processor, out, is_writer=True)


@dataclass(frozen=True)
class _TrainedModel:
    """The trained model of a run.

    Attributes:
        path: Hugging Face name or folder of the architecture and the tokenizer.
        precision: `model.precision` of the run.
        engine: name of the model engine in the checkpoint.
        chat_template: `data.chat_template` of the run.
        trust_remote_code: see `LoadingOptions`.
        lora: adapter of the run; None without an adapter. The checkpoint has the weights of the adapter.
        exports_adapter: True if the run exports the adapter alone.
        vision_lr: learning rate of the vision tower. With 0, the checkpoint has no adapter of the tower.
    """

    path: str
    precision: str
    engine: str
    chat_template: str | None
    trust_remote_code: bool
    lora: LoraConfig | None
    exports_adapter: bool
    vision_lr: float | None

    @property
    def is_policy(self) -> bool:
        """True for a language model, False for a reward model."""
        from rl_plugins.strategies.contract import POLICY

        return self.engine == POLICY

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the export."""
        import torch

        dtype: torch.dtype = getattr(torch, dtype_of_passes(self.precision))
        return dtype

    def load_processor(self) -> Processor:
        """Return the tokenizer of the model, or the processor of a vision-language model."""
        from rl_plugins.data.image_prompts import load_tokenizer_or_processor

        return load_tokenizer_or_processor(
            self.path, trust_remote_code=self.trust_remote_code, chat_template=self.chat_template
        )


def _read_trained_model(checkpoint: Path, model: str | None, trust_remote_code: bool) -> _TrainedModel:
    from omegaconf import OmegaConf

    from rl_plugins.config.models import LoraConfig
    from rl_plugins.models.folder import check_folder
    from rl_plugins.strategies.contract import POLICY, REWARD_MODEL

    file = RunFolder(checkpoint.absolute().parent).config
    config: Any = read_yaml(file, REPLACE) if file.is_file() else OmegaConf.create()
    # config.yaml may have an expression with a variable of another shell.
    path = model or OmegaConf.select(config, "model.path", throw_on_resolution_failure=False)
    if path is None:
        raise ConfigError(f"{file} does not name the model that was trained: name its folder with --model")
    if path.startswith(("/", ".", "~")) and not Path(path).is_dir():
        origin = "--model" if model else str(file)
        raise ConfigError(
            f"{origin} names {path}, which does not exist: name a folder of the architecture with --model"
        )
    folder = model_folder(path, option="--model", weights=False, trust_remote_code=trust_remote_code)
    check_folder(folder, trust_remote_code=trust_remote_code)
    engine = REWARD_MODEL if OmegaConf.select(config, "stage") == "reward_modeling" else POLICY
    precision, template = (OmegaConf.select(config, name) for name in ("model.precision", "data.chat_template"))
    values: Any = OmegaConf.to_container(config)
    options = values.get("model", {}).get("lora", {})
    lora = LoraConfig(**{**options, "path": None}) if options.get("rank") else None
    exports_adapter = OmegaConf.select(config, "run.export_lora") == "adapter"
    vision_lr = OmegaConf.select(config, "optimizer.vision_lr")
    return _TrainedModel(
        path, precision or "32-true", engine, template, trust_remote_code, lora, exports_adapter, vision_lr
    )


def _read_sharded_weights(state: Path, engine: str) -> dict[str, Tensor]:
    from rl_plugins.strategies.fsdp_shards import is_model_folder, read_weights

    folder = state / engine
    if is_model_folder(folder):
        return read_weights(folder)
    from rl_plugins.strategies.zero_shards import TAG, ZeroShards

    if not (folder / TAG).is_dir():
        raise ConfigError(f"{state} holds no shards of the model {engine!r}")
    return dict(ZeroShards(folder / TAG).whole_weights())


def _read_unsharded_weights(state: Path, engine: str) -> dict[str, Tensor]:
    from rl_plugins.plain_file import load_plain

    # The file also holds the states of loops and callbacks.
    checkpoint = load_plain(state, mmap=True)
    prefix = f"{engine}."
    weights = checkpoint.get("state_dict", {})
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _build_architecture(trained: _TrainedModel) -> PreTrainedModel:
    """Return the model without weights, in the dtype of the export."""
    import torch
    from transformers import AutoConfig, AutoModelForTokenClassification, GenerationConfig

    from rl_plugins.models.scalar_head import scalar_head_config
    from rl_plugins.vision_language import model_class

    model: PreTrainedModel
    trust = {"trust_remote_code": trained.trust_remote_code}
    with torch.device("meta"):
        if not trained.is_policy:
            config = scalar_head_config(trained.path, **trust)
            return AutoModelForTokenClassification.from_config(config, dtype=trained.dtype, **trust)
        folder = model_folder(trained.path, weights=False, trust_remote_code=trained.trust_remote_code)
        config = AutoConfig.from_pretrained(folder, **trust)
        model = model_class(folder).from_config(config, dtype=trained.dtype, **trust)
    # A model need not have this file.
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _build_adapted_model(
    trained: _TrainedModel, lora: LoraConfig, weights: dict[str, Tensor], description: str
) -> tuple[PeftModel, MergedWeightSource]:
    """Return the initial model of the run with the adapter of the checkpoint, and the source of its weights."""
    import torch

    from rl_plugins.models.loading import load_causal_lm
    from rl_plugins.models.lora import MergedWeightSource, add_adapter
    from rl_plugins.models.scalar_head import load_scalar_head
    from rl_plugins.vision_language import with_frozen_tower
    from rl_plugins.weights.source import ModuleWeightSource

    load: Any = load_causal_lm if trained.is_policy else load_scalar_head
    base = load(trained.path, dtype=trained.dtype, trust_remote_code=trained.trust_remote_code)
    model = with_frozen_tower(add_adapter(base, lora), trained.vision_lr)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name, weight in _select_weights(weights, parameters, description).items():
            parameters[name].copy_(weight)
    return model, MergedWeightSource(ModuleWeightSource(model), model)


def _select_weights(weights: dict[str, Tensor], tensors: Mapping[str, Tensor], description: str) -> dict[str, Tensor]:
    """Return the weights of parameters and buffers. Tied weights appear once.

    A weight has the dtype of its parameter; a buffer keeps the dtype of the checkpoint.

    Raises:
        ConfigError: a parameter or a buffer is missing, or has another shape.
        CheckpointError: a weight is NaN or infinite.
    """
    from torch.nn import Parameter

    from rl_plugins.models.finite import not_finite

    wrong = [name for name, tensor in tensors.items() if name not in weights or weights[name].shape != tensor.shape]
    if wrong:
        raise ConfigError(
            f"the checkpoint is not of the model {description}: {len(wrong)} of {len(tensors)} parameters are "
            f"missing or have another shape, {wrong[0]} first"
        )
    parameters = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Parameter)}
    selected = {name: weights[name].to(parameter.dtype) for name, parameter in parameters.items()}
    if bad := not_finite(selected.items()):
        raise CheckpointError(
            f"the checkpoint {description} has weights that are NaN or infinite: {len(bad)} of {len(selected)} "
            f"parameters, {bad[0]} first: export another checkpoint"
        )
    return selected | {name: weights[name] for name in tensors if name not in parameters}
