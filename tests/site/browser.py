"""Looks at a site in headless Chromium: browser.py SITE PICTURES [PAGE...]. By default it opens all pages of the site;
of those that show a header's source, which are alike, one.

At each width it opens every page, and where all are opened it searches too. Prints a line for a page that is wider than
the window, that writes an error or a warning to the console, or that is not found by a search, and then exits non-zero.
It ends the browser that it starts.
"""

import os
import sys
import tempfile
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

WIDTHS = (1280, 390)
# Pictures of these are kept, and of the searches: for a word of a page, and for a name of a header.
PICTURED = ("index.html", "docs/getting-started.html", "docs/coming-from.html", "reference/dtensor/dtensor.h.html")
SEARCHES = {
    "torchrun": "docs/getting-started.html",
    "redistribute_many": "reference/dtensor/dtensor.h.html#redistribute_many",
}
SECONDS = 30
# Returns the width of the window, and that of the page: of the document, or of the content where it is wider than its
# place. Code and tables may be wider than theirs, since they scroll by themselves.
MEASURE = """
const inner = [...document.querySelectorAll(".content")].map(each => each.scrollWidth - each.clientWidth);
return [window.innerWidth, document.documentElement.scrollWidth + Math.max(0, ...inner)];
"""


def open_browser(home):
    """Starts Chromium, which keeps its files in `home`."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = Service("/usr/bin/chromedriver", env={**os.environ, "HOME": home, "TMPDIR": home})
    return webdriver.Chrome(options=options, service=service)


class Look:
    """Opens pages at one width, and collects what is wrong with them."""

    def __init__(self, driver, site, pictures, width):
        self.driver, self.site, self.pictures, self.width = driver, site, pictures, width
        self.problems = []
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def page(self, page):
        self.driver.get(f"file://{self.site}/{page}")
        self.check(page)
        if page in PICTURED:
            self.picture(page)

    def navigation(self):
        """Checks that the list of pages is seen, on a narrow window once its button is pressed."""
        link = self.driver.find_element(By.CSS_SELECTOR, ".sidebar-tree a")
        button = self.driver.find_element(By.CSS_SELECTOR, "label.nav-overlay-icon[for=__navigation]")
        if button.is_displayed():
            button.click()
        WebDriverWait(self.driver, SECONDS).until(lambda driver: 0 <= link.rect["x"] < self.width)
        self.picture("navigation")

    def search(self, word, wanted):
        self.driver.get(f"file://{self.site}/search.html?q={word}")
        WebDriverWait(self.driver, SECONDS).until(
            lambda driver: "earch finished" in driver.find_element(By.CSS_SELECTOR, "#search-results").text
            or "did not match" in driver.find_element(By.CSS_SELECTOR, "#search-results").text
        )
        found = [link.get_attribute("href") for link in self.driver.find_elements(By.CSS_SELECTOR, "ul.search a")]
        if f"file://{self.site}/{wanted}" not in found:
            self.problem(f"search for {word}", f"does not find {wanted}")
        self.check(f"search for {word}")
        self.picture(f"search-{word}")

    def check(self, page):
        window, width = self.driver.execute_script(MEASURE)
        if window != self.width or width > window:
            self.problem(page, f"is {width} pixels wide in a window of {window}")
        for line in self.driver.get_log("browser"):
            if line["level"] in ("SEVERE", "WARNING"):
                self.problem(page, line["message"])

    def problem(self, page, text):
        self.problems.append(f"{page} at {self.width} pixels: {text}")

    def picture(self, page):
        self.driver.save_screenshot(str(self.pictures / f"{self.width}-{page.replace('/', '-')}.png"))


def look_at(driver, site, pictures, pages, searches):
    problems = []
    for width in WIDTHS:
        look = Look(driver, site, pictures, width)
        for page in pages:
            look.page(page)
        for word, wanted in searches.items():
            look.search(word, wanted)
        if searches:
            look.navigation()
        problems += look.problems
    return problems


def main(site, pictures, *pages):
    site, pictures = Path(site).resolve(), Path(pictures)
    pictures.mkdir(parents=True, exist_ok=True)
    searches = {} if pages else SEARCHES
    if not pages:
        pages = [str(path.relative_to(site)) for path in sorted(site.rglob("*.html"))]
        sources = [page for page in pages if page.startswith("source/")]
        pages = [page for page in pages if page not in sources[1:]]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        driver = open_browser(home)
        try:
            problems = look_at(driver, site, pictures, pages, searches)
        finally:
            driver.quit()
    print("\n".join(problems))
    print(f"{len(pages)} pages at {len(WIDTHS)} widths, {len(problems)} problems")
    return 1 if problems or not pages else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
