"""The page opens in a browser without a network and shows its pictures."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import tiny

from moejax.plan.page import make_page
from moejax.plan.report import make_report
from moejax.plan.svg import COLOURS
from moejax.plan.target import read_target

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")
def test_browser_shows_the_pictures_without_a_network(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed: pip install 'moejax[dev]'")
    page, shot = tmp_path / "plan.html", tmp_path / "plan.png"
    page.write_text(make_page(make_report(tiny.config(2, 4, 2), read_target("h200x8"))), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * 0.0.0.0", "--hide-scrollbars"]
    command = [str(BROWSER), *flags, "--window-size=1000,1600", f"--screenshot={shot}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert shot.is_file(), done.stderr[-2000:]
    pixels = (image.imread(shot)[..., :3] * 255).round().astype(int)
    for colour in COLOURS[:4]:  # the bars of the first pictures
        red, green, blue = (int(part, 16) for part in re.findall("..", colour[1:]))
        same = (abs(pixels - [red, green, blue]).max(axis=-1) <= 2).sum()
        assert same > 300, f"no bar in {colour}"
