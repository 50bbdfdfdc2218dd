"""Batches and short runs with images, for tests of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from benchmarks.tiny_vision import processor, save_tiny_vision
from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.datamodule import PromptDataModule
from rl_plugins.data.image_prompts import ImagePromptEncoder
from rl_plugins.data.images import IMAGE_INPUTS
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.pictures import picture, row
from rl_plugins.tests.stages import canned
from rl_plugins.tests.tiers import tiered

FAMILIES = ("llava", "gemma3", "qwen2_5_vl", "qwen3_vl", "idefics3")
EACH_FAMILY = tiered(FAMILIES, core={"llava", "gemma3", "qwen2_5_vl", "idefics3"})
"""Families as cases of a test. `make test` compares the passes of Qwen3-VL in test_vision_language."""
RESPONSES = [[80, 81, 82, 83, 257], [70, 257], [60, 61, 257], [75, 76, 77, 257], [62, 63, 257], [71, 257]]


def saved_families(folder: Path) -> dict[str, Path]:
    """Save a tiny model of each family in a folder; return the folder of each family."""
    for family in FAMILIES:
        save_tiny_vision(family, folder / family)
    return {family: folder / family for family in FAMILIES}


def batch_of(family: str, places: list[int]) -> dict[str, Any]:
    """Return a batch in which each second example has an image. Examples 0 and 4 have the same prompt and image."""
    prompts = ImagePromptEncoder(processor(family))
    encoded = {
        place: encoded_with_image(prompts, picture(place))
        if place % 2 == 0
        else (prompts.tokenizer.encode("no picture"), None)
        for place in {place % 4 for place in places}
    }
    ids, inputs = zip(*(encoded[place % 4] for place in places), strict=True)
    responses = [RESPONSES[place] for place in places]
    return {"prompt_ids": list(ids), "response_ids": responses, IMAGE_INPUTS: list(inputs)}


def encoded_with_image(prompts: ImagePromptEncoder, image: Image) -> tuple[list[int], Any]:
    ids, images = prompts.encode([{"role": "user", "content": "<image>color?"}], [image], {})
    assert images is not None
    return ids, images.inputs


def single_device() -> SingleDeviceRolloutStrategy:
    return SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())


def of_tower(weights: dict[str, Tensor]) -> list[str]:
    return [name for name in weights if any(part in name for part in ("vision_tower", "visual", "vision_model"))]


def of_images(weights: dict[str, Tensor]) -> list[str]:
    """Return the names of the weights of vision tower and projector. A new projector of Gemma 3 is 0."""
    of_text = ("language_model", "text_model", "score", "lm_head")
    return [name for name in weights if not any(part in name for part in of_text)]


def assert_alike(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for parameter, tensor in expected.items():
        torch.testing.assert_close(weights[parameter], tensor, rtol=0, atol=2e-5, msg=parameter)


def rows_of(count: int) -> list[dict[str, Any]]:
    return [row("<image>color?", picture(number)) if number % 2 else row("no picture") for number in range(count)]


def sampled(
    family: str,
    folder: Path,
    *,
    max_tokens: int = 8,
    return_experts: bool = False,
    data: PromptDataModule | None = None,
    **options: Any,
) -> Any:
    """Train one step of GRPO on samples of the transformers engine; return the stage."""
    stage = canned.Keeping(
        load_causal_lm(str(folder), dtype=torch.float32),
        tokenizer=processor(family),
        # Half of the vocabulary ends a turn.
        sampling=SamplingConfig(max_tokens=max_tokens, num_samples=3, stop_token_ids=tuple(range(128))),
        optimizer=OptimizerConfig(lr=0.01),
        updates_per_step=2,
        max_steps=1,
        **{"algorithm": Algorithm(), "scorer": lambda solution_str: float(len(solution_str)), **options},
    )
    stage.shown_samples.limit = 5
    data = data or PromptDataModule(rows_of(4), tokenizer=processor(family), prompts_per_step=4)
    strategy = SingleDeviceRolloutStrategy(rollout=TransformersRollout(str(folder), return_experts=return_experts))
    canned.quiet_trainer(strategy).fit(stage, datamodule=data)
    assert stage.step == 1
    return stage
