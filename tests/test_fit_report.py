"""The fit report: what terms amount to, how well rows tell them, the worst rows, and its tables, pages and pictures."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from planner.cli import _run
from planner.cost import kernel, physics
from planner.cost.base import BatchShape, Checks, CostModel, TermError
from planner.cost.fit import fit_all
from planner.cost.residual import predict
from planner.fit_page import page
from planner.fit_plot import draw, to_png, to_svg
from planner.fit_report import FitReport, Term, fit_report, fit_reports, near_noise, to_json
from planner.fit_view import grids, render
from planner.report import _fit_table
from planner.search.kinds import find_kinds
from planner.specs.base import dump_json, dump_yaml
from planner.specs.layout import Layout
from planner.specs.profile import Sample
from tests.planning import problem
from tests.test_fit import gpu, grid, invented, linear_law, made_of, model, profile, roofline_law

MIXED = {
    "model": "opt-13b",
    "cluster": {
        "name": "mixed",
        "nodes": [
            {
                "name": name,
                "gpu": card,
                "gpus": 2,
                "links": {"kind": "nvswitch"},
                "nics": {"count": 1, "bytes_per_s": "400Gb/s", "kind": "infiniband"},
            }
            for name, card in (("a", "a100-80gb"), ("b", "h100-80gb"))
        ],
    },
    "workload": "sharegpt",
    "slo": {"ttft_s": "1s", "tpot_s": "100ms"},
    "search": {"max_tp": 2},
}


def report_of(*costs: CostModel, name: str = "splitwise-llama2-70b-h100") -> FitReport:
    """Return the report of cost models of Llama-2-70B on H100."""
    return fit_report(model("llama2-70b"), gpu("h100-80gb"), profile(name), costs)


def term(report: FitReport, name: str, layout: str = "TP4") -> Term:
    """Return one term of one degree."""
    (found,) = (t for degree in report.degrees for t in degree.terms if (t.name, t.layout) == (name, layout))
    return found


def checked(law: CostModel, shapes: list[BatchShape], off: float = 0.02, rms: float = 0.03) -> CostModel:
    """Return `law` as if fitted to what it says at `shapes`, each a setting of its own predicted `off` too long."""
    rows = np.array(shapes, dtype=float)
    times = predict(law.parameters, rows)
    checks = Checks(rows, rows[:, 3] > 0, np.arange(len(rows)), times, times * (1 + off))
    error = TermError(off, off, off, len(rows), rms=rms)
    return replace(law, checks=checks, prefill_error=error, decode_error=error)


FULL = [
    *(BatchShape.prefill(n, b) for b in (1, 4) for n in (128, 512, 2048, 8192)),
    *(BatchShape.decode(b, b * k) for b in (1, 8, 64) for k in (256, 1024, 4096)),
]
ONE_CONTEXT = [
    *(BatchShape.prefill(n, b) for b in (1, 4) for n in (128, 512, 2048, 8192)),
    *(BatchShape.decode(b, b * 512) for b in (1, 8, 64)),
]


@cache
def measured() -> FitReport:
    """Two degrees, fitted: TP4 is the whole grid, TP2 leaves the cost of a KV token open."""
    rows = grid(roofline_law())
    two = [
        s._replace(tp=2, time_s=1.9 * s.time_s)
        for s in rows
        if (s.context_tokens in (0, 1024) and s.batch in (1, 4, 16)) or s.phase == "prefill"
    ]
    made = made_of([*rows, *two])
    costs = fit_all(made, model("llama2-70b"), gpu("h100-80gb"))
    return fit_report(model("llama2-70b"), gpu("h100-80gb"), made, costs.values())


@cache
def published() -> FitReport:
    """Coefficients alone, in two regimes, at four degrees."""
    (found,) = fit_reports("distserve-opt-66b-a100")
    return found


def shown(report: FitReport, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False, markup=False)
    for piece in render([report]):
        console.print(piece)
    return console.file.getvalue()


# --- what terms amount to ---


def test_the_factors_on_a_roofline_come_back_as_shares_of_the_peaks():
    # typical is 0.65 of the FLOP rate, 0.55 of it in attention, 0.8 of the bandwidth for weights and for KV; the law
    # takes 1.4, 1.5, 1.1 and 1.3 times as long. A token's time holds norms and gates beside its FLOP.
    report = report_of(roofline_law())
    spec, card = model("llama2-70b"), gpu("h100-80gb")
    flop_share = 1 - physics.between_products_s(spec, card, 4) / physics.typical(spec, card, 4)[4]
    for name, share, peak in (
        ("prefill tokens", flop_share * 0.65 / 1.4, 989e12),
        ("prefill attention", 0.55 / 1.5, 989e12),
        ("weight streaming", 0.8 / 1.1, 3.35e12),
        ("decode KV read", 0.8 / 1.3, 3.35e12),
    ):
        found = term(report, name)
        assert found.of_peak == pytest.approx(share, rel=1e-3), name
        assert found.value == pytest.approx(share * peak, rel=2e-3), name
    assert term(report, "prefill overhead").value == pytest.approx(4 * physics.STEP_S)


def test_coefficients_come_back_as_rates():
    # 90 us per token: 2 x 68.7e9 FLOP per token of 70B without embedding and head, over 4 GPUs: 382 TFLOP/s each;
    # 90 ns per KV token of 80 layers x 2 x 1,024 x 2 bytes = 327,680 bytes over 4 GPUs: 910 GB/s each
    report = report_of(linear_law())
    assert term(report, "prefill tokens").value == pytest.approx(2 * 68.7e9 / 90e-6 / 4, rel=0.01)
    assert term(report, "decode KV read").value == pytest.approx(327_680 / 90e-9 / 4, rel=1e-9)
    assert term(report, "decode overhead").value == 0.028
    assert term(report, "decode batch").value == 2e-4


def test_the_two_regimes_of_a_published_fit_are_told_apart_and_an_impossible_rate_is_said():
    terms = [t for t in published().degrees[0].terms if t.name == "decode KV read"]
    assert [t.when for t in terms] == ["<95", ">=95"]
    assert terms[0].of_peak < 1 < terms[1].of_peak  # 2,486 of 2,039 GB/s
    assert "above the data sheet's peak" in terms[1].why and "above" not in terms[0].why
    assert all(t.told == "published" for t in terms)


def test_a_term_that_costs_nothing_has_no_rate():
    law = linear_law()
    law.parameters[3] = 0.0
    found = term(report_of(law), "prefill attention")
    assert (found.value, found.of_peak) == (None, None)
    assert "no cost" in shown(report_of(law))


def test_the_shares_of_time_of_a_linear_law_add_up_to_all_of_it():
    terms = report_of(checked(linear_law(), FULL)).degrees[0].terms
    for phase in ("prefill", "decode"):
        assert sum(t.of_time for t in terms if t.phase == phase and t.of_time) == pytest.approx(1.0, abs=1e-6)


def test_the_best_measured_row_is_in_no_need_of_a_law():
    # 64 requests of 4,096 KV tokens read 138 GB of weights and 64 x 4,096 x 327,680 bytes, on 4 GPUs
    cost = checked(roofline_law(), [BatchShape.decode(64, 64 * 4096), BatchShape.prefill(4096)])
    found = term(report_of(cost), "decode at best")
    read = model("llama2-70b").streamed_weight_bytes(1) + 64 * 4096 * 327_680
    assert found.value == pytest.approx(read / cost.checks.measured_s[0] / 4)
    assert found.told == "measured"


# --- how well rows tell them ---


def test_standard_errors_are_those_of_least_squares():
    cost = checked(linear_law(), FULL, rms=0.03)
    report = report_of(cost)
    for phase, names, columns, coefficients in (
        ("prefill", ("prefill overhead", "prefill tokens", "prefill attention"), (1, 2), (0.02, 9e-5, 3e-9)),
        ("decode", ("decode overhead", "decode batch", "decode KV read"), (3, 4), (0.028, 2e-4, 9e-8)),
    ):
        rows = cost.checks.shapes[cost.checks.decode == (phase == "decode")]
        design = np.c_[np.ones(len(rows)), rows[:, columns]] * coefficients
        relative = design / design.sum(axis=1)[:, None]  # errors are relative to the time of the row
        spread = np.sqrt(np.diag(np.linalg.inv(relative.T @ relative / 0.03**2 + np.eye(3))))
        assert [term(report, name).standard_error for name in names] == pytest.approx(list(spread), rel=1e-4)


def test_fitted_terms_lie_within_a_few_standard_errors_of_the_truth():
    rng = np.random.default_rng(5)
    rows = [s._replace(time_s=s.time_s * float(np.exp(0.03 * rng.standard_normal()))) for s in grid(linear_law())[:48]]
    costs = fit_all(made_of(rows), model("llama2-70b"), gpu("h100-80gb"))
    found, truth = report_of(*costs.values()), report_of(linear_law())
    assert found.degrees[0].cost.family == "linear"
    for each in truth.degrees[0].terms:
        fitted = term(found, each.name)
        assert abs(np.log(fitted.value / each.value)) < 3.5 * fitted.standard_error, each.name
        assert fitted.standard_error < 0.3


def test_two_terms_that_only_move_together_are_told_weakly():
    # at batches of 1 to 8 the weights and the overhead of a step are one constant: no row tells them apart
    shapes = [BatchShape.decode(b, b * k) for b in (1, 2, 4, 8) for k in (256, 4096)] + FULL[:8]
    report = report_of(checked(roofline_law(), shapes))
    assert term(report, "weight streaming").told == term(report, "decode overhead").told == "weakly"
    assert term(report, "prefill tokens").told == "here"


def test_a_term_at_the_bound_of_its_multiplier_is_said_to_be_at_its_limit():
    law = roofline_law()
    law.parameters[7] *= 0.8 / 1.1  # weights at the data sheet's bandwidth
    found = term(report_of(checked(law, FULL)), "weight streaming")
    assert found.told == "limit" and found.of_peak == pytest.approx(1.0)


def test_what_a_degree_cannot_tell_is_borrowed_from_one_that_can_and_else_physics():
    tp4, tp2 = checked(roofline_law(), FULL), replace(checked(roofline_law(), ONE_CONTEXT), layout=Layout(2))
    borrowed = term(report_of(tp4, tp2), "decode KV read", "TP2")
    assert borrowed.told == "borrowed" and borrowed.standard_error is None
    assert borrowed.why.startswith("contexts vary at 0 batch sizes, 2 are needed; taken from TP4")
    assert term(report_of(tp2), "decode KV read", "TP2").told == "physics"
    linear = replace(checked(linear_law(), ONE_CONTEXT), layout=Layout(2))  # this family borrows nothing
    assert term(report_of(tp4, linear), "decode KV read", "TP2").told == "physics"


def test_without_rows_of_a_phase_none_of_its_terms_is_told_here():
    prefill_only = checked(roofline_law(), FULL[:8])
    told = {t.name: t.told for t in report_of(prefill_only).degrees[0].terms if t.phase == "decode"}
    assert set(told.values()) == {"physics"} and len(told) == 4


def test_a_borrowed_term_is_that_of_the_fit_not_of_physics():
    kv = term(measured(), "decode KV read", "TP2")
    assert kv.told == "borrowed"
    assert kv.of_peak == pytest.approx(term(measured(), "decode KV read").of_peak, rel=0.02)
    assert kv.of_peak < 0.9 * physics.KV_EFFICIENCY


def test_the_cost_models_of_a_problem_name_their_gpu():
    costs = find_kinds(problem(**MIXED)).costs
    assert [(cost.gpu, cost.layout.tp, cost.unprofiled) for cost in costs] == [
        (card, tp, card == "h100-80gb") for card in ("a100-80gb", "h100-80gb") for tp in (1, 2)
    ]


# --- errors and rows ---


def test_the_worst_rows_come_worst_first_and_no_setting_twice():
    for phase in ("prefill", "decode"):
        worst = measured().worst(phase)
        sizes = [abs(row.error) for row in worst]
        assert len(worst) == 5 and sizes == sorted(sizes, reverse=True)
        assert len({(row.layout, row.setting) for row in worst}) == 5
        everything = [abs(r.error) for degree in measured().degrees for r in degree.of(phase) if r.error is not None]
        assert sizes[0] == max(everything)


def test_a_row_says_its_shape_as_it_was_measured():
    shapes = [BatchShape.prefill(300, 4, cached_tokens=700), BatchShape.decode(8, 8 * 513)]
    prefill, decode = report_of(checked(roofline_law(), shapes)).degrees[0].rows
    assert (prefill.batch, prefill.new_tokens, prefill.cached_tokens, prefill.tokens) == (4, 300, 700, 1200)
    assert (decode.batch, decode.context_tokens) == (8, 513)
    assert prefill.error == pytest.approx(0.02)


def test_a_median_near_the_spread_of_repeats_is_marked():
    assert near_noise(TermError(0.014, 0.1, 0.2, 9, noise=0.01))
    assert not near_noise(TermError(0.016, 0.1, 0.2, 9, noise=0.01))
    assert not near_noise(TermError(0.014, 0.1, 0.2, 9))
    cost = checked(roofline_law(), FULL)
    near = replace(cost, prefill_error=TermError(0.014, 0.1, 0.2, 9, rms=0.03, noise=0.01))
    assert "1.4% *" in shown(report_of(near)) and "no model can do much better" in shown(report_of(near))
    assert "no model can do much better" not in shown(report_of(cost))


def test_the_plain_data_is_strict_json_and_holds_every_row():
    cost = checked(roofline_law(), FULL)
    cost.checks.predicted_s[0] = np.nan
    data = json.loads(dump_json(to_json([report_of(cost)])))  # dump_json refuses NaN
    (fit,) = data["fits"]
    (degree,) = fit["degrees"]
    assert (fit["gpu"], fit["model"], degree["layout"]) == ("h100-80gb", "llama2-70b", "TP4")
    assert len(degree["held_out"]) == len(FULL)
    assert degree["held_out"][0]["predicted_s"] is None and degree["held_out"][0]["error"] is None
    assert degree["errors"]["decode"]["rms"] == 0.03 and degree["errors"]["decode"]["near_noise"] is False
    assert {"name", "value", "unit", "of_peak", "of_time", "standard_error", "told", "why"} <= set(degree["terms"][0])
    assert len(fit["worst"]["prefill"]) == 5


# --- tables ---


@pytest.mark.parametrize("make", [measured, published], ids=["measured", "published"])
def test_no_table_is_wider_than_80_columns_or_folds_a_cell(make):
    lines = shown(make()).splitlines()
    assert max(map(len, lines)) <= 80
    for table in grids(make()):
        for row in table.rows:
            pattern = r"\s+".join(re.escape(cell) for cell in row if cell)
            assert any(re.search(pattern, line) for line in lines), row


def test_degrees_that_differ_in_nothing_share_a_row():
    report = fit_report(
        model("llama2-70b"), gpu("h200"), None, [invented("llama2-70b", "h200", tp) for tp in (1, 2, 4)]
    )
    text = shown(report)
    assert re.search(r"weight streaming +all +3,840 GB/s +80%", text)  # 0.8 of 4.8 TB/s at each degree
    assert re.search(r"all +prefill +roofline +- +25.0%", text)
    assert not re.search(r"collectives +all", text)  # TP1 has none


def test_the_table_of_a_plan_names_gpu_types_where_there_are_two():
    def columns(*costs: CostModel) -> list[str]:
        return [str(column.header) for column in _fit_table(list(costs)).columns]

    costs = find_kinds(problem(**MIXED)).costs
    assert "GPU" not in columns(*costs[:2])
    assert columns(*costs)[0] == "GPU"


# --- pictures ---


def picture(report: FitReport):
    """Return the figure and its panels by title."""
    figure = draw([report])
    return figure, {axes.get_title(): axes for axes in figure.axes}


def test_every_held_out_row_is_drawn_at_its_place():
    report = measured()
    axes = picture(report)[1]["Decode: settings left out of the fit"]
    drawn = np.concatenate([line.get_xydata() for line in axes.lines if line.get_linestyle() == "None"])
    rows = [row for degree in report.degrees for row in degree.of("decode")]
    expected = np.array([(1e3 * row.measured_s, 1e3 * row.predicted_s) for row in rows])
    assert np.allclose(np.sort(drawn, axis=0), np.sort(expected, axis=0))


def test_curves_are_solid_where_rows_were_measured_and_dashed_beyond():
    report = report_of(checked(roofline_law(), FULL))
    axes = picture(report)[1]["Prefill: time of one prompt"]
    spans = {"-": [], "--": []}
    for line in axes.lines:
        if line.get_linestyle() in spans and len(line.get_xdata()) > 1:
            spans[line.get_linestyle()].append((min(line.get_xdata()), max(line.get_xdata())))
    assert spans["-"] == [(128, 8192)]  # one prompt of 128 to 8,192 tokens was measured
    assert spans["--"] == [(32, 128), (8192, 4 * 4 * 8192)]  # 4 of 8,192 were, as a batch
    (solid,) = (line for line in axes.lines if line.get_linestyle() == "-")
    x, y = solid.get_xydata()[-1]
    assert y == pytest.approx(1e3 * report.degrees[0].cost.iteration_s(BatchShape.prefill(int(x))))


def test_degrees_keep_their_colour_whatever_else_was_measured():
    def colours(report: FitReport) -> dict[str, str]:
        handles = picture(report)[1]["Prefill: time of one prompt"].get_legend().get_lines()
        return {str(line.get_label()): line.get_color() for line in handles}

    both, alone = colours(measured()), colours(report_of(roofline_law()))
    assert both["TP4"] == alone["TP4"] != both["TP2"]
    odd = colours(published())  # TP3 takes a colour that no power of two needs here
    assert len({odd[tp] for tp in ("TP2", "TP3", "TP4", "TP8")}) == 4


@pytest.mark.parametrize("make", [measured, published], ids=["measured", "published"])
def test_labels_stay_inside_the_picture_and_off_each_other(make):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = draw([make()])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer, whole = canvas.get_renderer(), figure.bbox
    for axes in figure.axes:
        texts = [axes.title, axes.xaxis.label, axes.yaxis.label]
        for axis, low, high in ((axes.xaxis, "x0", "x1"), (axes.yaxis, "y0", "y1")):
            inside = sorted(axis.get_view_interval())
            ticks = [t.label1 for t in axis.get_major_ticks() if inside[0] <= t.get_loc() <= inside[1]]
            assert len(ticks) >= 3, axes.get_title()
            boxes = sorted((t.get_window_extent(renderer) for t in ticks), key=lambda box, low=low: getattr(box, low))
            assert all(getattr(a, high) <= getattr(b, low) for a, b in pairwise(boxes)), axes.get_title()
            texts += ticks
            label = axis.label.get_window_extent(renderer)
            assert not any(label.overlaps(box) for box in boxes)
        for text in texts:
            box = text.get_window_extent(renderer)
            assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1


def test_axes_say_their_units():
    for axes in draw([measured()]).axes:
        assert re.search(r"\[ms]|\[%]", axes.get_ylabel()), axes.get_title()
        assert re.search(r"\[ms]|tokens|\[requests]", axes.get_xlabel()), axes.get_title()


def test_equal_reports_give_equal_pictures_without_a_date():
    first = to_svg([measured()])
    assert first == to_svg([measured()])
    assert first.startswith("<?xml") and "<dc:date>" not in first
    drawn = to_png([published()])
    assert drawn == to_png([published()]) and drawn.startswith(b"\x89PNG")


def test_a_users_own_matplotlib_settings_change_nothing():
    import matplotlib

    expected = to_svg([published()])
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30, "svg.hashsalt": "other"}):
        assert to_svg([published()]) == expected
        assert matplotlib.rcParams["font.size"] == 30  # and ours leave theirs alone


# --- the page ---


class Page(HTMLParser):
    """Ids, links and cells of a page; raises when a tag is closed that was not open."""

    def __init__(self, text: str):
        super().__init__()
        self.ids, self.links, self.cells, self.open = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[name] for name in ("href", "src", "xlink:href") if name in found]
        self.links += re.findall(r"url\((.*?)\)", " ".join(value or "" for value in found.values()))
        if tag not in ("meta", "path", "use", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in ("meta", "path", "use", "rect"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def test_the_page_stands_alone_and_holds_every_table():
    reports = [measured(), published()]
    text = page("some/folder/a <b> & c.1.yaml", reports)
    found = Page(text)
    assert found.open == []
    assert len(found.ids) == len(set(found.ids)) and text.count("<svg") == 2
    assert found.links and all(link.startswith("#") for link in found.links)  # nothing to fetch
    assert {link[1:] for link in found.links} <= set(found.ids)
    assert "<title>a &lt;b&gt; &amp; c.1: fit" in text
    cells = [cell for report in reports for table in grids(report) for row in table.rows for cell in row if cell]
    assert found.cells == cells


# --- the command ---


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Run in an empty folder, on a terminal of 80 columns, with a small profile and a problem of two GPU types."""
    rows = [
        Sample("prefill", 1, 1, b, n, 0, 0, round(0.01 + 2e-5 * b * n, 6)) for b in (1, 4) for n in (128, 1024, 4096)
    ]
    rows += [
        Sample("decode", 1, 1, b, 0, 0, k, round(0.01 + 1e-4 * b + 4e-8 * b * k, 6))
        for b in (1, 32)
        for k in (512, 4096)
    ]
    small = made_of(rows, "small").model_copy(update={"model": "llama3.1-8b"})
    mine = small.model_copy(update={"model": "nobody-knows", "gpu": "h100-sxm"})
    (tmp_path / "small.yaml").write_text(dump_yaml(small.model_dump(mode="json", exclude_defaults=True)))
    (tmp_path / "mine.yaml").write_text(dump_yaml(mine.model_dump(mode="json", exclude_defaults=True)))
    (tmp_path / "problem.yaml").write_text(yaml.safe_dump(MIXED))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def test_a_profile_alone_is_fitted_with_report_and_picture(folder, capsys):
    assert _run(["fit", "small.yaml", "-q", "--report", "new/fit.html", "--plot", "fit.png"]) == 0
    printed = capsys.readouterr()
    assert "llama3.1-8b on h100-80gb (profile small)" in printed.out and printed.err == ""
    assert "Predicted worst: prefill" in printed.out
    assert Path("fit.png").read_bytes().startswith(b"\x89PNG")
    assert "<title>small: fit" in Path("new/fit.html").read_text()
    assert sorted(os.listdir()) == ["fit.png", "mine.yaml", "new", "problem.yaml", "small.yaml"]  # no leftovers


def test_rows_that_cannot_be_are_left_out_and_said(folder, capsys):
    text = Path("small.yaml").read_text()
    # 16,384 tokens of 8B are 16,384 x 2 x 7.5e9 FLOP: 250 ms at 989 TFLOP/s, not 5 ms
    Path("small.yaml").write_text(text.rstrip() + "\n  - [prefill, 1, 1, 16384, 0, 0.005]\n")
    assert _run(["fit", "small.yaml", "-q", "--json"]) == 0
    (degree,) = json.loads(capsys.readouterr().out)["fits"][0]["degrees"]
    assert len(degree["held_out"]) == 10 and max(row["new_tokens"] or 0 for row in degree["held_out"]) == 4096
    assert any("peak" in note for note in degree["notes"]), degree["notes"]


def test_a_profile_preset_needs_no_file_and_a_problem_names_both_of_its_gpu_types(folder, capsys):
    assert _run(["fit", "distserve-opt-13b-a100", "-q"]) == 0
    assert "opt-13b on a100-80gb (profile distserve-opt-13b-a100)" in capsys.readouterr().out
    assert _run(["fit", "problem.yaml", "-q"]) == 0
    printed = capsys.readouterr().out
    assert "opt-13b on a100-80gb (profile distserve-opt-13b-a100)" in printed
    assert "opt-13b on h100-80gb (data sheet, no profile)" in printed
    assert _run(["fit", "problem.yaml", "-q", "--json"]) == 0
    assert [fit["gpu"] for fit in json.loads(capsys.readouterr().out)["fits"]] == ["a100-80gb", "h100-80gb"]


def test_model_and_gpu_can_be_given_for_a_profile_that_names_none_of_ours(folder, capsys):
    assert _run(["fit", "mine.yaml", "-q"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("mine.yaml:2:8: model: no model preset is called 'nobody-knows'") and "--model" in said
    assert _run(["fit", "mine.yaml", "-q", "--model", "llama3.1-8b", "--gpu", "h100-80gb"]) == 0
    assert "llama3.1-8b on h100-80gb (profile small)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope"], "no problem file and no profile preset named 'nope'; shipped profiles: "),
        (["distserve-opt-13b"], "did you mean 'distserve-opt-13b-a100'?"),
        (["nope.yaml"], "nope.yaml: no such file"),
        (["small.yaml", "--gpu", "a100-80gb"], "gpu: measured h100-80gb, but --gpu says a100-80gb"),
        (["small.yaml", "--gpu", "h1000"], "--gpu: no preset named 'h1000'"),
        (["problem.yaml", "--model", "opt-13b"], "--model goes with a profile"),
        (["small.yaml", "--plot", "fit.pdf"], "--plot: expected a file that ends in .svg or .png, got 'fit.pdf'"),
        (["small.yaml", "--report", "small.yaml"], "small.yaml: would overwrite the input"),
        (["small.yaml", "--report", "a.svg", "--plot", "a.svg"], "a.svg: would overwrite"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments, said, folder, capsys):
    assert _run(["fit", *arguments, "-q"]) == 1
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_the_drawing_library_is_only_loaded_for_pictures(folder):
    code = (
        "import sys; from planner.cli import _run; assert _run(['fit', 'distserve-opt-13b-a100', '-q']) == 0; "
        "assert 'matplotlib' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_hybrid_says_how_far_its_grids_bend_the_roofline():
    base = roofline_law().parameters
    bent = np.concatenate([base, np.full(kernel.GRID, np.log(1.07)), np.zeros(kernel.GRID)])
    bent[kernel.FAMILY] = kernel.HYBRID
    cost = checked(CostModel(Layout(4), bent, family="hybrid"), FULL)
    found = term(report_of(cost), "prefill residual")
    assert found.value == pytest.approx(0.07)
    names = [t.name for t in report_of(cost).degrees[0].terms]
    assert "decode residual" not in names  # that grid is flat
