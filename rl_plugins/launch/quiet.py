"""Silence the start-up messages of libraries, which are the same in every run."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries() -> None:
    """Silence Lightning, transformers, DeepSpeed, MLflow, Ray Train and torch in this process, except for errors."""
    for name in ("lightning.pytorch", "lightning.fabric", "DeepSpeed", "mlflow", "alembic", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Ray Train names some loggers after its files.
    for name in [name for name in logging.root.manager.loggerDict if "/ray/train/" in name]:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    # A view would matter only if code changed the logits in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
