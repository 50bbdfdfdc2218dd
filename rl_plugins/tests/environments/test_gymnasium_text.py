"""GymnasiumText: FrozenLake of Gymnasium in conversations, with default texts and with functions of the user."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest

from rl_plugins.environments.gymnasium_text import GymnasiumText
from rl_plugins.environments.stateful import StatefulEnvironment
from rl_plugins.environments.step_result import StepResult
from rl_plugins.environments.text_adapters import seed_of
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.conversations import Opening
from rl_plugins.rewards.records import ScoringRequest
from rl_plugins.rewards.trajectory import Ending
from rl_plugins.tests.environments.test_stateful import SAMPLING, Scripted, talk_with, tokenizer
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.patience import patient

TARGET = "rl_plugins.environments.gymnasium_text.GymnasiumText"
SAMPLES = "rl_plugins.tests.environments.sample_environments"
ICE: dict[str, Any] = {"is_slippery": False}
ROW: dict[str, Any] = {"seed": 3, "extra_info": {}, "prompt": [{"role": "user", "content": "Reach the goal."}]}


class Walker(Scripted):
    """A policy that takes one move after the other."""

    def __init__(self, moves: list[str]) -> None:
        super().__init__()
        self.moves, self.prompts = moves, list[str]()

    def generate(self, prompts: list[list[int]], sampling: Any, seeds: Any) -> Any:
        (prompt,) = map(tokenizer.decode, prompts)
        self.prompts.append(prompt)
        self.said = {prompt: [f"{self.moves[len(self.prompts) - 1]}<|end|>"]}
        return super().generate(prompts, sampling, seeds)


def walk(moves: list[str]) -> tuple[Ending, list[str]]:
    config = {
        "_target_": TARGET,
        "env": "FrozenLake-v1",
        "to_text": f"{SAMPLES}.describe",
        "to_action": f"{SAMPLES}.read_move",
        "options": ICE,
    }
    walker = Walker(moves)
    with closing(StatefulEnvironment(config, max_turns=8, deadline_s=patient(60))) as environment:
        talk = talk_with(environment, walker)
        about = ScoringRequest("ice", "", None, {}, ROW["prompt"])
        talk.submit([Opening(1, [1], 5, about=about)], SAMPLING)
        (ending,) = talk.collect([1], 0)[1].endings
    return ending, walker.prompts


def test_frozen_lake_rewards_the_way_to_the_goal_and_not_into_a_hole() -> None:
    ending, prompts = walk(["down", "down", "hm", "right", "right", "down", "right"])
    assert prompts[0] == "<|user|>Reach the goal.\n\nrow 0, column 0<|assistant|>"
    assert ending.score.value == 1.0 and ending.turn_rewards == (0.0,) * 6 + (1.0,)
    observations = [message["content"] for message in ending.said if message["role"] == "user"]
    assert observations[:3] == ["row 1, column 0", "row 2, column 0", "There is no action in this answer."]
    assert observations[-1] == "row 3, column 3"
    fallen, _ = walk(["down", "right"])
    assert (fallen.score.value, fallen.turns, fallen.said[-1]["content"]) == (0.0, 2, "row 1, column 1")


def test_default_texts_are_the_rendering_and_the_last_number_of_a_response() -> None:
    async def play() -> tuple[Any, ...]:
        game = GymnasiumText("FrozenLake-v1", options={**ICE, "render_mode": "ansi"}, no_action_reward=-1.0)
        (first,) = await game.reset(ROW)
        results = [await game.step({"content": text}) for text in ("1 or 2? I take 1.", "7", "9" * 5000)]
        await game.close()
        return first["content"], *results

    first, moved, outside, without = asyncio.run(play())
    assert first.startswith("Reach the goal.\n\n") and "FHFH" in first
    assert moved.reward == 0.0 and "(Down)" in moved.messages
    assert outside == without == StepResult("There is no action in this answer.", reward=-1.0)


def test_seed_of_the_row_makes_equal_episodes() -> None:
    async def observe(seed: int) -> list[str]:
        game = GymnasiumText("FrozenLake-v1")
        row = {**ROW, "extra_info": {"seed": seed}}
        await game.reset(row)
        return [str((await game.step({"content": "0"})).messages) for _ in range(8)]

    first, again, other = (asyncio.run(observe(seed)) for seed in (1, 1, 2))
    assert first == again != other


@for_each("extra", [None, {}, {"seed": None}])
def test_row_without_a_seed_has_the_seed_of_the_group(extra: dict[str, Any] | None) -> None:
    assert seed_of({"seed": 3, "extra_info": extra}) == 3
    assert seed_of({"seed": 3, "extra_info": {"seed": 0}}) == 0


def test_space_without_default_actions_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"env='Pendulum-v1' has actions of the space Box.*: give to_action"):
        GymnasiumText("Pendulum-v1")
