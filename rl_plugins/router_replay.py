"""Replay of routes: a mixture of experts sends the tokens of a forward pass to the experts of an earlier pass.

After an optimizer step, the routers send some tokens to other experts than before. The log-probs of these tokens jump,
and with the log-probs the ratio to the old policy. With replayed routes, the ratio compares the same experts.

A router chooses experts by `torch.topk` over the scores of all experts. Replay returns the experts of the earlier pass
in place of the best experts. The weights of the experts are computed by the router from its own scores, so the router
still learns.

The routes come from the pass that computes the old log-probs, or from the rollout engine. An engine rounds differently,
so some tokens meet other experts in training than in sampling; with the routes of the engine, the experts are the same.

Sources: routing replay, Group Sequence Policy Optimization, section 5.3, https://arxiv.org/abs/2507.18071; routes of
the rollout engine (R3), Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers,
https://arxiv.org/abs/2510.11370.

Axes: `N` real tokens of all samples, sample after sample; `M` tokens that the routers see; `L` routers, the first layer
first; `K` experts of a token; `E` experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AutoConfig, PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder
from typing_extensions import override

from rl_plugins.device_copies import to_device
from rl_plugins.errors import ConfigError
from rl_plugins.model_json import chosen_experts, expert_count


class RouterReplay:
    """Records the experts of forward passes, or sets the experts; -1 leaves the choice to the router.

    Call `prepare` before a forward pass, `start` as the last call before the model runs, and `stop` after the pass, or
    after its backward pass, because gradient checkpointing runs the routers again there.

    Args:
        source: routes that a stage replays: `recompute` for the routes of the pass that computes the old log-probs,
            `rollout` for the routes of the rollout engine.

    Raises:
        ConfigError: the source is unknown.

    Example:
        >>> replay = RouterReplay()
        >>> replay.install(policy)
        >>> replay.prepare(None)
        >>> old = response_log_probs(policy, **inputs, router_replay=replay)
        >>> replay.stop()
        >>> experts_NLK = replay.experts_NLK
        >>> optimizer.step()
        >>> replay.prepare(experts_NLK)
        >>> new = response_log_probs(policy, **inputs, router_replay=replay)
        >>> loss_of(new, old).backward()
        >>> replay.stop()
    """

    def __init__(self, source: str = "recompute") -> None:
        if source not in ("recompute", "rollout"):
            raise ConfigError(f"router_replay={source}: use recompute or rollout")
        self.source = source
        self._routers: list[nn.Module] = []
        self._blocks: list[int] = []
        self._prepared_NLK: Tensor | None = None
        self._places_N: Tensor | None = None
        self._set_MLK: Tensor | None = None
        self._is_on = False
        self._chosen: dict[int, Tensor] = {}

    def install(self, model: nn.Module) -> None:
        """Change the routers of a model for good; a second call changes nothing.

        Args:
            model: mixture of experts of transformers, possibly with an adapter.

        Raises:
            ConfigError: the model has no routers.
        """
        if self._routers:
            return
        named = routers_of(model, "router_replay")
        self._routers = [router.module for router in named.values()]
        # The last number of a name such as `model.layers.3.mlp.gate` is the number of the block.
        self._blocks = [int(re.findall(r"\d+", name)[-1]) for name in named]
        for layer, router in enumerate(named.values()):
            router.module.__dict__["forward"] = _Routed(router, self, layer)

    def prepare(self, experts_NLK: Tensor | None) -> None:
        """Set the experts of the next forward pass; None lets the routers choose.

        Args:
            experts_NLK: experts at each router, or, as vLLM returns experts, at each block, also without a router.
        """
        if experts_NLK is not None and experts_NLK.shape[1] != len(self._routers):
            experts_NLK = experts_NLK[:, self._blocks]
        self._prepared_NLK, self._set_MLK, self._is_on = experts_NLK, None, False
        self._chosen.clear()

    def start(self, places_N: Tensor, num_tokens: int) -> None:
        """Begin a forward pass.

        Args:
            places_N: index of each real token among the tokens that the routers see.
            num_tokens: number of the tokens that the routers see, M.
        """
        self._places_N, self._is_on = places_N, True
        if self._prepared_NLK is not None:
            set_MLK = places_N.new_full((num_tokens + 1, *self._prepared_NLK.shape[1:]), -1)
            self._prepared_NLK = to_device(self._prepared_NLK, places_N.device)
            # Samples share the places of their prompt, and may have other routes there: the last sample counts.
            numbers_N = torch.arange(len(places_N), device=places_N.device)
            last_M = places_N.new_full((num_tokens,), -1).scatter_reduce_(0, places_N, numbers_N, "amax")
            # The route of an earlier sample goes to a place after the tokens.
            targets_N = torch.where(last_M[places_N] == numbers_N, places_N, num_tokens)
            set_MLK[targets_N] = self._prepared_NLK.to(places_N.dtype)
            self._set_MLK = set_MLK[:num_tokens]

    def stop(self) -> None:
        """Let the routers choose in passes of others, such as a check of the weights."""
        self._is_on = False

    @property
    def experts_NLK(self) -> Tensor:
        """Experts that the routers chose in the last forward pass, int16.

        Raises:
            ConfigError: a router did not choose by `torch.topk`.
        """
        return self._chosen_NLK().to(torch.int16)

    @property
    def differing_N(self) -> Tensor:
        """Share of the set experts of each token that the routers of the last forward pass did not choose, float32."""
        assert self._prepared_NLK is not None, "the experts were not set"
        set_NLK = self._prepared_NLK.to(self._places_N)
        is_chosen_NLK = (set_NLK[..., None] == self._chosen_NLK()[..., None, :]).any(dim=-1) | (set_NLK < 0)
        return (~is_chosen_NLK).float().mean(dim=(1, 2))

    def chosen(self, layer: int, scores_ME: Tensor, best: Any) -> Any:
        """Return the result of `torch.topk` for the experts of a layer, given the result for the router's choice."""
        if not self._is_on:
            return best
        self._chosen[layer] = best.indices
        if self._set_MLK is None:
            return best
        set_MK = self._set_MLK[:, layer]
        # Padding, and tokens without a route.
        experts_MK = torch.where(set_MK < 0, best.indices, set_MK)
        return type(best)((scores_ME.gather(-1, experts_MK), experts_MK))

    def _chosen_NLK(self) -> Tensor:
        for layer, router in enumerate(self._routers):
            if layer not in self._chosen:
                raise ConfigError(
                    f"router_replay: {type(router).__name__} does not choose its experts by torch.topk: leave "
                    "router_replay out"
                )
        return torch.stack([self._chosen[layer][self._places_N] for layer in range(len(self._routers))], dim=1)


def check_routers(config: Mapping[str, Any], option: str) -> None:
    """Check if the class of a model has routers. A class of the model's own code is not looked at.

    Args:
        config: content of the model's config.json.
        option: option that needs routers.

    Raises:
        ConfigError: the class has no routers.
    """
    families = [config["model_type"], *filter(None, [(config.get("text_config") or {}).get("model_type")])]
    if "auto_map" not in config and not any(map(has_routers, families)):
        raise _without_routers(option)


def has_routers(family: str) -> bool:
    """Return True if the models of a family, such as qwen3_moe, or the text model of qwen3_vl_moe, have routers."""
    config = type(AutoConfig.for_model(family))
    classes: list[Any] = [mapping.get(config, None) for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING)]
    return any(of_family is not None and _recorders(of_family) for of_family in classes)


def _without_routers(option: str) -> ConfigError:
    return ConfigError(f"{option}: the model is not a mixture of experts of transformers: leave {option} out")


class _Routed:
    """Forward of a router whose choice of experts goes through a `RouterReplay`."""

    def __init__(self, router: ExpertRouter, replay: RouterReplay, layer: int) -> None:
        self._router, self._forward = router, router.module.forward
        self._replay, self._layer = replay, layer

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with _Choice(self._router, self._replay, self._layer):
            return self._forward(*arguments, **options)


class _Choice(TorchFunctionMode):
    """Finds the choice of experts in the forward of a router.

    Some routers first choose groups of experts by `torch.topk`, too. The choice of experts has a column per expert.
    """

    def __init__(self, router: ExpertRouter, replay: RouterReplay, layer: int) -> None:
        super().__init__()
        self._router, self._replay, self._layer = router, replay, layer

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk) and args[0].ndim == 2 and args[0].shape[-1] == self._router.experts:
            return self._replay.chosen(self._layer, args[0], result)
        return result


class ExpertRouter(NamedTuple):
    """A router of a mixture of experts.

    Attributes:
        module: the router.
        logits: index of the logits in the output of the module.
        experts: experts of the layer.
        chosen: experts of a token.
    """

    module: nn.Module
    logits: int
    experts: int
    chosen: int


def routers_of(model: nn.Module, option: str) -> dict[str, ExpertRouter]:
    """Return the routers of a model by name: the modules from which transformers takes `router_logits`.

    Args:
        model: mixture of experts of transformers, possibly with an adapter.
        option: option that needs routers.

    Raises:
        ConfigError: the model has no routers.
    """
    # The text model of a vision-language model has the routers, and its class names them.
    for inner in model.modules():
        if isinstance(inner, PreTrainedModel):
            sizes = inner.config.get_text_config().to_dict()
            experts, chosen = expert_count(sizes), chosen_experts(sizes)
            found = {
                name: ExpertRouter(module, one.index, experts, chosen)
                for name, module in inner.named_modules()
                for one in _recorders(inner)
                if isinstance(module, one.target_class) and (one.layer_name or "") in name
            }
            if found:
                return found
    raise _without_routers(option)


def _recorders(model: PreTrainedModel | type[PreTrainedModel]) -> list[OutputRecorder]:
    found = (model._can_record_outputs or {}).get("router_logits", [])
    recorders = found if isinstance(found, list) else [found]
    return [one if isinstance(one, OutputRecorder) else OutputRecorder(one) for one in recorders]
