// Gumbel-max over what a row keeps.
#pragma once

#include <cstdint>

#include "philox.h"
#include "sampling_filters.h"
#include "sampling_row.h"

namespace tokenline {

// argmax(logit / temperature + noise) over the tokens that `cut` keeps, the first of equal ones
// (Maddison et al., "A* sampling", 2014). The row is scanned.
int64_t draw(const LogitRow& row, const Cut& cut, float temperature, const Philox& philox);

}  // namespace tokenline
