"""Chromium without a window, for the pages that .ci/browser opens."""

import os

import pytest


@pytest.fixture(scope="session")
def chromium():
    from playwright.sync_api import sync_playwright  # only .ci/browser installs it

    with sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
