"""Keeps libraries from talking over the run: what they say at every start says nothing about it."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries() -> None:
    """Silence start-up chatter of Lightning, transformers, DeepSpeed and torch in this process; errors still show."""
    for name in ("lightning.pytorch", "lightning.fabric", "DeepSpeed", "mlflow", "alembic", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Ray Train names some of its loggers after their files.
    for name in [name for name in logging.root.manager.loggerDict if "/ray/train/" in name]:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    # Logits that are a view would matter if someone changed them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
