"""An engine core in a process of its own, as on CUDA: weights in flight, memory, and the end of processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from ray.exceptions import ActorDiedError
from safetensors.torch import load_file, save_file

from integration_tests.resident import (
    assert_engine_has,
    change,
    hold_after,
    inside,
    load_policy,
    log_probs_of,
    running_engine,
    steps_taken,
)
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.rollout.engine import GroupRequest
from rl_plugins.rollout.vllm.client import VLLMRollout
from rl_plugins.rollout.vllm.config import CPU_ENVIRONMENT, VLLMConfig
from rl_plugins.tests.patience import is_running, wait_until
from rl_plugins.weights.source import ModuleWeightSource

# The last test ends the engine.
pytestmark = pytest.mark.random_order(disabled=True)

BATCHED_TOKENS = 1536
# Number of updates in flight: on a busy machine, the engine core may have finished before the pause.
ATTEMPTS = 8


@contextmanager
def engine_with_a_core(workplace: Path) -> Iterator[VLLMRollout]:
    """Run an engine with an engine core in a process of its own."""
    config = VLLMConfig(str(workplace / "tiny"), max_model_len=256, vllm={"max_num_batched_tokens": BATCHED_TOKENS})
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(CPU_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING", "1")
            rollout = stack.enter_context(running_engine(config))
        rollout.connect(0, 1)
        yield rollout


@pytest.fixture(scope="module")
def engine(running_ray: Any, workplace: Path) -> Iterator[VLLMRollout]:
    with engine_with_a_core(workplace) as rollout:
        yield rollout


def processes_of(rollout: VLLMRollout) -> tuple[psutil.Process, psutil.Process]:
    """Return the process of the actor, and the process of the engine core."""
    actor = psutil.Process(int(inside(rollout, lambda _: os.getpid())))
    (core,) = [child for child in actor.children(recursive=True) if "EngineCore" in " ".join(child.cmdline())]
    return actor, core


def test_engine_has_the_arguments_of_the_user(engine: VLLMRollout) -> None:
    scheduler = inside(engine, lambda actor: actor._llm.llm_engine.vllm_config.scheduler_config)
    assert scheduler.max_num_batched_tokens == BATCHED_TOKENS


def test_update_weights_pauses_an_engine_core_and_changes_groups_in_flight(
    engine: VLLMRollout, workplace: Path
) -> None:
    policy, prompt = load_policy(workplace), [5, 6, 7]
    source = ModuleWeightSource(policy)
    for version in range(3, 3 + 2 * ATTEMPTS, 2):
        before = deepcopy(policy)
        engine.update_weights(source, version=version)
        assert_engine_has(engine, policy)
        last = hold_after(engine, 20)
        engine.submit([GroupRequest(version, prompt, seed=version)], SamplingConfig(num_samples=4, max_tokens=200))
        wait_until(lambda: steps_taken(engine) == last, "20 steps of the engine")  # noqa: B023
        change(policy, seed=version + 1)
        engine.update_weights(source, version=version + 1)
        (group,) = engine.fetch(list(engine.collect([version], 1).values()))
        assert group is not None
        if all(version + 1 in versions for versions in group.response_versions()):
            break
        # The engine core takes steps until the pause reaches it, and had finished a response before.
    else:
        raise AssertionError(f"{ATTEMPTS} times, a response was finished before the pause")
    kept = []
    for response, log_probs, versions in zip(
        group.responses(), group.response_log_probs(), group.response_versions(), strict=True
    ):
        old, new = versions.count(version), versions.count(version + 1)
        assert versions == [version] * old + [version + 1] * new
        with_old, with_new = (log_probs_of(one, prompt + response)[len(prompt) - 1 :] for one in (before, policy))
        assert np.allclose(log_probs[:old], with_old[:old], atol=1e-3)
        assert np.allclose(log_probs[old:], with_new[old:], atol=1e-3)
        kept.append(old)
    # Each response is a request of its own to the engine core, which takes steps between two of them.
    assert max(kept) >= 20


def test_generate_of_an_engine_core_repeats_the_samples_after_sleep(engine: VLLMRollout) -> None:
    prompts, sampling = [[5, 6, 7], list(range(10, 50))], SamplingConfig(num_samples=2, max_tokens=12)
    before = engine.generate(prompts, sampling, [1, 2]).responses()
    freed = engine.sleep()
    assert freed is not None and freed.expected > 0
    engine.wake_up()
    assert engine.generate(prompts, sampling, [1, 2]).responses() == before


@pytest.mark.extended
@pytest.mark.usefixtures("running_ray")
def test_engine_core_that_does_not_start_has_an_error_with_the_reason(workplace: Path, tmp_path: Path) -> None:
    shutil.copytree(workplace / "tiny", tmp_path / "tiny")
    weights = load_file(workplace / "tiny" / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, tmp_path / "tiny" / "model.safetensors", metadata={"format": "pt"})
    with (
        pytest.raises(ActorDiedError, match="vLLM does not start: AssertionError: Attempted to load weight"),
        engine_with_a_core(tmp_path),
    ):
        raise AssertionError("the engine starts with a weight of another shape")


@pytest.mark.extended
def test_engine_core_ends_with_a_killed_actor(engine: VLLMRollout) -> None:
    """End the engine of this module, after all other tests."""
    actor, core = processes_of(engine)
    actor.kill()
    wait_until(lambda: not is_running(core.pid), "the end of the engine core", 30)
