"""The page of `python -m trainkit report` in Chromium: .ci/browser runs these."""

import json
import re
import time
from contextlib import contextmanager

import pytest
import report_runs
from playwright.sync_api import expect

from trainkit.tools.report import write_report

DESKTOP = {"width": 1400, "height": 900}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """Return the page of each kind of run, and of two runs that are compared."""
    home = tmp_path_factory.mktemp("runs")
    folders = {name: make(home / name) for name, make in report_runs.KINDS.items()}
    found = {}
    for name, runs in {name: [folder] for name, folder in folders.items()}.items():
        found[name] = home / f"{name}.html"
        write_report(runs, found[name])
    found["compare"] = home / "compare.html"
    write_report([folders["healthy"], folders["muon"]], found["compare"], title="AdamW or Muon")
    return found


@contextmanager
def opened(chromium, path, *, at="", viewport=DESKTOP, **options):
    """Yield a page that has drawn itself; it must log nothing, and load no other address."""
    context = chromium.new_context(viewport=viewport, reduced_motion="reduce", **options)
    page = context.new_page()
    heard, loaded = [], []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("dialog", lambda dialog: (heard.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: loaded.append(request.url.split("#")[0]))
    page.goto(f"file://{path}{at}")
    page.wait_for_selector("html[data-ready]")
    yield page
    assert heard == []
    assert set(loaded) == {f"file://{path}"}
    context.close()


def settle(page):
    """Wait until what was changed is on the screen: curves are drawn between frames."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 60)))")


def picture_of(page, card):
    settle(page)
    return page.locator(f"[data-card='{card}'] canvas").first.evaluate("node => node.toDataURL()")


def drag(page, card, begin, end):
    plot = page.locator(f"[data-card='{card}'] .u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + begin * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], y, steps=4)
    page.mouse.up()


def zoom_of(page):
    """Return the range of the axis that the address holds, None if all is shown."""
    settle(page)
    found = re.search(r"z=([\d.e+-]+)%7E([\d.e+-]+)", page.evaluate("location.hash"))
    return None if found is None else (float(found[1]), float(found[2]))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", [*report_runs.KINDS, "compare"])
def test_every_page_is_drawn_without_an_error_and_fits_a_phone(chromium, pages, kind, scheme):
    for viewport in (DESKTOP, PHONE):
        with opened(chromium, pages[kind], viewport=viewport, color_scheme=scheme) as page:
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= viewport["width"]
            for canvas in page.locator("canvas").all():
                box = canvas.bounding_box()
                assert box["width"] > 80
                assert box["x"] + box["width"] <= viewport["width"]


def test_a_hundred_thousand_steps_open_in_three_seconds_and_twenty_megabytes(chromium, pages):
    size = pages["long"].stat().st_size
    began = time.perf_counter()
    with opened(chromium, pages["long"]) as page:
        took = time.perf_counter() - began
        expect(page.locator(".tile").first).to_contain_text("100,000")
    print(f"{took:.2f} s, {size / 1e6:.1f} MB")
    assert took < 3
    assert size < 20e6


# ------------------------------------------------------------------------------------ looking


def test_a_drag_zooms_every_chart_and_a_double_click_shows_all(chromium, pages):
    with opened(chromium, pages["healthy"]) as page:
        cards = ("loss", "norm", "rate", "layers")
        whole = page.locator("[data-card='loss'] .u-over")
        # Drawn twice: where lines cross, a few pixels of the very first picture are others.
        whole.dblclick(position={"x": 300, "y": 100})
        before = [picture_of(page, card) for card in cards]
        drag(page, "loss", 0.25, 0.5)
        assert zoom_of(page) == pytest.approx((5000, 10_000), abs=100)
        after = [picture_of(page, card) for card in cards]
        assert all(a != b for a, b in zip(before, after, strict=True))
        expect(page.get_by_role("button", name="Show all")).to_be_visible()
        whole.dblclick(position={"x": 300, "y": 100})
        assert zoom_of(page) is None
        page.mouse.move(5, 5)
        assert [picture_of(page, card) for card in cards] == before


def test_smoothing_log_and_axis_change_the_curves(chromium, pages):
    with opened(chromium, pages["healthy"]) as page:
        seen = [picture_of(page, "loss")]
        page.locator("#smoothing").fill("11")
        seen.append(picture_of(page, "loss"))
        page.locator("[data-card='loss']").get_by_role("button", name="log").click()
        seen.append(picture_of(page, "loss"))
        for axis in ("Tokens", "Time"):
            page.get_by_role("button", name=axis).click()
            seen.append(picture_of(page, "loss"))
        assert len(set(seen)) == len(seen)


def test_a_zoom_stays_where_it_was_when_the_axis_changes(chromium, pages):
    with opened(chromium, pages["healthy"], at="#x=step&z=5000~10000") as page:
        page.get_by_role("button", name="Tokens").click()
        low, high = zoom_of(page)
        run = json.loads(page.locator("#runs").text_content())["runs"][0]
        tokens = dict(zip(run["x"]["step"], run["x"]["tokens"], strict=True))
        assert low == pytest.approx(tokens[min(x for x in tokens if x >= 5000)])
        assert high == pytest.approx(tokens[min(x for x in tokens if x >= 10_000)])


def test_the_keyboard_reaches_charts_zoom_and_values(chromium, pages):
    with opened(chromium, pages["healthy"]) as page:
        plot = page.locator("[data-card='loss'] .plot")
        plot.focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator(".tip")).to_contain_text("training")
        page.keyboard.press("+")
        zoomed = zoom_of(page)
        page.keyboard.press("Shift+ArrowRight")
        assert zoom_of(page) > zoomed
        page.keyboard.press("0")
        assert zoom_of(page) is None
        controls = page.locator("button, input, a, .plot, .limit").all()
        assert len(controls) > 40
        assert all(control.evaluate("node => node.tabIndex") == 0 for control in controls)


def test_the_tip_shows_the_value_under_the_cursor(chromium, pages):
    with opened(chromium, pages["one-line"]) as page:
        data = json.loads(page.locator("#runs").text_content())
        (loss,) = data["runs"][0]["series"]["loss"]["v"]
        page.locator("[data-card='loss'] .u-over").hover()
        expect(page.locator(".tip")).to_contain_text(f"{loss:.3f}"[:4])


def test_marks_of_the_lane_explain_themselves(chromium, pages):
    with opened(chromium, pages["healthy"]) as page:
        marks = page.locator(".lane .mark")
        texts = []
        for index in (0, 2, 10):
            marks.nth(index).hover(force=True)
            texts.append(page.locator(".tip").text_content())
        assert texts[0].startswith("start")
        assert len(set(texts)) == 3


def test_dark_and_light_follow_the_system_and_a_switch(chromium, pages):
    for scheme, other in (("light", "dark"), ("dark", "light")):
        with opened(chromium, pages["healthy"], color_scheme=scheme) as page:
            assert page.evaluate("document.documentElement.dataset.theme") == scheme
            before = picture_of(page, "loss")
            page.emulate_media(color_scheme=other)
            assert picture_of(page, "loss") != before
            page.emulate_media(color_scheme=scheme)
            page.locator("#theme").click()
            assert page.evaluate("document.documentElement.dataset.theme") == other
            page.reload()
            assert page.evaluate("document.documentElement.dataset.theme") == other


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(chromium, pages, theme):
    with opened(chromium, pages["one-line"], at=f"#t={theme}") as page:
        style = "getComputedStyle(document.documentElement).getPropertyValue"
        for ground in ("--card", "--bg"):
            for name in ("--ink", "--ink-2", "--ink-3", "--bad", "--warn", "--good"):
                pair = [page.evaluate(f"{style}('{x}').trim()") for x in (name, ground)]
                assert contrast(*pair) >= 4.5, (theme, name, ground)


def contrast(a, b):
    """Return the contrast of two colours, #rrggbb, as WCAG 2 defines it."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, (a, b)))
    return (high + 0.05) / (low + 0.05)


def test_a_printed_page_is_light_and_has_no_controls(chromium, pages):
    with opened(chromium, pages["healthy"], at="#t=dark") as page:
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        expect(page.locator("#bar")).to_be_hidden()
        for card in page.locator("[data-card]").all():
            box, inner = card.bounding_box(), card.locator("canvas").first.bounding_box()
            assert inner["x"] + inner["width"] <= box["x"] + box["width"] + 1
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


# ------------------------------------------------------------------------------------ comparing


def test_two_runs_are_compared(chromium, pages):
    with opened(chromium, pages["compare"]) as page:
        rows = page.locator(".runs tbody tr")
        expect(rows).to_have_count(2)
        differing = page.locator("#differences dt").all_text_contents()
        assert differing == ["lr", "optimizer", "seed"]
        before = picture_of(page, "loss")
        rows.nth(1).get_by_role("button").click()
        assert picture_of(page, "loss") != before
        expect(page.locator("[data-card='loss'] .legend")).not_to_contain_text("muon")
        rows.nth(1).get_by_role("button").click()
        page.mouse.move(5, 5)
        assert picture_of(page, "loss") == before


def test_a_setting_is_found(chromium, pages):
    with opened(chromium, pages["healthy"]) as page:
        page.locator(".find").fill("weight_d")
        assert page.locator("#configuration dt").all_text_contents() == ["weight_decay"]


def test_events_are_filtered(chromium, pages):
    with opened(chromium, pages["healthy"]) as page:
        rows = page.locator(".events tbody tr")
        before = rows.count()
        page.locator(".chips button", has_text="skip").click()
        assert rows.count() == before - 4


# ------------------------------------------------------------------------------------ safety


def test_html_in_names_and_texts_is_shown_as_text(chromium, pages):
    with opened(chromium, pages["hostile"]) as page:
        for selector in ("img", "main b:text('bold')", "main i:text('metric')", "main script"):
            assert page.locator(selector).count() == 0
        for part in ("#samples", "#events", "[data-card='corpora-0'] .legend", ".facts", ".pill"):
            expect(page.locator(part).first).to_contain_text(report_runs.HOSTILE)


def test_a_script_that_gets_in_would_not_run(chromium, pages):
    context = chromium.new_context()
    page = context.new_page()
    page.goto(f"file://{pages['healthy']}")
    ran = page.evaluate(
        """async () => {
          const script = document.createElement("script");
          script.textContent = "window.ran = true";
          document.body.append(script);
          const answer = await fetch("https://example.org").catch(() => "blocked");
          return [window.ran, answer];
        }"""
    )
    assert ran == [None, "blocked"]
    context.close()


# ------------------------------------------------------------------------------------ following


def test_the_cards_at_the_top_show_the_figures_of_the_run(chromium, tmp_path):
    out = tmp_path / "report.html"
    write_report([report_runs.known(tmp_path / "run")], out)
    with opened(chromium, out) as page:
        shown = [tile.inner_text().split("\n") for tile in page.locator(".tile").all()]
    assert shown == [
        ["Step", "150", "of 200 · 75 %"],
        ["Training loss", "2.0000", "perplexity 7.389"],
        ["Held-out loss", "2.5000", "best 2.2500"],
        ["Tokens", "150k", "2k a second"],
        ["Step time", "500ms", "median of the last 100"],
        ["MFU", "40%", "HFU 50 %"],
        ["Memory peak", "3GiB", "on rank 2"],
        ["Time", "4 min 9 s", "25 s left"],
    ]


def test_every_step_of_the_statistics_by_layer_is_drawn(chromium, tmp_path):
    lines = report_runs.make_steps(100)
    layers = [
        {"step": step, "kind": "activation", "names": ["layers.0"], "rms": [rms], "nonfinite": [0]}
        for step, rms in ((50, 1.0), (75, 1.0), (100, 9.0))
    ]
    folder = report_runs.write_run(tmp_path / "run", lines, [], layers=layers)
    out = tmp_path / "report.html"
    write_report([folder], out)
    with opened(chromium, out) as page:
        settle(page)
        card = page.locator("[data-card='layers']")
        colors = card.locator("canvas").evaluate(
            """canvas => {
              const row = canvas.getContext("2d").getImageData(0, 10, canvas.width, 1).data;
              const found = new Map();
              for (let x = 110; x < canvas.width - 20; x++) {
                const color = row.slice(4 * x, 4 * x + 3).join();
                found.set(color, (found.get(color) || 0) + 1);
              }
              return [...found.values()].filter(n => n > 100);
            }"""
        )
        # Nothing is known before step 25; then two equal columns, and the last one.
        assert len(colors) == 3
        assert colors[1] == pytest.approx(2 * colors[2], rel=0.05)
        # What is pressed can be read under the pointer as well.
        pressed = card.get_by_role("button", name="not finite")
        pressed.click()
        style = pressed.evaluate(
            "x => [getComputedStyle(x).color, getComputedStyle(x).backgroundColor]"
        )
        assert style[0] != style[1]
        expect(card.locator(".ramp")).to_have_text("0 everywhere")


def test_an_open_page_follows_a_run_until_it_ends(chromium, tmp_path):
    lines = report_runs.make_steps(400)
    folder = tmp_path / "run"
    out = tmp_path / "report.html"

    def write(count, *, ended=False):
        events = report_runs.make_events(lines[:count], last=400, end=ended)
        report_runs.write_run(folder, lines[:count], events)
        if ended:
            (folder / "lock").unlink()
        write_report([folder], out, refresh=2.5)  # longer than the drag below takes

    write(200)
    with opened(chromium, out) as page:
        step = page.locator(".tile").first
        expect(step).to_contain_text("200")
        drag(page, "loss", 0.25, 0.5)
        page.mouse.move(5, 5)
        page.locator("#smoothing").fill("6")
        zoom = zoom_of(page)
        page.evaluate("scrollTo(0, 500)")
        write(300)
        expect(step).to_contain_text("300")
        assert zoom_of(page) == zoom
        expect(page.locator("#smoothing")).to_have_value("6")
        expect(page.get_by_role("button", name="Show all")).to_be_visible()
        assert page.evaluate("scrollY") == 500
        write(400, ended=True)
        expect(page.locator(".pill")).to_have_text("ended")
        opened_at = page.evaluate("performance.timeOrigin")
        page.wait_for_timeout(4000)
        assert page.evaluate("performance.timeOrigin") == opened_at


def test_a_page_that_nobody_writes_any_more_is_not_loaded_again(chromium, tmp_path):
    folder = report_runs.write_run(tmp_path / "run", report_runs.make_steps(3), [])
    out = tmp_path / "report.html"
    write_report([folder], out, refresh=0.3)
    old = re.sub(r'"written":[\d.]+', f'"written":{time.time() - 100}', out.read_text())
    out.write_text(old)
    with opened(chromium, out) as page:
        opened_at = page.evaluate("performance.timeOrigin")
        page.wait_for_timeout(1200)
        assert page.evaluate("performance.timeOrigin") == opened_at
        expect(page.locator("#foot")).to_contain_text("Nobody writes this page any more")
