"""What docs/from_horovod.md says is what is there."""

import re
import sys

import pytest

import commlib.keras
from tests.launching import MPIRUN, ROOT, run, tail

PAGE = (ROOT / "docs" / "from_horovod.md").read_text()


def test_every_name_of_the_table_is_there():
    rows = re.findall(r"^\| `.*?` \| `(\w+)\(.*` \|$", PAGE, re.MULTILINE)
    assert len(rows) >= 5
    assert [name for name in rows if name not in commlib.keras.__all__] == []
    named = set(re.findall(r"`(\w+)", PAGE))
    assert [name for name in commlib.keras.__all__ if name not in named] == []


@pytest.mark.slow
@pytest.mark.launch
def test_the_program_trains_saves_and_goes_on_on_two_ranks(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my.py").write_text(program)
    result = run(*MPIRUN, "2", sys.executable, "my.py", cwd=tmp_path)
    assert result.returncode == 0, tail(result)
    reports = re.findall(r"rank \d: (\d+) steps, (\d) epochs, loss (\S+)", result.stdout)
    assert len(reports) == 2
    assert reports[0] == reports[1]
    steps, epochs, loss = reports[0]
    assert int(steps) == 36 * int(epochs) + 40
    assert float(loss) < 1  # the targets' variance is 8
    assert not (tmp_path / "backup").exists()
