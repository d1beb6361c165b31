#include "tessera/placement/planner/cost_model.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <stdexcept>

#include <fmt/format.h>

namespace tessera {
namespace {

CostModel uniform(int64_t mesh_ndim, const Link& link) {
  return {.links = std::vector<Link>(static_cast<std::size_t>(mesh_ndim), link)};
}

// Says whether rank / ranks_per_host is the same for all ranks of each group along `mesh_dim`.
bool inside_hosts(const Mesh& mesh, int64_t mesh_dim, int64_t ranks_per_host) {
  int64_t stride = 1;
  for (int64_t d = mesh_dim + 1; d < mesh.ndim(); ++d) stride *= mesh.size(d);
  const int64_t block = stride * mesh.size(mesh_dim);
  for (int64_t i = 0; i < mesh.size(); ++i) {
    const int64_t first = i / block * block + i % stride;
    const auto host = [&](int64_t at) { return mesh.ranks()[static_cast<std::size_t>(at)] / ranks_per_host; };
    if (host(i) != host(first)) return false;
  }
  return true;
}

void check_sample(const LinkSample& sample, const Mesh& mesh) {
  if (sample.mesh_dim < 0 || sample.mesh_dim >= mesh.ndim()) {
    throw std::invalid_argument(
        fmt::format("CostModel::fitted: a sample of mesh dimension {}, but the mesh {} has dimensions [0, {})",
                    sample.mesh_dim, mesh.to_string(), mesh.ndim()));
  }
  const auto is_amount = [](double x) { return std::isfinite(x) && x >= 0; };
  if (is_amount(sample.bytes) && is_amount(sample.microseconds)) return;
  throw std::invalid_argument(fmt::format(
      "CostModel::fitted: a sample of {} bytes in {} us on mesh dimension {}; both must be numbers of at least 0",
      sample.bytes, sample.microseconds, sample.mesh_dim));
}

// Fits a line to the samples of one mesh dimension by least squares, with a latency of at least 0.
Link fitted_link(const std::vector<LinkSample>& samples, int64_t mesh_dim) {
  std::set<double> sizes;
  double bytes = 0;
  double time = 0;
  for (const LinkSample& sample : samples) {
    sizes.insert(sample.bytes);
    bytes += sample.bytes / static_cast<double>(samples.size());
    time += sample.microseconds / static_cast<double>(samples.size());
  }
  if (sizes.size() < 2) {
    throw std::invalid_argument(fmt::format(
        "CostModel::fitted: mesh dimension {} has samples of {} message sizes; measure at least 2, one small "
        "and one large",
        mesh_dim, sizes.size()));
  }
  // The line passes through the mean of the samples, or through zero if it would otherwise have a negative latency.
  const auto slope = [&](double from_bytes, double from_time) {
    double products = 0;
    double squares = 0;
    for (const LinkSample& sample : samples) {
      products += (sample.bytes - from_bytes) * (sample.microseconds - from_time);
      squares += (sample.bytes - from_bytes) * (sample.bytes - from_bytes);
    }
    return products / squares;
  };
  double per_byte = slope(bytes, time);
  if (per_byte <= 0) {
    throw std::invalid_argument(fmt::format(
        "CostModel::fitted: the times of mesh dimension {} do not grow with the bytes, up to {}; measure larger "
        "messages, or more of them",
        mesh_dim, *sizes.rbegin()));
  }
  double latency = time - per_byte * bytes;
  if (latency < 0) {
    latency = 0;
    per_byte = slope(0, 0);
  }
  return {.microseconds = latency, .bytes_per_microsecond = 1 / per_byte};
}

// Parses "120 us + 2000 MB/s".
std::optional<Link> parse_link(std::string_view text) {
  Link out;
  const auto take_number = [&text](double& number) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    return error == std::errc();
  };
  const auto take = [&text](std::string_view word) {
    const bool there = text.starts_with(word);
    if (there) text.remove_prefix(word.size());
    return there;
  };
  const bool parsed = take_number(out.microseconds) && take(" us + ") && take_number(out.bytes_per_microsecond) &&
                      take(" MB/s") && text.empty();
  return parsed ? std::optional(out) : std::nullopt;
}

}  // namespace

CostModel CostModel::bytes_only(int64_t mesh_ndim) { return uniform(mesh_ndim, {}); }

CostModel CostModel::gloo(int64_t mesh_ndim) {
  return uniform(mesh_ndim, {.microseconds = 120, .bytes_per_microsecond = 2000});
}

CostModel CostModel::nvlink_infiniband(const Mesh& mesh, int64_t ranks_per_host) {
  if (ranks_per_host < 1) {
    throw std::invalid_argument(
        fmt::format("CostModel: {} ranks per host; give the number of GPUs that NVLink joins", ranks_per_host));
  }
  CostModel model;
  for (int64_t d = 0; d < mesh.ndim(); ++d) {
    model.links.push_back(inside_hosts(mesh, d, ranks_per_host)
                              ? Link{.microseconds = 10, .bytes_per_microsecond = 200e3}
                              : Link{.microseconds = 20, .bytes_per_microsecond = 25e3});
  }
  return model;
}

CostModel CostModel::fitted(const Mesh& mesh, std::span<const LinkSample> samples) {
  std::vector<std::vector<LinkSample>> of(static_cast<std::size_t>(mesh.ndim()));
  for (const LinkSample& sample : samples) {
    check_sample(sample, mesh);
    of[static_cast<std::size_t>(sample.mesh_dim)].push_back(sample);
  }
  CostModel out;
  for (int64_t d = 0; d < mesh.ndim(); ++d) {
    out.links.push_back(mesh.size(d) == 1 ? Link{} : fitted_link(of[static_cast<std::size_t>(d)], d));
  }
  return out;
}

Link CostModel::over(std::span<const int64_t> mesh_dims) const {
  if (mesh_dims.empty())
    throw std::invalid_argument("CostModel::over: no mesh dimensions; give those over which the step communicates");
  Link slowest = links.at(static_cast<std::size_t>(mesh_dims[0]));
  for (const int64_t mesh_dim : mesh_dims) {
    const Link& link = links.at(static_cast<std::size_t>(mesh_dim));
    slowest.microseconds = std::max(slowest.microseconds, link.microseconds);
    slowest.bytes_per_microsecond = std::min(slowest.bytes_per_microsecond, link.bytes_per_microsecond);
  }
  return slowest;
}

double CostModel::microseconds(uint32_t mesh_dims, c10::function_ref<double(uint32_t)> received) const {
  double latency = 0;
  for (std::size_t i = 0; mesh_dims >> i != 0; ++i) {
    if ((mesh_dims >> i & 1) != 0) latency = std::max(latency, links[i].microseconds);
  }
  const uint32_t every = (uint32_t{1} << links.size()) - 1;
  double out = 0;
  double bytes = 0;  // that cross the slower links
  for (uint32_t slow = 0; slow != every;) {
    double bandwidth = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < links.size(); ++i) {
      if ((slow >> i & 1) == 0) bandwidth = std::min(bandwidth, links[i].bytes_per_microsecond);
    }
    for (std::size_t i = 0; i < links.size(); ++i) {
      if (links[i].bytes_per_microsecond <= bandwidth) slow |= uint32_t{1} << i;
    }
    const double more = std::max(received(slow), bytes);
    out += (more - bytes) / bandwidth;
    bytes = more;
  }
  return latency + out;
}

std::string CostModel::to_string() const {
  std::string out;
  for (const Link& link : links) {
    out += fmt::format("{}{} us + {} MB/s", out.empty() ? "" : ", ", link.microseconds, link.bytes_per_microsecond);
  }
  return out;
}

CostModel parse_cost_model(std::string_view text) {
  constexpr std::string_view kBetween = ", ";
  CostModel out;
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t end = std::min(rest.find(kBetween), rest.size());
    const std::optional<Link> link = parse_link(rest.substr(0, end));
    if (!link || end + kBetween.size() == rest.size()) {
      throw std::invalid_argument(
          fmt::format("parse_cost_model: \"{}\" is no cost model; write a link for each mesh dimension, e.g. 120 us + "
                      "2000 MB/s, 10 us + 25000 MB/s",
                      text));
    }
    out.links.push_back(*link);
    rest.remove_prefix(std::min(end + kBetween.size(), rest.size()));
  }
  return out;
}

void check_cost_model(const CostModel& model, int64_t mesh_ndim, const std::string& who) {
  const auto bad = [](const Link& link) {
    return !(link.microseconds >= 0) || !(link.bytes_per_microsecond > 0) || !std::isfinite(link.microseconds);
  };
  if (static_cast<int64_t>(model.links.size()) == mesh_ndim &&
      std::none_of(model.links.begin(), model.links.end(), bad))
    return;
  throw std::invalid_argument(fmt::format(
      "{}: the cost model [{}] does not fit a mesh of {} dimensions; give each a latency of at least 0 and a "
      "bandwidth above 0",
      who, model.to_string(), mesh_ndim));
}

}  // namespace tessera
