"""Ray and the vLLM engines that all tests of a run share: each start of an engine takes a core some 12 s.

The first test that uses Ray starts it, and with it, at the same time, all engines that tests of this run ask for. Tests
that use Ray come first, and Ray ends after the last of them: recipes have the machine for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rl_plugins.config.models import LoraConfig
from rl_plugins.models.lora import MergedWeightSource, add_adapter
from rl_plugins.rollout.vllm.client import VLLMRollout
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.tests.patience import patient
from rl_plugins.weights.check import PROBE, check_log_probs
from rl_plugins.weights.source import ModuleWeightSource

LORA_RANK = 5
"""A rank that vLLM has no room of its own for."""
WAITING = "test_reward_pool.py"
"""The tests that wait most: engines that start beside them take nobody's time."""


def engine_configs(model: str) -> dict[str, VLLMConfig]:
    """Settings of the resident engines, by the name of the fixture that hands the engine out."""
    return {
        "float32_engine": VLLMConfig(model, max_model_len=256, transport="gloo", bucket_mb=1),
        "bfloat16_engine": VLLMConfig(model, max_model_len=256, dtype="bfloat16", sleep="all"),
        "adapter_engine": VLLMConfig(model, max_model_len=64, lora_rank=LORA_RANK, check_updates=1),
    }


# Ray --------------------------------------------------------------------------------------------------------------


@dataclass
class RunningRay:
    """Ray, and the engines that have been started on it.

    Attributes:
        engines: client of each engine, by the name of its fixture.
    """

    engines: dict[str, VLLMRollout]


@pytest.fixture(scope="session")
def running_ray(request: pytest.FixtureRequest) -> Iterator[RunningRay]:
    """Ray on this machine, for all tests of a run, with two CPUs and, in name, four GPUs to give.

    A test may start actors and kill them. At its end nothing of it may hold a CPU or a GPU of Ray's.
    """
    ray.init(address="local", num_cpus=2, num_gpus=4, include_dashboard=False, log_to_driver=False)
    running = RunningRay({})
    asked_for = [name for name in engine_configs("") if any(_uses(item, name) for item in request.session.items)]
    if asked_for:
        configs = engine_configs(str(request.getfixturevalue("workplace") / "tiny"))
        running.engines = {name: VLLMRollout(configs[name]) for name in asked_for}
    for engine in running.engines.values():
        engine.start()
    yield running
    ray.shutdown()


def _uses(item: pytest.Item, *fixtures: str) -> bool:
    return not {*fixtures}.isdisjoint(getattr(item, "fixturenames", ()))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that use Ray come first, and among them those that use no engine: they run while the engines start."""

    def place(item: pytest.Item) -> tuple[bool, bool, bool]:
        return not _uses(item, "running_ray"), _uses(item, *engine_configs("")), item.path.name != WAITING

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """After the last test that uses Ray, Ray ends."""
    yield
    if _uses(item, "running_ray"):
        items = item.session.items
        if not any(_uses(later, "running_ray") for later in items[items.index(item) + 1 :]):
            ray.shutdown()


# Engines ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def float32_engine(running_ray: RunningRay, workplace: Path) -> Iterator[VLLMRollout]:
    """The resident engine in float32, with the weights of `workplace`'s tiny policy as version 0; they come over gloo.

    A test may sample, submit groups, update the weights and hold the engine. It may not end the engine's process.
    """
    rollout, policy = connect(running_ray, "float32_engine"), load_policy(workplace)
    send_weights_once(rollout, policy, version=0)
    assert_engine_has(rollout, policy)
    yield rollout
    rollout.close()


@pytest.fixture
def bfloat16_engine(running_ray: RunningRay, workplace: Path) -> Iterator[VLLMRollout]:
    """The resident engine in bfloat16, with the weights of `workplace`'s tiny policy as version 0.

    They come through shared memory, and are given back when the engine sleeps. A test may sample, update the weights,
    let the engine sleep, change what is in its memory, and kill who sends the weights. It may not end the engine's
    process.
    """
    rollout, policy = connect(running_ray, "bfloat16_engine"), load_policy(workplace)
    send_weights_once(rollout, policy, version=0)
    assert_engine_has(rollout, policy)
    yield rollout
    rollout.close()


@pytest.fixture
def adapter_engine(running_ray: RunningRay, workplace: Path) -> Iterator[VLLMRollout]:
    """The resident engine that updates bring an adapter of rank `LORA_RANK` alone; it has one of zeros, as version 0.

    A test may sample, update the adapter and let the engine sleep. It may not end the engine's process.
    """
    rollout = connect(running_ray, "adapter_engine")
    policy = add_adapter(load_policy(workplace), LoraConfig(rank=LORA_RANK))
    rollout.update_weights(MergedWeightSource(ModuleWeightSource(policy), policy), 0)
    assert_engine_has(rollout, policy)
    yield rollout
    rollout.close()


def connect(running_ray: RunningRay, name: str) -> VLLMRollout:
    """A new client of a resident engine, for which nothing of earlier clients is left but the weights."""
    resident = running_ray.engines[name]
    rollout = VLLMRollout(resident.config, name=resident.name)
    rollout.connect(0, 1)
    # A failed test may have left a step of its own.
    inside(rollout, forget_own_step)
    return rollout


def send_weights_once(rollout: VLLMRollout, policy: Any, version: int) -> None:
    """A weight update after which the client has no source of weights, as before its first update."""
    rollout.update_weights(ModuleWeightSource(policy), version)
    rollout._disconnect()


# What tests ask of an engine --------------------------------------------------------------------------------------


def inside(rollout: VLLMRollout, function: Callable[[Any], Any], engine: int = 0) -> Any:
    """Call a function with an engine's actor, in its process."""
    return ray.get(rollout._fleet.actors[engine].__ray_call__.remote(function), timeout=patient(60))


def steps_taken(rollout: VLLMRollout) -> int:
    """How many steps the engine has taken since it started."""
    return int(inside(rollout, lambda actor: actor._loop.steps))


def hold_after(rollout: VLLMRollout, steps: int) -> int:
    """Let the engine take so many more steps, and then none until `go_on` or the end of a weight update.

    Args:
        rollout: its client.
        steps: how many; an engine that is held goes on for them.

    Returns:
        What `steps_taken` will be.
    """

    def count_steps(actor: Any) -> int:
        engine, loop = actor._llm.llm_engine, actor._loop
        step, numbers = type(engine).step, iter(range(1, steps + 1))

        def counted() -> Any:
            outputs = step(engine)
            # `go_on` may have removed the step while this call ran: then nothing is to be held.
            if next(numbers) == steps and vars(engine).pop("step", None) is not None:
                loop.hold()
            return outputs

        engine.step = counted
        return int(loop.steps) + steps

    last = int(inside(rollout, count_steps))
    _release(rollout)
    return last


def go_on(rollout: VLLMRollout) -> None:
    """Let an engine take steps without an end, whatever `hold_after` said."""
    inside(rollout, forget_own_step)
    _release(rollout)


def forget_own_step(actor: Any) -> None:
    """Take away the step that a test has given to vLLM's engine."""
    vars(actor._llm.llm_engine).pop("step", None)


def _release(rollout: VLLMRollout) -> None:
    # The public end of a hold names the version of the weights, here the one that they have.
    version = inside(rollout, lambda actor: int(actor._llm.get_weight_version()))
    ray.get(rollout._fleet.actors[0].set_policy_version.remote(version), timeout=patient(60))


# Policies ---------------------------------------------------------------------------------------------------------


def load_policy(workplace: Path) -> Any:
    """The tiny policy, with the weights that engines start with."""
    # Collecting the tests does not wait for the seconds of this import.
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(workplace / "tiny")


def change(policy: Any, seed: int) -> None:
    """Change all weights, so that log-probs differ by more than any engine's rounding."""
    before, generator = log_probs_of(policy, PROBE), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    assert max(abs(one - other) for one, other in zip(before, log_probs_of(policy, PROBE), strict=True)) > 0.1


def log_probs_of(policy: Any, tokens: list[int]) -> list[float]:
    """Log-probs of tokens after the first, as the policy itself computes them."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits: torch.Tensor = policy(input_ids=ids).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()


def assert_engine_has(rollout: VLLMRollout, policy: Any) -> None:
    """Compare the log-probs of a short prompt."""
    check_log_probs(log_probs_of(policy, PROBE), rollout.prompt_log_probs(PROBE), rollout.log_prob_tolerance)
