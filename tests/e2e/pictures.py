"""Pictures of reports: ``python tests/e2e/pictures.py FOLDER [README_PICTURE]``.

Runs the embedded case with a right kernel, with one that leaves a scale out in one layer, and with
one that runs nowhere here; renders the three reports and the difference of the first two; and
photographs them in Chromium at 1280 and 420 pixels, light and dark.
"""

import importlib
import itertools
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import reconcile
from reconcile.diff import difference

KERNELS = Path(__file__).parents[1] / "model" / "kernels.py"
RUNS = {
    "pass": "my_kernels:clean",
    "fail": "my_kernels:ignores_scale_in_layer_3_down",
    "inconclusive": "my_kernels:declines_always",
}
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
README_HEIGHT = 1345
MOST = 8000
"""Pixels of the tallest picture; Chromium takes none of more than 16,384."""


def pages(folder):
    """Name and page of each report."""
    with tempfile.TemporaryDirectory() as place:
        shutil.copy(KERNELS, Path(place) / "my_kernels.py")
        sys.path.insert(0, place)
        session = reconcile.session()
        reports = {
            name: session.run(kernel=kernel, command=f"reconcile run --kernel {kernel}")
            for name, kernel in RUNS.items()
        }
        sys.path.remove(place)
    render = importlib.import_module("reconcile_reports.html").render
    texts = {name: render(report) for name, report in reports.items()}
    found = difference(reports["pass"], reports["fail"])
    texts["diff"] = importlib.import_module("reconcile_reports.diff_html").render(found)
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return list(texts)


def photograph(page_file, pictures):
    """Each of (path, width, colour scheme, height or None for the whole page)."""
    browser_path = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=FLAGS)
        for path, width, scheme, height in pictures:
            size = {"width": width, "height": height or 900}
            page = browser.new_page(viewport=size, color_scheme=scheme)
            page.goto(page_file.resolve().as_uri())
            if height is None:
                tall = page.evaluate("document.documentElement.scrollHeight")
                page.set_viewport_size({"width": width, "height": min(tall, MOST)})
            page.screenshot(path=path)
            page.close()
        browser.close()


def main(folder, readme=None):
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    for name in pages(place):
        sizes = itertools.product((1280, 420), ("light", "dark"))
        shots = [(place / f"{name}-{w}-{scheme}.png", w, scheme, None) for w, scheme in sizes]
        photograph(place / f"{name}.html", shots)
    if readme:
        photograph(place / "fail.html", [(readme, 1180, "light", README_HEIGHT)])


if __name__ == "__main__":
    main(*sys.argv[1:])
