"""Client of a pool: the parts of a micro-batch that each actor gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from rl_plugins.models.pool import ModelPool
from rl_plugins.models.pool_actor import PoolConfig


class Actor:
    """Stands for the handle of an actor, and returns the ids as scores."""

    def __init__(self) -> None:
        self.scores = self
        self.images: list[Any] = []

    def remote(self, arrays: dict[str, Any], options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.images.append((arrays["input_ids_BS"][:, 0].tolist(), options["image_inputs_B"]))
        return "process", {"scores": arrays["input_ids_BS"]}


class Pool(ModelPool):
    """A pool whose calls have ended."""

    @override
    def _wait(self, calls: Sequence[tuple[int, Any]], timeout_s: float, task: str) -> list[Any]:
        return [result for _, result in calls]


def test_position_scores_sends_each_actor_the_images_of_the_samples() -> None:
    pool = Pool(PoolConfig("reference", "model", "causal_lm", actors=2))
    actors = [Actor(), Actor()]
    pool._actors, pool._processes = actors, ["process"] * 2
    ids = torch.arange(5)[:, None].repeat(1, 3)
    images = [None, {"pixel_values": torch.tensor([1.0])}, None, {"pixel_values": torch.tensor([3.0])}, None]
    scores = pool.position_scores(
        input_ids_BS=ids, attention_mask_BS=torch.ones_like(ids), position_ids_BS=ids, image_inputs_B=images
    )
    assert torch.equal(scores, ids.to(scores))
    sent = {
        number: image
        for actor in actors
        for numbers, given in actor.images
        for number, image in zip(numbers, given, strict=True)
    }
    assert sorted(sent) == [0, 1, 2, 3, 4] and all(sent[number] is image for number, image in enumerate(images))
