"""Install pip into the environment this runs in, where Python came without ``ensurepip``.

The wheel comes from PyPI (or ``PIP_INDEX_URL``), its SHA-256 is checked, and it installs itself.
"""

import hashlib
import html
import os
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path

# Old enough for every Python we support, and named exactly, so that no version order is needed here.
WHEEL = "pip-24.0-py3-none-any.whl"


def main() -> None:
    """Download the wheel, check it, and let it install itself."""
    page = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/pip/"
    links = re.findall(r'href="([^"]+)"', read(page).decode())
    addresses = [html.unescape(link) for link in links if f"/{WHEEL}#sha256=" in link]
    if not addresses:
        sys.exit(f"{page} has no {WHEEL} with a SHA-256")
    address, _, digest = addresses[0].partition("#sha256=")
    wheel = read(urllib.parse.urljoin(page, address))
    if hashlib.sha256(wheel).hexdigest() != digest:
        sys.exit(f"{WHEEL}: the download is damaged, its SHA-256 is wrong")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, WHEEL)
        path.write_bytes(wheel)
        subprocess.run([sys.executable, f"{path}/pip", "install", "--quiet", str(path)], check=True)


def read(address: str) -> bytes:
    """Return the content of an address."""
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            return answer.read()
    except OSError as error:
        sys.exit(f"{address} cannot be read: {error}")


if __name__ == "__main__":
    main()
