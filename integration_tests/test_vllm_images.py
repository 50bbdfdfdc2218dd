"""Prompts with images in a live vLLM engine: tokens, log-probs, weights of the vision tower, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.tiny_vision import save_tiny_vision
from integration_tests.resident import change, hold_after, inside, running_engine, steps_taken
from rl_plugins.config.models import LoraConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.image_prompts import ImagePromptEncoder, load_processor
from rl_plugins.errors import ConfigError, DataError
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.lora import MergedWeightSource, adapter_off, add_adapter
from rl_plugins.rollout.engine import GroupRequest
from rl_plugins.rollout.vllm.client import VLLMRollout
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.tests.models.random_adapter import with_random_adapter
from rl_plugins.tests.patience import wait_until
from rl_plugins.tests.pictures import picture
from rl_plugins.weights.source import ModuleWeightSource

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Idefics 3, which vLLM has without torchvision."""
    folder = tmp_path_factory.mktemp("idefics3")
    save_tiny_vision("idefics3", folder)
    return folder


@pytest.fixture(scope="module")
def engine(running_ray: Any, model: Path) -> Iterator[VLLMRollout]:
    with running_engine(VLLMConfig(str(model), max_model_len=128)) as rollout:
        rollout.connect(0, 1)
        yield rollout


@pytest.fixture(scope="module")
def policy(model: Path) -> Any:
    """The policy. A connection sends the weights of one policy, and tests may change the weights."""
    return load_causal_lm(str(model), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def requests(model: Path) -> list[GroupRequest]:
    """Prompts with two images, one and none, and a later turn of a conversation about an image."""
    prompts, found = ImagePromptEncoder(load_processor(str(model))), []
    # As in validation, tickets may be negative.
    for ticket, (text, images) in enumerate({
        "<image>and <image>?": [picture(1), picture(2, (24, 48))], "<image>color?": [picture(3)], "no picture": [],
    }.items(), start=-2):  # fmt: skip
        ids, of_prompt = prompts.encode([{"role": "user", "content": text}], images, {})
        found.append(GroupRequest(ticket, ids, 5 + ticket, images=of_prompt))
    second = [*found[1].prompt, 80, 81, 258, 82, 259]
    return [*found, GroupRequest(3, second, 3, images=found[1].images)]


def log_probs_of(policy: Any, request: GroupRequest, response: list[int]) -> np.ndarray:
    """Log-probs of a response by transformers. The token of an image is never sampled."""
    inputs = {} if request.images is None else request.images.inputs
    with torch.no_grad():
        logits = policy(input_ids=torch.tensor([request.prompt + response]), **inputs).logits[0, :-1]
    logits[:, policy.config.image_token_id] = -torch.inf
    chosen = logits[-len(response) :].log_softmax(-1).gather(-1, torch.tensor(response)[:, None])
    return np.asarray(chosen[:, 0])


def sampled(engine: VLLMRollout, requests: list[GroupRequest], sampling: SamplingConfig) -> list[Any]:
    engine.submit(requests, sampling)
    ended = engine.collect([request.ticket for request in requests], len(requests))
    return engine.fetch([ended[request.ticket] for request in requests])


def test_groups_of_prompts_with_images_have_the_log_probs_of_the_policy_also_after_sleep(
    engine: VLLMRollout, policy: Any, requests: list[GroupRequest]
) -> None:
    change(policy, seed=1)
    engine.update_weights(ModuleWeightSource(policy), version=1)
    groups = sampled(engine, requests, SamplingConfig(num_samples=3, max_tokens=6))
    for request, group in zip(requests, groups, strict=True):
        assert len(group.responses()) == 3
        for response, log_probs in zip(group.responses(), group.response_log_probs(), strict=True):
            assert np.allclose(log_probs, log_probs_of(policy, request, response), atol=1e-4)
    engine.sleep()
    engine.wake_up()
    again = sampled(engine, requests, SamplingConfig(num_samples=3, max_tokens=6))
    assert [group.responses() for group in again] == [group.responses() for group in groups]
    assert inside(engine, lambda actor: actor._image_token_id) == policy.config.image_token_id


def test_update_weights_changes_the_vision_tower_for_groups_in_flight(
    engine: VLLMRollout, policy: Any, requests: list[GroupRequest]
) -> None:
    source, before, request = ModuleWeightSource(policy), deepcopy(policy), requests[0]
    engine.update_weights(source, version=3)
    last = hold_after(engine, 5)
    engine.submit([request], SamplingConfig(num_samples=2, max_tokens=60))
    wait_until(lambda: steps_taken(engine) == last, "5 steps of the engine")
    with torch.no_grad():
        for parameter in policy.model.vision_model.parameters():
            parameter.mul_(1.5)
    engine.update_weights(source, version=4)
    (group,) = engine.fetch(list(engine.collect([request.ticket], 1).values()))
    assert group is not None
    for response, log_probs, versions in zip(
        group.responses(), group.response_log_probs(), group.response_versions(), strict=True
    ):
        old = versions.count(3)
        assert 0 < old < len(response)
        with_old, with_new = (log_probs_of(one, request, response) for one in (before, policy))
        assert np.allclose(log_probs[:old], with_old[:old], atol=1e-4)
        assert np.allclose(log_probs[old:], with_new[old:], atol=1e-4)
        assert not np.allclose(with_old, with_new, atol=1e-3)


@pytest.mark.usefixtures("running_ray")
def test_engine_applies_an_adapter_of_the_language_model(model: Path, requests: list[GroupRequest]) -> None:
    policy = load_causal_lm(str(model), dtype=torch.float32).eval()
    adapter = LoraConfig(rank=2, alpha=20, target_modules="language-model")
    adapted = with_random_adapter(add_adapter(policy, adapter), std=0.3)
    with running_engine(VLLMConfig(str(model), max_model_len=128, lora_rank=2)) as rollout:
        rollout.connect(0, 1)
        rollout.update_weights(MergedWeightSource(ModuleWeightSource(adapted), adapted), 1)
        groups = sampled(rollout, requests, SamplingConfig(num_samples=2, max_tokens=6))
    for request, group in zip(requests, groups, strict=True):
        for response, log_probs in zip(group.responses(), group.response_log_probs(), strict=True):
            assert np.allclose(log_probs, log_probs_of(adapted, request, response), atol=1e-4)
            with adapter_off(adapted):
                assert not np.allclose(log_probs, log_probs_of(adapted, request, response), atol=0.1)


@pytest.mark.usefixtures("running_ray")
@pytest.mark.skipif(find_spec("torchvision") is not None, reason="vLLM runs LLaVA with torchvision")
def test_connect_names_the_package_that_the_model_needs(tmp_path: Path) -> None:
    save_tiny_vision("llava", tmp_path)
    needed = r"LlavaForConditionalGeneration needs a package .*'torchvision'"
    config = VLLMConfig(str(tmp_path), max_model_len=128)
    with running_engine(config) as rollout, pytest.raises(ConfigError, match=needed):
        rollout.connect(0, 1)


def test_submit_refuses_a_prompt_with_other_tokens_than_the_engine_makes(
    engine: VLLMRollout, policy: Any, requests: list[GroupRequest]
) -> None:
    engine.update_weights(ModuleWeightSource(policy), version=5)
    images = requests[1].images
    wrong = GroupRequest(7, [*requests[1].prompt[:3], *requests[1].prompt], 1, images=images)
    engine.submit([wrong], SamplingConfig(max_tokens=2))
    with pytest.raises(DataError, match=r"vLLM makes \d+ tokens of a prompt with images, and the processor of the"):
        engine.collect([7], 1)
