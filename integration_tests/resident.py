"""Ray and the vLLM engines shared by all tests of a run: each start of an engine keeps a core busy for some 12 s.

The first test with Ray starts Ray and, at the same time, all engines used by the tests of this run. Tests with Ray come
first, and Ray ends after the last of them: recipes then have the whole machine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
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
"""A rank between the adapter sizes of vLLM."""
WAITING = "test_reward_pool.py"
"""The tests with the longest waits. Engines can start beside these tests without delay for other tests."""


def engine_configs(model: str) -> dict[str, VLLMConfig]:
    """Settings of the resident engines, by the name of the engine's fixture."""
    return {
        "float32_engine": VLLMConfig(model, max_model_len=256, transport="gloo", bucket_mb=1),
        "bfloat16_engine": VLLMConfig(model, max_model_len=256, dtype="bfloat16", sleep="all"),
        "adapter_engine": VLLMConfig(model, max_model_len=64, lora_rank=LORA_RANK, check_updates=1),
    }


# Ray --------------------------------------------------------------------------------------------------------------


@dataclass
class RunningRay:
    """Ray, and the started engines.

    Attributes:
        engines: client of each engine, by the name of the engine's fixture.
    """

    engines: dict[str, VLLMRollout]


@pytest.fixture(scope="session")
def running_ray(request: pytest.FixtureRequest) -> Iterator[RunningRay]:
    """Ray on this machine, for all tests of a run, with two CPUs and four GPUs. The GPUs need not exist.

    A test may start actors and kill them. At the end of a test, none of its actors may hold a CPU or GPU of Ray.
    """
    with pytest.MonkeyPatch.context() as patch:
        # Ray refuses more GPUs than the variable shows.
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        # Ray sets the variable, which is removed at the end of the context.
        patch.setenv("PYTHONBREAKPOINT", "")
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
    """Put tests with Ray first, and start with the tests without an engine, because the engines start meanwhile."""

    def place(item: pytest.Item) -> tuple[bool, bool, bool]:
        return not _uses(item, "running_ray"), _uses(item, *engine_configs("")), item.path.name != WAITING

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Stop Ray after the last test with Ray, also if the test runs once more because it was late."""
    result = yield
    if _uses(item, "running_ray"):
        items = item.session.items
        if not any(_uses(later, "running_ray") for later in items[items.index(item) + 1 :]):
            ray.shutdown()
    return result


# Engines ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def float32_engine(running_ray: RunningRay, workplace: Path) -> Iterator[VLLMRollout]:
    """The resident engine in float32 with gloo. The weights of `workplace`'s tiny policy are version 0.

    A test may sample, submit groups, update the weights and hold the engine. A test must not end the engine's process.
    """
    rollout, policy = connect(running_ray, "float32_engine"), load_policy(workplace)
    send_weights_once(rollout, policy, version=0)
    assert_engine_has(rollout, policy)
    yield rollout
    rollout.close()


@pytest.fixture
def bfloat16_engine(running_ray: RunningRay, workplace: Path) -> Iterator[VLLMRollout]:
    """The resident engine in bfloat16 with shared memory. The weights of `workplace`'s tiny policy are version 0.

    A sleeping engine releases its weights. A test may sample, update the weights, let the engine sleep, change its
    memory, and kill the sender of the weights. A test must not end the engine's process.
    """
    rollout, policy = connect(running_ray, "bfloat16_engine"), load_policy(workplace)
    send_weights_once(rollout, policy, version=0)
    assert_engine_has(rollout, policy)
    yield rollout
    rollout.close()


@pytest.fixture
def adapter_engine(running_ray: RunningRay, workplace: Path) -> Iterator[VLLMRollout]:
    """The resident engine with updates of an adapter of rank `LORA_RANK` alone. An adapter of zeros is version 0.

    A test may sample, update the adapter and let the engine sleep. A test must not end the engine's process.
    """
    rollout = connect(running_ray, "adapter_engine")
    policy = add_adapter(load_policy(workplace), LoraConfig(rank=LORA_RANK))
    rollout.update_weights(MergedWeightSource(ModuleWeightSource(policy), policy), 0)
    assert_engine_has(rollout, policy)
    yield rollout
    rollout.close()


def connect(running_ray: RunningRay, name: str) -> VLLMRollout:
    """A new client of a resident engine. The engine keeps the weights of earlier clients, and nothing else."""
    resident = running_ray.engines[name]
    rollout = VLLMRollout(resident.config, name=resident.name)
    rollout.connect(0, 1)
    # A failed test may have left its step function in the engine.
    inside(rollout, forget_own_step)
    return rollout


def send_weights_once(rollout: VLLMRollout, policy: Any, version: int) -> None:
    """Update the weights, and remove the client's source of weights: the client is as before its first update."""
    rollout.update_weights(ModuleWeightSource(policy), version)
    rollout._disconnect()


# Calls of tests to an engine --------------------------------------------------------------------------------------


def inside(rollout: VLLMRollout, function: Callable[[Any], Any], engine: int = 0) -> Any:
    """Call a function with an engine's actor, in the process of the actor."""
    return ray.get(rollout._fleet.actors[engine].__ray_call__.remote(function), timeout=patient(60))


def steps_taken(rollout: VLLMRollout) -> int:
    """Return the number of steps of the engine since its start."""
    return int(inside(rollout, lambda actor: actor._loop.steps))


def hold_after(rollout: VLLMRollout, steps: int) -> int:
    """Let the engine take this number of steps, and then none until `go_on` or the end of a weight update.

    Args:
        rollout: client of the engine.
        steps: number of steps. A held engine goes on for these steps.

    Returns:
        Value of `steps_taken` after these steps.
    """

    def count_steps(actor: Any) -> int:
        engine, loop = actor._llm.llm_engine, actor._loop
        step, numbers = type(engine).step, iter(range(1, steps + 1))

        def counted() -> Any:
            outputs = step(engine)
            # `go_on` may have removed the step while this call ran: then the engine goes on.
            if next(numbers) == steps and vars(engine).pop("step", None) is not None:
                loop.hold()
            return outputs

        engine.step = counted
        return int(loop.steps) + steps

    last = int(inside(rollout, count_steps))
    _release(rollout)
    return last


def go_on(rollout: VLLMRollout) -> None:
    """Let an engine take steps without an end, also after `hold_after`."""
    inside(rollout, forget_own_step)
    _release(rollout)


def forget_own_step(actor: Any) -> None:
    """Remove a test's step function from vLLM's engine."""
    vars(actor._llm.llm_engine).pop("step", None)


def _release(rollout: VLLMRollout) -> None:
    # The public end of a hold names the version of the weights, here the present version.
    version = inside(rollout, lambda actor: int(actor._llm.get_weight_version()))
    ray.get(rollout._fleet.actors[0].set_policy_version.remote(version), timeout=patient(60))


@contextmanager
def running_engine(config: VLLMConfig) -> Iterator[VLLMRollout]:
    """Run an engine for tests that end the engine's process, or need another model or option than resident engines.

    Ray must run. The engine starts meanwhile; `rollout.connect(0, 1)` waits for the start.
    """
    rollout = VLLMRollout(config)
    rollout.start()
    try:
        yield rollout
    finally:
        rollout.stop()


# Policies ---------------------------------------------------------------------------------------------------------


def load_policy(workplace: Path) -> Any:
    """The tiny policy, with the weights of a new engine."""
    # This import takes seconds, and the collection of tests does not wait for the import.
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(workplace / "tiny")


def change(policy: Any, seed: int) -> None:
    """Change all weights: the log-probs then differ by more than the rounding of any engine."""
    before, generator = log_probs_of(policy, PROBE), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    assert max(abs(one - other) for one, other in zip(before, log_probs_of(policy, PROBE), strict=True)) > 0.1


def log_probs_of(policy: Any, tokens: list[int]) -> list[float]:
    """Return the log-probs of all tokens after the first, computed by the policy."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits: torch.Tensor = policy(input_ids=ids).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()


def assert_engine_has(rollout: VLLMRollout, policy: Any) -> None:
    """Compare the log-probs of a short prompt."""
    check_log_probs(log_probs_of(policy, PROBE), rollout.prompt_log_probs(PROBE), rollout.log_prob_tolerance)
