"""Takes the pictures of pages that the docs show, with a headless Chromium.

`make quickstart`, then `python docs/images/take_screenshots.py outputs/quickstart-.../grpo`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

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


def take(browser: str, page: str, picture: Path, *, width: int, height: int) -> None:
    """Photograph the upper part of a page."""
    picture.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
            f"--window-size={width},{height}", f"--screenshot={picture}", page,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode or not picture.is_file():
        sys.exit(f"error: {browser} took no picture of {page}:\n{done.stderr[-2000:]}")
    print(f"{picture} ({picture.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    main()
