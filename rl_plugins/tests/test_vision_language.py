"""Log-probs and scores of vision-language models, padded and packed, against single samples of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, SmolVLMConfig

from benchmarks.tiny_vision import processor, save_tiny_vision
from rl_plugins.config.models import LoraConfig
from rl_plugins.data.experience import Experience
from rl_plugins.data.image_prompts import ImagePromptEncoder
from rl_plugins.data.images import IMAGE_INPUTS, inputs_of, num_patches
from rl_plugins.errors import ConfigError
from rl_plugins.model_json import read_model_config
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.models.lora import MergedWeightSource, add_adapter
from rl_plugins.models.packing import pack, shares_prompts
from rl_plugins.models.scalar_head import load_scalar_head, response_scores
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.planning.shape import shape_of
from rl_plugins.stages.micro_batches import Lengths
from rl_plugins.tests.pictures import picture
from rl_plugins.tests.stages.with_images import assert_alike, of_tower
from rl_plugins.vision_language import SampleImages, language_model, patch_size, vision_tower
from rl_plugins.weights.source import ModuleWeightSource

FAMILIES = ("llava", "gemma3", "qwen2_5_vl", "qwen3_vl", "idefics3")
PROMPTS = [
    ("<image>which color?", [picture(1)]),
    ("no picture at all", []),
    ("<image> or <image>?", [picture(2, (20, 40)), picture(3, (48, 24))]),
    # The same tokens as the first prompt, and another image.
    ("<image>which color?", [picture(4)]),
]
OF_PROMPT = [2, 0, 1, 3, 0, 2, 1]
"""Prompt of each sample."""
RESPONSES = [[60, 61, 62], [80, 81, 82, 83], [70, 71], [75], [84, 85], [63], [72, 73, 74]]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(family)
    save_tiny_vision(family, path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_causal_lm(str(folder), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def samples(family: str) -> Experience:
    return samples_of(family)


def samples_of(family: str) -> Experience:
    prompts = ImagePromptEncoder(processor(family))
    encoded = [
        prompts.encode([{"role": "user", "content": question}], images, {})
        if images
        else (prompts.tokenizer.encode(question), None)
        for question, images in PROMPTS
    ]
    ids, images_of_prompts = zip(*[encoded[number] for number in OF_PROMPT], strict=True)
    return Experience.from_responses(ids, RESPONSES, 0, image_inputs=inputs_of(images_of_prompts))


@pytest.fixture(scope="module")
def alone(family: str) -> list[dict[str, Any]]:
    """Inputs of transformers for each sample alone."""
    found = []
    for number, tokens in zip(OF_PROMPT, RESPONSES, strict=True):
        (question, images), response = PROMPTS[number], torch.tensor([tokens])
        inputs: dict[str, Any] = {"input_ids": torch.tensor([processor(family).tokenizer.encode(question)])}
        if images:
            made = processor(family)
            text = made.apply_chat_template(
                [{"role": "user", "content": parts(question)}], tokenize=False, add_generation_prompt=True
            )
            inputs = dict(made(images=images, text=[text], return_tensors="pt", add_special_tokens=False))
            inputs.pop("attention_mask")
        for name, value in inputs.items():
            if name in ("token_type_ids", "mm_token_type_ids"):
                inputs[name] = torch.cat([value, torch.zeros_like(response)], dim=1)
        found.append({**inputs, "input_ids": torch.cat([inputs["input_ids"], response], dim=1)})
    return found


def parts(question: str) -> list[dict[str, str]]:
    pieces = question.split("<image>")
    listed: list[dict[str, str]] = []
    for place, piece in enumerate(pieces):
        listed += [{"type": "image"}] if place else []
        listed += [{"type": "text", "text": piece}] if piece else []
    return listed


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_response_log_probs_with_images_equal_single_samples(
    model: Any, samples: Experience, alone: list[dict[str, Any]], packed: bool
) -> None:
    with torch.no_grad():
        found = response_log_probs(model, **samples.forward_inputs, packed=packed).log_probs_BT
        for own, inputs, tokens in zip(found, alone, RESPONSES, strict=True):
            response = torch.tensor(tokens)[:, None]
            log_probs = model(**inputs).logits[0, -len(tokens) - 1 : -1].log_softmax(-1)
            torch.testing.assert_close(own[: len(tokens)], log_probs.gather(-1, response)[:, 0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_response_scores_with_images_equal_single_samples(
    family: str, folder: Path, samples: Experience, alone: list[dict[str, Any]], packed: bool
) -> None:
    model: Any = load_scalar_head(str(folder), dtype=torch.float32).eval()
    body = load_causal_lm(str(folder), dtype=torch.float32).base_model.state_dict()
    assert all(torch.equal(weight, body[name]) for name, weight in model.base_model.state_dict().items())
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found = response_scores(model, **samples.forward_inputs, packed=packed)
        for own, inputs, tokens in zip(found, alone, RESPONSES, strict=True):
            scores = model(**inputs).logits[0, -len(tokens) :, 0]
            torch.testing.assert_close(own[: len(tokens)], scores, rtol=0, atol=5e-5)


def assert_images_are_read_once(model: Any, samples: Experience, *, packed: bool) -> None:
    """Compare gradients with a pass in which no sample shares an image, and count patches at the tower."""

    def gradients(images: list[Any]) -> tuple[dict[str, torch.Tensor], list[int]]:
        model.zero_grad()
        seen: list[int] = []
        embedding = next(m for m in vision_tower(model).modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Conv3d))
        hook = embedding.register_forward_hook(lambda module, given, made: seen.append(made[:, 0].numel()))
        inputs: dict[str, Any] = {**samples.forward_inputs, "image_inputs_B": images}
        log_probs_N = response_log_probs(model, **inputs, packed=packed).log_probs_BT[samples.response_mask.bool()]
        (log_probs_N * torch.linspace(-1, 1, len(log_probs_N))).sum().backward()
        hook.remove()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, seen

    images = samples.columns[IMAGE_INPUTS]
    shared, once = gradients(images)
    # Other objects, and so other images.
    expected, each = gradients([inputs and {**inputs} for inputs in images])
    patches = [num_patches(inputs, patch_size(model)) if inputs else 0 for inputs in images]
    assert once == [sum(patches[place] for place in (0, 1, 3))] and each == [sum(patches)]
    assert any(expected[name].abs().max() > 1e-4 for name in of_tower(expected))
    assert_alike(shared, expected)
    assert "get_image_features" not in vars(model.base_model)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_gradients_with_images_of_several_samples_equal_a_pass_for_each_sample(
    folder: Path, samples: Experience, packed: bool
) -> None:
    model: Any = load_causal_lm(str(folder), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("mm_input_projection_weight"):
            # A new projector of Gemma 3 is 0, and keeps gradients from its tower.
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(3))
    assert_images_are_read_once(model, samples, packed=packed)


def test_gradients_of_smolvlm_with_images_of_several_samples(tmp_path: Path) -> None:
    config = save_tiny_vision("idefics3", tmp_path).config.to_dict()
    del config["model_type"], config["vision_config"]["model_type"]
    model = AutoModelForImageTextToText.from_config(SmolVLMConfig(**config), dtype=torch.float32)
    assert_images_are_read_once(model, samples_of("idefics3"), packed=False)


def test_packed_row_has_each_prompt_and_each_image_once(family: str, model: Any, samples: Experience) -> None:
    row = pack(model, **samples.forward_inputs)
    # Gemma 3 has a mask of its own.
    shared = family != "gemma3"
    assert shares_prompts(model) == shared
    prompts = samples.prompt_lengths[:4] if shared else samples.prompt_lengths
    tokens = prompts.sum() + samples.response_lengths.sum()
    input_ids = row.inputs.arguments["input_ids"]
    assert input_ids.shape == (1, tokens)
    images = SampleImages(model, samples.columns[IMAGE_INPUTS][:4], samples.input_ids[:4])
    for name, values in images.arguments(input_ids).items():
        torch.testing.assert_close(row.inputs.arguments[name], values, rtol=0, atol=0)
    assert Lengths.of(samples).first_B.tolist() == [0, 1, 2, 3, 1, 0, 2]


def test_adapter_of_the_language_model_leaves_tower_and_projector_as_before(folder: Path) -> None:
    model = add_adapter(
        load_causal_lm(str(folder), dtype=torch.float32), LoraConfig(rank=4, target_modules="language-model")
    )
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(name.startswith(f"base_model.model.{language_model(model)}.layers.") for name in trained)
    shape = shape_of(read_model_config(folder / "config.json"), "model")
    assert sum(parameter.numel() for parameter in trained.values()) == shape.adapter(4, with_tower=False)
    assert "adapter_config.json" in MergedWeightSource(ModuleWeightSource(model), model).adapter_files()


def test_adapter_files_refuse_an_adapter_of_the_vision_tower(folder: Path) -> None:
    model = add_adapter(load_causal_lm(str(folder), dtype=torch.float32), LoraConfig(rank=4))
    source = MergedWeightSource(ModuleWeightSource(model), model)
    with pytest.raises(ConfigError, match=r"alone: use LoraConfig\(target_modules='language-model'\), or lora_rank=0"):
        source.adapter_files()


def test_arguments_of_images_have_the_size_of_the_largest_images(folder: Path) -> None:
    # LLaVA-NeXT has the patches of an image on the second axis, Pixtral has images of all sizes.
    inputs = [
        {"pixel_values": torch.ones(1, *shape), "image_sizes": torch.tensor([shape[-2:]])}
        for shape in ((5, 3, 4, 4), (4, 3, 2, 6))
    ]
    model = load_causal_lm(str(folder), dtype=torch.float32)
    ids_BS = torch.full((2, 1), model.config.image_token_id)
    joined = SampleImages(model, inputs, ids_BS).arguments(ids_BS)
    assert joined["pixel_values"].shape == (2, 5, 3, 4, 6) and joined["image_sizes"].tolist() == [[4, 4], [2, 6]]
    for index, shape in enumerate(((5, 3, 4, 4), (4, 3, 2, 6))):
        own = joined["pixel_values"][index]
        assert own[tuple(map(slice, shape))].eq(1).all() and own.sum() == torch.ones(shape).sum()


def test_response_scores_of_a_model_of_text_refuse_images(samples: Experience, tmp_path: Path) -> None:
    model = load_scalar_head(str(save_tiny_policy(tmp_path)), dtype=torch.float32)
    with pytest.raises(ConfigError, match="the samples have images, and Qwen2ForTokenClassification reads text alone"):
        response_scores(model, **samples.forward_inputs)
