"""Weights over gloo into live vLLM engines, as if they were on other machines, and what happens when one is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_plugins.rollout.engine import EngineLost, SamplingConfig
from rl_plugins.rollout.vllm.client import VLLMRollout
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.weight_check import PROBE
from rl_plugins.rollout.weights import ModuleWeightSource

STALL_S = 4.0


class Source(ModuleWeightSource):
    """A policy's weights; when half of them are on their way, something may happen."""

    happens: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        weights = list(super().__iter__())
        for number, weight in enumerate(weights):
            if number == len(weights) // 2 and self.happens:
                self.happens()
            yield weight


@pytest.fixture(scope="module")
def policy(workplace: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(workplace / "tiny")


@pytest.fixture(scope="module")
def rollout(workplace: Path, running_ray: None) -> Iterator[VLLMRollout]:
    config = VLLMConfig(
        str(workplace / "tiny"), max_model_len=64, transport="gloo", bucket_mb=1, stall_timeout_s=STALL_S
    )
    rollout = VLLMRollout(config, num_engines=2)
    rollout.start()
    rollout.connect(0, 1)
    yield rollout
    rollout.stop()


def change(policy: Any) -> None:
    """As a step of training does."""
    before = policy_log_probs(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    assert max(abs(one - other) for one, other in zip(before, policy_log_probs(policy), strict=True)) > 0.1


def policy_log_probs(policy: Any) -> list[float]:
    with torch.no_grad():
        logits = policy(input_ids=torch.tensor([PROBE])).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(PROBE[1:])[:, None]).squeeze(-1).tolist()


def assert_engines_have(policy: Any, rollout: VLLMRollout, *engines: int) -> None:
    assert rollout._fleet.living == list(engines)
    for engine in engines:
        ask = rollout._fleet.begin(engine, "prompt_log_probs", PROBE, timeout_s=60, phase="test")
        assert ask() == pytest.approx(policy_log_probs(policy), abs=1e-4)


def pid_of(rollout: VLLMRollout, engine: int) -> int:
    return int(ray.get(rollout._fleet.actors[engine].__ray_call__.remote(lambda _: os.getpid()), timeout=60))


def kill_and_wait_until_ray_has_started_another(rollout: VLLMRollout, engine: int) -> None:
    before, deadline = pid_of(rollout, engine), time.monotonic() + 120
    os.kill(before, signal.SIGKILL)
    while True:
        try:
            assert pid_of(rollout, engine) != before
            return
        except ray.exceptions.RayActorError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def update_until_both_have(policy: Any, rollout: VLLMRollout) -> None:
    """Each update gives those that are up again the weights."""
    deadline = time.monotonic() + 120
    rollout.update_weights(ModuleWeightSource(policy), 3)
    while rollout.num_living < 2:
        assert time.monotonic() < deadline
        time.sleep(0.5)
        rollout.update_weights(ModuleWeightSource(policy), 3)
    assert_engines_have(policy, rollout, 0, 1)


def test_every_engine_samples_from_what_was_sent(rollout: VLLMRollout, policy: Any) -> None:
    for version in (1, 2):
        change(policy)
        rollout.update_weights(ModuleWeightSource(policy), version)
        assert_engines_have(policy, rollout, 0, 1)


@pytest.mark.extended
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_an_engine_that_is_lost_halfway_is_replaced_while_the_other_works(
    rollout: VLLMRollout, policy: Any, what: signal.Signals, lost: int
) -> None:
    source, pid = Source(policy), pid_of(rollout, lost)
    rollout._disconnect()
    rollout.update_weights(source, 1)
    change(policy)
    source.happens = lambda: os.kill(pid, what)
    begun = time.monotonic()
    with pytest.raises(EngineLost):
        rollout.update_weights(source, 2)
    # Rank 0 waits for what it sends to be taken, then for all engines to say that they live.
    assert time.monotonic() - begun < (2 * STALL_S if what == signal.SIGSTOP else STALL_S) + 10
    assert rollout.replace_lost() == 1
    rollout.update_weights(ModuleWeightSource(policy), 2)
    assert_engines_have(policy, rollout, 1 - lost)
    sampled = rollout.generate([[5, 6], [7, 8]], SamplingConfig(max_tokens=4), [1, 2])
    assert set(sampled.policy_versions) == {2}

    change(policy)
    update_until_both_have(policy, rollout)


def test_one_that_was_started_again_before_anybody_missed_it_does_not_sample_from_its_first_weights(
    rollout: VLLMRollout, policy: Any
) -> None:
    rollout.update_weights(ModuleWeightSource(policy), 1)
    kill_and_wait_until_ray_has_started_another(rollout, 0)
    with pytest.raises(EngineLost):
        rollout.generate([[5, 6], [7, 8]], SamplingConfig(max_tokens=4), [1, 2])
    assert rollout.replace_lost() == 1
    update_until_both_have(policy, rollout)

    kill_and_wait_until_ray_has_started_another(rollout, 0)
    with pytest.raises(EngineLost):
        rollout.update_weights(ModuleWeightSource(policy), 3)
    assert rollout.replace_lost() == 1
    update_until_both_have(policy, rollout)


@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
def test_updates_reach_both_processes_of_a_tensor_parallel_engine_which_needs_both(
    running_ray: None, workplace: Path, policy: Any, transport: Any
) -> None:
    config = VLLMConfig(
        str(workplace / "tiny"), max_model_len=64, tensor_parallel_size=2, transport=transport, bucket_mb=1
    )
    rollout = VLLMRollout(config)
    rollout.connect(0, 1)
    try:
        for version in (1, 2):
            change(policy)
            rollout.update_weights(ModuleWeightSource(policy), version)
            assert_engines_have(policy, rollout, 0)
        processes = psutil.Process(pid_of(rollout, 0)).children(recursive=True)
        (second,) = [process for process in processes if "Worker_TP1" in " ".join(process.cmdline())]
        second.kill()
        with pytest.raises(EngineLost):
            rollout.update_weights(ModuleWeightSource(policy), 3)
        assert rollout.replace_lost() == 1
        rollout.update_weights(ModuleWeightSource(policy), 3)
        assert_engines_have(policy, rollout, 0)
    finally:
        rollout.stop()
