"""Teachers of a distillation: log-probs of the samples under one teacher, or under several."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import TeacherConfig
from rl_plugins.data.experience import Experience
from rl_plugins.errors import ConfigError, DataError
from rl_plugins.stages.forward_passes import ForwardPasses
from rl_plugins.stages.model_inputs import MODEL_INPUTS


def make_teachers(config: TeacherConfig, algorithm: Algorithm, passes: ForwardPasses) -> Teachers | None:
    """Return the teachers of an algorithm; None for an algorithm without a teacher."""
    if not algorithm.needs & MODEL_INPUTS["teacher"]:
        return None
    return Teachers(config, passes, algorithm.teacher_top_k if "teacher_top_log_probs_BTK" in algorithm.needs else 0)


class Teachers:
    """Adds the log-probs of the teachers to samples.

    With weights w, the log-prob of a token is `sum of w_m log p_m` over the teachers m, so the reverse KL of the policy
    to this sum is the weighted sum of the reverse KLs to the teachers. The likeliest tokens of all
    teachers stand side by side, each with the weight of its teacher. Without weights, a sample has the teacher of its
    data source.

    Args:
        config: settings of the teachers.
        passes: forward passes of the models.
        top_k: number of a teacher's most likely tokens for each response token; 0 for none.

    Source: distillation on samples of the student, https://arxiv.org/abs/2306.13649; the geometric mean of several
    teachers, https://arxiv.org/abs/1503.02531; a teacher for each data source as in verl,
    https://github.com/verl-project/verl, `docs/algo/opd.md`.
    """

    def __init__(self, config: TeacherConfig, passes: ForwardPasses, top_k: int) -> None:
        self._config, self._passes, self._top_k = config, passes, top_k

    def add(self, samples: Experience) -> None:
        """Fill `teacher_log_probs`, and with `top_k` the likeliest tokens of the teachers. Collective.

        Raises:
            DataError: the data source of a sample has no teacher.
        """
        weights, parts = [], []
        with self._passes.strategy.phase_log.measure("teacher_log_probs"):
            for teacher, rows_N in self._rows(samples).items():
                run = partial(self._log_probs, self._config.models[teacher])
                # Empty if no rank has a sample of the teacher.
                if part := self._passes.per_token(samples, run, rows_N):
                    parts.append(part)
                    weights.append(self._config.weights.get(teacher, 1.0))
        # Samples of other teachers have 0 in a part.
        samples.teacher_log_probs = sum_of([w * part["log_probs"] for w, part in zip(weights, parts, strict=True)])
        if not self._top_k:
            return
        join = partial(torch.cat, dim=-1) if self._config.weights else sum_of
        samples.teacher_top_ids = join([part["top_ids"] for part in parts])
        samples.teacher_top_log_probs = join([part["top_log_probs"] for part in parts])
        if self._config.weights:
            columns = zip(weights, parts, strict=True)
            samples.teacher_top_weights = join([torch.full_like(part["top_log_probs"], w) for w, part in columns])

    def _rows(self, samples: Experience) -> dict[str, Tensor]:
        """Return the indices of each teacher's samples."""
        everything = torch.arange(len(samples))
        if self._config.weights or not self._config.paths:
            return dict.fromkeys(self._config.models, everything)
        try:
            teachers = [self._config.teacher_of(source) for source in samples.columns["data_source"]]
        except ConfigError as error:
            raise DataError(f"teacher.paths: {error}") from None
        return {
            name: everything[torch.tensor([teacher == name for teacher in teachers], dtype=torch.bool)]
            for name in self._config.models
        }

    def _log_probs(self, model: str, micro: Experience) -> dict[str, Tensor]:
        result = self._passes.log_probs(model, micro, entropy=False, top_k=self._top_k)
        if result.top_ids_BTK is None or result.top_log_probs_BTK is None:
            return {"log_probs": result.log_probs_BT}
        return {
            "log_probs": result.log_probs_BT,
            "top_ids": result.top_ids_BTK,
            "top_log_probs": result.top_log_probs_BTK,
        }


def sum_of(tensors: list[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape."""
    return torch.stack(tensors).sum(dim=0)
