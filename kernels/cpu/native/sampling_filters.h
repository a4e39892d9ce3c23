// Which tokens of a row min_p, top_k and top_p leave, found by thresholds instead of a sort.
#pragma once

#include <cfloat>
#include <cstdint>

#include "sampling_row.h"

namespace tokenline {

// What a row asks for, as Kernels.sample says it.
struct Filters {
  float temperature;
  float min_p;
  int64_t top_k;
  float top_p;
};

// A token on its way through the filters, and what it counts there.
struct Candidate {
  float logit;
  int32_t id;
  double weight;

  // Whether it ranks before another: by logit, equal ones by id.
  bool operator<(const Candidate& other) const {
    return logit > other.logit || (logit == other.logit && id < other.id);
  }
};

// Where a ranking ends: at the logit `value`, of which ids up to `last_id` still belong to it.
// Impossible tokens are never in it.
struct Cut {
  float value = -FLT_MAX;
  int64_t last_id = INT64_MAX;

  bool keeps(float logit, int64_t id) const {
    return logit > value || (logit == value && id <= last_id);
  }
};

// Memory that a row needs on the way.
struct Workspace {
  float* block_maxima;    // [num_blocks]
  float* buffer;          // [num_blocks]
  float* masses;          // [num_blocks · 64]
  Candidate* candidates;  // [vocab_size]
};

// The tokens that a scanned row keeps.
Cut filter(const LogitRow& row, const Filters& filters, const Workspace& workspace);

// The shortest beginning of the ranking whose weights add up to `wanted`, or all of it; there is at
// least one candidate, they come in the order of their ids, and are moved about.
Cut rank_until(Candidate* candidates, int64_t count, double wanted);

}  // namespace tokenline
