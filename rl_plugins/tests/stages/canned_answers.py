"""One step of supervised fine-tuning on fixed answers, with an optimizer that records its gradients."""

from __future__ import annotations

from torch import Tensor

from rl_plugins.stages.sft import SFT
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.stages import canned

ANSWERS = [("1+1", "2"), ("12+30", "42."), ("4+4", "it is eight"), ("100+1", "a hundred and one"), ("7", "seven")]


def gradients(*, tokens_per_micro_batch: int = 10**6, packing: bool = True) -> tuple[list[Tensor], dict[str, float]]:
    """Return the gradient of one step, and the metrics."""
    own = canned.OwnPolicy()
    stage = SFT(
        own,
        tokenizer=canned.tokenizer,
        tokens_per_micro_batch=tokens_per_micro_batch,
        packing=packing,
    )
    metrics = canned.metrics_of(stage)
    batch = {
        "prompt_ids": [canned.tokenizer.encode(question) for question, _ in ANSWERS],
        "response_ids": [[*canned.tokenizer.encode(answer), canned.tokenizer.eos_token_id] for _, answer in ANSWERS],
    }
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(), precision="64-true")
    trainer.fit(stage, canned.loader([batch]))
    (gradient,) = own.recorder.gradients
    return gradient, metrics
