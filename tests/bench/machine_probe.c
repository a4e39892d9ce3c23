// Two loops at the limits of a core, reading memory and multiplying int8; machine.py calls them.

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Independent sums, enough to hide an instruction's latency and few enough for AVX2's registers.
#define ACCUMULATORS 12
// One operand comes from memory, as in a matrix product; all of them fit into a first-level cache.
#define OPERAND_BYTES 12288

static int8_t operands[OPERAND_BYTES] __attribute__((aligned(64)));

// Sums `count` words, in eight sums at once.
uint64_t read_words(const uint64_t *words, size_t count) {
    uint64_t sums[8] = {0};
    for (size_t i = 0; i + 8 <= count; i += 8) {
        for (size_t lane = 0; lane < 8; ++lane) sums[lane] += words[i + lane];
    }
    uint64_t sum = 0;
    for (size_t lane = 0; lane < 8; ++lane) sum += sums[lane];
    return sum;
}

#if defined(__AVX512VNNI__)
#define KIND "vpdpbusd, 64 bytes"
#define WIDTH 64
typedef __m512i sums_t;
static inline sums_t load(const int8_t *from) { return _mm512_load_si512((const void *)from); }
static inline sums_t dot(sums_t sum, sums_t a, sums_t b) { return _mm512_dpbusd_epi32(sum, a, b); }
#elif defined(__AVXVNNI__)
#define KIND "vpdpbusd, 32 bytes"
#define WIDTH 32
typedef __m256i sums_t;
static inline sums_t load(const int8_t *from) { return _mm256_load_si256((const __m256i *)from); }
static inline sums_t dot(sums_t sum, sums_t a, sums_t b) {
    return _mm256_dpbusd_avx_epi32(sum, a, b);
}
#elif defined(__AVX2__)
// Of 4-bit weights, pairs can be summed in 16 bits: these may exceed what is measured here.
#define KIND "vpmaddubsw, vpmaddwd, vpaddd; 4-bit weights need fewer"
#define WIDTH 32
typedef __m256i sums_t;
static inline sums_t load(const int8_t *from) { return _mm256_load_si256((const __m256i *)from); }
static inline sums_t dot(sums_t sum, sums_t a, sums_t b) {
    const sums_t pairs = _mm256_maddubs_epi16(a, b);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#elif defined(__ARM_FEATURE_DOTPROD)
#define KIND "sdot, 16 bytes"
#define WIDTH 16
typedef int32x4_t sums_t;
static inline sums_t load(const int8_t *from) {
    return vreinterpretq_s32_s8(vld1q_s8(from));
}
static inline sums_t dot(sums_t sum, sums_t a, sums_t b) {
    return vdotq_s32(sum, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
}
#else
#define KIND "none: scalar"
#define WIDTH 4
typedef int32_t sums_t;
static inline sums_t load(const int8_t *from) { return *(const int32_t *)(const void *)from; }
static inline sums_t dot(sums_t sum, sums_t a, sums_t b) {
    for (int shift = 0; shift < 32; shift += 8) sum += (int8_t)(a >> shift) * (int8_t)(b >> shift);
    return sum;
}
#endif

void fill_operands(void) { memset(operands, 1, sizeof operands); }

#if defined(__AMX_INT8__)
// Sixteen rows times sixteen columns, 64 products for each pair, in four sums at once.
static uint64_t tile_products(uint64_t rounds) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_of_row[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int tile = 0; tile < 8; ++tile) shapes.bytes_of_row[tile] = 64, shapes.rows[tile] = 16;
    __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
    for (uint64_t round = 0; round < rounds; ++round) {
        __asm__ volatile("tdpbssd %tmm5, %tmm4, %tmm0\n\ttdpbssd %tmm5, %tmm4, %tmm1\n\t"
                         "tdpbssd %tmm5, %tmm4, %tmm2\n\ttdpbssd %tmm5, %tmm4, %tmm3");
    }
    __asm__ volatile("tilerelease");
    return rounds * 4 * 16 * 16 * 64 * 2;
}

// Whether the system lets this process use the tiles.
static int may_use_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
#else
static uint64_t tile_products(uint64_t rounds) { return rounds; }
static int may_use_tiles(void) { return 0; }
#endif

const char *int8_instructions(void) { return may_use_tiles() ? "tdpbssd" : KIND; }

// Multiplies and adds int8 in `rounds` rounds; returns how many multiplications and additions.
// `result` keeps the sums alive.
uint64_t int8_products(uint64_t rounds, int32_t *result) {
    if (may_use_tiles()) return tile_products(rounds);
    sums_t sums[ACCUMULATORS];
    memset(sums, 0, sizeof sums);
    const sums_t left = load(operands);
    size_t place = 0;
    for (uint64_t round = 0; round < rounds; ++round) {
        const int8_t *right = operands + place;
#pragma GCC unroll 12
        for (int i = 0; i < ACCUMULATORS; ++i) {
            sums[i] = dot(sums[i], left, load(right + i * WIDTH));
        }
        place = (place + ACCUMULATORS * WIDTH) % OPERAND_BYTES;
    }
    int32_t total = 0;
    for (int i = 0; i < ACCUMULATORS; ++i) {
        int32_t first;
        memcpy(&first, &sums[i], sizeof first);
        total += first;
    }
    *result = total;
    return rounds * ACCUMULATORS * WIDTH * 2;
}
