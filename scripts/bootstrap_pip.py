"""Install pip into the environment this runs in, where Python came without ``ensurepip``.

The wheel comes from PyPI (or ``PIP_INDEX_URL``), its SHA-256 is checked, and it installs itself.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path

# Old enough for every Python we support, and named exactly, so that no version order is needed here.
WHEEL = "pip-24.0-py3-none-any.whl"


def main():
    """Download the wheel, check it, and let it install itself."""
    page = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/pip/"
    request = urllib.request.Request(page, headers={"Accept": "application/vnd.pypi.simple.v1+json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)["files"]
    entry = next(file for file in files if file["filename"] == WHEEL)
    with urllib.request.urlopen(urllib.parse.urljoin(page, entry["url"]), timeout=60) as answer:
        wheel = answer.read()
    if hashlib.sha256(wheel).hexdigest() != entry["hashes"]["sha256"]:
        sys.exit(f"{WHEEL}: the download is damaged (wrong SHA-256)")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, WHEEL)
        path.write_bytes(wheel)
        subprocess.run([sys.executable, f"{path}/pip", "install", "--quiet", str(path)], check=True)


if __name__ == "__main__":
    main()
