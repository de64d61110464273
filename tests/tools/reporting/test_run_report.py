"""Check the data of the report page, that it is one file, and that a browser shows it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_lite.checkpoint.reader import read_weights
from megatron_lite.metrics.logger import MetricsLogger, read_metrics
from tools.plot import main
from tools.reporting.run_report import PAGE, collect, columns, write_report

HOSTILE = "</script><script>document.title = 'taken'</script><!-- <b>&amp; \u2028 größe 🙂"


class Page(HTMLParser):
    """Collect the elements with their attributes, and the text of the script elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self._inside = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts.append(data)


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    """Copy the trained run and add validations, hostile samples and results."""
    copy = tmp_path / "my run"
    shutil.copytree(trained_run, copy)
    metrics = MetricsLogger(copy, total_steps=60, initial_step=30, progress_bar=False)
    metrics.log(30, {"loss": 4.5, "bits_per_byte": 2.25, "tokens": 7680}, kind="validation")
    metrics.log(30, {"prompt": "def ", "text": HOSTILE}, kind="sample")
    metrics.close()
    results = {"results": {"perplexity": {"validation": {"loss": 4.5, "dtype": "float32"}}}, "step": 30}
    (copy / "results.json").write_text(json.dumps({**results, "device": "cpu", "date": "2026-01-01T00:00:00"}))
    (copy / "summary.json").write_text(json.dumps({"steps": 30, "compressors": {"gzip -9": 2.0}, "sample": "def x"}))
    return copy


def test_page_data_of_a_run(run: Path) -> None:
    data = collect(run)
    logged = [line for line in read_metrics(run) if line["kind"] == "train"]
    assert data["name"] == "my run"
    assert data["train"]["step"] == list(range(1, 31))
    assert data["train"]["loss"] == pytest.approx([line["loss"] for line in logged], rel=1e-5)
    assert data["validation"]["bits_per_byte"] == [None, 2.25]
    assert data["samples"] == [{"step": 30, "prompt": "def ", "text": HOSTILE}]
    assert data["evaluation"]["results"] == {"perplexity": {"validation": {"loss": 4.5, "dtype": "float32"}}}
    assert data["compressors"] == {"gzip -9": 2.0}
    assert "mixers" in data["config"]
    assert data["environment"]["checkpoint"] == "step_00000030"
    weights = read_weights(run)
    assert data["environment"]["parameters"] == sum(w.numel() for w in weights.values())
    assert "torch" in data["environment"]["versions"]


def test_page_is_one_file_without_external_references(run: Path) -> None:
    assert main([str(run), "--html"]) == 0
    text = (run / "report.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    for tag, attributes in page.elements:
        assert not {"src", "srcset", "action"} & attributes.keys(), tag
        assert attributes.get("href", "data:").startswith("data:"), tag
    assert "http" not in text.replace("http-equiv", "")
    assert "url(" not in text
    assert "@import" not in text
    assert len(page.scripts) == 2, "generated text stays inside the data"
    assert json.loads(page.scripts[0])["samples"][0]["text"] == HOSTILE
    assert re.search(r'content="default-src \'none\'', text)


def test_page_of_a_run_after_its_first_step(tmp_path: Path) -> None:
    metrics = MetricsLogger(tmp_path, total_steps=5, progress_bar=False)
    with pytest.raises(ValueError, match="no training step is logged there yet"):
        write_report(tmp_path)
    metrics.log(1, {"loss": float("nan"), "tokens": 10})
    metrics.close()
    data = collect(tmp_path)
    assert data["train"] == {"step": [1], "time": data["train"]["time"], "tokens": [10]}
    assert data["config"] is data["environment"] is data["evaluation"] is None
    assert write_report(tmp_path / "metrics.jsonl", tmp_path / "out" / "a.html").is_file()


def test_infinite_numbers_are_omitted_and_a_damaged_file_is_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "results.json"
    whole = path.read_text()
    path.write_text(whole.replace("4.5", "Infinity"))
    write_report(run)
    assert collect(run)["evaluation"]["results"] == {"perplexity": {"validation": {"loss": None, "dtype": "float32"}}}
    path.write_text(whole[:20])
    assert main([str(run), "--html"]) == 2
    assert f"{path} is no JSON" in capsys.readouterr().err


def test_long_runs_are_averaged() -> None:
    lines = [{"step": i, "loss": float(i), "mfu": None if i % 2 else 0.5} for i in range(1, 11)]
    averages = columns(lines, most=4)
    assert averages["step"] == [3, 6, 9, 10]
    assert averages["loss"] == [2.0, 5.0, 8.0, 10.0]
    assert averages["mfu"] == [0.5, 0.5, 0.5, 0.5]
    counted = [{"step": i, "tokens": 10 * i, "skipped_steps": i // 5, "time": 2 * i, "on": True} for i in range(1, 11)]
    ends = {"step": [5, 10], "tokens": [50, 100], "skipped_steps": [1, 2], "time": [10, 20]}
    assert columns(counted, most=2) == ends
    assert columns(lines, most=10)["loss"] == [line["loss"] for line in lines]


def test_scores_and_sample_of_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = MetricsLogger(tmp_path, total_steps=3, progress_bar=False)
    for step in (1, 2, 3):
        metrics.log(step, {"loss": 4.0, "tokens": 10 * step})
    metrics.log(3, {"suite/task": 0.5}, kind="evaluation")
    metrics.close()
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 3, "sample": "def x"}))
    monkeypatch.setattr("tools.reporting.run_report.MOST_POINTS", 2)
    data = collect(tmp_path)
    assert data["scores"]["suite/task"] == [0.5]
    assert data["samples"] == [{"step": 3, "prompt": "", "text": "def x"}]
    assert (data["steps_per_point"], data["train"]["step"]) == (2, [2, 3])


SCORES = {
    "checkpoint": "x",
    "step": 30,
    "device": "cpu",
    "date": "2026-11-23T12:00:00",
    "results": {"suite": {"tiny": {"acc": 0.75, "seconds": 9.5}, "whole": {"acc": 0.5}}},
    "details": {
        "suite": {
            "tiny": {"acc": {"stderr": 0.25, "chance": 0.3125, "documents": 4, "whole": 100}},
            "whole": {"acc": {"stderr": None, "chance": None, "documents": 50}},
        }
    },
}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_page_shows_scores_with_error_chance_and_documents(run: Path) -> None:
    (run / "results.json").write_text(json.dumps(SCORES))
    text = shown_by_node(write_report(run)).replace("\u00a0", " ")
    assert "metric value standard error chance documents" in text
    assert "tiny acc 0.75 ± 0.25 0.3125 4 of 100 (too few to measure)" in text
    assert re.search(r"whole acc 0\.5 +50(?! \()", text)


def test_page_of_several_runs(run: Path, trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Show results, curves, differing keys, and scores with their significance, in one file."""
    other = tmp_path / "other<b>"
    shutil.copytree(trained_run, other, ignore=shutil.ignore_patterns("SHA256SUMS"))
    config = other / "checkpoints" / "step_00000030" / "config.yml"
    changed = re.sub(r"^  lr: .*", "  lr: 0.5", config.read_text(), count=1, flags=re.MULTILINE)
    config.write_text(re.sub(r"^  mixers: .*", "  mixers: [gla]", changed, count=1, flags=re.MULTILINE))
    for folder, correct in ((run, 9), (other, 1)):
        for step, count in ((3, 5), (30, correct)):  # the newest is shown
            entry = {"ids": [f"{i}:{i}" for i in range(10)], "values": [1.0] * count + [0.0] * (10 - count)}
            target = folder / "evaluation" / f"step_{step:08d}" / "results.json"
            target.parent.mkdir(parents=True)
            content = {"metalion": {"title": "m", "documents": {"t": {"acc": entry}}}, "results": {}}
            target.write_text(json.dumps({**content, "higher_is_better": {"t": {"acc": True}}}))
    (other / "results.json").write_text(json.dumps(SCORES))
    assert main([str(run), str(other), "--html", "-o", str(tmp_path / "runs.html")]) == 0
    text = (tmp_path / "runs.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert not page.scripts
    assert "http" not in text.replace("http-equiv", "")
    (picture,) = [attributes["src"] for tag, attributes in page.elements if tag == "img"]
    assert picture is not None
    assert picture.startswith("data:image/svg+xml;base64,")
    rows = [re.sub(r"<[^>]*>", "|", line) for line in text.splitlines() if line.startswith("<tr><td>")]
    scores = {row.replace("||", "|").replace("\u00a0", " ").strip("|") for row in rows if "|suite|" in row}
    assert scores == {"suite|tiny|acc|-|0.75 ± 0.25, n = 4", "suite|whole|acc|-|0.5"}, "seconds are no metric"
    assert '<td>suite</td><td class="text">tiny</td><td class="text">acc</td><td>-</td>' in text
    assert "Losses in nats per token" in text
    assert "Accuracies from 0 to 1. ±: standard error. -: not evaluated. n: documents." in text
    assert "Scores on fewer than 50 show only that the task runs." in text
    assert any("|my run|" in row and "|30|" in row for row in rows)
    differences = {row.replace("||", "|").strip("|") for row in rows if re.match(r"\|+[a-z]+\.", row)}
    assert differences == {"optimizer.lr|0.003|0.5", "model.mixers|[metala, attention]|[gla]"}
    (compared,) = [row for row in rows if "|t|" in row]
    assert "|90.00||10.00||-80.00|" in compared
    assert "|my run, significant|" in compared
    assert "p: probability of a difference this large between equal models" in text
    assert "other<b>" not in text
    assert "perplexity" in text
    assert "Evaluation: other&lt;b&gt; minus my run" in text


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser chromium")
def test_browser_shows_the_page(run: Path, tmp_path: Path) -> None:
    page = write_report(run)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--disable-sync", "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    shown = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=240, check=True).stdout
    assert "<title>my run</title>" in shown
    titles = re.findall(r"<h3>([^<]*)</h3>", shown)
    assert {"loss, nats per token", "gradient norm", "learning rate", "tokens per second", "perplexity"} <= set(titles)
    assert "&lt;/script&gt;" in shown
    assert "resolved" in shown
    assert "step_00000030" in shown


# The parts of a browser that the page's script uses. The program prints the text of each element that the script accessed.
BROWSER = r"""
const [, , file, more] = process.argv;
const [data, script] = [...require("fs").readFileSync(file, "utf8").matchAll(/<script[^>]*>([^]*?)<\/script>/g)].map((m) => m[1]);
const found = {};
class Element {
  children = []; style = {};
  append(...more) { this.children.push(...more); }
  replaceChildren(...all) { this.children = all; }
  set textContent(text) { this.children = [text]; }
  get textContent() { return this.children.map((child) => child.textContent ?? child).join(" "); }
  setAttribute() {} addEventListener() {}
  getBoundingClientRect() { return { width: 400, height: 200, left: 0 }; }
  getContext() { return new Proxy({}, { get: () => () => {} }); }
}
const document = {
  getElementById: (id) => found[id] ??= new Element(), createElement: () => new Element(),
  addEventListener() {}, documentElement: new Element(),
};
document.getElementById("data").textContent = data;
const getComputedStyle = () => ({ getPropertyValue: () => "" }), window = {}, matchMedia = () => new Element();
class ResizeObserver { constructor(draw) { this.observe = draw; } }
eval(script + ";" + (more ?? ""));
for (const id in found) if (id !== "data") console.log(id, found[id].textContent);
"""


def shown_by_node(page: Path, *script: str) -> str:
    (page.parent / "browser.js").write_text(BROWSER)
    command = ["node", str(page.parent / "browser.js"), str(page), *script]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_script_of_the_page(run: Path) -> None:
    metrics = MetricsLogger(run, total_steps=60, initial_step=30, progress_bar=False)
    metrics.log(30, {"loss": 4.5, "accuracy": 0.125}, kind="validation")
    metrics.close()
    page = write_report(run)
    text = shown_by_node(page)
    for words in (
        "loss, nats per token",
        "gradient norm",
        "12.50 % masked-token accuracy",
        HOSTILE,
        "step_00000030",
        "perplexity",
    ):
        assert words in text, words
    # A logarithmic axis between two points must not loop forever.
    assert shown_by_node(page, "zoom([3.2, 3.8])") == text


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_page_shows_the_loss_of_each_source(tmp_path: Path) -> None:
    """Draw one line per source through the steps with its text, and its validation."""
    metrics = MetricsLogger(tmp_path, total_steps=5, progress_bar=False)
    for step, losses in enumerate(({"loss/A": 3.0}, {"loss/A": 2.5, "loss/B": 5.0}, {"loss/B": 4.0}), start=1):
        metrics.log(step, {"loss": 3.0, "tokens": 10 * step, **losses})
    words = 'at("rest").append(JSON.stringify((charts.find((c) => c.sources) ?? { lines: [] }).lines))'
    assert "by source" in shown_by_node(write_report(tmp_path))
    metrics.log(3, {"loss": 3.0, "tokens": 30, "loss/A": 2.0, "loss/B": 3.5}, kind="validation")
    metrics.close()
    (drawn,) = re.findall(r"^rest (.*)$", shown_by_node(write_report(tmp_path), words), flags=re.M)
    lines = json.loads(drawn)
    assert [(line["name"], line["x"], line["y"]) for line in lines] == [
        ("A", [1, 2], [3.0, 2.5]),
        ("A, validation", [3], [2.0]),
        ("B", [2, 3], [5.0, 4.0]),
        ("B, validation", [3], [3.5]),
    ]
    assert lines[0]["color"] == lines[1]["color"] != lines[2]["color"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_diverged_run_shows_nan(tmp_path: Path) -> None:
    metrics = MetricsLogger(tmp_path, total_steps=5, progress_bar=False)
    for step, loss in ((1, 2.5), (2, float("nan"))):
        metrics.log(step, {"loss": loss, "tokens": 10 * step})
        metrics.log(step, {"loss": loss, "perplexity": 12.5 * loss, "tokens": 10 * step}, kind="validation")
    metrics.close()
    text = shown_by_node(write_report(tmp_path))
    assert "numbers NaN validation loss NaN perplexity NaN training loss" in text


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_page_names_the_validation_set_and_agrees_with_the_summary(tmp_path: Path) -> None:
    metrics = MetricsLogger(tmp_path, total_steps=40, progress_bar=False)
    for step in range(1, 41):
        speed = {"step_seconds": 1.0, "tokens_per_second": 10.0 + step}
        metrics.log(step, {"loss": 3.0 + step % 2, "tokens": 10 * step, **speed})
    for step, fraction in ((20, 0.25), (40, 1.0)):
        values = {"loss": step / 10, "tokens": 10 * step, "evaluated_fraction": fraction}
        metrics.log(step, values, kind="validation")
    metrics.close()
    summary = {"steps": 40, "training_seconds": 50.0, "tokens_per_second": 8.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    words = 'at("rest").append(JSON.stringify(charts[0].lines.filter((line) => line.points)))'
    text = shown_by_node(write_report(tmp_path), words)
    assert "numbers 4.0000 validation loss, whole set 3.3333 training loss, smoothed 8 tokens/s 50.0 s training" in text
    (points,) = re.findall(r"^rest (.*)$", text, flags=re.M)
    assert [(line["name"], line["y"], line["filled"]) for line in json.loads(points)] == [
        ("validation, part of the set", [2.0, None], False),
        ("validation, whole set", [None, 4.0], True),
    ]
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "steps": 20}))  # of a shorter run before
    assert "40.0 s training time" in shown_by_node(write_report(tmp_path))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_page_without_positive_numbers(tmp_path: Path) -> None:
    metrics = MetricsLogger(tmp_path, total_steps=5, progress_bar=False)
    metrics.log(1, {"loss": float("nan"), "gradient_norm": 0.0, "tokens": 10})
    metrics.close()
    assert "gradient norm" in shown_by_node(write_report(tmp_path))


def test_page_has_one_placeholder_for_the_data() -> None:
    assert PAGE.read_text(encoding="utf-8").count('"the data of the run"') == 1
