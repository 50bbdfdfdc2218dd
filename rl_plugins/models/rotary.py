"""Rotary frequencies of models in which the longest sample of a forward pass sets the frequencies.

Beyond a length, transformers computes the frequencies of some families from the largest position of the pass, for all
samples of the pass at once: `longrope` (Phi-3), https://arxiv.org/abs/2402.13753, and `dynamic`. A sample would get
other log-probs beside a longer sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from rl_plugins.errors import ConfigError

_LONGROPE = "longrope"


def check_positions(model: Callable[..., Any], positions: Tensor, option: str | None = None) -> None:
    """Check that no sample of a forward pass changes the rotary frequencies of another sample.

    Args:
        model: model, or a model engine around the model.
        positions: positions of the tokens; without `option`, one row for each sample [B, S].
        option: option of the strategy by which several ranks run one pass; None for a pass of one rank.

    Raises:
        ConfigError: the frequencies depend on the length of a sample, and the sample does not run alone.
    """
    for kind, length in _lengths(getattr(getattr(model, "module", model), "config", None)):
        # The frequencies of `dynamic` also depend on earlier passes.
        is_alone = option is None and len(positions) == 1 and kind == _LONGROPE
        if is_alone or not positions.numel() or int(positions.max()) < length:
            continue
        ways = [f"keep prompt and response within {length} tokens"]
        if option is not None:
            ways.append(f"set {option}=1")
        elif kind == _LONGROPE:
            ways.append(
                f"let longer samples run alone with tokens_per_micro_batch={length} (batch.tokens_per_micro_batch in "
                "a recipe)"
            )
        raise ConfigError(
            f"{type(getattr(model, 'module', model)).__name__} has the rotary positions {kind}, and a sample of more "
            f"than {length} tokens changes the log-probs of other samples: {', or '.join(ways)}"
        )


def _lengths(config: object) -> Iterator[tuple[str, int]]:
    """Yield kind and length of each set of rotary frequencies; longer samples change the frequencies."""
    if not isinstance(config, PreTrainedConfig):
        return
    text = config.get_text_config()
    rotary: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    # Some families have parameters for each type of layers.
    for parameters in [rotary] if "rope_type" in rotary else rotary.values():
        kind = parameters.get("rope_type") if isinstance(parameters, Mapping) else None
        if kind == _LONGROPE:
            yield kind, parameters["original_max_position_embeddings"]
        elif kind == "dynamic":
            yield kind, text.max_position_embeddings
