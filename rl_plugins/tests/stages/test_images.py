"""Stages on prompts with images: sharded models, ranks without images, and samples of the transformers engine."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.tiny_vision import EXPERTS, processor, save_tiny_vision
from rl_plugins.callbacks.router_losses import RouterLosses
from rl_plugins.config.models import LoraConfig, OptimizerConfig
from rl_plugins.config.sampling import EnvironmentConfig, SamplingConfig
from rl_plugins.data.datamodule import PromptDataModule
from rl_plugins.data.experience import ROUTED_EXPERTS, Experience
from rl_plugins.data.image_prompts import ImagePromptEncoder, load_processor
from rl_plugins.data.images import IMAGE_INPUTS, PROMPT_IMAGES, PromptImages, num_patches, thumbnail
from rl_plugins.data.preferences import PreferenceDataModule
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.errors import ConfigError
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.tiny import build_model, build_tokenizer
from rl_plugins.rewards.records import Score
from rl_plugins.rewards.trajectory import Ending
from rl_plugins.rollout.engine import Generations
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.stages.forward_passes import SequenceRows
from rl_plugins.stages.micro_batches import Lengths
from rl_plugins.stages.preference_optimization import PreferenceOptimization
from rl_plugins.stages.sampling import PromptSampler
from rl_plugins.stages.sft import SFT
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.sequence_parallel import body_of
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.strategies.tensor_parallel import plan_of
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.patience import patient
from rl_plugins.tests.pictures import encoded, picture, row
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned
from rl_plugins.tests.stages.with_images import (
    EACH_FAMILY,
    FAMILIES,
    assert_alike,
    batch_of,
    encoded_with_image,
    of_tower,
    rows_of,
    sampled,
    saved_families,
    single_device,
)
from rl_plugins.tests.tiers import tiered
from rl_plugins.vision_language import padded_inputs, patch_size, vision_tower


class OwnPolicy(canned.OwnPolicy):
    """A policy with SGD. Adam would amplify rounding errors, SGD does not."""

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.02)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved_families(tmp_path_factory.mktemp("families"))


def trained(
    family: str,
    folder: Path,
    strategy: Any,
    rank: int = 0,
    world_size: int = 1,
    batches: list[dict[str, Any]] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Train two steps of SFT, on the same batch without `batches`; return the weights."""
    weights: dict[str, Tensor] = {}

    class Inspect(SFT):
        def on_train_end(self) -> None:
            weights.update({name: tensor.clone() for name, tensor in self.strategy.weight_source()})

    model: Any = str(folder)
    if "optimizer" not in options:
        model = OwnPolicy(model=load_causal_lm(model, dtype=torch.float32))
    stage = Inspect(
        model,
        tokenizer=processor(family),
        scorer=canned.CannedScorer(),
        eval_sampling=SamplingConfig(max_tokens=4),
        max_steps=2,
        **options,
    )
    batches = batches or [batch_of(family, list(range(6))[rank::world_size])] * 2
    flags: dict[str, Any] = {"accelerator": "cpu", "precision": "32-true", "devices": 1, "num_nodes": world_size}
    canned.quiet_trainer(strategy, **flags).fit(stage, canned.loader(batches))
    assert stage.step == 2
    return weights


def trained_rank(rank: int, family: str, folder: Path, name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Train on one of two ranks. The second rank has no image."""
    of_strategy: dict[str, Any] = {"rollout": canned.CannedRollout(), "timeout_s": patient(100)}
    strategy = FSDPStrategy(**of_strategy) if name == "fsdp" else ZeroStrategy(stage=3, **of_strategy)
    return trained(family, folder, strategy, rank, 2, **options)


@pytest.mark.parametrize(
    ("family", "name", "packing"),
    tiered(
        product(FAMILIES, ("zero", "fsdp"), (True, False)),
        core={("qwen2_5_vl", "zero", True), ("gemma3", "fsdp", False), ("llava", "fsdp", True)},
    ),
)
def test_sharded_models_with_images_on_one_rank_alone_equal_one_process(
    family: str, name: str, packing: bool, folders: dict[str, Path]
) -> None:
    expected = trained(family, folders[family], single_device())
    start = dict(load_causal_lm(str(folders[family]), dtype=torch.float32).named_parameters())
    assert any(not torch.equal(expected[parameter], start[parameter]) for parameter in of_tower(expected))
    for weights, _ in run_ranks(trained_rank, family, folders[family], name, {"packing": packing}, world_size=2):
        assert_alike(weights, expected)


class WithoutBlankImages(ZeroStrategy):
    """Stage 3 with passes that do not use the vision tower."""

    needs_all_parameters = False


def trained_without_images_in_the_second_step(_: int, folder: Path, kind: str) -> dict[str, Tensor]:
    """Train on one rank. The second batch has no image, so the vision tower has no gradient in the second step."""
    strategy: Any = single_device()
    if kind != "single device":
        of_kind = WithoutBlankImages if kind == "unused" else ZeroStrategy
        place = "cpu" if kind == "cpu" else "stay"
        strategy = of_kind(stage=3, rollout=canned.CannedRollout(), offload={"policy": place})
    return trained("llava", folder, strategy, batches=[batch_of("llava", places) for places in ([0, 1], [1, 3])])


@pytest.mark.parametrize("kind", ["blank image", "cpu", "unused"])
def test_stage_3_does_not_train_a_tower_by_the_gradient_of_an_earlier_step(kind: str, folders: dict[str, Path]) -> None:
    expected = trained_without_images_in_the_second_step(0, folders["llava"], "single device")
    arguments = (folders["llava"], kind)
    ((weights, _),) = run_ranks(trained_without_images_in_the_second_step, *arguments, world_size=1)
    assert_alike(weights, expected)


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_patches_per_micro_batch_bounds_the_images_of_a_pass(family: str, folders: dict[str, Path]) -> None:
    folder = folders[family]
    bounded = trained(family, folder, single_device(), patches_per_micro_batch=1)
    assert_alike(bounded, trained(family, folder, single_device()))
    for packing in (True, False):
        stage = sampled(family, folder, packing=packing, patches_per_micro_batch=1)
        (samples,) = stage.trained_on
        first_B, images_B = Lengths.of(samples).first_B, samples.columns[IMAGE_INPUTS]
        shared = stage.passes.cutter.shares_prompts
        for part in stage.passes.micro_batches(samples):
            seen = [index for index in (first_B[part].unique() if shared else part).tolist() if images_B[index]]
            assert len(seen) <= 1


def test_patches_per_micro_batch_needs_a_vision_tower() -> None:
    stage = SFT(
        build_model(),
        tokenizer=build_tokenizer(),
        scorer=canned.CannedScorer(),
        eval_sampling=SamplingConfig(max_tokens=4),
        max_steps=1,
        patches_per_micro_batch=64,
    )
    batch = {"prompt_ids": [[1, 2]], "response_ids": [[3]]}
    with pytest.raises(ConfigError, match=r"patches_per_micro_batch: Qwen2ForCausalLM has no vision tower"):
        canned.quiet_trainer(single_device()).fit(stage, canned.loader([batch]))


def test_num_patches_counts_the_rows_of_the_vision_tower(folders: dict[str, Path]) -> None:
    for family in FAMILIES:
        prompts, model = (
            ImagePromptEncoder(processor(family)),
            load_causal_lm(str(folders[family]), dtype=torch.float32),
        )
        _, inputs = encoded_with_image(prompts, picture(0))
        rows: list[int] = []
        tower = vision_tower(model)
        embedding = next(module for module in tower.modules() if isinstance(module, nn.Conv2d | nn.Conv3d))
        embedding.register_forward_hook(lambda module, given, made: rows.append(made[:, 0].numel()))  # noqa: B023
        ids = torch.tensor([prompts.encode_blank(picture(0))[0]])
        model(**padded_inputs(
            model,
            input_ids_BS=ids,
            attention_mask_BS=torch.ones_like(ids),
            position_ids_BS=torch.arange(ids.shape[1])[None],
            image_inputs_B=[inputs],
        ).arguments)  # fmt: skip
        assert [num_patches(inputs, patch_size(model))] == rows


@pytest.mark.parametrize("name", ["zero", "fsdp"])
def test_vision_lr_freezes_or_slows_the_vision_tower(name: str, folders: dict[str, Path]) -> None:
    folder, start = folders["llava"], load_causal_lm(str(folders["llava"]), dtype=torch.float32).state_dict()

    def options(vision_lr: float | None) -> dict[str, Any]:
        return {"optimizer": OptimizerConfig(name="SGD", lr=0.02, vision_lr=vision_lr, gradient_clip=0.0)}

    def change(weights: dict[str, Tensor]) -> float:
        return float(sum((weights[tower] - start[tower]).norm() ** 2 for tower in of_tower(weights))) ** 0.5

    expected = {rate: trained("llava", folder, single_device(), **options(rate)) for rate in (None, 0.0, 0.002)}
    assert change(expected[0.0]) == 0 and change(expected[None]) > 1e-3
    assert change(expected[0.002]) == pytest.approx(0.1 * change(expected[None]), rel=0.2)
    outside = LoraConfig(rank=2, target_modules=r"model\.language_model.*q_proj")
    with pytest.raises(ConfigError, match="no parameter of the vision tower is trained, because the adapter leaves"):
        trained("llava", folder, single_device(), **options(0.002), lora=outside)
    for rate in (0.0, 0.002):
        for weights, _ in run_ranks(trained_rank, "llava", folder, name, options(rate), world_size=2):
            assert_alike(weights, expected[rate])


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_policy_optimization_samples_with_images_and_has_the_log_probs_of_the_engine(
    family: str, folders: dict[str, Path]
) -> None:
    for packing in (True, False):
        stage = sampled(family, folders[family], packing=packing)
        (samples,) = stage.trained_on
        shown = [len(sample["images"]) for sample in stage.shown_samples.training]
        assert sorted(shown) == [0, 0, 0, 1, 1] or sorted(shown) == [0, 0, 1, 1, 1]
        mask = samples.response_mask.bool()
        assert len(samples) == 12 and sum(images is not None for images in samples.columns[IMAGE_INPUTS]) == 6
        # Two prompts with an image, and the prompt without.
        assert len(Lengths.of(samples).first_B.unique()) == 3
        torch.testing.assert_close(samples.old_log_probs[mask], samples.rollout_log_probs[mask], rtol=0, atol=2e-5)


def test_samples_with_images_are_written_and_read_again(folders: dict[str, Path], tmp_path: Path) -> None:
    (samples,) = sampled("llava", folders["llava"]).trained_on
    samples.save(tmp_path / "samples")
    again = Experience.load(tmp_path / "samples")
    for own, other in zip(samples.columns[IMAGE_INPUTS], again.columns[IMAGE_INPUTS], strict=True):
        assert own is other is None or torch.equal(own["pixel_values"], other["pixel_values"])


def test_samples_of_a_prompt_whose_image_was_removed_fail(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "one.png").write_bytes(encoded(picture()))
    rows = [row("<image>color?", picture(1)), row("<image>color?", str(tmp_path / "one.png")), *rows_of(2)]
    data = PromptDataModule(rows, rows, tokenizer=processor("llava"), prompts_per_step=4, bad_images="filter")
    data.setup("fit")
    (tmp_path / "one.png").unlink()
    stage = sampled("llava", folders["llava"], data=data, eval_sampling=SamplingConfig(max_tokens=4))
    (samples,) = stage.trained_on
    bad = samples.groups == 1
    assert samples.valid.tolist() == (~bad).tolist() and not samples.response_mask[bad].any()
    # The validation before the step has metrics, too.
    assert [metrics["train/reward_image"] for metrics in stage.metrics if "train/reward" in metrics] == [3]
    strategy = SingleDeviceRolloutStrategy(rollout=TransformersRollout(str(folders["llava"])))
    canned.quiet_trainer(strategy).validate(stage, datamodule=data, verbose=False)
    assert [shown["failure"] for shown in stage.shown_samples.validation] == [None, "image", None, None]
    assert (
        caplog.text.count("left out since the start of the run: list, row 1, column 'images': image 0 cannot be read (")
        == 2
    )


def test_validation_samples_with_the_images_of_the_prompts(folders: dict[str, Path]) -> None:
    def responses(first: int) -> list[str]:
        stage = canned.Keeping(
            load_causal_lm(str(folders["llava"]), dtype=torch.float32),
            tokenizer=processor("llava"),
            sampling=SamplingConfig(max_tokens=4),
            eval_sampling=SamplingConfig(max_tokens=16),
            scorer=lambda solution_str: float(len(solution_str)),
        )
        rows = [row("<image>color?", picture(first)), row("no picture"), row("<image>color?", picture(1))]
        data = PromptDataModule(None, rows, prompts_per_step=1, eval_batch_size=2)
        strategy = SingleDeviceRolloutStrategy(rollout=TransformersRollout(str(folders["llava"])))
        canned.quiet_trainer(strategy).validate(stage, datamodule=data, verbose=False)
        shown = stage.shown_samples.validation
        assert [sample["images"] for sample in shown] == [[thumbnail(picture(first))], [], [thumbnail(picture(1))]]
        return [sample["response"] for sample in shown]

    ours, theirs = responses(0), responses(2)
    assert [own == other for own, other in zip(ours, theirs, strict=True)] == [False, True, True]


def test_images_stay_in_all_turns_of_a_conversation(folders: dict[str, Path]) -> None:
    def answer(solution_str: str, turns_left: int) -> object:
        return "and?" if turns_left else 1.0

    environment = EnvironmentConfig(max_turns=2, max_observation_tokens=8)
    (samples,) = sampled("llava", folders["llava"], max_tokens=32, scorer=answer, environment=environment).trained_on
    mask = samples.response_mask.bool()
    assert any(ending.turns == 2 for ending in samples.columns["ending"])
    torch.testing.assert_close(samples.old_log_probs[mask], samples.rollout_log_probs[mask], rtol=0, atol=2e-5)


def test_a_prompt_of_the_environment_has_no_images_beside_prompts_with_images() -> None:
    image = PromptImages({"pixel_values": torch.ones(1)}, [picture()], [5], 1)
    prompts = PromptBatch([[5], [5]], [0, 1], {"prompt": ["a", "b"], PROMPT_IMAGES: [image, image]}, epoch=0)
    score = Score(1.0)
    endings = [Ending(score, [], 0, 1), Ending(score, [], 0, 1, prompt=[{"role": "user"}], prompt_ids=[7, 8])]
    generations = Generations.from_responses([[60], [61]], [[0.0], [0.0]], ["stop", "stop"], 0)
    generations = replace(generations, endings=endings)
    sampler = PromptSampler(single_device(), processor("llava").tokenizer, seed=0)
    samples = sampler.experience(prompts, generations, 1, [0, 1])
    assert samples.columns[IMAGE_INPUTS] == [image.inputs, None]
    assert samples.prompts.tolist()[1] == [7, 8]


class ModelInAPool(nn.Module):
    """A model of another process."""

    def position_scores(self, **arguments: Any) -> Tensor:
        raise AssertionError("no pass runs")

    def response_log_probs(self, **arguments: Any) -> Any:
        raise AssertionError("no pass runs")


@pytest.mark.parametrize(("model", "rows"), [(nn.Linear(1, 1), 3), (ModelInAPool(), 2)], ids=["shared", "pool"])
def test_inputs_add_a_blank_image_for_models_that_the_ranks_share(
    model: nn.Module, rows: int, folders: dict[str, Path]
) -> None:
    stage = sampled("llava", folders["llava"])
    (samples,) = stage.trained_on
    passes = replace(stage.passes, strategy=SimpleNamespace(needs_all_parameters=True))
    without = [index for index, images in enumerate(samples.columns[IMAGE_INPUTS]) if images is None][:2]
    inputs = passes.inputs(model, SequenceRows.of(samples[torch.tensor(without)]))
    assert len(inputs["input_ids_BS"]) == len(inputs["image_inputs_B"]) == rows


def test_preference_optimization_and_an_adapter_train_with_images(folders: dict[str, Path]) -> None:
    rows = [{**found, "chosen": "red", "rejected": "green"} for found in rows_of(2)]
    data = PreferenceDataModule(rows, prompts_per_step=2)
    stage = PreferenceOptimization(
        str(folders["llava"]),
        tokenizer=load_processor(str(folders["llava"])),
        scorer=canned.CannedScorer(),
        eval_sampling=SamplingConfig(max_tokens=4),
        lora=LoraConfig(rank=2),
        max_steps=1,
    )
    metrics = canned.metrics_of(stage)
    canned.quiet_trainer(single_device()).fit(stage, datamodule=data)
    assert metrics["train/loss"] == pytest.approx(0.6931, abs=1e-3)


def test_export_of_a_vision_language_model_has_the_processor(folders: dict[str, Path], tmp_path: Path) -> None:
    stage = sampled("gemma3", folders["gemma3"])
    stage.export(tmp_path / "policy")
    prompts = ImagePromptEncoder(load_processor(str(tmp_path / "policy")))
    message = {"role": "user", "content": "<image>color?"}
    wanted = ImagePromptEncoder(processor("gemma3")).encode([message], [picture()], {})[0]
    assert prompts.encode([message], [picture()], {})[0] == wanted
    exported = dict(load_causal_lm(str(tmp_path / "policy"), dtype=torch.float32).named_parameters())
    assert all(torch.equal(exported[name], tensor) for name, tensor in stage.policy.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_parallel_blocks_of_a_vision_language_model_are_refused(family: str, folders: dict[str, Path]) -> None:
    model = load_causal_lm(str(folders[family]), dtype=torch.float32)
    with pytest.raises(ConfigError, match="has no plan for tensor parallelism: set tensor_parallel=1"):
        plan_of(model, "policy", 2)
    with pytest.raises(ConfigError, match="does not attend by packed_sdpa below a head: set sequence_parallel=1"):
        body_of(model, "policy", 2)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of LLaVA with experts."""
    folder: Path = tmp_path_factory.mktemp("mixture")
    save_tiny_vision("llava", folder, **EXPERTS)
    return folder


def test_router_replay_has_the_experts_of_the_tokens_of_images(mixture: Path) -> None:
    def trained_on(**options: Any) -> tuple[Experience, dict[str, float]]:
        stage = sampled("llava", mixture, **options)
        return stage.trained_on[0], stage.metrics[-1]

    recomputed, metrics = trained_on(router_replay="recompute")
    padded, padded_metrics = trained_on(router_replay="recompute", packing=False)
    of_engine, _ = trained_on(router_replay="rollout", return_experts=True)
    assert metrics["train/router_differing"] > 0
    assert padded_metrics["train/loss"] == pytest.approx(metrics["train/loss"], abs=1e-4)
    tokens = recomputed.sequence_lengths.tolist()
    columns = [samples.columns[ROUTED_EXPERTS] for samples in (recomputed, padded, of_engine)]
    for own, in_padded, sampled_with, count in zip(*columns, tokens, strict=True):
        assert len(own) == count and own.equal(in_padded)
        # The engine does not run the last token.
        assert own[:-1].equal(sampled_with[:-1])


def test_router_replay_leaves_the_choice_for_a_blank_image_to_the_routers(mixture: Path) -> None:
    for packing in (True, False):
        stage = sampled("llava", mixture, router_replay="recompute", packing=packing)
        (samples,) = stage.trained_on
        without = samples[torch.tensor([images is None for images in samples.columns[IMAGE_INPUTS]]).nonzero()[:, 0]]
        shared = SimpleNamespace(
            needs_all_parameters=True,
            phase_log=stage.strategy.phase_log,
            model_engine=stage.strategy.model_engine,
        )
        found = []
        with torch.no_grad():
            for passes in (stage.passes, replace(stage.passes, strategy=shared)):
                log_probs = passes.log_probs("policy", without.trimmed()).log_probs_BT
                found.append((log_probs, passes.differing_experts(without), torch.cat(passes.experts(without))))
        for alone, with_blank in zip(*found, strict=True):
            torch.testing.assert_close(alone, with_blank, rtol=0, atol=2e-5)
        assert len(found[0][1]) == without.sequence_lengths.sum()


def test_router_losses_refuse_a_stage_with_images(mixture: Path) -> None:
    stage, trainer = sampled("llava", mixture), canned.quiet_trainer(single_device())
    with pytest.raises(ConfigError, match="router_losses: losses of the routers of a vision-language model would"):
        RouterLosses(balance=0.01).on_fit_start(trainer, stage)
