"""The site of the documentation in Chromium: .ci/browser builds it, and runs these."""

import functools
import http.server
import threading
from pathlib import Path

import pytest

SITE = Path(__file__).parents[2] / "docs" / "_build" / "site"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
DESKTOP = {"width": 1400, "height": 900}
PHONE = {"width": 390, "height": 844}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    """Return where the built site is served: its search needs a server."""
    assert (SITE / "index.html").exists(), "run docs/site/build.py first"
    handler = functools.partial(Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def opened(chromium, address):
    """Yield a function that opens a page of the site; none may complain or load what is absent."""
    contexts, problems = [], []

    def open_page(**options):
        contexts.append(chromium.new_context(**({"viewport": DESKTOP} | options)))
        page = contexts[-1].new_page()

        def note(text):
            problems.append(f"{page.url.removeprefix(address)}: {text}")

        page.on("console", lambda m: m.type in ("error", "warning") and note(m.text))
        page.on("pageerror", lambda error: note(str(error)))
        page.on("request", lambda r: r.url.startswith((address, "data:", "blob:")) or note(r.url))
        page.on("response", lambda r: r.status < 400 or note(f"{r.status} {r.url}"))
        return page

    yield open_page, problems
    for context in contexts:
        context.close()
    assert problems == []


def test_all_pages_are_built():
    assert len(PAGES) > 100


@pytest.mark.parametrize("name", PAGES)
def test_every_page_opens_without_an_error_shows_its_pictures_and_fits_a_phone(
    opened, address, name
):
    open_page, problems = opened
    page = open_page()
    page.goto(address + name)
    assert page.locator("h1").count() == 1
    for viewport, scheme in ((DESKTOP, "light"), (PHONE, "dark")):
        page.set_viewport_size(viewport)
        page.emulate_media(color_scheme=scheme)
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            problems.append(f"{name}: is wider than {viewport['width']}")
        problems += [f"{name}: {source} is not shown" for source in absent_pictures(page)]


def absent_pictures(page):
    """Return the addresses of pictures that the browser could not draw, those far below too."""
    return page.evaluate(
        """async () => {
            const shown = async image => {
                image.loading = "eager"
                try { await image.decode() } catch { return false }
                return image.naturalWidth > 0
            }
            const found = []
            for (const image of document.images)
                if (image.checkVisibility() && !(await shown(image))) found.push(image.src)
            return found
        }"""
    )


def test_a_search_for_a_function_leads_to_it(opened, address):
    page = opened[0]()
    page.goto(address)
    page.keyboard.press("Control+k")
    page.keyboard.type("zigzag_shard")
    page.locator("a[href*='trainkit.batch.shards.zigzag_shard']").first.click()
    page.wait_for_url("**/reference/batch.html*#trainkit.batch.shards.zigzag_shard")
    assert "source/trainkit/batch/shards.py.html#__codelineno-0-" in page.content()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_site_begins_in_the_colors_of_the_system_and_can_be_switched(opened, address, scheme):
    page = opened[0](color_scheme=scheme)
    page.goto(address + "gallery.html")

    def colors():
        return page.evaluate("document.body.dataset.mdColorScheme")

    def reports():
        found = "img => img.checkVisibility() ? [img.src.split('/').pop().split('#')[0]] : []"
        return page.evaluate(f"[...document.images].flatMap({found})")

    begin = {"light": "default", "dark": "slate"}[scheme]
    assert colors() == begin
    assert ("report-dark.png" in reports(), "report.png" in reports()) == (
        scheme == "dark",
        scheme == "light",
    )
    seen = set()
    for _ in range(3):
        page.locator("label.md-header__button[for^='__palette']:visible").click()
        seen.add(colors())
    assert seen == {"default", "slate"}
