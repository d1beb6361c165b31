#pragma once

#include <array>
#include <string_view>

namespace embed {

// The program compares these sentences when it is given no text. They are pairs on one topic each, of different
// lengths, so that the nearest sentence to each is the other one of its pair. tests/embed/make_reference.py reads them
// from here.
inline constexpr std::array<std::string_view, 8> kSentences = {
    "The cat is sleeping on the warm windowsill.",
    "A kitten naps in a patch of sunlight.",
    "Stock markets fell sharply after the interest rate decision.",
    "Investors sold their shares when the central bank raised its key rate by half a percentage point.",
    "How do I bake bread at home?",
    "Add two cups of flour, a little yeast and a pinch of salt, then knead the dough for ten minutes.",
    "The telescope captured light from a galaxy ten billion years old.",
    "Astronomers watched a distant star collapse.",
};

}  // namespace embed
