"""Checks that the C++ examples of the public headers' comments stand in a test: examples.py ROOT TEST.

Spaces and comments may differ, and `...` in an example stands for any code.
"""

import re
import sys
from pathlib import Path


def squeezed(code):
    return re.sub(r"\s", "", re.sub(r"//.*", "", code))


def main(root, test):
    sys.path.insert(0, str(Path(root, "tools/site")))
    from comments import to_markdown
    from headers import read_header
    from reference import read_groups

    def examples_of(entries):
        for entry in entries:
            yield from re.findall(r"```cpp\n(.*?)\n```", to_markdown(entry.comment), re.DOTALL)
            yield from examples_of(entry.members)

    tested = squeezed(Path(test).read_text())
    examples, problems = 0, 0
    for header in (header for _, headers in read_groups() for header in headers):
        for example in examples_of(read_header(Path(root, header))):
            examples += 1
            if not all(squeezed(part) in tested for part in re.split(r"(?<!\w)\.\.\.(?!\w)", example)):
                problems += 1
                print(f"{header} has an example that {test} has not:\n{example}\n")
    print(f"{examples} examples, {problems} problems")
    return 1 if problems or examples < 10 else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
