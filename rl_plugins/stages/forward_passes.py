"""Forward passes of the models of a stage, over the micro-batches of a rank.

Axes: `R` rows and `W` longest response of a row, see `sequence_rows`; `N` tokens, `L` routers and `K` experts of a
token, see `router_replay`.
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
from rl_plugins.models.log_probs import ResponseLogProbs, response_log_probs
from rl_plugins.models.lora import adapter_off
from rl_plugins.models.packing import shares_prompts
from rl_plugins.models.remote import RemoteModel
from rl_plugins.models.scalar_head import response_scores, response_values
from rl_plugins.router_replay import RouterReplay
from rl_plugins.stages.micro_batches import Cutter, Lengths, PatchBudget
from rl_plugins.stages.sequence_rows import SequenceRows
from rl_plugins.strategies.contract import POLICY, REFERENCE, Strategy
from rl_plugins.vision_language import BlankImage, with_blank_image


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
        return self.router_replay.differing_N[: sum(map(len, samples.columns[ROUTED_EXPERTS]))]

    def scores(self, name: str, samples: Experience) -> Tensor:
        """Run a model with a scalar head over a micro-batch; return its scores, [B, T]."""
        rows, model = SequenceRows.of(samples), self.strategy.model_engine(name)
        scores_RW = response_scores(model, **self.inputs(model, rows), device=self.device, packed=self.packing)
        return rows.fold(scores_RW[: len(rows.samples)])

    def values(self, name: str, samples: Experience) -> Tensor:
        """Run a critic over a micro-batch; return its values, [B, T]."""
        rows, model = SequenceRows.of(samples), self.strategy.model_engine(name)
        values_RW = response_values(model, **self.inputs(model, rows), device=self.device, packed=self.packing)
        return rows.fold(values_RW[: len(rows.samples)])

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
                shape = (*samples.rollout_log_probs.shape, *values.shape[2:])
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
