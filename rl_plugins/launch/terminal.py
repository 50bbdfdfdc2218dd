"""Terminal of a run: libraries stay silent, and a terminal shows a progress bar."""

from __future__ import annotations

import logging
import sys
import warnings


def quiet_libraries() -> None:
    """Silence Lightning, transformers, DeepSpeed, MLflow, Ray Train and torch in this process, except for errors.

    Their messages at the start are the same in every run.
    """
    for name in ("lightning.pytorch", "lightning.fabric", "DeepSpeed", "mlflow", "alembic", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Tensors that are cut twice are gathered in two steps; nobody can change this.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
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


def redraw_interval_s() -> float:
    """Return the seconds between two updates of a bar; 0 if the output is a file, which cannot show a bar."""
    return 0.5 if sys.stderr.isatty() or "ipykernel" in sys.modules else 0.0
