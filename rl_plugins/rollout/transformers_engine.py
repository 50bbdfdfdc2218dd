"""Sampling in the trainer's own process with a plain transformers model: for debugging and parity tests.

The engine keeps a separate copy of the policy. The trained model never enters generation mode, however it is sharded.
"""

from __future__ import annotations

import copy
import math
import time
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.images import ImageInputs
from rl_plugins.errors import ConfigError
from rl_plugins.hub.files import model_folder
from rl_plugins.memory import MemoryChange
from rl_plugins.model_json import context_window
from rl_plugins.ranks import Ranks
from rl_plugins.rollout.engine import Generations, GroupRequest, RemoteSamples, collected, padded_routes
from rl_plugins.router_replay import RouterReplay
from rl_plugins.vision_language import ModelInputs, model_class, padded_inputs
from rl_plugins.weights.check import WeightsDiffer, tolerance_of
from rl_plugins.weights.source import WeightSource


class SynchronousGroups:
    """The group methods of `RolloutEngine`, implemented with `generate` in the caller's process.

    `submit` samples a group completely. A schedule that samples ahead therefore saves no time here, and serves
    debugging only. The staleness of the groups is the same as with a separate engine.
    """

    sleeps = True
    gpu_share: float | None = None
    shares_gpus = False
    busy_s = 0.0
    num_living = 1

    def __init__(self) -> None:
        self._finished: dict[int, Generations] = {}

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        """Sample responses, see `RolloutEngine`."""
        raise NotImplementedError

    def sample_groups(self, requests: Sequence[GroupRequest], sampling: SamplingConfig) -> Generations:
        """Sample the responses of groups with the same options."""
        return self.generate([request.prompt for request in requests], sampling, [request.seed for request in requests])

    def prepare(self, ranks: Ranks) -> None:
        """Do nothing, because the engine shares the caller's process."""

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        """Sample the groups."""
        start = time.perf_counter()
        alike: dict[SamplingConfig, list[GroupRequest]] = {}
        for request in requests:
            alike.setdefault(request.shortened(sampling), []).append(request)
        for options, batch in alike.items():
            generations = self.sample_groups(batch, options)
            parts = generations.split([options.num_samples] * len(batch))
            self._finished |= zip([request.ticket for request in batch], parts, strict=True)
        self.busy_s += time.perf_counter() - start

    def collect(self, required: Sequence[int], count: int) -> Mapping[int, Generations | RemoteSamples]:
        """Return submitted groups, all of which are finished."""
        return {ticket: self._finished.pop(ticket) for ticket in collected(self._finished, required, count)}

    def fetch(self, finished: Sequence[Generations | RemoteSamples]) -> list[Generations | None]:
        """Return the groups unchanged, because all groups are in this process."""
        return [group for group in finished if isinstance(group, Generations)]

    def drop(self, tickets: Sequence[int]) -> None:
        """Remove groups."""
        for ticket in tickets:
            self._finished.pop(ticket, None)

    def lost_tickets(self, among: Container[int] | None = None) -> list[int]:
        """Return an empty list, because the engine shares the caller's process."""
        return []

    def drop_lost_engines(self) -> int:
        """Return 0, because the engine shares the caller's process."""
        return 0


class TransformersRollout(SynchronousGroups):
    """An in-process engine with a KV cache, exact log-probs and per-sample seeds.

    Args:
        model: Hugging Face name or folder; or the policy itself as a model in memory, which is copied at once.
        dtype: dtype of the copy.
        device: device of the copy.
        max_batch_size: largest number of responses in a batch.
        check_updates: number of weight updates between two checks; 0 disables checks.
        trust_remote_code: run Python code that the model's config.json names (`auto_map`).
        return_experts: return the experts of a mixture's tokens, for a replay of routes in training.
    """

    def __init__(
        self,
        model: str | nn.Module,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        max_batch_size: int = 256,
        check_updates: int = 0,
        trust_remote_code: bool = False,
        return_experts: bool = False,
    ) -> None:
        super().__init__()
        self._routes = RouterReplay() if return_experts else None
        self._trust_remote_code = trust_remote_code
        self._path = model if isinstance(model, str) else type(model).__name__
        # A stage changes the attention of its policy later.
        self._given = None if isinstance(model, str) else _copied(model, dtype)
        self._dtype, self._device = dtype, torch.device(device)
        self._max_batch_size = max_batch_size
        self.check_updates = check_updates
        self._version = 0

    def connect(self, rank: int, world_size: int) -> None:
        """Load the copy of the policy, and forget earlier groups."""
        self._finished.clear()
        model: Any = self._given
        if model is None:
            folder = model_folder(self._path, trust_remote_code=self._trust_remote_code)
            model = model_class(folder).from_pretrained(
                folder, dtype=self._dtype, trust_remote_code=self._trust_remote_code
            )
        if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
            # Other functions of transformers ignore soft caps.
            model.set_attn_implementation("eager")
        self._model = model.to(self._device).eval()
        self._window = context_window(self._model.config.get_text_config().to_dict())
        self._parameters = dict(self._model.named_parameters())
        if self._routes is not None:
            self._routes.install(self._model)

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Copy every tensor of the source. There is no cache to drop."""
        for meta in source.metadata():
            parameter = self._parameters.get(meta.name)
            if parameter is None or parameter.shape != meta.shape:
                here = "no such parameter" if parameter is None else f"a parameter of {list(parameter.shape)}"
                raise ConfigError(
                    f"the trained model has the parameter {meta.name} of {list(meta.shape)}, and the rollout engine's "
                    f"model {self._path} has {here}: start both from one model"
                )
        with torch.no_grad():
            for name, tensor in source:
                self._parameters[name].copy_(tensor)
        self._version = version

    @override
    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        """Sample `num_samples` responses to each prompt."""
        return self._generate([(prompt, None) for prompt in prompts], sampling, seeds)

    @override
    def sample_groups(self, requests: Sequence[GroupRequest], sampling: SamplingConfig) -> Generations:
        prompts = [(request.prompt, None if request.images is None else request.images.inputs) for request in requests]
        return self._generate(prompts, sampling, [request.seed for request in requests])

    def _generate(self, prompts: Sequence[_Prompt], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        if sampling.stop:
            raise ConfigError("the transformers engine does not support `stop` strings: use `stop_token_ids`")
        if sampling.vllm:
            raise ConfigError(f"sampling.vllm.{next(iter(sampling.vllm))} needs the vLLM engine: leave it out")
        rows = [prompt for prompt in prompts for _ in range(sampling.num_samples)]
        row_seeds = None if seeds is None else [s + i for s in seeds for i in range(sampling.num_samples)]
        responses: list[list[int]] = []
        log_probs: list[list[float]] = []
        experts: list[np.ndarray] = []
        for start in range(0, len(rows), self._max_batch_size):
            stop = start + self._max_batch_size
            batch = self._sample(rows[start:stop], sampling, row_seeds[start:stop] if row_seeds else None)
            responses += batch.tokens
            log_probs += batch.log_probs
            experts += batch.experts
        ends = set(self._end_tokens(sampling))
        reasons = ["stop" if response[-1] in ends else "length" for response in responses]
        return Generations.from_responses(responses, log_probs, reasons, self._version, experts)

    def _end_tokens(self, sampling: SamplingConfig) -> list[int]:
        """Return the ends of responses. As in vLLM, the generation config of the model may name further ends."""
        config = getattr(self._model, "generation_config", None)
        ends: int | list[int] | None = getattr(config, "eos_token_id", None)
        return [*sampling.stop_token_ids, *([] if ends is None else ends if isinstance(ends, list) else [ends])]

    @torch.no_grad()
    def _sample(self, prompts: list[_Prompt], sampling: SamplingConfig, seeds: list[int] | None) -> _SampledRows:
        """Sample one batch of `B` rows, token by token."""
        generators = None if seeds is None else [torch.Generator(self._device).manual_seed(seed) for seed in seeds]
        ends = torch.tensor(self._end_tokens(sampling), dtype=torch.long, device=self._device)
        running_B = torch.ones(len(prompts), dtype=torch.bool, device=self._device)
        tokens_by_step: list[Tensor] = []
        log_probs_by_step: list[Tensor] = []
        running_by_step: list[Tensor] = []
        experts_by_step: list[Tensor] = []
        inputs, cache = self._inputs_of(prompts), None
        longest = max(len(prompt) for prompt, _ in prompts)
        for step in range(sampling.max_tokens):
            if self._window is not None and longest + step > self._window:
                raise ConfigError(
                    f"a prompt of {longest} tokens and its response, of at most max_tokens={sampling.max_tokens}, are "
                    f"longer than the {self._window} positions of the model: lower max_tokens, or max_prompt_tokens "
                    "of the data module"
                )
            self._record_routes(inputs)
            output = inputs.run(self._model, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            experts_by_step += self._recorded_routes(inputs)
            log_probs_BV = _processed_log_probs(output.logits[:, -1].float(), sampling)
            tokens_B = _draw(self._without_image_token(log_probs_BV), sampling.temperature, generators)
            tokens_by_step.append(tokens_B)
            log_probs_by_step.append(log_probs_BV.gather(-1, tokens_B[:, None]).squeeze(-1))
            running_by_step.append(running_B)
            running_B = running_B & ~torch.isin(tokens_B, ends)
            if not running_B.any():
                break
            inputs = _inputs_of_next_token(inputs, tokens_B)
        lengths_B = torch.stack(running_by_step).sum(dim=0).tolist()
        tokens_BT = torch.stack(tokens_by_step, dim=1).tolist()
        chosen_BT = torch.stack(log_probs_by_step, dim=1).tolist()
        return _SampledRows(
            [row[:length] for row, length in zip(tokens_BT, lengths_B, strict=True)],
            [row[:length] for row, length in zip(chosen_BT, lengths_B, strict=True)],
            _experts_of_rows(experts_by_step, [len(prompt) for prompt, _ in prompts], lengths_B),
        )

    def _inputs_of(self, prompts: list[_Prompt]) -> ModelInputs:
        """Return the prompts with padding on the left, and the inputs of their images."""
        rows = [prompt for prompt, _ in prompts]
        width = max(len(row) for row in rows)
        input_ids_BS = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=self._device)
        lengths_B = torch.tensor([len(row) for row in rows], device=self._device)
        mask_BS = (torch.arange(width, device=self._device) >= width - lengths_B[:, None]).long()
        return padded_inputs(
            self._model,
            input_ids_BS=input_ids_BS,
            attention_mask_BS=mask_BS,
            position_ids_BS=(mask_BS.cumsum(-1) - 1).clamp(min=0),
            image_inputs_B=[images for _, images in prompts],
        )

    def _record_routes(self, inputs: ModelInputs) -> None:
        """Record the experts of the tokens in the next pass, if the engine returns experts."""
        if self._routes is not None:
            num_tokens = inputs.arguments["input_ids"].numel()
            self._routes.prepare(None)
            self._routes.start(torch.arange(num_tokens, device=self._device), num_tokens)

    def _recorded_routes(self, inputs: ModelInputs) -> list[Tensor]:
        """Return the experts [B, S, L, K] of the last pass; an empty list if the engine returns no experts."""
        if self._routes is None:
            return []
        self._routes.stop()
        return [self._routes.experts_NLK.unflatten(0, tuple(inputs.arguments["input_ids"].shape))]

    def _without_image_token(self, log_probs_BV: Tensor) -> Tensor:
        """Return the log-probs without the token of an image, which the trainer would replace by an image."""
        token = getattr(self._model.config, "image_token_id", None)
        if token is None:
            return log_probs_BV
        return log_probs_BV.index_fill(-1, torch.tensor([token], device=log_probs_BV.device), -torch.inf)

    @property
    def keeps_weights(self) -> bool:
        """True, because the copy stays in memory."""
        return True

    @property
    def log_prob_tolerance(self) -> float:
        """Tolerance of the copy's dtype."""
        return tolerance_of(self._dtype)

    def check_weights(self, source: WeightSource) -> None:
        """Compare every tensor with the copy, see `RolloutEngine`."""
        different = [name for name, tensor in source if not torch.equal(self._parameters[name], tensor.to(self._dtype))]
        if different:
            raise WeightsDiffer(f"{different[0]} of the rollout engine differs from the policy")

    @torch.no_grad()
    def prompt_log_probs(self, prompt: list[int]) -> list[float]:
        """Return the log-probs from a forward pass of the copy."""
        logits_TV = self._model(input_ids=torch.tensor([prompt], device=self._device)).logits[0, :-1].float()
        chosen_T = torch.tensor(prompt[1:], device=self._device)
        log_probs: list[float] = logits_TV.log_softmax(-1).gather(-1, chosen_T[:, None]).squeeze(-1).tolist()
        return log_probs

    def sleep(self) -> MemoryChange | None:
        """Do nothing: the copy stays in memory."""
        return None

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do nothing: the copy stays in memory."""

    def close(self) -> None:
        """Delete the copy."""
        del self._model, self._parameters


def _copied(model: object, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a model with parameters of a dtype, without hooks.

    Raises:
        ConfigError: the object is no model of transformers, or the model has an adapter.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ConfigError(
            f"TransformersRollout got a {type(model).__name__} without the config of a model of transformers: pass the "
            "folder or the name of a model, or a model, such as the .model of a LightningModule"
        )
    if hasattr(model, "get_base_model"):
        raise ConfigError(
            "TransformersRollout got a model with an adapter, and samples with the base model: pass the folder or the "
            "name of the base model, rollout=TransformersRollout(folder)"
        )
    # Hooks of callbacks count the passes of training alone, and keep objects that cannot be copied.
    hooks = [hook for module in model.modules() for hook in (module._forward_hooks, module._forward_pre_hooks)]
    copied = copy.deepcopy(model, {id(hook): OrderedDict() for hook in hooks})
    for parameter in copied.parameters():
        # Buffers, such as rotary frequencies, keep their precision.
        parameter.data = parameter.data.to(dtype)
    return copied


_Prompt = tuple[list[int], ImageInputs | None]
"""Token ids of a prompt, and the inputs of its images."""


class _SampledRows(NamedTuple):
    """Tokens and log-probs of each row of a batch, and the experts of the tokens, as in `Generations`."""

    tokens: list[list[int]]
    log_probs: list[list[float]]
    experts: list[np.ndarray]


def _inputs_of_next_token(inputs: ModelInputs, tokens_B: Tensor) -> ModelInputs:
    """Return the sampled tokens, one column, as inputs of the pass after the pass of `inputs`."""
    mask_BS = inputs.arguments["attention_mask"]
    return ModelInputs({
        "input_ids": tokens_B[:, None],
        "attention_mask": torch.cat([mask_BS, mask_BS.new_ones(len(tokens_B), 1)], dim=-1),
        # A vision-language model may have several positions for a token.
        "position_ids": inputs.arguments["position_ids"][..., -1:] + 1,
    })  # fmt: skip


def _experts_of_rows(
    experts_by_step: list[Tensor], prompt_lengths: list[int], response_lengths: list[int]
) -> list[np.ndarray]:
    """Return the experts of the tokens of each row, padded to the prompt and the response; empty without experts."""
    if not experts_by_step:
        return []
    experts_BSLK = torch.cat(experts_by_step, dim=1).cpu().numpy()
    width = max(prompt_lengths)
    return [
        # Prompts are padded on the left, and the last token of a response is no input of the model.
        padded_routes(row[width - prompt :][: prompt + response - 1], prompt + response)
        for row, prompt, response in zip(experts_BSLK, prompt_lengths, response_lengths, strict=True)
    ]


def _processed_log_probs(logits_BV: Tensor, sampling: SamplingConfig) -> Tensor:
    if sampling.temperature > 0:
        logits_BV = logits_BV / sampling.temperature
    if sampling.min_p > 0:
        least_B1 = logits_BV.max(dim=-1, keepdim=True).values + math.log(sampling.min_p)
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        kth = logits_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits_BV.sort(dim=-1, descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= sampling.top_p)
        logits_BV = logits_BV.masked_fill(dropped, -torch.inf)
    return logits_BV.log_softmax(dim=-1)


def _draw(log_probs_BV: Tensor, temperature: float, generators: list[torch.Generator] | None) -> Tensor:
    """Draw one token per row; greedy at temperature 0.

    The index of the largest p / e, with exponential noise e, is a sample of p.
    """
    if temperature == 0:
        return log_probs_BV.argmax(dim=-1)
    noise_BV = torch.empty_like(log_probs_BV)
    if generators is None:
        noise_BV.exponential_()
    else:
        for row, generator in zip(noise_BV, generators, strict=True):
            row.exponential_(generator=generator)
    return (log_probs_BV.exp() / noise_BV).argmax(dim=-1)
