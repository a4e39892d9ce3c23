// Calls every function of the library that allocates, with each of its allocations failing in turn:
// a status says so, and the same again, with memory, gives what it gives otherwise.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "api.h"

namespace {

// While `is_limited`, so many more allocations succeed.
std::atomic<bool> is_limited{false};
std::atomic<int64_t> num_left{0};

bool may_allocate() { return !is_limited.load() || num_left.fetch_sub(1) > 0; }

}  // namespace

// Found before the system's own, also by the library.
extern "C" void* malloc(size_t size) {
  static auto* real = reinterpret_cast<void* (*)(size_t)>(dlsym(RTLD_NEXT, "malloc"));
  return may_allocate() ? real(size) : nullptr;
}

extern "C" void* aligned_alloc(size_t alignment, size_t size) {
  static auto* real =
      reinterpret_cast<void* (*)(size_t, size_t)>(dlsym(RTLD_NEXT, "aligned_alloc"));
  return may_allocate() ? real(alignment, size) : nullptr;
}

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

constexpr int64_t kTokens = 6, kWidth = 64, kHeadDim = 32, kVocab = 300;

// Memory at a multiple of 64 bytes, all zeros.
template <class T>
class Aligned {
 public:
  explicit Aligned(size_t size) : size_(size) {
    const size_t bytes = (size * sizeof(T) + 63) & ~size_t{63};
    data_ = static_cast<T*>(aligned_alloc(64, bytes));
    std::memset(data_, 0, bytes);
  }
  ~Aligned() { std::free(data_); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  operator T*() { return data_; }
  std::vector<T> copy() const { return {data_, data_ + size_}; }

 private:
  size_t size_;
  T* data_;
};

struct Floats : Aligned<float> {
  // Values of both signs, in no order.
  explicit Floats(int64_t size) : Aligned(static_cast<size_t>(size)) {
    for (int64_t i = 0; i < size; i++) {
      (*this)[i] = static_cast<float>((i * 7919 + 13) % 101 - 50) / 50.0f;
    }
  }
};

// Activations in both forms.
struct Activations {
  explicit Activations(int64_t width)
      : values(kTokens * width),
        quantised(static_cast<size_t>(kTokens * width)),
        scales(static_cast<size_t>(kTokens * width / 32)),
        sums(static_cast<size_t>(kTokens * width / 32)),
        rows{values, width, quantised, scales, sums, 1} {}
  Floats values;
  Aligned<int8_t> quantised;
  Aligned<float> scales, sums;
  TlRows rows;
};

// All memory of the caller's, so that only the library allocates while it is called.
struct Buffers {
  Floats source{2 * kWidth * kWidth}, table{kTokens * kWidth}, ones{kWidth};
  Aligned<uint8_t> packed{1 << 16}, packed_table{1 << 16};
  TlMatrix weight{TL_Q8, 2 * kWidth, kWidth, packed, nullptr};
  TlMatrix embedding{TL_F32, kTokens, kWidth, packed_table, nullptr};
  Activations x{kWidth}, taken{kWidth}, product{2 * kWidth}, gated{kWidth}, attended{kWidth};
  Floats residual{kTokens * kWidth}, cos_sin{kTokens * kHeadDim}, keys{kTokens * kHeadDim};
  Aligned<uint8_t> cache{1 << 16};
  Aligned<int32_t> numbers{kTokens}, cu_seqlens{2}, seq_lens{1}, block_table{1};
  TlRotary rotary{cos_sin, numbers, nullptr, 0};
  TlKvLayer kv{cache, TL_KV_F16, 16, 1, kHeadDim};
  Floats logits{kVocab};
  Aligned<int64_t> row{1}, lens{1}, top_k{1}, token{1}, top_ids{3};
  Aligned<int32_t> allowed{(kVocab + 31) / 32}, history{4};
  Floats one{1}, logprob{1}, top_logprobs{3};

  Buffers() {
    for (int32_t i = 0; i < kTokens; i++) numbers[i] = i;
    cu_seqlens[1] = seq_lens[0] = kTokens;
    for (int i = 0; i < (kVocab + 31) / 32; i++) allowed[i] = -1;
    one[0] = 0.9f;
    lens[0] = 4;
  }
};

// All calls until one fails.
class Calls {
 public:
  Calls(Buffers& buffers, int num_threads) : b(buffers), num_threads_(num_threads) {}
  ~Calls() {
    tl_program_delete(program_);
    tl_pool_delete(pool_);
  }

  int32_t pack() {
    const int64_t row_bytes = kWidth * static_cast<int64_t>(sizeof(float));
    const int32_t status = tl_pack(TL_Q8, TL_SOURCE_F32, b.source, row_bytes, nullptr, 0, 2 * kWidth,
                                   2 * kWidth, kWidth, b.packed);
    return status ? status
                  : tl_pack(TL_F32, TL_SOURCE_F32, b.table, row_bytes, nullptr, 0, kTokens, kTokens,
                            kWidth, b.packed_table);
  }

  int32_t record() {
    pool_ = tl_pool_new(num_threads_);
    program_ = tl_program_new();
    if (!pool_ || !program_) return TL_NO_MEMORY;
    TlProgram* p = program_;
    int32_t status = tl_add_embedding(p, 0, b.numbers, &b.embedding, b.x.rows);
    const auto add = [&](auto call) { status = status ? status : call(); };
    add([&] { return tl_add_quantise(p, 0, b.x.values, kWidth, kWidth, b.x.rows); });
    add([&] { return tl_add_take_rows(p, 0, b.numbers, b.x.rows, kWidth, b.taken.rows); });
    add([&] { return tl_add_linear(p, 0, b.taken.rows, &b.weight, 0, b.product.values, 2 * kWidth); });
    add([&] { return tl_add_gated_linear(p, 0, b.taken.rows, &b.weight, b.gated.rows); });
    add([&] {
      return tl_add_silu_and_mul(p, 0, b.product.values, 2 * kWidth, kWidth, b.taken.rows);
    });
    add([&] {
      return tl_add_rms_norm(p, 0, b.gated.values, kWidth, kWidth, b.ones, 1e-5f, b.x.rows);
    });
    add([&] { return tl_add_rope(p, 0, b.x.values, kWidth, 2, kHeadDim, b.rotary); });
    add([&] {
      return tl_add_rope_and_cache(p, 0, b.keys, kHeadDim, b.keys, kHeadDim, b.rotary, b.kv,
                                   b.numbers);
    });
    if (status) return status;
    TlAttentionPlan* plan = tl_add_attention_plan(p, 1, b.cu_seqlens, b.seq_lens, b.block_table, 1,
                                                  nullptr, 16);
    if (!plan) return TL_NO_MEMORY;
    add([&] {
      return tl_add_attention(p, 0, plan, b.x.values, kWidth, 2, b.kv, 0.2f, 0, b.attended.rows);
    });
    add([&] {
      return tl_add_add_rms_norm(p, 0, b.attended.values, kWidth, b.residual, kWidth, kWidth, b.ones,
                                 1e-5f, b.gated.rows);
    });
    return status;
  }

  int32_t run() {
    const int64_t counts[TL_NUM_COUNTS] = {kTokens, 1, 0, 0};
    return tl_program_run(program_, pool_, counts);
  }

  int32_t sample() {
    int32_t status = tl_mask_logits(pool_, b.logits, kVocab, kVocab, 1, b.row, b.allowed);
    const auto call = [&](auto next) { status = status ? status : next(); };
    call([&] {
      return tl_penalize(pool_, b.logits, kVocab, kVocab, 1, nullptr, b.history, 4, b.lens, b.lens,
                         b.one, b.one, b.one);
    });
    call([&] {
      return tl_sample(pool_, b.logits, kVocab, kVocab, 1, b.one, b.one, b.top_k, b.one, b.lens,
                       b.lens, b.token);
    });
    call([&] {
      return tl_token_logprobs(pool_, b.logits, kVocab, kVocab, 1, b.token, 3, b.logprob, b.top_ids,
                               b.top_logprobs);
    });
    return status;
  }

 private:
  Buffers& b;
  int num_threads_;
  TlPool* pool_ = nullptr;
  TlProgram* program_ = nullptr;
};

// Calls with no more than so many allocations that succeed; returns whether that was too few.
template <class Call>
bool fails_well(int64_t allowed, Call call) {
  num_left.store(allowed);
  is_limited.store(true);
  const int32_t status = call();
  is_limited.store(false);
  check(status == TL_OK || status == TL_NO_MEMORY, "a status");
  return status != TL_OK;
}

struct Results {
  std::vector<float> values, logits, logprobs;
  std::vector<int64_t> ids;
  explicit Results(Buffers& b)
      : values(b.gated.values.copy()),
        logits(b.logits.copy()),
        logprobs(b.top_logprobs.copy()),
        ids(b.top_ids.copy()) {}
  bool operator==(const Results& other) const {
    return values == other.values && logits == other.logits && logprobs == other.logprobs &&
           ids == other.ids;
  }
};

Results undisturbed() {
  Buffers buffers;
  Calls calls(buffers, 1);
  check(!calls.pack() && !calls.record() && !calls.run() && !calls.sample(), "calls with memory");
  return Results(buffers);
}

// Returns how many allocations failed at least once.
int64_t each_allocation_may_fail(const Results& expected, int num_threads) {
  int64_t allowed = 0, num_calm = 0;
  // Some allocations can be done without, such as a helper's: the last that cannot is past when a
  // good many in a row were not missed.
  for (; num_calm < 20; allowed++) {
    Buffers buffers;
    bool has_failed = false;
    has_failed |= fails_well(allowed, [&] { return Calls(buffers, num_threads).pack(); });
    has_failed |= fails_well(allowed, [&] { return Calls(buffers, num_threads).record(); });
    Calls calls(buffers, num_threads);
    check(!calls.pack() && !calls.record(), "adding with memory");
    has_failed |= fails_well(allowed, [&] { return calls.run(); });
    std::memset(buffers.residual, 0, kTokens * kWidth * sizeof(float));
    const Floats residual(kTokens * kWidth), logits(kVocab);
    std::memcpy(buffers.residual, const_cast<Floats&>(residual), sizeof(float) * kTokens * kWidth);
    check(!calls.run(), "a run with memory after one without");
    has_failed |= fails_well(allowed, [&] { return calls.sample(); });
    std::memcpy(buffers.logits, const_cast<Floats&>(logits), sizeof(float) * kVocab);
    check(!calls.sample(), "sampling with memory after sampling without");
    check(Results(buffers) == expected, "the results after a failure");
    num_calm = has_failed ? 0 : num_calm + 1;
  }
  return allowed - num_calm;
}

void absurd_sizes_are_refused() {
  Buffers buffers;
  TlPool* pool = tl_pool_new(2);
  // More than there are addresses for.
  constexpr int64_t kSize = int64_t{1} << 56;
  check(tl_penalize(pool, buffers.logits, 0, kSize, 1, nullptr, buffers.history, 4, buffers.lens,
                    buffers.lens, buffers.one, buffers.one, buffers.one) == TL_NO_MEMORY,
        "penalties of too large a vocabulary");
  check(tl_sample(pool, buffers.logits, 0, kSize, 1, buffers.one, buffers.one, buffers.top_k,
                  buffers.one, buffers.lens, buffers.lens, buffers.token) == TL_NO_MEMORY,
        "sampling from too large a vocabulary");
  check(tl_pack(TL_F32, TL_SOURCE_F32, buffers.source, 0, nullptr, 0, 1, 1, kSize,
                buffers.packed) == TL_NO_MEMORY,
        "packing too long a row");
  tl_pool_delete(pool);
}

}  // namespace

int main() {
  const Results expected = undisturbed();
  for (const int num_threads : {1, 3}) {
    check(each_allocation_may_fail(expected, num_threads) > 20, "enough allocations were tried");
  }
  absurd_sizes_are_refused();
  std::puts("all hold");
}
