"""Reports: what a run has left, where it is in steps and seconds, what is said of it, and the page."""

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.training.recorded import RECORDED, begun, checkpoint, epoch, folder, resumed, step
from tests.training.refusal import invoke, refusal
from tests.training.small import phase, trainer
from training.config import run_files
from training.report import facts
from training.report.curves import charts
from training.report.page import MOST_RUNS, Page, rounds
from training.report.run import read

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)> $x_{$ _y ' & \x1b[31m \u202e"
VOID = {"meta", "input"}


def run_in(path, name="run"):
    return read(path, name)


def happened(run):
    return [words for _, _, words in facts.events(run).rows]


class Elements(HTMLParser):
    """The elements of a page and its text; it fails where tags do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._open += [tag] * (tag not in VOID)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("style", "script") and data.strip():
            self.words.append(data)


TWO_PHASES = {"phases": [{"epochs": 2}, {"steps": 6}]}


def test_steps_are_counted_over_phases_and_epochs_have_theirs(tmp_path):
    records = [
        *begun(),
        *(step(0, 4), epoch(0, steps=4), step(1, 8), epoch(1, steps=4)),
        *(step(2, 3, phase=1, run_steps=11), epoch(2, steps=4, phase=1)),
        *(step(3, 6, phase=1, run_steps=14), epoch(3, steps=2, phase=1, run_steps=14)),
    ]
    path = folder(tmp_path / "a", records, **TWO_PHASES)
    run = run_in(path)
    assert [each.end for each in run.steps] == [4, 8, 8 + 3, 8 + 6]
    assert [(each.phase, each.end) for each in run.epochs] == [(0, 4), (0, 8), (1, 12), (1, 14)]
    assert [each.begin for each in run.phases] == [0, 8]
    assert run.end == 14
    (path / "config.yaml").write_text("phases: [")  # records alone say so
    assert [each.begin for each in run_in(path).phases] == [0, 8]


def test_seconds_begin_when_steps_are_compiled(tmp_path):
    run = run_in(folder(tmp_path / "a", [*begun(5.0), step(0, 1, seconds=6.5)]))
    assert run.steps[0].seconds == pytest.approx(1.5)


def test_a_resumed_run_goes_on_at_its_checkpoint_and_what_is_trained_again_is_there_once(tmp_path):
    records = [
        *begun(5.0),
        *(step(0, 4, seconds=9.0, loss=1.0), epoch(0, steps=4, seconds=4.0)),
        *(step(1, 5, seconds=10.0, loss=2.0), checkpoint(6, seconds=12.0, copied=0.2, written=0.3)),
        step(1, 8, seconds=14.0, loss=3.0),  # lost, as is the epoch after it
        epoch(1, steps=4, seconds=9.0, loss=7.0),
        *begun(2.0),
        *(resumed(6, run_epoch=1, phase_steps=6), step(1, 8, seconds=3.0, loss=4.0)),
        epoch(1, steps=4, seconds=8.0, loss=8.0),
    ]
    run = run_in(folder(tmp_path / "a", records, phases=[{"epochs": 3}]))
    # the checkpoint holds the run as it was at 12 - 0.5 - 5 seconds; the step comes one second after
    assert [(each.end, each.record["loss"]) for each in run.steps] == [(4, 1.0), (5, 2.0), (8, 4.0)]
    assert [each.seconds for each in run.steps] == pytest.approx([4.0, 5.0, 6.5 + 1.0])
    assert [(each.end, each.record["loss"]) for each in run.epochs] == [(4, 1.0), (8, 8.0)]
    assert facts.facts(run)["resumed"] == "once"


def test_a_run_that_began_again_for_want_of_a_checkpoint_has_nothing_of_before(tmp_path):
    records = [*begun(), step(0, 1), epoch(0), *begun(), step(0, 2)]
    run = run_in(folder(tmp_path / "a", records))
    assert ([each.end for each in run.steps], run.epochs) == ([2], [])


# That json reads, and the masking of secrets does not.
DEEP = b'{"kind": "epoch", "x": %s1%s}' % (b'{"x": ' * 900, b"}" * 900)


def test_what_is_no_record_is_left_out_and_counted(tmp_path):
    path = folder(tmp_path / "a", [*begun(), epoch(0)], name="a")
    junk = [b'{"kind": 3}', b"[1]", b"\xff\x00", b"[" * 100_000, b'{"kind": "step", "epoch": 0, "st', DEEP]
    (path / "summary.json").write_bytes(DEEP)
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b"\n\n" + b"\n".join(junk))
    run = run_in(path)
    assert [each.kind for each in (*run.events, *run.epochs, *run.steps)] == ["run", "prepare", "epoch"]
    assert run.summary == {}
    assert facts.facts(run)["state"] == "unfinished; 6 damaged lines of metrics.jsonl left out"


@pytest.mark.parametrize(
    ("second", "state"), [({"epochs": 4}, "unfinished; 3 of 5 epochs"), ({"steps": 20}, "unfinished")]
)
def test_of_how_many_epochs_is_said_where_all_phases_have_epochs(tmp_path, second, state):
    records = [*begun(), *map(epoch, range(3))]
    path = folder(tmp_path / "a", records, phases=[{"epochs": 1}, second])
    assert facts.facts(run_in(path))["state"] == state


def test_values_of_any_kind_are_drawn_where_they_are_numbers(tmp_path):
    odd = [None, "x", [], {}, True, -1, 1e400, 10**400, 1e300, 0, float("nan")]
    records = [*begun(ranks="x", nodes=3), *(step(value, value, loss=value) for value in odd)]
    for value in odd:
        values = dict.fromkeys(("loss", "run_seconds", "sent_inter_bytes", "hidden_share", "slowest"), value)
        values |= {"stage_seconds": {"select": value}, "images_per_second": value, "metrics": {"top1": value}}
        records += [epoch(value, steps=value, **values), epoch(0, **values)]
        for kind in ("choice", "resume", "switch", "stall", "checkpoint", "cache", "prepare", "summary"):
            records.append({"kind": kind, **dict.fromkeys(("phase", "steps", "memory", "changes"), value)})
    path = folder(tmp_path / "a", records, phases=[{"epochs": "x", "reducer": [], "learning_rate": {}}, 3])
    (path / "summary.json").write_text('{"phases": [3, {"stall_seconds": "x"}], "seconds": "x"}')
    assert "<svg" in Page([run_in(path)]).text


@pytest.mark.parametrize("kept", [3, 40])
def test_a_run_that_was_stopped_anywhere_has_a_page(tmp_path, kept):
    path = tmp_path / "a"
    shutil.copytree(RECORDED / "small", path)
    (path / "summary.json").unlink()
    lines = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (path / "metrics.jsonl").write_bytes(b"".join(lines[:kept])[:-7])
    words = Elements(Page([run_in(path)]).text).words
    assert "unfinished" in words
    assert ("No step was recorded yet." in words) == (kept < 6)


def test_a_run_of_one_rank_is_read_as_the_trainer_records_it(tmp_path):
    words = ("log_every=1", "target={metric: top1, at_least: 0.01}", "checkpoints={every_steps: 2}")
    trainer(tmp_path, *words, phases=(phase(epochs=1, batch=400), phase(steps=3, batch=400))).fit()
    (path,) = tmp_path.iterdir()
    run = run_in(path)
    (ended,) = run.epochs  # the target is reached in the first one
    assert list(ended.metrics) == ["top1", "top5"]
    assert (ended.unit, ended.end, run.end) == ("images", 3, 3)
    assert [each.end for each in run.steps] == [1, 2, 3]
    drawn = [chart.name for chart in charts([run])]
    assert drawn == ["loss", "top1", "top5", "throughput", "learning-rate"]
    told = facts.facts(run)
    assert told["target"].startswith("top1 of at least 1.00 %: reached in epoch 1, after ")
    assert told["reducers"] == "none: one rank"
    assert told["ranks"].startswith("1 rank on 1 node (")
    assert told["checkpoints"].startswith("2, ")
    assert facts.state(run) == facts.REACHED
    files = (run_files.METRICS, run_files.SUMMARY, run_files.CONFIG, run_files.DAWNBENCH)
    assert all((path / name).exists() for name in files)
    assert told["hardware"].startswith("1 rank on ")


def test_records_say_phase_and_step_of_the_run(tmp_path):
    phases = (phase(epochs=1, batch=400), phase(steps=2, batch=400))
    trainer(tmp_path, "log_every=1", "checkpoints={every_steps: 9}", phases=phases).fit()
    (path,) = tmp_path.glob("*/metrics.jsonl")
    records = [each for each in map(json.loads, path.read_text().splitlines()) if "run_steps" in each]
    found = [(each["phase"], each["run_steps"]) for each in records if each["kind"] in ("step", "epoch")]
    assert found == [(0, 1), (0, 2), (0, 3), (0, 3), (1, 4), (1, 5), (1, 5)]
    assert {(each["phase"], each["run_steps"]) for each in records[-2:]} == {(1, 5)}


def test_a_run_without_tests_shows_its_loss(tmp_path):
    records = [*begun(), epoch(0, metrics={"top1": None}, loss=0.25)]
    run = run_in(folder(tmp_path / "a", records))
    assert [chart.name for chart in charts([run])] == ["loss"]
    assert next(facts.tiles(run)) == ("training loss", "0.25", "not tested")


def test_density_follows_its_warm_up(tmp_path):
    reducer = {"name": "hitopk", "density": 0.01}
    warmup = {"start": 0.16, "epochs": 2}
    phases = [{"epochs": 3, "reducer": reducer, "density_warmup": warmup}, {"epochs": 1}]
    records = [*begun(), *(epoch(number) for number in range(3)), epoch(3, reducer="dense", phase=1)]
    found = {each.name: each for each in charts([run_in(folder(tmp_path / "a", records, phases=phases))])}
    (curve,) = found["density"].curves
    found = [(point.end, pytest.approx(point.value)) for point in curve.points]
    # from 0.16 in two equal ratios to 0.01: a quarter each; then all
    expected = [(0, 0.16), (4, 0.16), (4, 0.04), (8, 0.04), (8, 0.01), (12, 0.01), (12, 1.0), (16, 1.0)]
    assert found == expected


def test_bytes_are_those_of_a_step_and_dense_ones_stand_beside_them(tmp_path):
    sent = {"sent_inter_bytes": 400, "sent_intra_bytes": 80, "dense_inter_bytes": 4000}
    run = run_in(folder(tmp_path / "a", [*begun(), epoch(0, steps=4, **sent)]))
    curves = {chart.name: chart.curves for chart in charts([run])}
    inter, intra = (
        [[point.value for point in each.points] for each in curves[f"bytes-{link}"]]
        for link in ("inter", "intra")
    )
    assert (inter, intra) == ([[100.0, 100.0], [1000.0, 1000.0]], [[20.0, 20.0]])
    assert ("sent between nodes", "400 B", "10% of the 4.00 kB of dense") in list(facts.tiles(run))


def test_the_exchange_is_set_beside_what_auto_predicted(tmp_path):
    seconds = {"predicted_seconds": 0.002, "predicted_dense_seconds": 0.025}
    choice = {"kind": "choice", "seconds": 0.0, "phase": 0, "reason": "hitopk: 2 ms expected", **seconds}
    stages = [{"select": 0.5, "forward_backward": 9.0}, {"select": 0.001, "inter": 0.002}, {"combine": 0.003}]
    records = [*begun(), choice, *(epoch(place, stage_seconds=each) for place, each in enumerate(stages))]
    run = run_in(folder(tmp_path / "a", records, phases=[{"epochs": 3}]))
    table = facts.phases(run)
    (told,) = (dict(zip(table.header, row, strict=True)) for row in table.rows)
    # the first epoch, in which kernels may be compiled, does not move a median
    assert (told["exchange a step"], told["predicted"], told["predicted, dense"]) == ("3 ms", "2 ms", "25 ms")
    assert ["0.0 s", "0", "phase 1: auto picks hitopk: 2 ms expected"] in facts.events(run).rows


def test_stalls_skipped_steps_and_the_slowest_rank_are_told(tmp_path):
    late = [{"rank": 1, "excess": 0.1}, {"rank": 1, "excess": 0.3}, {"rank": 0, "excess": 0.9}]
    records = [*begun(), *(epoch(place, slowest=each, passed_over=2) for place, each in enumerate(late))]
    records.append({"kind": "stall", "seconds": 1.0, "phase": 1, "stall_seconds": 0.25})
    records += [checkpoint(4, 1.0, copied=0.1), checkpoint(8, 1.0, copied=0.1, written=5.0, waited=0.2)]
    records.append({"kind": "stop", "seconds": 2.0, "reason": "loss no better"})
    path = folder(tmp_path / "a", records)
    summary = {"seconds": 4.0, "phases": [{"skipped_steps": 2}, {"skipped_steps": 1}]}
    (path / "summary.json").write_text(json.dumps(summary))
    assert happened(run_in(path)) == [
        "steps compiled in 0.0 s",
        "ranks stood still for 250 ms before phase 2",
        "loss no better: the run ended early",
    ]
    told = facts.facts(run_in(path))
    assert told["slowest rank"] == "rank 1 in 2 of 3 epochs, by 20.0% on average"
    assert told["stalls between phases"] == "250 ms before phase 2"
    assert told["steps skipped"] == "3 of 12, for a NaN or an infinity"
    both = facts.facts_of([run_in(path), run_in(RECORDED / "small")])
    assert ["steps passed over", "6 of all ranks, whose rounds had lasted round_seconds", "–"] in both.rows
    assert told["checkpoints"] == "2, 200 ms each (median), 400 ms together, 10.0% of the time"


def test_skipped_steps_of_a_run_that_has_not_ended_are_of_those_that_were_logged(tmp_path):
    records = [*begun(), step(0, 10), step(0, 20, finite=False), step(0, 30)]
    told = facts.facts(run_in(folder(tmp_path / "a", records)))
    assert told["steps skipped"] == "1 of 3 logged, for a NaN or an infinity"


def test_samples_are_counted_by_level_over_all_processes(tmp_path):
    counts = [{"memory": 5, "storage": 1}, {"memory": 1, "storage": 1, "damaged_on_disk": 2}]
    records = [record for each in counts for record in (*begun(), {"kind": "cache", "seconds": 1.0, **each})]
    run = run_in(folder(tmp_path / "a", records))
    assert [row[1:3] for row in facts.reads(run).rows] == [["6", "75.0%"], ["2", "25.0%"]]
    assert "2 damaged records of the cache were read again" in happened(run)


@pytest.fixture(scope="module")
def page():
    return Page([run_in(RECORDED / "small", "small")])


def test_a_page_is_one_file_that_refers_to_nothing_outside(page):
    links = [value for _, given in Elements(page.text).found for key, value in given.items() if "href" in key]
    assert links
    assert all(each.startswith("#") for each in links)
    assert not re.search(r"\ssrc=|@import|url\((?!#)", page.text)
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', page.text)[1]
    assert policy.startswith("default-src 'none'")
    script = re.search("<script>(.*)</script>", page.text, re.DOTALL)[1]
    assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert len(page.text) < 400_000


@pytest.mark.parametrize(
    ("outer", "bars"),
    [
        ({"fragments": 3, "delay": 2}, [(4, 6, 2), (8, 10, 3), (12, 14, 1)]),
        ({"fragments": 2}, [(6, 6.2, 2), (12, 12.2, 1)]),
        ({"delay": 2}, [(12, 14, 1)]),
        # one exchange a round, and what is damaged
        *((outer, []) for outer in (None, {}, "x", {"fragments": 5}, {"fragments": 4, "delay": 3})),
    ],
)
def test_the_fragments_of_a_round_are_drawn_where_they_travel(tmp_path, outer, bars):
    phases = [{"epochs": 1}, {"epochs": 1, "local_steps": 12, "outer": outer}]
    run = run_in(folder(tmp_path / "a", [*begun(), epoch(0), epoch(1, phase=1)], phases=phases))
    if not bars:
        assert rounds(run) is None
        return
    assert "When fragments are exchanged" in Page([run]).text
    (axes,) = rounds(run).axes
    found = [path.get_extents() for each in axes.collections for path in each.get_paths()]
    assert [(each.x0, each.x1, each.y0 + 0.4) for each in found] == [pytest.approx(bar) for bar in bars]


def test_every_picture_has_a_title_and_names_of_its_own(page):
    pictures = re.findall(r"<svg xmlns.*?</svg>", page.text, re.DOTALL)
    assert len(pictures) == 2 * (len(page.pictures) - 1) + 1  # over steps, over time, and the stages
    for each in map(ElementTree.fromstring, pictures):
        title = next(iter(each))
        assert title.tag.endswith("title")
        assert each.get("aria-labelledby") == title.get("id")
        assert each.get("role") == "img"
        assert "small" in title.text
    names = [given["id"] for _, given in Elements(page.text).found if "id" in given]
    assert len(names) == len(set(names))
    used = re.findall(r"(?:url\(|href=\")#([^)\"]+)", page.text)
    assert set(used) <= set(names)


def test_names_are_text_wherever_they_come_from(tmp_path):
    names = {"command": HOSTILE, "hosts": [HOSTILE], "versions": {HOSTILE: HOSTILE}, "transport": HOSTILE}
    records = [
        *begun(ranks=2, nodes=[2], **names),
        {"kind": "choice", "seconds": 0.0, "phase": 0, "reason": HOSTILE},
        {"kind": "switch", "seconds": 0.0, "before": HOSTILE, "after": HOSTILE},
        epoch(0, reducer=HOSTILE, input=HOSTILE, metrics={HOSTILE: 0.5}, **{f"{HOSTILE}_per_second": 5.0}),
        epoch(1, reducer=HOSTILE, input=HOSTILE, metrics={HOSTILE: 0.5}, stage_seconds={"select": 1.0}),
    ]
    parts = dict.fromkeys(("name", "model", "dataset", "optimizer"), HOSTILE)
    phases = [{"epochs": 1}, {"epochs": 1, "learning_rate": HOSTILE}]
    path = folder(tmp_path / "a", records, **parts, phases=phases)
    plain = Elements(Page([run_in(path, "run")] * 2).text)
    hostile = Elements(Page([run_in(path, HOSTILE)] * 2).text)
    assert [tag for tag, _ in hostile.found] == [tag for tag, _ in plain.found]
    assert [tag for tag, _ in hostile.found].count("script") == 1
    assert all(not key.startswith("on") for _, given in hostile.found for key in given)
    assert any("<script>alert(1)</script>" in word for word in hostile.words)
    assert all(character.isprintable() or character in "\n" for word in hostile.words for character in word)


def test_secrets_are_masked_wherever_they_stand(tmp_path):
    words = "cloudtrain train x dataset.storage.options.secret=hunter2"
    path = folder(
        tmp_path / "a",
        [*begun(command=words), epoch(0), {"kind": "buckets", "reason": "password=hunter2", "seconds": 0.0}],
        dataset={"name": "imagenet", "options": {"secret": "hunter2"}},
        optimizer="token=hunter2",
    )
    text = Page([run_in(path)]).text
    assert "hunter2" not in text
    assert "secret=***" in text


def test_the_report_of_a_run_is_in_its_folder_with_its_pictures(tmp_path):
    records = [*begun(), *(epoch(place, stage_seconds={"select": 1.0}) for place in range(2))]
    path = folder(tmp_path / "run-1", records)
    before = {each.name for each in path.iterdir()}
    result = invoke("report", path)
    assert (result.exit_code, result.stderr) == (0, "")
    made = {each.name for each in path.iterdir()} - before
    assert {"report.html", "report-loss.png", "report-stages.png"} <= made
    assert all(re.fullmatch(r"report(\.html|-[a-z0-9-]+\.png)", name) for name in made)
    pictures = len(made) - 1
    assert result.stdout == f"report: {path}/report.html, and its {pictures} charts as report-*.png\n"
    assert "<title>run-1 – cloudtrain</title>" in (path / "report.html").read_text()


def test_the_report_of_several_runs_is_here_and_names_them_apart(tmp_path, monkeypatch):
    for name in ("a/x", "b/x"):
        folder(tmp_path / name, [*begun(), epoch(0)])
    monkeypatch.chdir(tmp_path)
    assert invoke("report", "a/x", "b/x").exit_code == 0
    assert {"a/x", "b/x"} <= set(Elements(Path("report.html").read_text()).words)
    assert invoke("report", "a/x", "b/x", "--output", "two.html").exit_code == 0
    assert Path("two-loss.png").exists()


def test_what_is_no_run_of_a_network_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        assert f"{path}: expected the folder of a run" in refusal("report", path)
    for name, task in {"a": "linear", "b": {"name": "linear"}}.items():
        path = folder(tmp_path / name, [{"kind": "pass", "seconds": 1.0}], task=task)
        expected = "expected a run that trains a network, got one of task linear"
        assert refusal("report", path).endswith(expected)


def test_a_report_that_cannot_be_written_is_one_line(tmp_path):
    path = folder(tmp_path / "a", [*begun(), epoch(0)])
    line = refusal("report", path, "--output", tmp_path / "x.pdf")
    assert "--output: expected a file that ends in .html" in line
    line = refusal("report", path, "--output", tmp_path / "no" / "x.html")
    assert line.endswith("no/x.html: expected a file that can be written: No such file or directory")
    assert f"at most {MOST_RUNS} runs" in refusal("report", *[path] * (MOST_RUNS + 1))
