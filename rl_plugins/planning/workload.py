"""A step to plan: its work, the placement of its workers, and the micro-batches that follow from both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rl_plugins.config.precision import dtype_of_passes
from rl_plugins.planning.shape import ModelShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number by dtype."""
COPY_COST = 0.125
"""Weight of a prompt token for each further sample: attention keeps keys and values of the token for each sample.

The constant is repeated from `stages/micro_batches.py`, because that module imports torch.
"""


@dataclass(frozen=True)
class PlannedCritic:
    """A model that a step trains beside the policy.

    Attributes:
        name: name of the model in the stage, such as `critic`.
        shape: shape of the model.
        trained: parameters with a gradient.
        moment_width: bytes of a number in the moments of the optimizer; None without quantisation.
        four_bits: the weights under the adapter are in 4 bits.
        muon: the optimizer is Muon.
    """

    name: str
    shape: ModelShape
    trained: int
    moment_width: float | None = None
    four_bits: bool = False
    muon: bool = False


@dataclass(frozen=True)
class Workload:
    """Models, lengths and batch of one step of policy optimization.

    Attributes:
        policy: shape of the policy.
        precision: precision flag of the Lightning trainer.
        engine_dtype: dtype of the weights in the rollout engine.
        matrix_width: bytes of a number in the matrices of a quantised rollout engine; None without quantisation.
        cache_width: bytes of a number in the KV cache; None for the engine's dtype.
        moment_width: bytes of a number in the moments of the policy's optimizer, if the optimizer quantises its states;
            None without quantisation.
        muon: the policy's optimizer is Muon.
        prompts: prompts of a step.
        oversampling: prompts of an engine for each prompt of a step.
        samples: responses to each prompt.
        prompt_tokens: mean tokens of a prompt.
        response_tokens: mean tokens of a response.
        images: mean images of a prompt, whose tokens are among the tokens of the prompt.
        image_patches: mean patches of an image; None for the patches of the model's usual images.
        max_tokens: tokens of the longest prompt and the longest response together.
        packing: samples are packed into rows, and the samples of a prompt share its tokens.
        micro_batch_tokens: tokens of one forward and backward pass on a worker.
        log_prob_tokens: tokens of one pass without gradient; None for `micro_batch_tokens`.
        updates: optimizer steps of one pass over the samples.
        passes: passes over the samples of a step.
        gradient_checkpointing: activations are computed again in the backward pass.
        four_bits: the weights of the policy under the adapter are in 4 bits.
        lora_rank: rank of the adapter if only an adapter is trained; 0 without an adapter.
        adapts_tower: the adapter changes the vision tower, too.
        trains_tower: the vision tower of the policy is trained, and not frozen.
        adapts_experts: the adapter changes the experts of a mixture, too.
        expert_parallel: workers that share the experts of a layer under FSDP2.
        merged: the engine receives whole weights of a policy with an adapter.
        critics: critics, and a process reward model, that the training workers train.
        frozen: shapes of the models without training on the training workers, by the names of the models.
        places: places of the parameters of frozen models, if not `stay`: `while_sampling` or `cpu`.
        averages: numbers of the models with an average in float32, by the names of the models.
        max_num_seqs: largest number of responses sampled by an engine at the same time.
        prefix_caching: the engine reads a prompt once for all its responses.
        kv_cache_bytes: bytes of the KV cache reserved by an engine on a CPU.
        bucket_bytes: bytes of the weights in flight in a weight update.
    """

    policy: ModelShape
    precision: str = "bf16-true"
    engine_dtype: str = "bfloat16"
    matrix_width: float | None = None
    cache_width: float | None = None
    moment_width: float | None = None
    muon: bool = False
    prompts: int = 64
    oversampling: int = 1
    samples: int = 8
    prompt_tokens: float = 512
    response_tokens: float = 1024
    images: float = 0.0
    image_patches: float | None = None
    max_tokens: int = 1536
    packing: bool = True
    micro_batch_tokens: int = 16384
    log_prob_tokens: int | None = None
    updates: int = 1
    passes: int = 1
    gradient_checkpointing: bool = False
    four_bits: bool = False
    lora_rank: int = 0
    adapts_tower: bool = True
    trains_tower: bool = True
    adapts_experts: bool = False
    expert_parallel: int = 1
    merged: bool = False
    critics: Sequence[PlannedCritic] = ()
    frozen: Mapping[str, ModelShape] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    averages: Mapping[str, int] = field(default_factory=dict)
    max_num_seqs: int = 256
    prefix_caching: bool = True
    kv_cache_bytes: float = 2**30
    bucket_bytes: float = 64 * 2**20

    @property
    def dtype(self) -> str:
        """Dtype of the arithmetic in training."""
        return dtype_of_passes(self.precision)

    @property
    def width(self) -> int:
        """Bytes of a number in the arithmetic of training."""
        return DTYPE_BYTES[self.dtype]

    @property
    def engine_width(self) -> int:
        """Bytes of a number in the rollout engine."""
        return DTYPE_BYTES[self.engine_dtype]

    @property
    def sample_bytes(self) -> float:
        """Bytes of the keys and values of a token in the rollout engine."""
        return self.policy.kv_bytes(1) * (self.cache_width or self.engine_width)

    @property
    def engine_bytes(self) -> float:
        """Bytes of all weights in the rollout engine."""
        return self._in_engine(self.policy.parameters, self.policy.embedding * (1 if self.policy.tied else 2))

    def read_bytes(self, sequences: float) -> float:
        """Return the bytes of weights that the engine reads for a token of each of some sequences."""
        return self._in_engine(self.policy.multiplied_by(sequences), self.policy.embedding)

    def _in_engine(self, parameters: float, heads: int) -> float:
        # Engines do not quantise the embedding and the output head.
        return heads * self.engine_width + (parameters - heads) * (self.matrix_width or self.engine_width)

    @property
    def sampled_prompts(self) -> int:
        """Prompts of the engines for a step."""
        return self.prompts * self.oversampling

    @property
    def responses(self) -> int:
        """Responses of the engines for a step."""
        return self.sampled_prompts * self.samples

    @property
    def sample_tokens(self) -> float:
        """Mean tokens of a prompt and a response together."""
        return self.prompt_tokens + self.response_tokens

    def image_flops(self, shape: ModelShape) -> float:
        """Return the operations of a forward pass of a model's vision tower over the images of a prompt."""
        if shape.tower is None:
            return 0.0
        return self.images * shape.tower.forward_flops(self.image_patches or shape.tower.patches)

    @property
    def trained_parameters(self) -> int:
        """Parameters of the policy with a gradient."""
        with_tower = self.trains_tower and (self.adapts_tower or not self.lora_rank)
        return trained_of(self.policy, self.lora_rank, with_tower=with_tower, with_experts=self.adapts_experts)

    @property
    def sends_adapter(self) -> bool:
        """True if the engine receives only an adapter."""
        return self.lora_rank > 0 and not self.merged

    @property
    def sent_parameters(self) -> int:
        """Parameters in a weight update of the engine."""
        return self.trained_parameters if self.sends_adapter else self.policy.parameters


def trained_of(shape: ModelShape, lora_rank: int, *, with_tower: bool, with_experts: bool) -> int:
    """Return the parameters with a gradient of a model, or of its adapter.

    Args:
        shape: shape of the model.
        lora_rank: rank of the adapter; 0 without an adapter.
        with_tower: the vision tower is trained, too.
        with_experts: the matrices of each expert have an adapter, too.
    """
    if lora_rank:
        return shape.adapter(lora_rank, with_tower=with_tower, with_experts=with_experts)
    return shape.parameters - (0 if with_tower or shape.tower is None else sum(shape.tower.matrices))


@dataclass(frozen=True)
class Plan:
    """One placement of the workers and engines of a step.

    Attributes:
        trainers: training workers, each with a device.
        engines: rollout engines.
        tensor_parallel: devices of an engine.
        colocated: the engines share the devices of the trainers. Otherwise the engines have devices of their own.
        zero_stage: ZeRO stage, 1 to 3; 0 stands for FSDP2.
        accumulate_shards: FSDP2 accumulates gradients in shards.
        offload: location of the states of trained models: `while_sampling` (on the host during sampling, if an
            engine has no room beside the states), `stay` (on the device), `cpu` (optimizer always on the host).
        sleep: memory that the engines free while the workers train: `none`, `kv_cache` or `all`.
        engine_share: largest share of an accelerator's memory for an engine.
        ahead: steps whose samples are drawn while an earlier step trains; more than 0 requires separate devices.
    """

    trainers: int
    engines: int
    tensor_parallel: int = 1
    colocated: bool = True
    zero_stage: int = 3
    accumulate_shards: bool = False
    offload: str = "while_sampling"
    sleep: str = "kv_cache"
    engine_share: float = 0.4
    ahead: int = 0

    @property
    def devices(self) -> int:
        """Devices of trainers and engines together."""
        return self.trainers + (0 if self.colocated else self.engines * self.tensor_parallel)


def micro_batch_budgets(work: Workload) -> list[int]:
    """Return budgets of tokens for a micro-batch: the given one, and room for 1, 2, 4 ... samples of a prompt.

    A larger micro-batch runs a prompt for more samples at once, but a smaller one may have room for the activations
    that a larger one must compute again.
    """
    copied = COPY_COST * work.prompt_tokens
    counts = [2**power for power in range(work.samples.bit_length()) if 2**power < work.samples] + [work.samples]
    rooms = [math.ceil(work.prompt_tokens + n * work.response_tokens + (n - 1) * copied) for n in counts]
    return sorted({work.micro_batch_tokens, *rooms})


@dataclass(frozen=True)
class MicroBatchSizes:
    """Sizes of the micro-batches of one worker in one pass over its samples.

    Attributes:
        tokens: tokens of all micro-batches. A prompt counts once for all its samples in the same micro-batch.
        prompts: prompts of all micro-batches, counted in the same way.
        passes: number of micro-batches.
        largest: tokens of the largest micro-batch.
        copies: mean number of samples that contain a token.
        context: mean number of tokens to which a token attends.
    """

    tokens: float
    prompts: float
    passes: int
    largest: float
    copies: float
    context: float


def log_prob_sizes(work: Workload, trainers: int) -> MicroBatchSizes:
    """Return `micro_batch_sizes` of passes without gradient, which may have a budget of their own."""
    if work.log_prob_tokens is None:
        return micro_batch_sizes(work, trainers)
    return micro_batch_sizes(replace(work, micro_batch_tokens=work.log_prob_tokens, updates=1), trainers)


def micro_batch_sizes(work: Workload, trainers: int) -> MicroBatchSizes:
    """Return the micro-batches of each worker for samples of mean lengths, as `stages/micro_batches.py` cuts them.

    Args:
        work: work of the step.
        trainers: number of training workers.
    """
    budget, prompts = max(work.micro_batch_tokens, work.max_tokens), work.prompts / trainers
    # Without packing, each sample has a prompt of its own.
    shared, own = (work.prompt_tokens, work.response_tokens) if work.packing else (0.0, work.sample_tokens)
    ways = []
    for bundle_budget in (budget, budget / 2, budget / 4):
        copied = COPY_COST * shared
        room = (bundle_budget - shared + copied) / (own + copied)
        together = min(work.samples, max(1, int(room)))
        bundles = math.ceil(work.samples / together)
        samples = work.samples / bundles
        size = shared + samples * own
        update_bundles = math.ceil(prompts / work.updates) * bundles
        passes = math.ceil(update_bundles / max(1, int(budget / (size + (samples - 1) * copied))))
        ways.append((passes, prompts * bundles * size, math.ceil(update_bundles / passes) * size, prompts * bundles))
    passes, tokens, largest, read_prompts = min(ways)
    responses = prompts * work.samples * own
    attended = responses * (shared + own / 2) + (tokens - responses) * shared / 2
    return MicroBatchSizes(
        tokens=tokens,
        prompts=read_prompts if work.packing else prompts * work.samples,
        passes=passes * work.updates,
        # A sample of the largest length has a micro-batch of its own.
        largest=max(largest, work.max_tokens),
        copies=prompts * work.samples * work.sample_tokens / tokens,
        context=attended / tokens,
    )
