#include <algorithm>

#include <doctest/doctest.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "tessera/examples/embed/bert.h"
#include "tessera/examples/embed/sentences.h"
#include "tessera/tests/embed/minilm.h"

namespace embed {
namespace {

TEST_CASE("the stored vectors are for the built-in sentences") {
  const Reference reference = read_reference();
  CHECK(std::equal(reference.texts.begin(), reference.texts.end(), kSentences.begin(), kSentences.end()));
  CHECK(reference.vectors.sizes() == at::IntArrayRef({static_cast<int64_t>(kSentences.size()), 384}));
}

TEST_CASE("all-MiniLM-L6-v2 in one process gives the vectors of sentence-transformers") {
  const at::NoGradGuard no_grad;
  const Reference reference = read_reference();
  BertModel model;
  model->eval();
  load_minilm(*model);
  const Inputs inputs = inputs_of(reference.texts);
  const at::Tensor vectors = sentence_vectors(model(inputs.ids, inputs.mask), inputs.mask);
  CHECK(smallest_cosine(vectors, reference.vectors) >= 0.99999);
  CHECK((vectors - reference.vectors).abs().max().item<float>() < 1e-5F);
}

TEST_CASE("the nearest to each built-in sentence is the other on its topic") {
  const Reference reference = read_reference();
  at::Tensor similarities = reference.vectors.mm(reference.vectors.t());
  similarities.fill_diagonal_(-1);
  const at::Tensor nearest = similarities.argmax(1);
  for (int64_t i = 0; i < nearest.size(0); ++i) CHECK(nearest[i].item<int64_t>() == (i ^ 1));
}

}  // namespace
}  // namespace embed
