"""What a step has to do, whatever it runs on: models, lengths, batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_plugins.planning.shape import ModelShape

WIDTHS = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""
COPY = 0.125
"""As in `stages/micro_batches.py`, which imports torch."""


@dataclass(frozen=True)
class Workload:
    """One step of policy optimization.

    Attributes:
        policy: what is trained.
        precision: Lightning's flag.
        engine_dtype: of the rollout engine's weights.
        prompts: of a step.
        samples: responses to each prompt.
        prompt_tokens: of a prompt, on average.
        response_tokens: of a response, on average.
        max_tokens: of the longest prompt and response together.
        micro_batch_tokens: of one forward and backward pass on a worker.
        updates: optimizer steps of a pass over the samples.
        passes: passes over the samples of a step.
        gradient_checkpointing: activations are computed again in the backward pass.
        lora_rank: of the adapter that is trained in the policy's place; 0 for none.
        merged: the engine is sent whole weights of a policy with an adapter.
        critic: trained beside the policy, if there is one.
        frozen: models that are run only, by their engine's name.
        max_num_seqs: responses that an engine samples at once.
        prefix_caching: a prompt is read once for all its responses.
        kv_cache_bytes: that an engine reserves on a CPU.
        bucket_bytes: of weights in flight.
    """

    policy: ModelShape
    precision: str = "bf16-true"
    engine_dtype: str = "bfloat16"
    prompts: int = 64
    samples: int = 8
    prompt_tokens: float = 512
    response_tokens: float = 1024
    max_tokens: int = 1536
    micro_batch_tokens: int = 16384
    updates: int = 1
    passes: int = 1
    gradient_checkpointing: bool = False
    lora_rank: int = 0
    merged: bool = False
    critic: ModelShape | None = None
    frozen: Mapping[str, ModelShape] = field(default_factory=dict)
    max_num_seqs: int = 256
    prefix_caching: bool = True
    kv_cache_bytes: float = 2**30
    bucket_bytes: float = 64 * 2**20

    @property
    def dtype(self) -> str:
        """That training computes in."""
        return "float32" if self.precision == "32-true" else "bfloat16"

    @property
    def width(self) -> int:
        """Bytes of a number that training computes with."""
        return WIDTHS[self.dtype]

    @property
    def responses(self) -> int:
        """Of a step."""
        return self.prompts * self.samples

    @property
    def sample_tokens(self) -> float:
        """Of a prompt and a response."""
        return self.prompt_tokens + self.response_tokens

    @property
    def trained_parameters(self) -> int:
        """Those of the policy that have a gradient."""
        return self.policy.adapter(self.lora_rank) if self.lora_rank else self.policy.parameters

    @property
    def sent_parameters(self) -> int:
        """What an update of the engine brings."""
        return self.trained_parameters if self.lora_rank and not self.merged else self.policy.parameters
