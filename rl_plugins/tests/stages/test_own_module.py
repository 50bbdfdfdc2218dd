"""The user's LightningModule as a policy: its model, optimizer and schedules are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.datamodule import PromptDataModule
from rl_plugins.data.prepare.tasks import addition_rows
from rl_plugins.errors import CheckpointError, ConfigError
from rl_plugins.models.tiny import build_model, build_tokenizer, save_tiny_policy
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.stages.own_module import call_hooks_of
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.stages.preference_optimization import OnlinePreferenceOptimization, PreferenceOptimization
from rl_plugins.stages.sft import SFT
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.loops import for_each

SAMPLING = SamplingConfig(max_tokens=3, num_samples=2)


class Own(LightningModule):
    def __init__(self, path, interval="step", late=False):
        super().__init__()
        self.path, self.interval = path, interval
        self.model: Any = None
        if not late:
            self.configure_model()

    def configure_model(self):
        if self.model is None:
            self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)

    def configure_optimizers(self):
        self.steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
        return [optimizer], [{"scheduler": self.scheduler, "interval": self.interval, "frequency": 2}]


class WithHooks(Own):
    """A module with hooks of training, which log, and hooks of validation."""

    def __init__(self, path, **hyperparameters):
        super().__init__(path)
        self.save_hyperparameters(hyperparameters)
        self.called = []

    def on_train_start(self):
        self.called.append("on_train_start")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.called.append(f"on_train_batch_end {batch_idx}")
        self.log("own_metric", 7.0)

    def on_before_optimizer_step(self, optimizer):
        self.called.append(f"on_before_optimizer_step {type(optimizer).__name__}")

    def on_save_checkpoint(self, checkpoint):
        checkpoint["own"] = len(self.called)

    def on_validation_epoch_end(self):
        raise AssertionError("the outputs of the module's validation_step are missing")


def length(solution_str):
    return len(solution_str) % 7


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(save_tiny_policy(tmp_path_factory.mktemp("tiny")))


def fit(stage, path, steps, ckpt_path=None, **options):
    rows = addition_rows(below=10, num_train=8, num_test=1, seed=0)["train"]
    defaults = {"logger": False, "enable_checkpointing": False}
    trainer = Trainer(
        max_steps=steps,
        strategy=SingleDeviceRolloutStrategy(rollout=TransformersRollout(path)),
        enable_progress_bar=False,
        enable_model_summary=False,
        **(defaults | options),
    )
    data = PromptDataModule(rows, rows[:1], tokenizer=path, prompts_per_step=4)
    trainer.fit(stage, datamodule=data, ckpt_path=ckpt_path)
    return trainer


def test_hooks_of_validation_of_a_lightning_module_are_named_in_a_warning(path, recwarn):
    PolicyOptimization(Own(path), scorer=length, sampling=SAMPLING)
    assert not [one for one in recwarn if "will not be called" in str(one.message)]
    with pytest.warns(
        UserWarning, match=r"WithHooks: on_validation_epoch_end will not be called, .*Trainer\(callbacks="
    ):
        PolicyOptimization(WithHooks(path), scorer=length, sampling=SAMPLING)


@pytest.mark.filterwarnings("ignore:WithHooks. on_validation_epoch_end will not be called")
def test_hooks_of_training_of_a_lightning_module_are_called(path, tmp_path):
    own = WithHooks(path)
    stage = PolicyOptimization(own, scorer=length, sampling=SAMPLING)
    trainer = fit(stage, path, steps=2)
    steps = [name for i in range(2) for name in ("on_before_optimizer_step SGD", f"on_train_batch_end {i}")]
    assert own.called == ["on_train_start", *steps]
    assert float(trainer.callback_metrics["own_metric"]) == 7.0
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    assert saved["own"] == 5 and saved["stage"]["step"] == 2


def test_checkpoint_of_a_lightning_module_is_refused_with_the_way_out(path, tmp_path):
    own, saved = Own(path), tmp_path / "sft.ckpt"
    trainer = Trainer(max_steps=1, logger=False, accelerator="cpu", enable_checkpointing=False)
    trainer.strategy.connect(own)
    trainer.save_checkpoint(saved)
    stage = PolicyOptimization(own, scorer=length, sampling=SAMPLING)
    message = r"the checkpoint is of a LightningModule without a stage, .*leave ckpt_path out.*load_from_checkpoint"
    with pytest.raises(CheckpointError, match=message):
        fit(stage, path, steps=1, ckpt_path=saved)


def test_configure_callbacks_of_a_lightning_module_adds_callbacks(path):
    class WithCallback(Own):
        def configure_callbacks(self):
            return [Timer(duration="01:00:00:00")]

    trainer = fit(PolicyOptimization(WithCallback(path), scorer=length, sampling=SAMPLING), path, steps=1)
    assert any(isinstance(callback, Timer) for callback in trainer.callbacks)


def test_configure_callbacks_of_a_lightning_module_is_checked(path):
    class WithCallback(Own):
        def configure_callbacks(self):
            return [EarlyStopping("val/reward")]

    with pytest.raises(ConfigError, match="looks for the smallest reward"):
        fit(PolicyOptimization(WithCallback(path), scorer=length, sampling=SAMPLING), path, steps=1)


def test_configure_optimizers_of_a_lightning_module_reads_the_steps_of_each_trainer(path):
    own = Own(path)
    stage = PolicyOptimization(own, scorer=length, sampling=SAMPLING)
    fit(stage, path, steps=1)
    assert own.steps == 1
    fit(stage, path, steps=2)
    assert own.steps == 2


def test_own_schedule_and_max_steps_of_the_trainer_with_several_updates_get_a_warning(path):
    stage = PolicyOptimization(Own(path), scorer=length, sampling=SAMPLING, updates_per_step=2)
    with pytest.warns(UserWarning, match=r"moves once in a step of the stage.*Trainer\(max_steps=2\) counts"):
        fit(stage, path, steps=2)


def test_hooks_of_a_lightning_module_see_the_device_of_the_stage(path):
    class Asks(Own):
        def on_train_start(self):
            self.asked = self.device

    own, trainer = Asks(path), Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
    holder = LightningModule()
    call_hooks_of(own, holder)
    holder.trainer, holder._device = trainer, torch.device("cuda", 1)
    holder.on_train_start()
    assert own.asked == torch.device("cuda", 1)


@for_each("name", ["backward", "optimizer_step", "optimizer_zero_grad", "on_before_zero_grad", "lr_scheduler_step"])
def test_methods_that_change_an_optimizer_step_are_refused(path, name):
    own = Own(path)
    changed = type("Changed", (Own,), {name: lambda self, *args: None})
    own.__class__ = changed
    with pytest.raises(ConfigError, match=rf"Changed.{name} is not called, because .*or pass the .model"):
        PolicyOptimization(own, scorer=length, sampling=SAMPLING)


@pytest.mark.filterwarnings("ignore:WithHooks. on_validation_epoch_end will not be called")
def test_hyperparameters_of_a_lightning_module_are_logged(path, tmp_path):
    own = WithHooks(path, width=3)
    fit(PolicyOptimization(own, scorer=length, sampling=SAMPLING), path, 1, logger=CSVLogger(tmp_path, "logs"))
    assert "width: 3" in (tmp_path / "logs" / "version_0" / "hparams.yaml").read_text()


@pytest.mark.parametrize(("interval", "advances"), [("step", 3), ("epoch", 1)])
def test_scheduler_of_a_lightning_module_follows_interval_and_frequency(path, interval, advances):
    own = Own(path, interval)
    fit(PolicyOptimization(own, scorer=length, sampling=SAMPLING), path, steps=6)  # epochs of two steps
    assert own.scheduler.last_epoch == advances
    assert own.steps == 6


def test_model_made_in_configure_model_is_trained(path):
    own = Own(path, late=True)
    with pytest.raises(ConfigError, match="pass tokenizer="):
        PolicyOptimization(own, scorer=length, sampling=SAMPLING)
    tokenizer = PolicyOptimization(path, scorer=length, sampling=SAMPLING).tokenizer
    stage = PolicyOptimization(own, scorer=length, sampling=SAMPLING, tokenizer=tokenizer)
    before = AutoModelForCausalLM.from_pretrained(path).get_input_embeddings().weight
    fit(stage, path, steps=1)
    assert stage.policy is own.model
    assert (own.model.get_input_embeddings().weight - before).abs().max() > 0


def test_lightning_module_with_the_model_under_another_name_is_refused_at_once(path):
    class Other(LightningModule):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(1, 1)
            self.lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    with pytest.raises(ConfigError, match=r"Other.model is not an nn.Module.*: add `self.model = self.lm` to the"):
        PolicyOptimization(Other(), scorer=length, sampling=SAMPLING)


def test_lightning_module_without_an_optimizer_gets_the_optimizer_of_the_stage(path):
    class Bare(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    trainer = fit(PolicyOptimization(Bare(), scorer=length, sampling=SAMPLING), path, steps=1)
    assert isinstance(trainer.optimizers[0], torch.optim.AdamW)


@pytest.mark.parametrize(("packing", "attention"), [(True, "packed_sdpa"), (False, "sdpa")])
def test_packing_sets_the_attention_of_a_transformers_model(path, packing, attention):
    own = Own(path)
    stage = PolicyOptimization(own, scorer=length, sampling=SAMPLING, packing=packing)
    fit(stage, path, 1)
    assert own.model.config._attn_implementation == attention


def test_stop_token_ids_have_the_end_token_of_the_tokenizer(path):
    stage = PolicyOptimization(path, scorer=length, sampling=SAMPLING)
    end = (stage.tokenizer.eos_token_id,)
    assert stage.sampling_setup is not None
    assert stage.sampling.stop_token_ids == stage.sampling_setup.eval_sampling.stop_token_ids == end
    told = SamplingConfig(max_tokens=3, stop_token_ids=(7,))
    assert PolicyOptimization(path, scorer=length, sampling=told).sampling.stop_token_ids == (*end, 7)


def test_model_without_a_path_and_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM has no name_or_path to load a tokenizer from"):
        PolicyOptimization(build_model(), scorer=length, sampling=SAMPLING)


def test_tokenizer_made_by_the_user_gets_a_padding_token_and_needs_an_end(path):
    made = PreTrainedTokenizerFast(tokenizer_object=build_tokenizer().backend_tokenizer, eos_token="<|end|>")
    stage = PolicyOptimization(build_model(), tokenizer=made, scorer=length, sampling=SAMPLING)
    assert stage.tokenizer is made and made.pad_token_id == made.eos_token_id
    for tokenizer, message in (
        (
            PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer),
            r"\(\w+\) has no eos_token: .*set tokenizer\.eos",
        ),
        (made.backend_tokenizer, r"is a Tokenizer, and no tokenizer of transformers: .*PreTrainedTokenizerFast\("),
    ):
        with pytest.raises(ConfigError, match=message):
            PolicyOptimization(build_model(), tokenizer=tokenizer, scorer=length, sampling=SAMPLING)


def test_hyperparameters_of_another_class_are_refused(path):
    own = WithHooks(path, _class_path="rl_plugins.PolicyOptimization", scorer="length")
    with pytest.raises(
        ConfigError, match=r"WithHooks\.hparams has the options of PolicyOptimization, .*LightningCLI\(rl"
    ):
        PolicyOptimization(own, scorer=length, sampling=SAMPLING)


def test_tokenizer_may_be_the_name_of_a_folder(path, tmp_path):
    options: dict[str, Any] = {"scorer": length, "sampling": SAMPLING}
    stage = PolicyOptimization(build_model(), tokenizer=str(path), **options)
    assert stage.tokenizer.name_or_path == str(path) and stage.sampling.stop_token_ids
    with pytest.raises(ConfigError, match="there is no tokenizer in the folder: save the model's tokenizer there"):
        PolicyOptimization(build_model(), tokenizer=str(tmp_path), **options)


@pytest.mark.parametrize("of_eval", [False, True], ids=["training", "validation"])
def test_max_tokens_beyond_the_positions_of_the_model_are_refused(path, of_eval):
    positions = AutoConfig.from_pretrained(path).max_position_embeddings
    largest, larger = (SamplingConfig(max_tokens=count, num_samples=2) for count in (positions - 1, positions))
    message = rf"max_tokens={positions}: the model has {positions} positions for a prompt and its response: lower"
    options: dict[str, Any] = {"sampling": SAMPLING, "eval_sampling": larger} if of_eval else {"sampling": larger}
    for model in (str(path), AutoModelForCausalLM.from_pretrained(path), Own(path)):
        PolicyOptimization(model, scorer=length, sampling=largest)
        with pytest.raises(ConfigError, match=message):
            PolicyOptimization(model, scorer=length, **options)
    with pytest.raises(ConfigError, match=message):
        OnlinePreferenceOptimization(str(path), scorer=length, **options)
    for stage in (SFT, PreferenceOptimization):
        with pytest.raises(ConfigError, match=message):
            stage(str(path), scorer=length, eval_sampling=larger)


def test_options_of_another_type_are_refused_with_the_class(path):
    options: Any = {"max_tokens": 3}
    name: Any = "rloo"
    with pytest.raises(ConfigError, match=r"sampling=\{'max_tokens': 3\}: pass rl\.SamplingConfig\(\.\.\.\)"):
        PolicyOptimization(path, scorer=length, sampling=options)
    with pytest.raises(ConfigError, match=r"algorithm='rloo': pass rl\.Algorithm\(\.\.\.\)"):
        PolicyOptimization(path, scorer=length, sampling=SAMPLING, algorithm=name)


def test_groups_of_one_sample_get_a_warning(path):
    with pytest.warns(UserWarning, match="num_samples=1: GRPO compares the samples of a prompt"):
        PolicyOptimization(path, scorer=length, sampling=SamplingConfig(max_tokens=3))


def test_checkpoint_of_another_stage_is_refused_with_the_way_out(path, tmp_path):
    stage = PolicyOptimization(path, scorer=length, sampling=SAMPLING)
    fit(stage, path, steps=1).save_checkpoint(tmp_path / "saved.ckpt")

    class Own(PolicyOptimization):
        """A class of the user."""

    own = Own(path, scorer=length, sampling=SAMPLING)
    fit(own, path, steps=2, ckpt_path=tmp_path / "saved.ckpt")
    assert own.step == 2
    other = SFT(path, scorer=length, eval_sampling=SAMPLING)
    with pytest.raises(CheckpointError, match=r"of the stage PolicyOptimization, and SFT cannot.*leave ckpt_path out"):
        fit(other, path, steps=2, ckpt_path=tmp_path / "saved.ckpt")
