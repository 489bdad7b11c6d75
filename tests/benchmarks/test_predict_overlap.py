"""What the docs say of overlap on the papers' cluster is what closed forms predict, and the engine does."""

from xml.etree import ElementTree

import pytest

from benchmarks import predict_overlap
from benchmarks.drawing.pages import with_block
from benchmarks.predict_overlap import (
    HITOPKCOMM,
    PICTURE,
    RATES,
    SIMULATED,
    asked_for,
    load,
    operations,
    pages,
    resnet50_sides,
    simulate,
    steps,
    vgg19_sides,
    workloads,
)
from benchmarks.shapes import resnet50, vgg19
from training.plan.step import FORWARD, Bucket, Workload


@pytest.mark.slow
def test_the_tables_of_the_pages_are_those_of_the_script_and_of_the_newest_record():
    # To refresh: python -m benchmarks.predict_overlap
    for path, blocks in pages().items():
        page = path.read_text()
        for name, text in blocks.items():
            assert with_block(page, name, text) == page, name


def test_the_picture_is_of_the_numbers_as_they_are(tmp_path):
    predict_overlap.draw(tmp_path / "fresh.svg")
    fresh, kept = (
        [each.attrib for each in ElementTree.parse(path).iter() if each.tag.endswith("use")]
        for path in (tmp_path / "fresh.svg", PICTURE)
    )
    assert fresh == kept
    assert len(fresh) > len(steps())  # a mark for each


# ------------------------------------------------------------- what the issue asks


def test_where_messages_are_a_third_and_fit_overlap_gains_a_fifth_and_hides_seven_tenths():
    found = asked_for()
    assert len(found) >= 5
    assert min(each.gain for each in found) >= 1.2
    assert min(each.hidden for each in found) >= 0.7


def test_no_step_is_faster_than_its_two_resources_allow_nor_slower_than_without_overlap():
    assert len(steps()) == 4 * len(RATES) * 5
    for each in steps():
        least = max(each.computing, FORWARD * each.computing + each.messages)
        assert least < each.overlapped < each.plain
        assert 0 < each.hidden < 1


def test_the_engine_on_the_virtual_clock_takes_as_long_as_the_closed_forms():
    found = load()
    assert [(each.workload, each.gbit, each.reducer) for each in found] == list(SIMULATED)
    for each in found:
        assert each.plain == pytest.approx(each.expected.plain, rel=0.01)
        assert each.overlapped == pytest.approx(each.expected.overlapped, rel=0.01)
        assert each.hidden == pytest.approx(each.expected.hidden, abs=0.03)


@pytest.mark.parametrize("reducer", ["dense", "hitopk"])
def test_a_simulated_step_is_two_resources_side_by_side(reducer, monkeypatch):
    """Here on two nodes of two ranks; the record is of 128 ranks."""
    small = Workload("small", 0.004, (Bucket(4_000_000, 0.6), Bucket(8_000_000, 0.3), Bucket(1_000_000, 0.1)))
    monkeypatch.setattr(predict_overlap, "workloads", lambda: {"small": small})
    monkeypatch.setattr(HITOPKCOMM, "nodes", 2)
    monkeypatch.setattr(HITOPKCOMM, "ranks_per_node", 2)
    found = simulate("small", 25.0, reducer)
    assert found.plain == pytest.approx(found.expected.plain, rel=0.01)
    assert found.overlapped == pytest.approx(found.expected.overlapped, rel=0.01)
    assert found.hidden == pytest.approx(found.expected.hidden, abs=0.01)
    assert found.overlapped < found.plain


# ------------------------------------------------------------- computing


def test_layers_share_the_backward_pass_by_their_multiply_adds():
    shapes = [(3, 3, 2, 5), (5,), (10, 4), (4,)]
    assert operations(shapes, [7]) == [90 * 49, 0, 40, 0]
    networks = ((resnet50(), resnet50_sides()), (vgg19(), vgg19_sides()))
    published = (4.09e9, 19.63e9)
    assert [sum(operations(*each)) for each in networks] == pytest.approx(published, rel=0.001)
    for each in workloads().values():
        assert sum(bucket.share for bucket in each.buckets) == pytest.approx(1)
        assert each.forward + sum(map(each.backward, each.buckets)) == pytest.approx(each.computing)
