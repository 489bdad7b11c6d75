"""Reports in Debian's Chromium, without a window: what is seen, and that nothing goes wrong."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launching import tail
from tests.training.recorded import RECORDED, begun, epoch, folder
from tests.training.test_report import HOSTILE, run_in
from training.report.page import Page

WIDTH, HEIGHT = 1200, 1500
# Points at the middle of the first chart that is shown, as a user does.
POINT = """
<script>
  const svg = document.querySelector(".of-steps svg"), box = svg.getBoundingClientRect();
  const at = {clientX: box.left + box.width / 2, clientY: box.top + 40};
  svg.dispatchEvent(new PointerEvent("pointermove", at));
</script>
"""


@pytest.fixture(scope="module")
def chromium():
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs chromium: apt-get install chromium")
    return program


@pytest.fixture
def browse(chromium, tmp_path):
    """Open a page; return what the browser printed. Anything written to the console of the page fails."""

    def opened(page: Path, *words: str) -> str:
        command = [
            *(chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={tmp_path}/profile"),
            *("--enable-logging=stderr", "--log-level=0", f"--window-size={WIDTH},{HEIGHT}", *words),
            page.as_uri(),
        ]
        own = {"env": os.environ | {"HOME": str(tmp_path)}, "capture_output": True, "text": True}
        result = subprocess.run(command, **own, timeout=120, check=False)
        assert result.returncode == 0, tail(result)
        assert [line for line in result.stderr.splitlines() if "CONSOLE" in line] == []
        return result.stdout

    return opened


def page_of(path: Path, *runs: Path | tuple[Path, str]) -> Path:
    path.write_text(Page([run_in(*each) for each in runs]).text)
    return path


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A page of two runs that differ: the second one has lower values."""
    here = tmp_path_factory.mktemp("two")
    shutil.copytree(RECORDED / "small", here / "other")
    lines = (here / "other" / "metrics.jsonl").read_text()
    values = r'"(loss|top1|top5|images_per_second)": ([\d.]+)'
    lower = re.sub(values, lambda found: f'"{found[1]}": {0.8 * float(found[2])}', lines)
    (here / "other" / "metrics.jsonl").write_text(lower)
    return page_of(here / "two.html", (RECORDED / "small", "small"), (here / "other", "other"))


def test_values_are_shown_where_the_pointer_is(browse, two, tmp_path):
    # Its policy lets a page run no script but its own; this copy has none.
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", two.read_text())
    pointed = tmp_path / "pointed.html"
    pointed.write_text(page.replace("</body>", f"{POINT}</body>"))
    (tip,) = re.findall(r'<div class="tip"(?! hidden)[^>]*>(.*?)</div></div>', browse(pointed, "--dump-dom"))
    words = re.findall(r"<span>(.*?)</span>", tip)
    names = [word.partition(":")[0] for word in words]
    assert names == ["small, rank 0", "other, rank 0", "small", "other"]
    value = {word.partition(":")[0]: float(re.search(r": ([\d.]+) at step", word)[1]) for word in words}
    assert value["other"] == pytest.approx(0.8 * value["small"], rel=2e-3)  # four digits are shown


def test_a_script_in_a_name_is_not_run(browse, tmp_path):
    records = [*begun(command=HOSTILE, hosts=[HOSTILE]), epoch(0, reducer=HOSTILE, metrics={HOSTILE: 0.5})]
    path = folder(tmp_path / "run", records, name=HOSTILE)
    page = page_of(tmp_path / "hostile.html", (path, HOSTILE), (path, f"{HOSTILE}2"))
    content = browse(page, "--dump-dom")  # alert() would be seen on the console: the policy refuses it
    assert content.count("<script") == 1
    assert "<img" not in content
