"""Adds up the test cases that tests reported: count_test_cases.py BAZEL_EXIT_CODE EVENTS.json... NAME.program...

A file NAME.program holds "passed" or "failed" of a program that counts as one test case. Reads Bazel's build events,
and in the log of each test the line "[tessera] N passed, N failed, N skipped". Prints what was skipped and why, what
failed without saying so in cases, how many assertions ran, and the sum. In CI a case that was skipped since something
is missing that tools/setup installs has failed, but for MPI in a build that leaves it out: the events of such a build
are in without_mpi.json. Exits non-zero when anything failed or nothing ran.
"""

import json
import os
import pathlib
import re
import sys
import urllib.parse

REPORT = re.compile(r"^\[tessera\] (\d+) passed, (\d+) failed, (\d+) skipped$", re.MULTILINE)
ASSERTIONS = re.compile(r"^\[tessera\] (\d+) assertions$", re.MULTILINE)
# One line for each case that was skipped: TESSERA_SKIP and TESSERA_SKIP_MISSING of tests/harness/skip.h.
SKIPPED = re.compile(r"^\[tessera\] (skipped|missing): (.*)$", re.MULTILINE)

# Tests over MPI say NO_MPI in a build without MPI. WITHOUT_MPI is the part of tools/test that makes such a build.
NO_MPI = "this build has no MPI"
WITHOUT_MPI = "without_mpi"


def read_log(outputs):
    for output in outputs:
        if output.get("name") == "test.log" and "uri" in output:
            path = urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path)
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read()
    return ""


def test_results(paths):
    """Yields part of tools/test, label, status and log of the last attempt at each test of each run."""
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
                    log = read_log(result.get("testActionOutput", []))
                    results[key["label"], key.get("shard", 1), key.get("run", 1)] = result["status"], log
        for (label, _, _), (status, log) in sorted(results.items()):
            yield pathlib.Path(path).stem, label, status, log


def in_ci():
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def count_missing(part, label, log):
    """Prints which cases of a test were skipped and why. Returns how many may not be, since CI may lack nothing."""
    failed = 0
    for kind, reason in SKIPPED.findall(log):
        fails = in_ci() and kind == "missing" and not (part == WITHOUT_MPI and NO_MPI in reason)
        failed += fails
        print(f"{'failed, since CI may lack nothing' if fails else 'skipped'}: {label}: {reason}")
    return failed


def failed_programs(paths):
    """Prints and returns the names of the programs that failed."""
    failed = [pathlib.Path(path).stem for path in paths if pathlib.Path(path).read_text().strip() != "passed"]
    for name in failed:
        print(f"failed: {name}")
    return failed


def main(bazel_exit_code, paths):
    programs = [path for path in paths if path.endswith(".program")]
    failed = len(failed_programs(programs))
    passed = len(programs) - failed
    skipped = assertions = 0
    for part, label, status, log in test_results([path for path in paths if path not in programs]):
        reports = REPORT.findall(log)
        assertions += sum(int(count) for count in ASSERTIONS.findall(log))
        counts = [sum(int(report[i]) for report in reports) for i in range(3)]
        missing = min(count_missing(part, label, log), counts[2])
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
