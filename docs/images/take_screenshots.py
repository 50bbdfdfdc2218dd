"""Takes the pictures of pages that the docs show, with a headless Chromium: a run's report, and its page in MLflow.

`make quickstart`, then `python docs/images/take_screenshots.py outputs/quickstart-.../grpo`.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_plugins.addresses import free_port
from rl_plugins.run_folder import RunFolder

IMAGES = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_S = 120


def main() -> None:
    """Take all of them; exits with what is missing, if something is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run that is through")
    run = RunFolder(parser.parse_args().run.absolute())
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"error: none of {', '.join(BROWSERS)} is in PATH; on Debian: apt-get install chromium")
    if not run.report.is_file():
        sys.exit(f"error: {run.report} is not there: has the run ended?")
    take(browser, run.report.as_uri(), IMAGES / "report.png", width=1280, height=1545)
    with served(run) as page:
        take(browser, f"{page}/artifacts/report.html", IMAGES / "mlflow.png", width=1700, height=1100, wait_s=30)


@contextmanager
def served(run: RunFolder) -> Iterator[str]:
    """The address of a run's page, of an MLflow server over the run's store."""
    from mlflow import MlflowClient
    from omegaconf import OmegaConf

    store = OmegaConf.load(run.config).tracking.uri
    run_id = run.tracking_run.read_text().strip()
    port = free_port("127.0.0.1")
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--port", str(port)]
    server = subprocess.Popen([*command, "--workers", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not answers(port):
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"error: {' '.join(command)} does not answer")
            time.sleep(0.5)
        experiment = MlflowClient(store).get_run(run_id).info.experiment_id
        yield f"{address}/#/experiments/{experiment}/runs/{run_id}"
    finally:
        server.terminate()
        server.wait(TIMEOUT_S)


def answers(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def take(browser: str, page: str, picture: Path, *, width: int, height: int, wait_s: int = 0) -> None:
    """Photograph the upper part of a page, after the seconds that its scripts may take."""
    picture.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
            f"--window-size={width},{height}", f"--screenshot={picture}",
            *([f"--virtual-time-budget={1000 * wait_s}"] if wait_s else []), page,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode or not picture.is_file():
        sys.exit(f"error: {browser} took no picture of {page}:\n{done.stderr[-2000:]}")
    print(f"{picture} ({picture.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    main()
