// See sampling_filters.h.
#include "sampling_filters.h"

#include <algorithm>
#include <cmath>

#include "sampling_noise.h"

namespace tokenline {
namespace {

// So many candidates are ranked by sorting them.
constexpr int64_t kFewCandidates = 64;
constexpr int kBuckets = 256;

int64_t gather(const LogitRow& row, float least, float end, Candidate* candidates) {
  int64_t count = 0;
  row.visit_between(least, end, [&](int64_t id, float logit) {
    candidates[count++] = {logit, static_cast<int32_t>(id), 1.0};
  });
  return count;
}

// Keeps those candidates, of `count`, in their order; returns how many there are.
template <class IsKept>
int64_t keep_if(Candidate* candidates, int64_t count, IsKept is_kept) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; i++) {
    candidates[kept] = candidates[i];
    kept += is_kept(candidates[i]);
  }
  return kept;
}

// Makes weights masses, exp((logit - largest) / temperature); returns their sum.
double weigh(const LogitRow& row, float inverse_temperature, Candidate* candidates,
             int64_t count) {
  const F32x16 most = broadcast(row.largest()), scale = broadcast(inverse_temperature);
  double total = 0;
  for (int64_t first = 0; first < count; first += kLanes) {
    const int64_t part = std::min<int64_t>(kLanes, count - first);
    float values[kLanes] = {};
    for (int64_t i = 0; i < part; i++) values[i] = candidates[first + i].logit;
    store(values, exp((load(values) - most) * scale));
    for (int64_t i = 0; i < part; i++) {
      candidates[first + i].weight = static_cast<double>(values[i]);
      total += candidates[first + i].weight;
    }
  }
  return total;
}

// Looks for the threshold at which the tokens above it weigh enough, by passes over the row that
// add up what lies above a guess. Tokens weigh 1 each or, with `masses`, those.
class ThresholdSearch {
 public:
  ThresholdSearch(const LogitRow& row, const float* masses, Candidate* candidates)
      : row_(row), masses_(masses), candidates_(candidates) {}

  // What all tokens weigh whose logits are no less.
  double weight(float threshold) const { return measure(threshold).weight; }

  // Where the ranking, which reaches down to `lowest` at most, weighs `wanted`. It is looked for
  // first a few `step`s below the largest logit.
  Cut find(double wanted, float lowest, double step) const {
    Level above = {std::nextafter(row_.largest(), INFINITY), 0, 0.0}, below;
    for (;; step *= 3) {
      const double guess = static_cast<double>(row_.largest()) - step;
      below = measure(static_cast<float>(std::max(guess, static_cast<double>(lowest))));
      if (below.weight >= wanted) break;
      if (below.threshold <= lowest) return {lowest, INT64_MAX};
      above = below;
    }
    // Bounded, since halves come slowly to a point on which many logits lie.
    for (int i = 0; i < kMostHalvings && below.count - above.count > kEnough; i++) {
      const double sum =
          static_cast<double>(below.threshold) + static_cast<double>(above.threshold);
      const Level middle = measure(static_cast<float>(sum / 2));
      (middle.weight >= wanted ? below : above) = middle;
    }
    const int64_t count = gather(row_, below.threshold, above.threshold, candidates_);
    if (masses_) {
      for (int64_t i = 0; i < count; i++) {
        candidates_[i].weight = static_cast<double>(masses_[candidates_[i].id]);
      }
    }
    return rank_until(candidates_, count, wanted - above.weight);
  }

 private:
  // Candidates that are quicker to rank than to halve.
  static constexpr int64_t kEnough = 512;
  static constexpr int kMostHalvings = 12;

  // Of the tokens whose logits are no less than the threshold.
  struct Level {
    float threshold;
    int64_t count;
    double weight;
  };

  Level measure(float threshold) const {
    float padded[kBlock];
    int64_t count = 0;
    F64x16 sums = zero64();
    for (int64_t b = 0; b < row_.num_blocks(); b++) {
      if (row_.block_maximum(b) < threshold) continue;
      const float* values = row_.block(b, padded);
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const uint32_t bits = bits_not_less(load(values + i), broadcast(threshold));
        count += __builtin_popcount(bits);
        if (!masses_) continue;
        sums = add(sums, select_bits(bits, load(masses_ + b * kBlock + i), zero()));
      }
    }
    return {threshold, count, masses_ ? sum(sums) : static_cast<double>(count)};
  }

  const LogitRow& row_;
  const float* masses_;
  Candidate* candidates_;
};

// The least float that is min_p times as probable as the largest.
float min_p_bound(const LogitRow& row, const Filters& filters) {
  const double bound =
      static_cast<double>(row.largest()) +
      static_cast<double>(filters.temperature) * natural_log(static_cast<double>(filters.min_p));
  if (bound <= -FLT_MAX) return -FLT_MAX;
  const float nearest = static_cast<float>(bound);
  return static_cast<double>(nearest) < bound ? std::nextafter(nearest, FLT_MAX) : nearest;
}

// The top_k first of those that are no less than `lowest`.
Cut filter_by_rank(const LogitRow& row, const Filters& filters, float lowest,
                   const Workspace& workspace) {
  const double top_k = static_cast<double>(filters.top_k);
  if (filters.top_k > row.num_blocks()) {
    const ThresholdSearch search(row, nullptr, workspace.candidates);
    if (search.weight(lowest) <= top_k) return {lowest, INT64_MAX};
    return search.find(top_k, lowest, static_cast<double>(filters.temperature));
  }
  lowest = std::max(lowest, row.bound_of_kth(filters.top_k, workspace.buffer));
  const int64_t count = gather(row, lowest, INFINITY, workspace.candidates);
  if (count <= filters.top_k) return {lowest, INT64_MAX};
  return rank_until(workspace.candidates, count, top_k);
}

// Of what `kept` keeps, the first whose masses add up to their share.
Cut filter_by_mass(const LogitRow& row, const Filters& filters, const Cut& kept,
                   const Workspace& workspace) {
  const double temperature = static_cast<double>(filters.temperature);
  const double share = static_cast<double>(filters.top_p);
  const float inverse = 1.0f / filters.temperature;
  if (kept.last_id == INT64_MAX) {
    // Lower down all masses are 0.
    const double nothing = static_cast<double>(row.largest()) - 88.0 * temperature;
    const float lowest =
        std::max(kept.value, static_cast<float>(std::max<double>(nothing, -FLT_MAX)));
    row.exponentials(inverse, workspace.masses);
    const ThresholdSearch search(row, workspace.masses, workspace.candidates);
    return search.find(share * search.weight(lowest), lowest, 3.0 * temperature);
  }
  int64_t count = gather(row, kept.value, INFINITY, workspace.candidates);
  count = keep_if(workspace.candidates, count,
                  [&](const Candidate& c) { return kept.keeps(c.logit, c.id); });
  const double total = weigh(row, inverse, workspace.candidates, count);
  return rank_until(workspace.candidates, count, share * total);
}

}  // namespace

Cut filter(const LogitRow& row, const Filters& filters, const Workspace& workspace) {
  Cut cut;
  if (filters.min_p > 0) cut.value = min_p_bound(row, filters);
  if (filters.top_k > 0 && filters.top_k < row.vocab_size()) {
    cut = filter_by_rank(row, filters, cut.value, workspace);
  }
  if (filters.top_p < 1) cut = filter_by_mass(row, filters, cut, workspace);
  return cut;
}

Cut rank_until(Candidate* candidates, int64_t count, double wanted) {
  // Buckets of equal width; the one in which the ranking ends is looked at more closely, until it
  // holds few candidates or equal ones.
  while (count > kFewCandidates) {
    float least = candidates[0].logit, most = least;
    for (int64_t i = 1; i < count; i++) {
      least = std::min(least, candidates[i].logit);
      most = std::max(most, candidates[i].logit);
    }
    if (least == most) break;  // ranked by their ids already
    const double range = static_cast<double>(most) - static_cast<double>(least);
    const double scale = (kBuckets - 1) / range;
    const auto bucket_of = [=](const Candidate& c) {
      return static_cast<int>((static_cast<double>(most) - static_cast<double>(c.logit)) * scale);
    };
    double weights[kBuckets] = {};
    for (int64_t i = 0; i < count; i++) weights[bucket_of(candidates[i])] += candidates[i].weight;
    int last = 0;
    while (last < kBuckets - 1 && weights[last] < wanted) wanted -= weights[last++];
    count = keep_if(candidates, count, [&](const Candidate& c) { return bucket_of(c) == last; });
  }
  if (count <= kFewCandidates) std::sort(candidates, candidates + count);
  int64_t last = 0;
  for (; last < count - 1 && candidates[last].weight < wanted; last++) {
    wanted -= candidates[last].weight;
  }
  return {candidates[last].logit, candidates[last].id};
}

}  // namespace tokenline
