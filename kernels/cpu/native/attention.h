// Attention's memory: how the keys and values of a layer lie in its blocks.
#pragma once

#include <cstdint>

#include "api.h"
#include "simd.h"

namespace tokenline {

// A block holds its KV heads one after the other; each has, in parts that begin at multiples of 64
// bytes:
//
//   keys          [head_dim][lanes]    a token per lane: 16 scores need no sum across lanes
//   values        [block_size][width]
//   key scales    [lanes]              TL_KV_INT8 only: float32, x ≈ scale · q of a token's head
//   value scales  [lanes]
//
// `lanes` is block_size and `width` head_dim, each up to a multiple of 16. A value's columns beyond
// head_dim are zero once it is written; what lies in unwritten slots may be anything.
struct KvLayout {
  KvLayout(int32_t type, int64_t block_size, int64_t num_kv_heads, int64_t head_dim)
      : lanes(up_to(block_size, kLanes)), width(up_to(head_dim, kLanes)) {
    const int64_t element = type == TL_KV_F32 ? 4 : type == TL_KV_F16 ? 2 : 1;
    const int64_t scales = type == TL_KV_INT8 ? lanes * static_cast<int64_t>(sizeof(float)) : 0;
    values_at = up_to(head_dim * lanes * element, 64);
    key_scales_at = values_at + up_to(block_size * width * element, 64);
    value_scales_at = key_scales_at + up_to(scales, 64);
    head_bytes = value_scales_at + up_to(scales, 64);
    block_bytes = num_kv_heads * head_bytes;
  }

  static int64_t up_to(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
  }

  int64_t lanes;
  int64_t width;
  int64_t values_at;  // bytes from the head's beginning, as those below
  int64_t key_scales_at;
  int64_t value_scales_at;
  int64_t head_bytes;
  int64_t block_bytes;
};

// One KV head of one block. Element is what its type stores: uint16_t (float16), float or int8_t.
template <class Element>
struct KvHead {
  KvHead(const TlKvLayer& kv, const KvLayout& layout, int64_t block, int64_t head) {
    char* at = static_cast<char*>(kv.blocks) + block * layout.block_bytes;
    at += head * layout.head_bytes;
    keys = reinterpret_cast<Element*>(at);
    values = reinterpret_cast<Element*>(at + layout.values_at);
    if (sizeof(Element) == 1) {
      key_scales = reinterpret_cast<float*>(at + layout.key_scales_at);
      value_scales = reinterpret_cast<float*>(at + layout.value_scales_at);
    }
  }

  float* key_scale(int64_t slot) const { return key_scales ? key_scales + slot : nullptr; }
  float* value_scale(int64_t slot) const { return value_scales ? value_scales + slot : nullptr; }

  Element* keys;
  Element* values;
  // NULL where the type has none.
  float* key_scales = nullptr;
  float* value_scales = nullptr;
};

TL_INLINE F32x16 load_elements(const uint16_t* p) { return load_f16(p); }
TL_INLINE F32x16 load_elements(const float* p) { return load(p); }
TL_INLINE F32x16 load_elements(const int8_t* p) { return load_i8(p); }

}  // namespace tokenline
