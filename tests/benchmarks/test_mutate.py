"""The faults of ``benchmarks/mutate.py`` fit the code, and the script sees which of them the tests find."""

from collections import Counter

import pytest

from benchmarks import mutate

TABLE = """
areas:
  density: {tests: [tests/test_density.py], only: rounded_share}
faults:
  density:
    - {id: rounds, file: commlib/density.py, old: 'round(density * size)', new: 'int(density * size)'}
    - {id: same, file: commlib/density.py, old: '# Of the first four', new: '# Of the first 4'}
    - {id: misread, file: commlib/density.py, old: 'round(density * size)', new: '0', only: 'k_is (the'}
"""


def test_every_fault_is_one_of_the_code_as_it_is():
    areas, faults = mutate.load(mutate.FAULTS)
    assert not [name for name, count in Counter(fault.id for fault in faults).items() if count > 1]
    assert not [fault.id for fault in faults if not fault.applies(mutate.ROOT) or fault.old == fault.new]
    assert set(areas) == {fault.area for fault in faults}
    assert not [test for area in areas.values() for test in area.tests if not (mutate.ROOT / test).exists()]


@pytest.mark.slow
def test_a_fault_in_the_copy_is_found_and_one_without_effect_survives(tmp_path, capsys):
    table, file = tmp_path / "faults.yaml", mutate.ROOT / "commlib" / "density.py"
    table.write_text(TABLE)
    before = file.stat().st_mtime_ns
    assert mutate.main(["--faults", str(table), "--jobs", "1"]) == 1
    printed = capsys.readouterr().out
    rounds, same, misread = (line.partition(" s  density: ") for line in printed.splitlines()[1:4])
    assert rounds[0].startswith("caught")
    assert rounds[2].startswith("rounds  tests/test_density.py::test_k_is_the_rounded_share")
    assert same[0].startswith("SURVIVED") and same[2] == "same  "
    assert misread[0].startswith("does not apply")
    assert misread[2].startswith("misread  pytest cannot read: (rounded_share) and (k_is")
    assert file.stat().st_mtime_ns == before
