"""Adds up the test cases that tests reported: count_test_cases.py BAZEL_EXIT_CODE EVENTS.json...

Reads Bazel's build events, and in the log of each test the line "[tessera] N passed, N failed, N skipped". Prints what
was skipped and why, what failed without saying so in cases, how many assertions ran, and the sum. In CI a case that was
skipped for a program that is not installed has failed. Exits non-zero when anything failed or nothing ran.
"""

import json
import os
import re
import sys
import urllib.parse

REPORT = re.compile(r"^\[tessera\] (\d+) passed, (\d+) failed, (\d+) skipped$", re.MULTILINE)
ASSERTIONS = re.compile(r"^\[tessera\] (\d+) assertions$", re.MULTILINE)
SKIPPED = re.compile(r"^\[tessera\] skipped: (.*)$", re.MULTILINE)

# What tests say where a program that tools/setup installs is missing.
MISSING = "is not installed"


def read_log(outputs):
    for output in outputs:
        if output.get("name") == "test.log" and "uri" in output:
            path = urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path)
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read()
    return ""


def test_results(paths):
    """Yields label, status and log of the last attempt at each test of each run."""
    for path in paths:
        results = {}
        if not os.path.exists(path):
            continue  # Bazel ended before its first event
        with open(path, encoding="utf-8") as file:
            for line in file:
                event = json.loads(line)
                if "testResult" in event:
                    key = event["id"]["testResult"]
                    result = event["testResult"]
                    results[key["label"], key.get("shard", 1)] = result["status"], read_log(result.get("testActionOutput", []))
        for (label, _), (status, log) in sorted(results.items()):
            yield label, status, log


def main(bazel_exit_code, paths):
    passed = failed = skipped = assertions = 0
    for label, status, log in test_results(paths):
        missing = 0
        for reason in SKIPPED.findall(log):
            may_not_skip = os.environ.get("CI") and MISSING in reason
            missing += 1 if may_not_skip else 0
            print(f"{'failed, since CI may lack nothing' if may_not_skip else 'skipped'}: {label}: {reason}")
        reports = REPORT.findall(log)
        assertions += sum(int(count) for count in ASSERTIONS.findall(log))
        counts = [sum(int(report[i]) for report in reports) for i in range(3)]
        counts = [counts[0], counts[1] + missing, counts[2] - missing]
        if not reports:
            # It crashed, ran out of time, or is no doctest: a test that says nothing has not passed.
            counts = [0, 1, 0]
        elif status != "PASSED" and counts[1] == missing:
            counts[1] += 1
        if counts[1] > 0:
            print(f"failed: {label}: {counts[1]} ({status.lower()}{'' if reports else ', no report of test cases'})")
        passed, failed, skipped = passed + counts[0], failed + counts[1], skipped + counts[2]
    if bazel_exit_code not in (0, 3) or (bazel_exit_code == 3 and failed == 0):
        print(f"failed: Bazel ended with code {bazel_exit_code}: something was not built or not run")
        failed += 1
    print(f"{assertions} assertions")
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
