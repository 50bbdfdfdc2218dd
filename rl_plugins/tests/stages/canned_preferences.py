"""One step of preference optimization on fixed pairs, judged responses or samples, with the recording optimizer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.preferences import PairBatch, UnpairedBatch
from rl_plugins.stages.preference_optimization import OnlinePreferenceOptimization, PreferenceOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.stages import canned

tokenizer: Any = canned.tokenizer

# Prompt, chosen, rejected, margin.
PAIRS = [
    ("1+1", "2", "twenty-two", 0.0),
    ("12+30", "42.", "4", 1.5),
    ("4+4", "it is eight", "9", 0.25),
    ("100+1", "101", "it is a hundred and two", 0.0),
    ("7", "x", "y", 3.0),
    ("2+2+2", "six", "seven of them", 0.5),
]
# Prompt, response, label.
JUDGED = [
    ("1+1", "2", True),
    ("12+30", "4 or so", False),
    ("4+4", "it is eight", True),
    ("100+1", "102", False),
    ("7", "x", False),
    ("2+2+2", "seven of them", False),
]
# Loss, options, and True for data of pairs.
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "dpo": ("dpo", {"beta": 0.7, "label_smoothing": 0.1}, True),
    "rpo by length": ("rpo", {"beta": 2.0, "nll_weight": 0.5, "length_normalized": True}, True),
    "ipo": ("ipo", {"beta": 0.5}, True),
    "orpo": ("orpo", {"odds_weight": 0.5}, True),
    "simpo": ("simpo", {}, True),
    "kto on pairs": ("kto", {"beta": 0.3, "desirable_weight": 1.3}, True),
    "kto": ("kto", {"beta": 0.3, "undesirable_weight": 0.7}, False),
}
VALIDATED = ("dpo", "orpo", "kto on pairs", "kto")
ON_TWO_RANKS = ("rpo by length", "orpo", "kto on pairs", "kto")
# With this policy the KL of mismatched pairs is above 0: KTO's reference point is not at its bound.
SEED = 15
EVERYTHING = list(range(len(PAIRS)))


def ids(text: str) -> list[int]:
    encoded: list[int] = tokenizer.encode(text)
    return encoded


def response(text: str) -> list[int]:
    return [*ids(text), tokenizer.eos_token_id]


def batch_of(pairs: bool, rows: list[int]) -> PairBatch | UnpairedBatch:
    if not rows:
        return PairBatch([], [], [], [], []) if pairs else UnpairedBatch([], [], [], [])
    if pairs:
        prompts, chosen, rejected, margins = zip(*(PAIRS[row] for row in rows), strict=True)
        return PairBatch(
            list(map(ids, prompts)), list(map(response, chosen)), list(map(response, rejected)), list(margins), rows
        )
    prompts, responses, labels = zip(*(JUDGED[row] for row in rows), strict=True)
    return UnpairedBatch(list(map(ids, prompts)), list(map(response, responses)), list(labels), rows)


def strategy_of(rank: int, world_size: int, **options: Any) -> Any:
    if world_size == 1:
        return SingleDeviceRolloutStrategy(**options)
    return canned.AllReduceStrategy(rank, world_size, **options)


def stage_of(model: Any, stage_class: Any = PreferenceOptimization, **options: Any) -> Any:
    """A stage with a model and the settings of all these tests."""
    sampling = SamplingConfig(max_tokens=20, num_samples=3, temperature=canned.TEMPERATURE)
    name = "sampling" if issubclass(stage_class, OnlinePreferenceOptimization) else "eval_sampling"
    arguments = {
        "tokenizer": tokenizer,
        "scorer": canned.CannedScorer(),
        "reference": canned.other_model(),
        "optimizer": OptimizerConfig(gradient_clip=0.0),
        name: sampling,
        **options,
    }
    return stage_class(model, **arguments)


def fit(stage: Any, batches: list[Any], rank: int, world_size: int) -> dict[str, float]:
    """The metrics of the last step."""
    metrics = canned.metrics_of(stage)
    strategy = strategy_of(rank, world_size, rollout=canned.CannedRollout())
    canned.quiet_trainer(strategy, precision="64-true").fit(stage, canned.loader(batches))
    return metrics


def validate(case: str, rows: list[int], rank: int = 0, world_size: int = 1) -> dict[str, float]:
    """Return the metrics of a validation on some rows, which may be none on this rank."""
    loss, loss_options, pairs = CASES[case]
    stage = stage_of(canned.OwnPolicy(SEED), loss=loss, loss_options=loss_options, tokens_per_micro_batch=45)
    metrics = canned.metrics_of(stage)
    trainer = canned.quiet_trainer(strategy_of(rank, world_size), precision="64-true")
    trainer.validate(stage, canned.loader([batch_of(pairs, rows)]), verbose=False)
    return metrics


def gradients(
    case: str, *, tokens_per_micro_batch: int = 10**6, packing: bool = True, rank: int = 0, world_size: int = 1
) -> tuple[list[list[Tensor]], dict[str, float]]:
    """Return the gradient of one step on given responses, and the metrics."""
    loss, loss_options, pairs = CASES[case]
    own = canned.OwnPolicy(SEED)
    batching: dict[str, Any] = {"tokens_per_micro_batch": tokens_per_micro_batch, "packing": packing}
    options = {"loss": loss, "loss_options": loss_options, **batching}
    # Rows are dealt to ranks in turn.
    metrics = fit(stage_of(own, **options), [batch_of(pairs, EVERYTHING[rank::world_size])], rank, world_size)
    return own.recorder.gradients, metrics


def online_gradients(
    prompts: list[str], *, rank: int = 0, world_size: int = 1, **options: Any
) -> tuple[list[list[Tensor]], dict[str, float]]:
    """Return the gradients of one step on samples, and the metrics."""
    own = canned.OwnPolicy(SEED)
    stage = stage_of(own, OnlinePreferenceOptimization, **options)
    metrics = fit(stage, [canned.prompt_batch(prompts[rank::world_size])], rank, world_size)
    # The clock counts steps without a pair, too.
    return own.recorder.gradients, {**metrics, "step": stage.step}


# Prompts and options: all prompts, also in two updates; one rank of two without a pair; no pair at all.
ONLINE: dict[str, tuple[list[str], dict[str, Any]]] = {
    "all": (canned.PROMPTS, {"loss_options": {"beta": 0.7}}),
    "two updates": (canned.PROMPTS, {"loss_options": {"beta": 0.7}, "updates_per_step": 2}),
    "one rank": (["100+1", "4+4"], {"loss_options": {"beta": 0.7}}),
    "kto": (canned.PROMPTS, {"loss": "kto", "loss_options": {"beta": 0.7}}),
    "kto, one rank": (["100+1", "4+4", "1+1", "4+4"], {"loss": "kto"}),
    "none": (["4+4", "4+4"], {}),
}


def rank_results(rank: int) -> dict[str, Any]:
    """The gradients of every case, as one of two ranks."""
    # Uneven micro-batches: separate budgets of the ranks would give different numbers of micro-batches.
    options: dict[str, Any] = {"tokens_per_micro_batch": 45, "rank": rank, "world_size": 2}
    results: dict[str, Any] = {case: gradients(case, **options) for case in ON_TWO_RANKS}
    for case, (prompts, of_case) in ONLINE.items():
        results[f"online {case}"] = online_gradients(prompts, **options, **of_case)
    for case in VALIDATED:
        results[f"validated {case}"] = validate(case, [] if rank else EVERYTHING, rank, 2)
    return results
