#!/usr/bin/env python3
"""Writes unicode_tables.h, which holds what the uncased BERT tokenizer must know about Unicode.

    python3 examples/embed/make_unicode_tables.py VOCAB.TXT > examples/embed/unicode_tables.h

The tables are derived from Python's own `unicodedata`. A folding is kept only if its result can be in the vocabulary: a
word with any other letter becomes [UNK], whatever it is folded to.
"""
import sys
import unicodedata

LINE = 116


def code_points():
    return (c for c in range(0x110000) if not 0xD800 <= c < 0xE000)


def category(c):
    return unicodedata.category(chr(c))


def is_removed(c):
    """Combining marks, and controls other than tab and line ends."""
    return c in (0, 0xFFFD) or category(c) == "Mn" or (category(c) in ("Cc", "Cf", "Co") and chr(c) not in "\t\n\r")


def is_punctuation(c):
    ascii_symbol = 33 <= c <= 126 and not chr(c).isalnum()
    return ascii_symbol or category(c).startswith("P")


def fold(c):
    decomposed = unicodedata.normalize("NFD", chr(c))
    kept = "".join(x for x in decomposed if unicodedata.category(x) != "Mn")
    return "".join(x.lower() for x in kept)


def ranges(predicate):
    found = []
    for c in code_points():
        if predicate(c):
            if found and found[-1][1] == c - 1:
                found[-1][1] = c
            else:
                found.append([c, c])
    return found


def wrapped(items, indent, separator=""):
    line, lines = indent, []
    for item in items:
        if len(line) + len(item) + len(separator) > LINE and line != indent:
            lines.append(line.rstrip())
            line = indent
        line += item + separator
    return "\n".join(lines + [line.rstrip()])


def print_ranges(name, comment, found):
    print(f"// {comment}\ninline constexpr CodePointRange {name}[] = {{")
    print(wrapped([f"{{0x{a:X}, 0x{b:X}}}," for a, b in found], "    ", " "))
    print("};\n")


def spelled(text):
    """Letters written from left to right stand for themselves, everything else is escaped."""
    plain = all(category(ord(x)).startswith("L") and unicodedata.bidirectional(x) == "L" for x in text)
    if plain:
        return text
    return "".join(x if x.isascii() else f"\\u{ord(x):04X}" if ord(x) < 0x10000 else f"\\U{ord(x):08X}" for x in text)


def print_folded(name, comment, entries):
    print(f"// {comment}\ninline constexpr std::u32string_view {name} =")
    lines = wrapped([spelled(chr(c) + to) for c, to in entries], "").split("\n")
    print("\n".join(f'    U"{line}"' for line in lines) + ";\n")


def main(vocabulary):
    letters = set(open(vocabulary, encoding="utf-8").read())
    folded = [(c, fold(c)) for c in code_points()
              if not is_removed(c) and not 0xAC00 <= c <= 0xD7A3 and fold(c) not in ("", chr(c))]
    folded = [(c, to) for c, to in folded if chr(c) in letters or all(x in letters for x in to)]
    print("#pragma once\n")
    print("// Made by make_unicode_tables.py from the Unicode character database "
          f"{unicodedata.unidata_version}; not to be edited.\n")
    print("#include <cstdint>\n#include <string_view>\n\nnamespace embed {\n")
    print("// Code points first .. last, both included.")
    print("struct CodePointRange {\n  uint32_t first;\n  uint32_t last;\n};\n\n// clang-format off\n")
    print_ranges("kRemoved", "Combining marks (Mn) and controls (Cc, Cf, Co) other than tab and line ends.", ranges(is_removed))
    print_ranges("kPunctuation", "ASCII characters that are no letter, digit or space, and the categories P*.", ranges(is_punctuation))
    print_folded("kFolded", "Pairs: a character, then what is left of it in lower case without its marks. Sorted by the first.",
                 [x for x in folded if len(x[1]) == 1])
    print_folded("kFoldedToTwo", "Triples: a character that becomes two. Sorted by the first.", [x for x in folded if len(x[1]) == 2])
    print("// clang-format on\n\n}  // namespace embed")


if __name__ == "__main__":
    main(sys.argv[1])
