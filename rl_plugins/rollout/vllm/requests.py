"""Requests to a vLLM engine and their outputs, in the form of vLLM, and the common start of the requests of ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.images import PromptImages
from rl_plugins.errors import DataError
from rl_plugins.rollout.engine import Generations, padded_routes

if TYPE_CHECKING:
    from vllm.inputs import TokensPrompt
    from vllm.renderers.base import BaseRenderer

# vLLM's least bias of a logit.
_NEVER = -100.0


class EngineRequest(NamedTuple):
    """Request to the engine.

    Attributes:
        prompt: token ids.
        parameters: vLLM's sampling parameters.
        images: images of the prompt, or of its beginning; None without images.
        reports_tokens: True if the parameters ask for an output after each step.
    """

    prompt: list[int]
    parameters: Any
    images: PromptImages | None = None
    reports_tokens: bool = False


Requests = Mapping[str, EngineRequest]
"""Requests to the engine by name."""


class RequestBarrier:
    """Barrier that collects the requests of several ranks and starts all requests in the order of the ranks."""

    def __init__(self) -> None:
        self._waiting: dict[int, Requests] = {}
        self._start: asyncio.Future[None] | None = None

    async def join(
        self, rank: int, ranks: Sequence[int], requests: Requests, begin: Callable[[Requests], None]
    ) -> None:
        """Add the requests of a rank, and wait for the start of all ranks' requests.

        Args:
            rank: rank of the caller.
            ranks: all ranks of the barrier.
            requests: requests of the caller.
            begin: function that starts requests. The last rank to join calls `begin` with the requests of all ranks.
        """
        if self._start is None:
            self._start = asyncio.get_running_loop().create_future()
        start, self._waiting[rank] = self._start, requests
        if len(self._waiting) == len(ranks):
            by_rank, self._waiting, self._start = self._waiting, {}, None
            try:
                begin({name: request for member in sorted(by_rank) for name, request in by_rank[member].items()})
            except BaseException as error:
                start.set_exception(error)
            else:
                start.set_result(None)
        # Shielded, because the deadline of one rank must not cancel the barrier of the other ranks.
        await asyncio.shield(start)

    def missing(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks without requests in the barrier."""
        return sorted(set(ranks) - set(self._waiting))

    def cancel(self) -> None:
        """Cancel the wait of all ranks and remove their requests."""
        if self._start is not None:
            self._start.cancel()
        self._waiting, self._start = {}, None


def engine_input(renderer: BaseRenderer, request: EngineRequest) -> Any:
    """Return vLLM's input for a request. vLLM puts the tokens of images in the places of the placeholders.

    Args:
        renderer: the engine's maker of inputs.
        request: the request.

    Raises:
        DataError: vLLM makes other tokens of the images than the policy's processor.
    """
    from vllm.inputs.engine import tokens_input

    if request.images is None:
        return tokens_input(request.prompt)
    prompt: TokensPrompt = {
        "prompt_token_ids": request.images.with_placeholders(request.prompt),
        "multi_modal_data": {"image": list(request.images.images)},
    }
    found: Any = renderer.process_for_engine(prompt, time.time())
    if found["prompt_token_ids"] != request.prompt:
        raise DataError(
            f"vLLM makes {len(found['prompt_token_ids'])} tokens of a prompt with images, and the processor of the "
            f"policy makes {len(request.prompt)} tokens, or other tokens: use TransformersRollout (in a recipe: "
            "rollout.engine=transformers)"
        )
    return found


def sampling_parameters(
    sampling: SamplingConfig, seed: int | None, excluded: int | None, *, reports_tokens: bool = False
) -> Any:
    """Return vLLM's sampling parameters.

    Args:
        sampling: options of sampling.
        seed: seed of the samples; None for no seed.
        excluded: token that is never sampled; None for none.
        reports_tokens: True if every step returns the tokens so far.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    if sampling.temperature == 0 and sampling.num_samples > 1:
        # vLLM refuses several greedy responses, which the agents of a greedy validation may ask for.
        sampling = replace(sampling, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0)
    further = dict(sampling.vllm)
    if "structured_outputs" in further:
        further["structured_outputs"] = StructuredOutputsParams(**further["structured_outputs"])
    if "min_tokens" in further:
        # The last turn of a conversation may be shorter.
        further["min_tokens"] = min(further["min_tokens"], sampling.max_tokens)
    # Keys of a config may be texts.
    biases = {int(token): bias for token, bias in further.pop("logit_bias", {}).items()}
    if excluded is not None:
        biases[excluded] = _NEVER
    return SamplingParams(
        **further,
        logit_bias=biases or None,
        n=sampling.num_samples,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop) or None,
        include_stop_str_in_output=bool(sampling.stop),
        detokenize=bool(sampling.stop),
        # A stop string may have a special token.
        skip_special_tokens=not sampling.stop,
        output_kind=RequestOutputKind.CUMULATIVE if reports_tokens else RequestOutputKind.FINAL_ONLY,
    )


def generations_of(outputs: Sequence[Any]) -> Generations:
    """Return the responses of finished requests, from vLLM's outputs."""
    completions = [completion for output in outputs for completion in output.outputs]
    experts = [
        padded_routes(completion.routed_experts, len(output.prompt_token_ids) + len(completion.token_ids))
        for output in outputs
        for completion in output.outputs
        if completion.routed_experts is not None
    ]
    return Generations.from_responses(
        responses=[completion.token_ids for completion in completions],
        # With logprobs=0, vLLM returns only the log-prob of the sampled token.
        log_probs=[[p for p, _ in zip(c.logprobs.logprobs, c.token_ids, strict=True)] for c in completions],
        finish_reasons=[completion.finish_reason for completion in completions],
        policy_versions=[
            [int(span.version) for span in completion.weight_versions for _ in range(span.start, span.end)]
            for completion in completions
        ],
        experts=experts,
    )
