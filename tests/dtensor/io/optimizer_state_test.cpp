#include "tessera/dtensor/io/optimizer_state.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/optim.h>
#include <torch/types.h>
// This comes after LibTorch, whose logging has a CHECK of its own.
#include <doctest/doctest.h>

#include "tessera/dtensor/io/safetensors_file.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/tests/dtensor/io/test_files.h"

namespace tessera {
namespace {

using torch::optim::Optimizer;
using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor>)>;

struct TwoLayersImpl : torch::nn::Module {
  TwoLayersImpl() {
    register_module("a", a);
    register_module("b", b);
  }
  at::Tensor forward(const at::Tensor& x) { return b(torch::tanh(a(x))); }
  torch::nn::Linear a{3, 5};
  torch::nn::Linear b{5, 2};
};
TORCH_MODULE(TwoLayers);

template <typename Class, typename Options>
MakeOptimizer make(Options options) {
  return [options](std::vector<at::Tensor> params) { return std::make_unique<Class>(std::move(params), options); };
}

std::vector<std::pair<const char*, MakeOptimizer>> optimizers() {
  using namespace torch::optim;
  return {
      {"SGD", make<SGD>(SGDOptions(0.1))},
      {"SGD with momentum", make<SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true))},
      {"Adam", make<Adam>(AdamOptions(0.01).amsgrad(true).weight_decay(0.1))},
      {"AdamW", make<AdamW>(AdamWOptions(0.01).betas({0.8, 0.99}))},
      {"RMSprop", make<RMSprop>(RMSpropOptions(0.01).momentum(0.5).centered(true))},
      {"Adagrad", make<Adagrad>(AdagradOptions(0.1).lr_decay(0.01))},
      {"LBFGS", make<LBFGS>(LBFGSOptions(0.5).max_iter(3).history_size(4).line_search_fn("strong_wolfe"))},
  };
}

void step(TwoLayers& net, Optimizer& optimizer, int64_t i) {
  const at::Tensor x = torch::sin(torch::arange(12, torch::kFloat) * (0.3 + static_cast<double>(i))).view({4, 3});
  optimizer.step([&] {
    optimizer.zero_grad();
    const at::Tensor loss = net(x).square().mean();
    loss.backward();
    return loss;
  });
}

TEST_CASE("optimizer state: 3 steps, saved, loaded into a new one, 3 more steps: equal to 6 steps, for every class") {
  for (const auto& each : optimizers()) {
    const auto& make_optimizer = each.second;
    CAPTURE(each.first);
    const TempFolder folder;
    torch::manual_seed(3);
    TwoLayers whole;
    TwoLayers start;
    save_weights(*whole, folder / "w");
    load_weights(*start, folder / "w");
    const std::unique_ptr<Optimizer> through = make_optimizer(whole->parameters());
    const std::unique_ptr<Optimizer> before = make_optimizer(start->parameters());
    for (int64_t i = 0; i < 3; ++i) {
      step(whole, *through, i);
      step(start, *before, i);
    }
    before->param_groups()[0].options().set_lr(0.125);  // as a scheduler does
    through->param_groups()[0].options().set_lr(0.125);
    save_weights(*start, folder / "w");
    save_optimizer(*before, *start, folder / "o");

    TwoLayers resumed;
    const std::unique_ptr<Optimizer> after = make_optimizer(resumed->parameters());
    load_weights(*resumed, folder / "w");
    load_optimizer(*after, *resumed, folder / "o");
    CHECK(after->param_groups()[0].options().get_lr() == 0.125);
    save_optimizer(*after, *resumed, folder / "again");
    CHECK(read_text(folder / "o") == read_text(folder / "again"));
    for (int64_t i = 3; i < 6; ++i) {
      step(whole, *through, i);
      step(resumed, *after, i);
    }
    for (std::size_t i = 0; i < whole->parameters().size(); ++i)
      CHECK(resumed->parameters()[i].equal(whole->parameters()[i]));
  }
}

TEST_CASE("optimizer state: kept by the parameters' paths, groups and options as JSON") {
  const TempFolder folder;
  TwoLayers net;
  torch::optim::AdamW optimizer({torch::optim::OptimizerParamGroup({net->a->weight}),
                                 torch::optim::OptimizerParamGroup({net->b->weight, net->b->bias},
                                                                   std::make_unique<torch::optim::AdamWOptions>(0.5))},
                                torch::optim::AdamWOptions(0.25));
  net(torch::ones({2, 3})).sum().backward();
  optimizer.step();
  save_optimizer(optimizer, *net, folder / "o");
  const SafetensorsFile file(folder / "o");
  CHECK(file.tensors().size() == 9);
  CHECK(file.read(*file.find("a.weight/step")).item<int64_t>() == 1);
  CHECK(file.find("b.bias/exp_avg")->shape == std::vector<int64_t>{2});
  CHECK(file.metadata().at("optimizer") == "AdamW");
  CHECK(
      file.metadata().at("param_groups") ==
      R"([{"options":{"lr":0.25,"beta1":0.9,"beta2":0.999,"eps":1e-08,"weight_decay":0.01,"amsgrad":false},"params":["a.weight"]},)"
      R"({"options":{"lr":0.5,"beta1":0.9,"beta2":0.999,"eps":1e-08,"weight_decay":0.01,"amsgrad":false},"params":["b.weight","b.bias"]}])");
}

TEST_CASE("optimizer state: options that JSON has no numbers for are loaded as they were saved") {
  const TempFolder folder;
  TwoLayers net;
  torch::optim::LBFGS optimizer(net->parameters(),
                                torch::optim::LBFGSOptions(1).tolerance_grad(-INFINITY).tolerance_change(1.0 / 3));
  save_optimizer(optimizer, *net, folder / "o");
  torch::optim::LBFGS loaded(net->parameters(),
                             torch::optim::LBFGSOptions(2).max_eval(5).line_search_fn("strong_wolfe"));
  load_optimizer(loaded, *net, folder / "o");
  CHECK(static_cast<torch::optim::LBFGSOptions&>(loaded.param_groups()[0].options()) ==
        static_cast<torch::optim::LBFGSOptions&>(optimizer.param_groups()[0].options()));
}

TEST_CASE("optimizer state: an integer option that an int64 cannot hold is refused") {
  const TempFolder folder;
  TwoLayers net;
  torch::optim::LBFGS optimizer(net->parameters(), torch::optim::LBFGSOptions(1).max_iter(7));
  save_optimizer(optimizer, *net, folder / "o");
  const std::string bytes = read_text(folder / "o");
  std::string json = bytes.substr(8);
  const std::string before = R"(\"max_iter\":7)";
  const std::size_t place = json.find(before);
  REQUIRE(place != std::string::npos);
  json.replace(place, before.size(), R"(\"max_iter\":18446744073709551615)");
  write_text(folder / "large", safetensors_bytes(json, ""));
  const std::string text = message_of([&] { load_optimizer(optimizer, *net, folder / "large"); });
  CHECK(text.find("the option 'max_iter' is larger than an int64") != std::string::npos);
  CHECK(static_cast<torch::optim::LBFGSOptions&>(optimizer.param_groups()[0].options()).max_iter() == 7);
}

TEST_CASE("optimizer state: param_groups that readers would refuse are refused before anything is written") {
  const TempFolder folder;
  torch::nn::Module module;
  module.register_parameter(std::string(std::size_t{17} << 20, 'w'), torch::zeros({2}));
  const torch::optim::SGD optimizer(module.parameters(), torch::optim::SGDOptions(0.1));
  const std::string text = message_of([&] { save_optimizer(optimizer, module, folder / "o"); });
  CAPTURE(text);
  CHECK(text.starts_with("save_optimizer: the options and the names of the parameters would have 17"));
  CHECK(text.find("bytes as param_groups, and at most 16777216 are read") != std::string::npos);
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("optimizer state: the name of a parameter without state may begin another's, before a slash") {
  const TempFolder folder;
  torch::nn::Module module;
  const at::Tensor first = module.register_parameter("w", torch::ones({2}));
  const at::Tensor second = module.register_parameter("w/x", torch::ones({3}));
  const MakeOptimizer make_sgd = make<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
  const std::unique_ptr<Optimizer> saved = make_sgd(module.parameters());
  for (const at::Tensor& parameter : {second, first}) {
    parameter.mutable_grad() = torch::ones_like(parameter);
    saved->step();
    save_optimizer(*saved, module, folder / "o");
    const std::unique_ptr<Optimizer> loaded = make_sgd(module.parameters());
    load_optimizer(*loaded, module, folder / "o");
    CHECK(loaded->state().size() == saved->state().size());
    CHECK(loaded->state().count(second.unsafeGetTensorImpl()) == 1);
    save_optimizer(*loaded, module, folder / "again");
    CHECK(read_text(folder / "o") == read_text(folder / "again"));
  }
}

// Is an optimizer class of the user's own.
struct Mine : torch::optim::Optimizer {
  explicit Mine(std::vector<at::Tensor> params)
      : Optimizer(std::move(params), std::make_unique<torch::optim::SGDOptions>(0.1)) {}
  at::Tensor step(LossClosure) override { return {}; }
};

// Is an AdamW whose state has more than LibTorch's.
struct WithAverage : torch::optim::AdamW {
  struct State : torch::optim::AdamWParamState {
    at::Tensor average;
  };
  using AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override {
    const at::Tensor loss = AdamW::step(std::move(closure));
    for (const at::Tensor& parameter : param_groups()[0].params()) {
      auto& slot = state_[parameter.unsafeGetTensorImpl()];
      auto state = std::make_unique<State>();
      static_cast<torch::optim::AdamWParamState&>(*state) = static_cast<torch::optim::AdamWParamState&>(*slot);
      state->average = parameter.detach().clone();
      slot = std::move(state);
    }
    return loss;
  }
};
struct OwnOptions : torch::optim::AdamWOptions {
  int64_t interval = 7;

 private:
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override { return std::make_unique<OwnOptions>(*this); }
};
struct OwnStep : torch::optim::AdamW {
  using AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override { return AdamW::step(std::move(closure)); }
};

TEST_CASE("optimizer state: a class derived from AdamW is saved where it keeps nothing of its own, and else refused") {
  const TempFolder folder;
  TwoLayers net;
  const auto trained = [&](auto& optimizer) {
    net->zero_grad();
    net(torch::ones({2, 3})).sum().backward();
    optimizer.step();
    return message_of([&] { save_optimizer(optimizer, *net, folder / "state"); });
  };
  WithAverage average(net->parameters());
  CHECK(trained(average).find("is derived from AdamW and has a state of a class of its own") != std::string::npos);
  torch::optim::AdamW options({torch::optim::OptimizerParamGroup(net->parameters(), std::make_unique<OwnOptions>())});
  CHECK(trained(options).find("is derived from AdamW and has options of a class of its own") != std::string::npos);
  OwnStep own(net->parameters());
  CHECK(trained(own) == "nothing was thrown");
  CHECK(message_of([&] { load_optimizer(options, *net, folder / "state"); }).find("options of a class of its own") !=
        std::string::npos);
  CHECK(message_of([&] { load_optimizer(own, *net, folder / "state"); }) == "nothing was thrown");
}

TEST_CASE("optimizer state: a file that does not fit is refused by message, and the optimizer stays as it was") {
  const TempFolder folder;
  TwoLayers net;
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.1));
  net(torch::ones({2, 3})).sum().backward();
  adam.step();
  save_optimizer(adam, *net, folder / "adam");
  save_weights(*net, folder / "weights");

  TwoLayers other;
  torch::optim::AdamW adamw(net->parameters());
  torch::optim::Adam fewer({net->a->weight}, torch::optim::AdamOptions(0.1));
  torch::optim::Adam foreign(other->parameters(), torch::optim::AdamOptions(0.1));
  torch::optim::Adam two(
      {torch::optim::OptimizerParamGroup({net->a->weight}), torch::optim::OptimizerParamGroup({net->b->weight})},
      torch::optim::AdamOptions(0.1));
  Mine mine(net->parameters());
  const auto refusal = [&](Optimizer& optimizer, const char* file) {
    return message_of([&] { load_optimizer(optimizer, *net, folder / file); });
  };
  const auto contains = [](const std::string& text, const std::string& want) {
    CAPTURE(text);
    CAPTURE(want);
    CHECK(text.find(want) != std::string::npos);
  };
  contains(refusal(adamw, "adam"), "holds the state of 'Adam', the optimizer is AdamW");
  contains(
      refusal(fewer, "adam"),
      "has 4 parameters, that of the optimizer 1; the first that differs is 'a.bias' in the file and the end of the "
      "list here");
  contains(refusal(two, "adam"), "load_optimizer: '" + folder / "adam" + "' has 1 parameter groups, the optimizer 2");
  contains(refusal(foreign, "adam"), "parameter 0 of group 0 of the optimizer (shape [5, 3]) is not in the module");
  contains(refusal(mine, "adam"), "none of torch::optim's Adagrad, Adam, AdamW, LBFGS, RMSprop and SGD");
  contains(refusal(adam, "weights"), "has no 'optimizer' in its __metadata__; it was not written by save_optimizer");
  contains(refusal(adam, "absent"), "No such file or directory");
  contains(message_of([&] { save_optimizer(mine, *net, folder / "mine"); }),
           "save_optimizer: the optimizer is none of");
  CHECK(adam.state().size() == 4);

  const std::string params = R"(\"params\":[\"a.weight\",\"a.bias\",\"b.weight\",\"b.bias\"]}])";
  const std::string options =
      R"([{\"options\":{\"lr\":0.1,\"beta1\":0.9,\"beta2\":0.999,\"eps\":1e-8,\"weight_decay\":0,\"amsgrad\":false},)";
  struct Row {
    const char* why;
    std::string groups;
    std::string tensors;
    int64_t bytes;
    const char* want;
  };
  const std::vector<Row> rows = {
      {"groups that are no JSON", "[{", "", 0, "param_groups is not valid JSON: "},
      {"a zero byte and anything after it", "[]\\u0000x", "", 0, "param_groups is not valid JSON: byte 3 is zero"},
      {"65 lists in each other", std::string(65, '['), "", 0,
       "param_groups has lists or objects in each other, more than 64 deep"},
      {"64 lists in each other", std::string(64, '['), "", 0, "param_groups is not valid JSON: "},
      {"an option twice", R"([{\"options\":{\"lr\":1,\"lr\":2},\"params\":[]}])", "", 0,
       "param_groups: the key 'lr' appears twice"},
      {"groups that are a number", "7", "", 0, "param_groups is not a list of"},
      {"a long name with a control character",
       R"([{\"options\":{\"lr\":1},\"params\":[\"\\u001b)" + std::string(200, 'x') + R"(\"]}])", "", 0,
       "the first that differs is '\\x1bxxx"},
      {"a missing option", R"([{\"options\":{\"lr\":0.1},)" + params, "", 0, "the option 'beta1' is missing"},
      {"an option of another type", R"([{\"options\":{\"lr\":true},)" + params, "", 0,
       "the option 'lr' is not a number"},
      {"one option too many",
       R"([{\"options\":{\"x\":1,\"lr\":0.1,\"beta1\":0.9,\"beta2\":0.999,\"eps\":1e-8,\"weight_decay\":0,\"amsgrad\":false},)" +
           params,
       "", 0, "a group has 7 options, Adam has 6"},
      {"half a state", options + params, R"(,"a.bias/step":{"dtype":"I64","shape":[],"data_offsets":[0,8]})", 8,
       "'a.bias/exp_avg' is missing in the file"},
      {"a counter that is none", options + params, R"(,"a.bias/step":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})",
       8, "'a.bias/step' is Float of shape [2] in the file, not one Long"},
      {"state of another shape", options + params,
       R"(,"a.bias/step":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"a.bias/exp_avg":{"dtype":"F32","shape":[2],"data_offsets":[8,16]})",
       16, "'a.bias/exp_avg' is [2] in the file, but its parameter is [5] in the module"},
      {"unknown state", options + params, R"(,"c.bias/step":{"dtype":"I64","shape":[],"data_offsets":[0,8]})", 8,
       "holds what Adam does not keep for these parameters: 'c.bias/step'"},
  };
  for (const Row& row : rows) {
    CAPTURE(row.why);
    write_text(folder / "bad", safetensors_bytes(R"({"__metadata__":{"optimizer":"Adam","param_groups":")" +
                                                     row.groups + "\"}" + row.tensors + "}",
                                                 std::string(static_cast<std::size_t>(row.bytes), '\0')));
    contains(refusal(adam, "bad"), row.want);
    CHECK(adam.state().size() == 4);
    CHECK(adam.param_groups()[0].options().get_lr() == 0.1);
  }
}

// Has two layers with one weight: that of the first, or of the second, is assigned to the other, which leaves a tensor.
struct Tied : torch::nn::Module {
  explicit Tied(bool to_first) {
    register_module("a", a);
    register_module("b", b);
    (to_first ? a : b)->weight = (to_first ? b : a)->weight;
  }
  torch::nn::Linear a{3, 3}, b{3, 3};
};

TEST_CASE(
    "optimizer state: a weight that was tied by assigning the member has left a tensor, which the optimizer holds "
    "too") {
  const std::vector<std::pair<const char*, MakeOptimizer>> kinds = {
      {"AdamW", make<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01))},
      {"Adagrad", make<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1))}};
  for (const auto& each : kinds) {
    for (const bool to_first : {false, true}) {
      CAPTURE(each.first);
      CAPTURE(to_first);
      const TempFolder folder;
      Tied saved(to_first), loaded(to_first);
      const std::unique_ptr<Optimizer> first = each.second(saved.parameters());
      const std::unique_ptr<Optimizer> second = each.second(loaded.parameters());
      saved.b->forward(saved.a->forward(torch::ones({2, 3}))).sum().backward();
      first->step();
      save_optimizer(*first, saved, folder / "o");
      load_optimizer(*second, loaded, folder / "o");
      for (std::size_t i = 0; i < saved.parameters().size(); ++i) {
        CHECK(second->state().count(loaded.parameters()[i].unsafeGetTensorImpl()) ==
              first->state().count(saved.parameters()[i].unsafeGetTensorImpl()));
      }
      save_optimizer(*second, loaded, folder / "again");
      CHECK(read_text(folder / "o") == read_text(folder / "again"));
      const std::string live = to_first ? "b.weight" : "a.weight";
      CHECK(SafetensorsFile(folder / "o").find(live + "/step") != nullptr);
    }
  }
}

TEST_CASE("optimizer state: a tensor that is only assigned has the path of the one in whose place it is, not both") {
  const TempFolder folder;
  TwoLayers net;
  net->b->bias = torch::ones({2}, torch::requires_grad());
  torch::optim::SGD alone({net->b->bias}, torch::optim::SGDOptions(0.1).momentum(0.9));
  net(torch::ones({2, 3})).sum().backward();
  alone.step();
  save_optimizer(alone, *net, folder / "o");
  CHECK(SafetensorsFile(folder / "o").find("b.bias/momentum_buffer") != nullptr);
  std::vector<at::Tensor> all = net->parameters();
  all.push_back(net->b->bias);
  torch::optim::SGD both(all, torch::optim::SGDOptions(0.1));
  CHECK(message_of([&] { save_optimizer(both, *net, folder / "both"); }).find("has two tensors for 'b.bias'") !=
        std::string::npos);
}

TEST_CASE("optimizer state: in a folder it has a file of its own beside the weights, or the one of earlier versions") {
  const TempFolder folder;
  TwoLayers net;
  torch::optim::AdamW optimizer(net->parameters());
  net(torch::ones({2, 3})).sum().backward();
  optimizer.step();
  const auto loaded = [&] {
    TwoLayers other;
    torch::optim::AdamW again(other->parameters());
    load_optimizer(again, *other, folder.path());
    return again.state().size();
  };
  save_optimizer(optimizer, *net, folder / "model.safetensors");
  CHECK(loaded() == 4);
  save_weights(*net, folder.path());
  CHECK(message_of(loaded).find("was not written by save_optimizer") != std::string::npos);
  save_optimizer(optimizer, *net, folder.path());
  CHECK(loaded() == 4);
  TwoLayers other;
  load_weights(*other, folder.path());
  CHECK(other->a->weight.equal(net->a->weight));
  const TempFolder empty;
  CHECK(message_of([&] {
          load_optimizer(optimizer, *net, empty.path());
        }).find("holds neither optimizer.safetensors nor optimizer.safetensors.index.json") != std::string::npos);
}

}  // namespace
}  // namespace tessera
