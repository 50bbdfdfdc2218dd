"""Functions of a checkout of verl, loaded without installing verl: files with stand-ins for the modules they import.

The files need torch, numpy, tensordict, transformers and omegaconf. All other modules of verl give names for
annotations alone, so each of their names is an empty class.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from typing_extensions import override

_PPO = "verl.trainer.ppo"
_DAPO = "verl.experimental.reward_loop.reward_manager.dapo"


class Verl:
    """A checkout of verl.

    Args:
        checkout: folder of the checkout.

    Raises:
        FileNotFoundError: the folder has no `verl/trainer/ppo/core_algos.py`.
    """

    def __init__(self, checkout: Path) -> None:
        self._checkout = checkout
        for name in list(sys.modules):
            if name.partition(".")[0] == "verl":
                del sys.modules[name]
        groupwise = self._load("verl.utils.groupwise")
        self.torch_functional = self._load("verl.utils.torch_functional")
        utils = sys.modules["verl.utils"]
        vars(utils).update(
            torch_functional=self.torch_functional,
            as_torch_index=groupwise.as_torch_index,
            group_mean_std=groupwise.group_mean_std,
        )
        _stand_in("verl.utils.import_utils").__dict__["deprecated"] = lambda *_: lambda function: function
        _stand_in("verl.protocol").__dict__["DataProto"] = _DataProto
        self.core = self._load(f"{_PPO}.core_algos")
        self.correction = self._load(f"{_PPO}.rollout_corr_helper")

    @property
    def version(self) -> str:
        """Version of the checkout."""
        return (self._checkout / "verl" / "version" / "version").read_text(encoding="utf-8").strip()

    def actor_config(self, **options: Any) -> Any:
        """Return options of the actor, with the clip widths of verl's defaults."""
        defaults = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "tau_pos": 1.0, "tau_neg": 1.05}
        config_class: Any = type("Config", (_Options, self.core.ActorConfig), {})
        return config_class(**{"global_batch_info": {}, "policy_loss": _Options(), **defaults, **options})

    def algorithm_config(self, **options: Any) -> Any:
        """Return options of the algorithm."""
        return _Options(**options)

    def resampling_weights(self, scores_BT: Tensor, **options: Any) -> Tensor:
        """Return the weights with which verl draws samples [B]."""
        drawn: list[Tensor] = []

        def draw(weights_B: Tensor, count: int, replacement: bool) -> Tensor:
            drawn.append(weights_B)
            return torch.arange(count)

        data = SimpleNamespace(batch=_Batch(token_level_scores=scores_BT), non_tensor_batch={}, meta_info={})
        with patch.object(torch, "multinomial", draw):
            self.core.compute_pf_ppo_reweight_data(data, **options)
        return drawn[0]

    def overlong_reward(self, length: int, *, max_tokens: int, buffer_tokens: int, factor: float) -> float:
        """Return the reward of DAPO's reward manager for a response with score 0."""
        manager = object.__new__(self._dapo.DAPORewardManager)
        manager.__dict__.update(
            tokenizer=SimpleNamespace(decode=lambda *_, **__: ""),
            compute_score=lambda **_: 0.0,
            is_async_reward_score=False,
            reward_router_address=None,
            reward_model_tokenizer=None,
            max_resp_len=max_tokens,
            overlong_buffer_cfg=_Options(enable=True, log=False, len=buffer_tokens, penalty_factor=factor),
        )
        item = SimpleNamespace(
            batch={"responses": torch.zeros(max_tokens), "attention_mask": (torch.arange(max_tokens) < length).long()},
            non_tensor_batch={"data_source": "", "reward_model": {"ground_truth": ""}},
        )

        async def run() -> float:
            manager.loop = asyncio.get_running_loop()
            return float((await manager.run_single([item]))["reward_score"])

        return asyncio.run(run())

    @cached_property
    def distillation(self) -> ModuleType:
        """Losses of distillation on one rank of a sequence."""
        vars(_stand_in("verl.utils.ulysses"))["get_ulysses_sequence_parallel_world_size"] = lambda: 1
        return self._load("verl.trainer.distillation.fsdp.losses")

    @cached_property
    def presets(self) -> Any:
        """Class whose methods are verl's presets of corrections."""
        return self._load("verl.trainer.config.algorithm").RolloutCorrectionConfig

    @cached_property
    def _dapo(self) -> ModuleType:
        package = _stand_in(_DAPO.rpartition(".")[0])
        package.__dict__["register"] = lambda name: lambda manager: manager
        return self._load(_DAPO)

    def _load(self, name: str) -> ModuleType:
        """Run a file of the checkout as a module."""
        path = self._checkout / Path(*name.split(".")).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with patch.object(sys, "meta_path", [_Finder(), *sys.meta_path]):
            _stand_in(name.rpartition(".")[0])
            sys.modules[name] = module
            spec.loader.exec_module(module)
        return module


class _Options:
    """Options by attribute, and by `get` as in OmegaConf."""

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)

    def get(self, name: str, default: Any = None) -> Any:
        return vars(self).get(name, default)


class _Batch(dict[str, Tensor]):
    """Tensors of a batch, with the attribute that verl sets."""

    batch_size: Any = None


class _DataProto:
    """The part of verl's container in which its functions return weights."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.batch = tensors

    @classmethod
    def from_dict(cls, tensors: Mapping[str, Tensor]) -> _DataProto:
        return cls(tensors)


class _StandIn(ModuleType):
    """Module in which each name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__[name] = type(name, (), {})
        return self.__dict__[name]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for each module of verl."""

    @override
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "verl":
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    @override
    def create_module(self, spec: Any) -> ModuleType:
        return _StandIn(spec.name)

    @override
    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names come at their first use."""


def _stand_in(name: str) -> ModuleType:
    """Import a stand-in, and the packages around it."""
    with patch.object(sys, "meta_path", [_Finder(), *sys.meta_path]):
        return importlib.import_module(name)
