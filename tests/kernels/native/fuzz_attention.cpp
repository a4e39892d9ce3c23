// Fuzzes rotary embedding, the paged cache and attention, on batches of sequences of every length.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "fuzz_rows.h"

namespace fuzz {
namespace {

constexpr const char* kKvNames[] = {"f16", "f32", "int8"};

struct Shape {
  int64_t block_size, num_kv_heads, num_heads, head_dim, sliding_window;
  int32_t kv_type;

  int64_t query_width() const { return num_heads * head_dim; }
  int64_t kv_width() const { return num_kv_heads * head_dim; }
};

// Sequences with random keys, values and queries. Each is computed a chunk of tokens at a time.
class Batch {
 public:
  Batch(Random& random, const Shape& shape, int64_t num_sequences)
      : shape_(shape),
        max_blocks_((kMostTokens + shape.block_size - 1) / shape.block_size),
        lengths_(static_cast<size_t>(num_sequences)),
        block_table_(num_sequences * max_blocks_),
        blocks_(num_sequences * max_blocks_ *
                tl_kv_block_bytes(shape.kv_type, shape.block_size, shape.num_kv_heads,
                                  shape.head_dim)),
        cos_sin_(kMostTokens * shape.head_dim),
        norm_(shape.head_dim),
        has_norm_(random.coin()) {
    for (int64_t& length : lengths_) length = random.integer(1, kMostTokens);
    starts_.resize(lengths_.size() + 1);
    std::partial_sum(lengths_.begin(), lengths_.end(), starts_.begin() + 1);
    for (int64_t i = 0; i < block_table_.size(); i++) block_table_[i] = static_cast<int32_t>(i);
    for (int64_t i = block_table_.size() - 1; i > 0; i--) {
      std::swap(block_table_[i], block_table_[random.integer(0, i)]);
    }
    random.fill_rows(cos_sin_.data(), kMostTokens, shape.head_dim, shape.head_dim, 1);
    random.fill_rows(norm_.data(), 1, shape.head_dim, shape.head_dim, 1);
    const int64_t tokens = starts_.back();
    query_.resize(static_cast<size_t>(tokens * shape.query_width()));
    key_.resize(static_cast<size_t>(tokens * shape.kv_width()));
    value_.resize(static_cast<size_t>(tokens * shape.kv_width()));
    // Finite, since a key that is not spoils all later tokens of its sequence.
    random.fill_rows(query_.data(), tokens, shape.query_width(), shape.query_width(), 4);
    random.fill_rows(key_.data(), tokens, shape.kv_width(), shape.kv_width(), 3);
    random.fill_rows(value_.data(), tokens, shape.kv_width(), shape.kv_width(), 4);
  }

  int64_t num_sequences() const { return static_cast<int64_t>(lengths_.size()); }
  int64_t start(int64_t sequence) const { return starts_[static_cast<size_t>(sequence)]; }
  int64_t length(int64_t sequence) const { return lengths_[static_cast<size_t>(sequence)]; }
  int64_t num_tokens() const { return starts_.back(); }

  void spoil_value(int64_t token) { value_[static_cast<size_t>(token * shape_.kv_width())] = NAN; }

  // What was in a block before has no effect.
  void fill_cache(int byte) {
    std::memset(blocks_.data(), byte, static_cast<size_t>(blocks_.size()));
  }

  // Computes these sequences, at most `chunk` tokens of each at a time, one step for all; writes
  // the tokens' rows of `out`, values and quantised.
  void compute(TlPool* pool, const std::vector<int64_t>& sequences, int64_t chunk, Output& out) {
    int64_t longest = 0;
    for (int64_t sequence : sequences) longest = std::max(longest, length(sequence));
    for (int64_t first = 0; first < longest; first += chunk) {
      std::vector<int64_t> tokens, of_sequence;
      std::vector<int32_t> cu_seqlens = {0};
      std::vector<int32_t> seq_lens(lengths_.size(), 1), chosen;
      for (int64_t sequence : sequences) {
        const int64_t end = std::min(first + chunk, length(sequence));
        if (first >= end) continue;
        for (int64_t i = first; i < end; i++) {
          tokens.push_back(start(sequence) + i);
          of_sequence.push_back(sequence);
        }
        cu_seqlens.push_back(static_cast<int32_t>(tokens.size()));
        seq_lens[static_cast<size_t>(sequence)] = static_cast<int32_t>(end);
        chosen.push_back(static_cast<int32_t>(sequence));
      }
      run_step(pool, tokens, of_sequence, cu_seqlens, seq_lens, chosen, out);
    }
  }

 private:
  static constexpr int64_t kMostTokens = 150;

  void run_step(TlPool* pool, const std::vector<int64_t>& tokens,
                const std::vector<int64_t>& of_sequence, const std::vector<int32_t>& cu_seqlens,
                const std::vector<int32_t>& seq_lens, const std::vector<int32_t>& chosen,
                Output& out) {
    const auto count = static_cast<int64_t>(tokens.size());
    Buffer<float> query(count * shape_.query_width());
    Buffer<float> key(count * shape_.kv_width()), value(count * shape_.kv_width());
    Buffer<int32_t> positions(count), slots(count);
    for (int64_t i = 0; i < count; i++) {
      const int64_t token = tokens[static_cast<size_t>(i)];
      const int64_t sequence = of_sequence[static_cast<size_t>(i)];
      const int64_t position = token - start(sequence);
      copy_row(query_, token, shape_.query_width(), query, i);
      copy_row(key_, token, shape_.kv_width(), key, i);
      copy_row(value_, token, shape_.kv_width(), value, i);
      positions[i] = static_cast<int32_t>(position);
      const int64_t block = block_table_[sequence * max_blocks_ + position / shape_.block_size];
      slots[i] = static_cast<int32_t>(block * shape_.block_size + position % shape_.block_size);
    }
    Output result(count, shape_.query_width(), true, true);
    const TlRotary rotary = {cos_sin_.data(), positions.data(), has_norm_ ? norm_.data() : nullptr,
                             1e-5f};
    const TlKvLayer kv = {blocks_.data(), shape_.kv_type, shape_.block_size, shape_.num_kv_heads,
                          shape_.head_dim};
    const auto add = [&](TlProgram* program) {
      tl_add_rope(program, TL_TOKENS, query.data(), shape_.query_width(), shape_.num_heads,
                  shape_.head_dim, rotary);
      tl_add_rope_and_cache(program, TL_TOKENS, key.data(), shape_.kv_width(), value.data(),
                            shape_.kv_width(), rotary, kv, slots.data());
      TlAttentionPlan* plan = tl_add_attention_plan(
          program, TL_SEQUENCES, cu_seqlens.data(), seq_lens.data(), block_table_.data(),
          max_blocks_, chosen.data(), shape_.block_size);
      tl_add_attention(program, TL_TOKENS, plan, query.data(), shape_.query_width(),
                       shape_.num_heads, kv, 0.125f, shape_.sliding_window, result.rows());
    };
    run_program(pool, add, {count, 0, static_cast<int64_t>(chosen.size()), 0});
    for (int64_t i = 0; i < count; i++) {
      out.copy_row(tokens[static_cast<size_t>(i)], result, i);
    }
  }

  static void copy_row(const std::vector<float>& from, int64_t from_row, int64_t width,
                       Buffer<float>& to, int64_t to_row) {
    std::memcpy(to.data() + to_row * width, from.data() + from_row * width,
                static_cast<size_t>(width) * sizeof(float));
  }

  Shape shape_;
  int64_t max_blocks_;
  std::vector<int64_t> lengths_, starts_;
  Buffer<int32_t> block_table_;
  Buffer<char> blocks_;
  Buffer<float> cos_sin_, norm_;
  bool has_norm_;
  std::vector<float> query_, key_, value_;
};

Shape random_shape(Random& random) {
  constexpr int64_t kBlockSizes[] = {1, 4, 8, 16, 32, 24};
  constexpr int64_t kHeadDims[] = {8, 16, 24, 64, 96, 128};
  Shape shape;
  shape.block_size = random.coin() ? 16 : kBlockSizes[random.integer(0, 5)];
  shape.num_kv_heads = random.integer(1, 3);
  shape.num_heads = shape.num_kv_heads * random.integer(1, 4);
  shape.head_dim = kHeadDims[random.integer(0, 5)];
  shape.sliding_window = random.coin() ? 0 : random.integer(1, 60);
  shape.kv_type = static_cast<int32_t>(random.integer(0, 2));
  return shape;
}

void fuzz_one_batch(Pools& pools, Random& random) {
  const Shape shape = random_shape(random);
  Batch batch(random, shape, random.integer(1, 5));
  std::vector<int64_t> all(static_cast<size_t>(batch.num_sequences()));
  std::iota(all.begin(), all.end(), 0);
  const std::string name = std::string("attention ") + kKvNames[shape.kv_type];
  const auto compute = [&](TlPool* pool, const std::vector<int64_t>& sequences, int64_t chunk) {
    Output out(batch.num_tokens(), shape.query_width(), true, true);
    batch.compute(pool, sequences, chunk, out);
    return out;
  };
  const auto compare = [&](const Output& a, const Output& b, int64_t sequence, const char* what) {
    for (int64_t i = 0; i < batch.length(sequence); i++) {
      check(a.has_equal_row(b, batch.start(sequence) + i), name + ": " + what);
    }
  };

  batch.fill_cache(0);
  const Output expected = compute(pools.one, all, 1000);
  {
    Digest digest(name);
    expected.add_to(digest);
  }
  // All bits set is a NaN in every type of float.
  batch.fill_cache(0xff);
  const Output threaded = compute(pools.many, all, 1000);
  for (int64_t sequence : all) compare(threaded, expected, sequence, "threads, and old values");
  const Output chunked = compute(pools.many, all, random.integer(1, 40));
  for (int64_t sequence : all) compare(chunked, expected, sequence, "chunks");
  const int64_t chosen = random.integer(0, batch.num_sequences() - 1);
  compare(compute(pools.many, {chosen}, 1000), expected, chosen, "a sequence alone");
  batch.spoil_value(batch.start(chosen));
  const Output spoilt = compute(pools.many, all, 1000);
  for (int64_t sequence : all) {
    if (sequence != chosen) compare(spoilt, expected, sequence, "a NaN of another sequence");
  }
}

}  // namespace

void fuzz_attention(Pools& pools, int rounds) {
  for (int round = 0; round < rounds; round++) {
    Random random(static_cast<uint64_t>(round));
    fuzz_one_batch(pools, random);
  }
}

}  // namespace fuzz
