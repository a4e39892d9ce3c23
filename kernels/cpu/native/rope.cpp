// Rotary position embedding (Su et al., 2021), and the writing of keys and values to the cache.
#include <cstring>

#include "attention.h"
#include "rows.h"

namespace tokenline {
namespace {

// The halves (a, b) of a head, normalised before where there is a norm, become
// (a cos - b sin, b cos + a sin). `out` may be `x`.
void rotate(const float* x, int64_t head_dim, const TlRotary& rotary, int64_t row, float* out) {
  const int64_t half = head_dim / 2;
  const float* cos = rotary.cos_sin + rotary.positions[row] * head_dim;
  const float* sin = cos + half;
  const float* norm = rotary.norm;
  F32x16 scale = zero();
  if (norm) {
    scale = broadcast(
        inverse_rms(head_dim, rotary.eps, [=](int64_t column, int64_t left) TL_INLINE_LAMBDA {
          return load_some(x + column, left);
        }));
  }
  for_each_part(half, [=](int64_t i, int64_t left) TL_INLINE_LAMBDA {
    F32x16 a = load_some(x + i, left), b = load_some(x + half + i, left);
    if (norm) {
      a = a * scale * load_some(norm + i, left);
      b = b * scale * load_some(norm + half + i, left);
    }
    const F32x16 c = load_some(cos + i, left), s = load_some(sin + i, left);
    store_some(out + i, a * c - b * s, left);
    store_some(out + half + i, b * c + a * s, left);
  });
}

// `width` values, a multiple of 16, as the cache stores them.
TL_INLINE void encode(const float* x, int64_t width, float* out, float*) {
  std::memcpy(out, x, static_cast<size_t>(width) * sizeof(float));
}

TL_INLINE void encode(const float* x, int64_t width, uint16_t* out, float*) {
  for (int64_t i = 0; i < width; i += kLanes) store_f16(out + i, load(x + i));
}

// As quantise_group, with one scale for the head.
TL_INLINE void encode(const float* x, int64_t width, int8_t* out, float* scale) {
  I32x16 bits = broadcast_int(0);
  for (int64_t i = 0; i < width; i += kLanes) bits = larger(bits, as_int(magnitude(load(x + i))));
  const int32_t most_bits = largest(bits);
  float most;
  std::memcpy(&most, &most_bits, sizeof most);
  const bool is_finite = most_bits < 0x7f800000;
  if (!is_finite || most < kSmallestMagnitude) {
    std::memset(out, 0, static_cast<size_t>(width));
    *scale = is_finite ? 0.0f : NAN;
    return;
  }
  const F32x16 inverse = broadcast(127.0f / most);
  for (int64_t i = 0; i < width; i += kLanes) {
    store_i8(out + i, round_to_int(load(x + i) * inverse));
  }
  *scale = most / 127.0f;
}

struct CacheOp {
  const float* key;
  int64_t key_stride;
  const float* value;
  int64_t value_stride;
  TlRotary rotary;
  TlKvLayer kv;
  KvLayout layout;
  const int32_t* slot_mapping;
};

// Writes one token's keys and values. `buffer` has room for two heads' floats.
template <class Element>
void write_token(const CacheOp& op, int64_t row, float* buffer) {
  const int64_t slot = op.slot_mapping[row];
  const int64_t block = slot / op.kv.block_size, offset = slot % op.kv.block_size;
  const int64_t dim = op.kv.head_dim, width = op.layout.width, lanes = op.layout.lanes;
  Element* encoded = reinterpret_cast<Element*>(buffer + width);
  for (int64_t i = dim; i < width; i++) buffer[i] = 0.0f;
  for (int64_t head = 0; head < op.kv.num_kv_heads; head++) {
    const KvHead<Element> to(op.kv, op.layout, block, head);
    rotate(op.key + row * op.key_stride + head * dim, dim, op.rotary, row, buffer);
    encode(buffer, width, encoded, to.key_scale(offset));
    for (int64_t i = 0; i < dim; i++) to.keys[i * lanes + offset] = encoded[i];
    std::memcpy(buffer, op.value + row * op.value_stride + head * dim,
                static_cast<size_t>(dim) * sizeof(float));
    encode(buffer, width, to.values + offset * width, to.value_scale(offset));
  }
}

template <class Element>
void add_cache_stage(TlProgram* program, int32_t count, const CacheOp& op) {
  const int64_t work = 8 * op.kv.num_kv_heads * op.kv.head_dim;
  add_row_stage(program, count, work, 2 * op.layout.width, [=](int64_t row, float* buffer) {
    write_token<Element>(op, row, buffer);
  });
}

}  // namespace
}  // namespace tokenline

using namespace tokenline;

int64_t tl_kv_block_bytes(int32_t type, int64_t block_size, int64_t num_kv_heads,
                          int64_t head_dim) {
  return KvLayout(type, block_size, num_kv_heads, head_dim).block_bytes;
}

int32_t tl_add_rope(TlProgram* program, int32_t count, float* query, int64_t stride,
                    int64_t num_heads, int64_t head_dim, TlRotary rotary) {
  return guarded([&] {
    program->begin_op("rope");
    add_row_stage(program, count, 2 * num_heads * head_dim, 0, [=](int64_t row, float*) {
      for (int64_t head = 0; head < num_heads; head++) {
        float* x = query + row * stride + head * head_dim;
        rotate(x, head_dim, rotary, row, x);
      }
    });
  });
}

int32_t tl_add_rope_and_cache(TlProgram* program, int32_t count, const float* key,
                              int64_t key_stride, const float* value, int64_t value_stride,
                              TlRotary rotary, TlKvLayer kv, const int32_t* slot_mapping) {
  return guarded([&] {
    program->begin_op("rope_and_cache");
    const KvLayout layout(kv.type, kv.block_size, kv.num_kv_heads, kv.head_dim);
    const CacheOp op{key, key_stride, value, value_stride, rotary, kv, layout, slot_mapping};
    if (kv.type == TL_KV_F32) {
      add_cache_stage<float>(program, count, op);
    } else if (kv.type == TL_KV_F16) {
      add_cache_stage<uint16_t>(program, count, op);
    } else {
      add_cache_stage<int8_t>(program, count, op);
    }
  });
}
