// Philox4x32-10, the sampler's noise bits, as kernels/noise.py has them.
//
// After Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The bits of token t
// at a position are word t mod 4 of the counter (t div 4, position, 0, 0) under the seed's key.
#pragma once

#include "sampling_lanes.h"

namespace tokenline {

class Philox {
 public:
  Philox(int64_t seed, int64_t position) : position_(static_cast<uint32_t>(position)) {
    uint32_t low = static_cast<uint32_t>(seed);
    uint32_t high = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
    for (int round = 0; round < kRounds; round++) {
      low_keys_[round] = low;
      high_keys_[round] = high;
      low += 0x9E3779B9;
      high += 0xBB67AE85;
    }
  }

  // The bits of token `id`.
  uint32_t bits(int64_t id) const {
    uint32_t c[4] = {static_cast<uint32_t>(id >> 2), position_, 0, 0};
    for (int round = 0; round < kRounds; round++) {
      const uint64_t product0 = uint64_t{kMultiplier0} * c[0];
      const uint64_t product1 = uint64_t{kMultiplier1} * c[2];
      c[0] = static_cast<uint32_t>((product1 >> 32) ^ c[1] ^ low_keys_[round]);
      c[2] = static_cast<uint32_t>((product0 >> 32) ^ c[3] ^ high_keys_[round]);
      c[1] = static_cast<uint32_t>(product1);
      c[3] = static_cast<uint32_t>(product0);
    }
    return c[id & 3];
  }

  // Those of the 32 tokens from `first_id` on, a multiple of 32.
  void bits_of_32(int64_t first_id, I32x16* first, I32x16* second) const;

 private:
  static constexpr int kRounds = 10;
  static constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;

  uint32_t position_;
  uint64_t low_keys_[kRounds], high_keys_[kRounds];  // below 2³²
};

// Eight counters at once, each word in the lower half of a lane of 64 bits; what the upper halves
// hold is of no account, since products are made of lower halves only. Counters lie so that the
// words, interleaved within 128 bits, come out in the order of the tokens.

#if defined(TL_AVX512)

TL_INLINE void Philox::bits_of_32(int64_t first_id, I32x16* first, I32x16* second) const {
  const __m512i multiplier0 = _mm512_set1_epi64(kMultiplier0);
  const __m512i multiplier1 = _mm512_set1_epi64(kMultiplier1);
  __m512i c0 = _mm512_add_epi64(_mm512_set1_epi64(first_id >> 2),
                                _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
  __m512i c1 = _mm512_set1_epi64(position_);
  __m512i c2 = _mm512_setzero_si512(), c3 = c2;
  for (int round = 0; round < kRounds; round++) {
    const __m512i product0 = _mm512_mul_epu32(c0, multiplier0);
    const __m512i product1 = _mm512_mul_epu32(c2, multiplier1);
    const __m512i low_key = _mm512_set1_epi64(static_cast<int64_t>(low_keys_[round]));
    const __m512i high_key = _mm512_set1_epi64(static_cast<int64_t>(high_keys_[round]));
    constexpr int kXor = 0x96;  // of three operands
    c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product1, 32), c1, low_key, kXor);
    c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product0, 32), c3, high_key, kXor);
    c1 = product1;
    c3 = product0;
  }
  const __m512i words01 = _mm512_mask_blend_epi32(0xAAAA, c0, _mm512_slli_epi64(c1, 32));
  const __m512i words23 = _mm512_mask_blend_epi32(0xAAAA, c2, _mm512_slli_epi64(c3, 32));
  first->v = _mm512_unpacklo_epi64(words01, words23);
  second->v = _mm512_unpackhi_epi64(words01, words23);
}

#elif defined(TL_AVX2)

TL_INLINE void Philox::bits_of_32(int64_t first_id, I32x16* first, I32x16* second) const {
  const __m256i multiplier0 = _mm256_set1_epi64x(kMultiplier0);
  const __m256i multiplier1 = _mm256_set1_epi64x(kMultiplier1);
  const __m256i group = _mm256_set1_epi64x(first_id >> 2);
  __m256i c0[2] = {_mm256_add_epi64(group, _mm256_setr_epi64x(0, 4, 1, 5)),
                   _mm256_add_epi64(group, _mm256_setr_epi64x(2, 6, 3, 7))};
  __m256i c1[2], c2[2], c3[2];
  for (int i = 0; i < 2; i++) {
    c1[i] = _mm256_set1_epi64x(position_);
    c2[i] = c3[i] = _mm256_setzero_si256();
  }
  for (int round = 0; round < kRounds; round++) {
    const __m256i low_key = _mm256_set1_epi64x(static_cast<int64_t>(low_keys_[round]));
    const __m256i high_key = _mm256_set1_epi64x(static_cast<int64_t>(high_keys_[round]));
    for (int i = 0; i < 2; i++) {
      const __m256i product0 = _mm256_mul_epu32(c0[i], multiplier0);
      const __m256i product1 = _mm256_mul_epu32(c2[i], multiplier1);
      c0[i] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product1, 32), c1[i]), low_key);
      c2[i] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product0, 32), c3[i]), high_key);
      c1[i] = product1;
      c3[i] = product0;
    }
  }
  __m256i words01[2], words23[2];
  for (int i = 0; i < 2; i++) {
    words01[i] = _mm256_blend_epi32(c0[i], _mm256_slli_epi64(c1[i], 32), 0xAA);
    words23[i] = _mm256_blend_epi32(c2[i], _mm256_slli_epi64(c3[i], 32), 0xAA);
  }
  *first = {_mm256_unpacklo_epi64(words01[0], words23[0]),
            _mm256_unpacklo_epi64(words01[1], words23[1])};
  *second = {_mm256_unpackhi_epi64(words01[0], words23[0]),
             _mm256_unpackhi_epi64(words01[1], words23[1])};
}

#else

TL_INLINE void Philox::bits_of_32(int64_t first_id, I32x16* first, I32x16* second) const {
  constexpr int kCounters = 8;
  uint64_t c0[kCounters], c1[kCounters], c2[kCounters], c3[kCounters];
  for (int i = 0; i < kCounters; i++) {
    c0[i] = static_cast<uint64_t>((first_id >> 2) + i);
    c1[i] = position_;
    c2[i] = c3[i] = 0;
  }
  for (int round = 0; round < kRounds; round++) {
    for (int i = 0; i < kCounters; i++) {
      const uint64_t product0 = kMultiplier0 * (c0[i] & 0xFFFFFFFF);
      const uint64_t product1 = kMultiplier1 * (c2[i] & 0xFFFFFFFF);
      c0[i] = (product1 >> 32) ^ c1[i] ^ low_keys_[round];
      c2[i] = (product0 >> 32) ^ c3[i] ^ high_keys_[round];
      c1[i] = product1;
      c3[i] = product0;
    }
  }
  for (int i = 0; i < kCounters; i++) {
    int32_t* words = i < kCounters / 2 ? first->v + 4 * i : second->v + 4 * (i - kCounters / 2);
    words[0] = static_cast<int32_t>(c0[i]);
    words[1] = static_cast<int32_t>(c1[i]);
    words[2] = static_cast<int32_t>(c2[i]);
    words[3] = static_cast<int32_t>(c3[i]);
  }
}

#endif

}  // namespace tokenline
