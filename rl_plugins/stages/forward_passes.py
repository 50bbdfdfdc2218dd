"""Forward passes of the models of a stage, over the micro-batches of a rank.

The trajectory of an agent may have several sequences, because an agent shortens its history or calls other agents. A
sample has the tokens of all sequences in the order of time, so rewards, advantages and averages count the trajectory as
one sample. In a forward pass each sequence is a row (`SequenceRows`), because the tokens of one sequence must not see
another.

Axes: `B` samples, `P` longest prompt, `T` longest response, `R` rows, `W` longest response of a row, `N` tokens, `L`
routers and `K` experts of a token, see `router_replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from rl_plugins.algorithms.aggregation import GlobalCounts, local_counts
from rl_plugins.data.experience import ROUTED_EXPERTS, Experience
from rl_plugins.data.image_prompts import Processor, blank_image
from rl_plugins.data.images import IMAGE_INPUTS
from rl_plugins.device_copies import to_device
from rl_plugins.models.log_probs import ResponseLogProbs, response_log_probs
from rl_plugins.models.lora import adapter_off
from rl_plugins.models.packing import shares_prompts
from rl_plugins.models.remote import RemoteModel
from rl_plugins.models.scalar_head import response_scores, response_values
from rl_plugins.router_replay import RouterReplay
from rl_plugins.stages.micro_batches import Cutter, Lengths, PatchBudget, most_sequences
from rl_plugins.strategies.contract import POLICY, REFERENCE, Strategy
from rl_plugins.vision_language import BlankImage, with_blank_image

_FIELDS = ("responses", "response_mask", "rollout_log_probs", "policy_versions", "teacher_top_ids")
"""Fields [B, T, ...] that a forward pass, or an `Experience`, needs."""


@dataclass(frozen=True)
class ForwardPasses:
    """Runs the models of a stage.

    Micro-batches are on the host, where rows are made, and results are on the device of the models. So the host does
    not wait for a GPU between micro-batches.

    Attributes:
        strategy: owner of the model engines.
        named_models: returns the models of the stage by name.
        tokens_per_micro_batch: tokens of one forward pass: real tokens with packing, padded tokens without.
        tokens_per_log_prob_batch: the same for passes without gradient.
        packing: True if the samples of a micro-batch run as one row without padding.
        dtype: dtype of the models' parameters.
        patches_per_micro_batch: patches of the images of one forward pass; None for no bound.
        temperature: divisor of the logits.
        router_replay: replay of the policy's routes; None without replay.
        processor: tokenizer of the policy, or processor of a vision-language model; makes the blank image of a rank
            without images. None: no sample has an image.
    """

    strategy: Strategy
    named_models: Callable[[], Mapping[str, nn.Module]]
    tokens_per_micro_batch: int
    tokens_per_log_prob_batch: int
    packing: bool
    dtype: torch.dtype
    patches_per_micro_batch: int | None = None
    temperature: float = 1.0
    router_replay: RouterReplay | None = None
    processor: Processor | None = None

    @property
    def device(self) -> torch.device:
        """Device of the models."""
        return self.strategy.phase_log.device

    @property
    def cutter(self) -> Cutter:
        """Cutter of a rank's samples into micro-batches."""
        models = [model for model in self.named_models().values() if not isinstance(model, RemoteModel)]
        prompts_together = self.packing and all(map(shares_prompts, models))
        return Cutter(
            self.tokens_per_micro_batch,
            self.packing,
            prompts_together,
            self.strategy.ranks.max,
            PatchBudget.of(self.patches_per_micro_batch, models[0]),
        )

    def log_prob_batches(self, samples: Experience) -> list[Tensor]:
        """Return `micro_batches` of passes without gradient."""
        return self.log_prob_cutter.indices(Lengths.of(samples))

    @property
    def log_prob_cutter(self) -> Cutter:
        """Cutter for passes without gradient."""
        return replace(self.cutter, tokens_per_micro_batch=self.tokens_per_log_prob_batch)

    def micro_batches(self, samples: Experience) -> list[Tensor]:
        """Return the indices of the samples of each micro-batch; the number of micro-batches is equal on all ranks."""
        return self.cutter.indices(Lengths.of(samples))

    def log_probs(
        self,
        name: str,
        samples: Experience,
        *,
        sum_pi_squared: bool = False,
        entropy: bool = True,
        entropy_gradient: bool = False,
        top_k: int = 0,
    ) -> ResponseLogProbs:
        """Run a causal language model over a micro-batch; see `response_log_probs`."""
        rows = SequenceRows.of(samples)
        with self._running(name) as model:
            inputs = self.inputs(model, rows)
            if self.router_replay is not None:
                # The reference may be the policy without its adapter, with routes of its own.
                experts = samples.columns.get(ROUTED_EXPERTS) if name == POLICY else None
                has_blank_image = len(inputs["input_ids_BS"]) > len(rows.samples)
                self.router_replay.prepare(self._routes(experts, has_blank_image) if experts else None)
            found = response_log_probs(
                model,
                **inputs,
                device=self.device,
                packed=self.packing,
                temperature=self.temperature,
                sum_pi_squared=sum_pi_squared,
                entropy=entropy,
                entropy_gradient=entropy_gradient,
                top_k=top_k,
                # The policy learns from the log-probs of the teachers' most likely tokens.
                tokens_BTK=rows.samples.teacher_top_ids if name == POLICY else None,
                router_replay=self.router_replay if name == POLICY else None,
            )
        if self.router_replay is not None and not torch.is_grad_enabled():
            self.router_replay.stop()
        return found.mapped(lambda values_RW: rows.fold(values_RW[: len(rows.samples)]))

    def inputs(self, model: nn.Module, rows: SequenceRows) -> dict[str, Any]:
        """Return the arguments of a forward pass of a model over the rows.

        Rows without images get one more row with a blank image, if the pass must use the vision tower.
        """
        inputs = rows.samples.forward_inputs
        images_R = inputs["image_inputs_B"]
        needs_tower = self.strategy.needs_all_parameters and not isinstance(model, RemoteModel)
        if not needs_tower or images_R is None or any(images_R) or self._blank_image is None:
            return {**inputs}
        return with_blank_image(self._blank_image, **inputs)

    @cached_property
    def _blank_image(self) -> BlankImage | None:
        return None if self.processor is None else blank_image(self.processor)

    def _routes(self, experts: Sequence[Tensor], has_blank_image: bool) -> Tensor:
        """Return the experts of all tokens of a pass [N, L, K]: -1 at the tokens of a blank image, which is last."""
        blank = len(self._blank_image[0]) if has_blank_image and self._blank_image else 0
        return nn.functional.pad(torch.cat(list(experts)), (0, 0, 0, 0, 0, blank), value=-1)

    def experts(self, samples: Experience) -> list[Tensor]:
        """Return the experts of the tokens of each sample in the last `log_probs`, on the CPU [tokens, L, K]."""
        assert self.router_replay is not None, "the routes are not recorded"
        tokens = SequenceRows.of(samples).tokens_B.tolist()
        # The tokens of a blank image follow.
        return list(self.router_replay.experts_NLK[: sum(tokens)].cpu().split(tokens))

    def differing_experts(self, samples: Experience) -> Tensor:
        """Return the share of the replayed experts of each token that the last `log_probs` would have replaced [N]."""
        assert self.router_replay is not None, "no routes are replayed"
        routes = samples.columns.get(ROUTED_EXPERTS)
        if routes is None:
            return torch.zeros(0, device=self.device)
        return self.router_replay.differing_N[: sum(map(len, routes))]

    def scores(self, name: str, samples: Experience) -> Tensor:
        """Run a model with a scalar head over a micro-batch; return its scores, [B, T]."""
        return self._numbers(response_scores, name, samples)

    def values(self, name: str, samples: Experience) -> Tensor:
        """Run a critic over a micro-batch; return its values, [B, T]."""
        return self._numbers(response_values, name, samples)

    def _numbers(self, run: Callable[..., Tensor], name: str, samples: Experience) -> Tensor:
        rows, model = SequenceRows.of(samples), self.strategy.model_engine(name)
        numbers_RW = run(model, **self.inputs(model, rows), device=self.device, packed=self.packing)
        return rows.fold(numbers_RW[: len(rows.samples)])

    @torch.no_grad()
    def per_token(
        self,
        samples: Experience,
        run: Callable[[Experience], Mapping[str, Tensor]],
        rows_N: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Run a function on every micro-batch, without gradient. Collective.

        Args:
            samples: samples of this rank, at least one.
            run: function of a micro-batch; returns named tensors [B, T, ...].
            rows_N: indices of the samples to run; None for all.

        Returns:
            The tensors of all samples, [B, T, ...], on the CPU, with 0 for samples that have not run. Empty if no rank
            has run a sample.
        """
        dtype = torch.promote_types(self.dtype, torch.float32)
        copies: list[tuple[Tensor, dict[str, Tensor]]] = []
        # Without `rows_N` nothing is copied.
        for indices in self.log_prob_batches(samples if rows_N is None else samples[rows_N]):
            chosen = indices if rows_N is None else rows_N[indices]
            # All ranks take part in every forward pass, also a rank without further samples.
            micro = samples[chosen if len(chosen) else slice(1)]
            found = run(micro.trimmed())
            # The copies join the queue of a GPU: the host goes on with the next micro-batch.
            copies.append((chosen, {name: values.to("cpu", non_blocking=True) for name, values in found.items()}))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        columns: dict[str, Tensor] = {}
        for chosen, found in copies:
            for name, values in found.items():
                kind = dtype if values.is_floating_point() else values.dtype
                # Responses without a token have one column here, and none in the samples.
                width = max(samples.rollout_log_probs.shape[1], values.shape[1])
                shape = (len(samples), width, *values.shape[2:])
                column = columns.setdefault(name, torch.zeros(shape, dtype=kind))
                if len(chosen):
                    column[chosen, : values.shape[1]] = values.to(column)
        return columns

    def counts(self, response_mask_BT: Tensor, rejected_B: Tensor | None = None) -> GlobalCounts:
        """Return the numbers of tokens and sequences of a mini-batch over all ranks. Collective.

        Args:
            rejected_B: True for samples of which a rollout correction rejected every token.
        """
        tokens, sequences = self.strategy.ranks.sum(local_counts(response_mask_BT, rejected_B)).tolist()
        return GlobalCounts(tokens, sequences, self.strategy.ranks.world_size)

    @contextmanager
    def _running(self, name: str) -> Iterator[nn.Module]:
        models = self.named_models()
        if name == REFERENCE and REFERENCE not in models:
            # The reference is the policy without its adapter.
            policy = models[POLICY]
            assert isinstance(policy, PeftModel)
            with adapter_off(policy):
                yield self.strategy.model_engine(POLICY)
        else:
            yield self.strategy.model_engine(name)


# Sequences of trajectories as rows ----


@dataclass(frozen=True)
class _TokenPlaces:
    """Places of the tokens in response columns of the rows, flattened.

    Attributes:
        rows_N: index in [R, W] of each token.
        samples_N: index in [B, T] of each token.
    """

    rows_N: Tensor
    samples_N: Tensor


@dataclass(frozen=True)
class SequenceRows:
    """Samples as rows of one sequence each.

    Attributes:
        samples: the rows. The prompt of a sequence that does not continue the prompt of its sample is its first token.
        shape: B and T.
        tokens_B: number of tokens of each sample in its rows, prompts included.
        places: places of the tokens; None if the rows are the samples.
    """

    samples: Experience
    shape: torch.Size
    tokens_B: Tensor
    places: _TokenPlaces | None = None

    @classmethod
    def of(cls, samples: Experience) -> SequenceRows:
        """Make the rows of samples."""
        shape = samples.responses.shape
        if samples.sequences is None or not bool(samples.sequences.any()):
            return cls(samples, shape, samples.sequence_lengths)
        return cls(*_split(samples, samples.sequences))

    def fold(self, values_RW: Tensor) -> Tensor:
        """Return numbers of the rows' response tokens in the shape of the samples, [B, T, ...].

        Padding, and tokens that are prompts of rows, get 0.
        """
        if self.places is None:
            return values_RW
        return _moved(values_RW, self.places.rows_N, self.places.samples_N, self.shape)


def _split(samples: Experience, sequences_BT: Tensor) -> tuple[Experience, torch.Size, Tensor, _TokenPlaces]:
    (count, width), device = sequences_BT.shape, sequences_BT.device
    nth_T, nth_B = torch.arange(width, device=device), torch.arange(count, device=device)
    samples_N = (nth_T < samples.response_lengths[:, None]).flatten().nonzero().squeeze(-1)
    most = most_sequences(samples)
    keys_N = samples_N.div(width, rounding_mode="floor") * most + sequences_BT.flatten()[samples_N]
    # Each sample has a row for its prompt, also without a response to the prompt.
    keys_R = torch.cat([keys_N, nth_B * most]).unique()
    sample_R, has_own_prompt_R = keys_R.div(most, rounding_mode="floor"), keys_R % most > 0
    row_N = torch.searchsorted(keys_R, keys_N)
    sizes_R = row_N.bincount(minlength=len(keys_R))
    order_N = row_N.argsort(stable=True)
    first_R = sizes_R.cumsum(dim=0) - sizes_R
    column_N = torch.empty_like(row_N)
    column_N[order_N] = torch.arange(len(row_N), device=device) - first_R[row_N[order_N]]
    column_N -= has_own_prompt_R[row_N].long()
    is_prompt_N = column_N < 0
    lengths_R = sizes_R - has_own_prompt_R.long()
    shape = torch.Size([len(keys_R), max(1, int(lengths_R.max()))])
    places = _TokenPlaces((row_N * shape[1] + column_N)[~is_prompt_N], samples_N[~is_prompt_N])

    prompts_RP = samples.prompts[sample_R]
    prompts_RP[row_N[is_prompt_N], -1] = samples.responses.flatten()[samples_N[is_prompt_N]]
    fields: dict[str, Any] = {
        name: _moved(values, places.samples_N, places.rows_N, shape)
        for name in _FIELDS
        if (values := getattr(samples, name)) is not None
    }
    columns: dict[str, Any] = {}
    if (images_B := samples.columns.get(IMAGE_INPUTS)) is not None:
        sources = zip(sample_R.tolist(), has_own_prompt_R.tolist(), strict=True)
        columns[IMAGE_INPUTS] = [None if has_own_prompt else images_B[sample] for sample, has_own_prompt in sources]
    rows = Experience(
        prompts=prompts_RP,
        prompt_lengths=samples.prompt_lengths[sample_R].masked_fill(has_own_prompt_R, 1),
        response_lengths=lengths_R,
        groups=samples.groups[sample_R],
        valid=samples.valid[sample_R],
        rows=columns,
        batch_size=[len(keys_R)],
        **fields,
    )
    tokens_B = rows.sequence_lengths.new_zeros(count).index_add(0, sample_R, rows.sequence_lengths)
    return rows, sequences_BT.shape, tokens_B, places


def _moved(values: Tensor, from_N: Tensor, to_N: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor of two axes (and the further axes of `values`) with values at other places, and 0 elsewhere."""
    from_N, to_N = to_device(from_N, values.device), to_device(to_N, values.device)
    moved = values.new_zeros(shape.numel(), *values.shape[2:])
    moved[to_N] = values.flatten(0, 1)[from_N]
    return moved.view(*shape, *values.shape[2:])
