// The library's C interface: all that Python calls. No exceptions cross it, and no torch type.
// Where memory runs out, what makes a pool, a program or a plan returns NULL, and what has a status
// TL_NO_MEMORY. What was to be written is then void, and a program that something was to be added to
// can only be deleted; pools, and programs that were to run, are as good as before.
//
// Every instruction set's build gives the same bits. Pointers are to memory of the caller, which
// outlives what was made with it; buffers are aligned to 64 bytes, and rows of a buffer to 4.
// Where nothing else is said, values are float32, `stride` counts floats from one row to the next,
// and a result never overlaps an argument.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
#define TL_API extern "C" __attribute__((visibility("default")))
#else
#define TL_API
#endif

// ---------------------------------------------------------------------------------------- basics

enum TlStatus { TL_OK = 0, TL_DOES_NOT_FIT = -1, TL_NO_MEMORY = -2 };

// A digest of this file as it was when the library was built; see build.py.
TL_API const char* tl_interface(void);

// The instruction set that this build uses, by its name in build.py.
TL_API const char* tl_instruction_set(void);

// Whether this machine runs the build for an instruction set.
TL_API int32_t tl_runs_here(const char* instruction_set);

// How a pool's threads share work; see pool.h. There are fewer threads where the system refuses.
typedef struct TlPool TlPool;
TL_API TlPool* tl_pool_new(int32_t num_threads);
TL_API void tl_pool_delete(TlPool*);
TL_API int32_t tl_pool_num_threads(const TlPool*);

// -------------------------------------------------------------------------------------- weights

// A matrix's weights in panels of 16 rows; panels.h gives the layout of each.
enum TlFormat {
  TL_Q4 = 0,       // 4 bits in groups of 32 columns: scale · q + minimum, both float16
  TL_Q4_WIDE = 1,  // the same with float32 scales and minima
  TL_Q8 = 2,       // int8 in groups of 32 columns: scale · q, float16
  TL_F16 = 3,
  TL_BF16 = 4,
  TL_F32 = 5,
};

// What rows come as when they are packed.
enum TlSource {
  TL_SOURCE_F32 = 0,
  TL_SOURCE_F16 = 1,
  TL_SOURCE_BF16 = 2,
  // Blocks as GGUF files hold them (see GGML's ggml-quants).
  TL_SOURCE_Q4_0 = 3,
  TL_SOURCE_Q4_1 = 4,
  TL_SOURCE_Q4_K = 5,
  TL_SOURCE_Q8_0 = 6,
};

typedef struct {
  int32_t format;
  int64_t rows;     // outputs
  int64_t columns;  // inputs
  const void* data; // tl_packed_bytes of it
  const float* bias; // [rows], or NULL
} TlMatrix;

TL_API int64_t tl_packed_bytes(int32_t format, int64_t rows, int64_t columns);

// Packs source rows order[0], order[1] … (NULL: 0, 1 …) as rows [first_row, first_row + num_rows)
// of the matrix at `data`. `first_row` is a multiple of 16; calls on different panels may run at
// once. `source` holds `source_stride` bytes a row. Rows that fill up the last panel become zero.
// TL_DOES_NOT_FIT where this source does not go into this format: Q4_0 and Q4_1 go into TL_Q4,
// Q4_K into TL_Q4_WIDE, Q8_0 into TL_Q8, floats into TL_Q8 and the float formats.
TL_API int32_t tl_pack(int32_t format, int32_t source_kind, const void* source,
                       int64_t source_stride, const int64_t* order, int64_t first_row,
                       int64_t num_rows, int64_t rows, int64_t columns, void* data);

// Rows [first_row, first_row + num_rows) of a packed matrix as float32 [num_rows, columns].
TL_API void tl_unpack(const TlMatrix* matrix, int64_t first_row, int64_t num_rows, float* out);

// ------------------------------------------------------------------------------------- programs

// A recorded list of ops. Pointers and widths are fixed when an op is added; how many rows it works
// on is looked up when the program runs, by the name of the count.
enum TlCount {
  TL_TOKENS = 0,          // T: tokens of the step
  TL_KEPT_TOKENS = 1,     // K: those kept to the end of the last layer
  TL_SEQUENCES = 2,       // n
  TL_KEPT_SEQUENCES = 3,  // k
  TL_NUM_COUNTS = 4,
};

typedef struct TlProgram TlProgram;
TL_API TlProgram* tl_program_new(void);
TL_API void tl_program_delete(TlProgram*);
TL_API int32_t tl_program_run(TlProgram*, TlPool*, const int64_t counts[TL_NUM_COUNTS]);

// Of all runs since profiling was switched on: seconds per op, in the order in which they were
// added. `seconds` has room for tl_program_num_ops.
TL_API int32_t tl_program_num_ops(const TlProgram*);
TL_API const char* tl_program_op_name(const TlProgram*, int32_t op);
TL_API void tl_program_set_profiling(TlProgram*, int32_t is_on);
TL_API void tl_program_profile(const TlProgram*, double* seconds);

// Rows of activations, as floats, quantised, or both; members that are NULL are not there.
// Quantised, a group of 32 columns has one scale: x ≈ scale · q, and `sums` holds scale · Σq. With
// one half, q is in [-127, 127]; with two, q = 255 · high + low, both in [-127, 127], and a row has
// the high halves of all its columns, then the low ones. A group with a value that is not finite has
// scale and sum NaN. Columns up to a multiple of 32 are zero.
typedef struct {
  float* values;
  int64_t stride;
  int8_t* quantised;       // [rows, halves, groups · 32]
  float* scales;           // [rows, groups]
  float* sums;             // [rows, groups]
  int32_t halves;          // 1 or 2, where there is a quantised form
} TlRows;

// out[i] = row ids[i] of `table`. out.values only.
TL_API int32_t tl_add_embedding(TlProgram*, int32_t count, const int32_t* ids,
                                const TlMatrix* table, TlRows out);

// out = x / sqrt(mean(x²) + eps) · weight, in any form that `out` has.
TL_API int32_t tl_add_rms_norm(TlProgram*, int32_t count, const float* x, int64_t stride,
                               int64_t width, const float* weight, float eps, TlRows out);

// residual += x, then as above.
TL_API int32_t tl_add_add_rms_norm(TlProgram*, int32_t count, const float* x, int64_t stride,
                                   float* residual, int64_t residual_stride, int64_t width,
                                   const float* weight, float eps, TlRows out);

// The quantised form of x, or of what `tl_add_take_rows` copied.
TL_API int32_t tl_add_quantise(TlProgram*, int32_t count, const float* x, int64_t stride,
                               int64_t width, TlRows out);

// out[i] = row indices[i] of `in`, in the forms that both have.
TL_API int32_t tl_add_take_rows(TlProgram*, int32_t count, const int32_t* indices, TlRows in,
                                int64_t width, TlRows out);

// silu(gate) · up of rows [gate, up], in any form that `out` has.
TL_API int32_t tl_add_silu_and_mul(TlProgram*, int32_t count, const float* gate_up, int64_t stride,
                                   int64_t width, TlRows out);

// out (+)= in · weightᵀ + bias. Quantised formats take `in` quantised, others its values.
// With `adds`, the product is added to what `out` holds. The matrix is copied, not what it points at.
TL_API int32_t tl_add_linear(TlProgram*, int32_t count, TlRows in, const TlMatrix* weight,
                             int32_t adds, float* out, int64_t out_stride);

// silu_and_mul of the product with a matrix of gate rows and then as many up rows. The matrix has
// a multiple of 64 rows and no bias.
TL_API int32_t tl_add_gated_linear(TlProgram*, int32_t count, TlRows in, const TlMatrix* gate_up,
                                   TlRows out);

// ------------------------------------------------------------------------------------- attention

// One layer's KV blocks, each `tl_kv_block_bytes` long; attention.h gives the layout.
enum TlKvType { TL_KV_F16 = 0, TL_KV_F32 = 1, TL_KV_INT8 = 2 };

typedef struct {
  void* blocks;
  int32_t type;
  int64_t block_size;
  int64_t num_kv_heads;
  int64_t head_dim;
} TlKvLayer;

TL_API int64_t tl_kv_block_bytes(int32_t type, int64_t block_size, int64_t num_kv_heads,
                                 int64_t head_dim);

// How heads are rotated: cos_sin [positions, head_dim] holds cos of dim / 2 angles, then sin, and
// row positions[i] is that of row i. `norm` [head_dim], or NULL, normalises each head before.
typedef struct {
  const float* cos_sin;
  const int32_t* positions;
  const float* norm;
  float eps;
} TlRotary;

// Rotates query [rows, num_heads · head_dim] in place.
TL_API int32_t tl_add_rope(TlProgram*, int32_t count, float* query, int64_t stride,
                           int64_t num_heads, int64_t head_dim, TlRotary rotary);

// Rotates key, and writes key and value [rows, num_kv_heads · head_dim] into slot_mapping[i].
TL_API int32_t tl_add_rope_and_cache(TlProgram*, int32_t count, const float* key,
                                     int64_t key_stride, const float* value, int64_t value_stride,
                                     TlRotary rotary, TlKvLayer kv, const int32_t* slot_mapping);

// The layout of a batch, for all attention ops of a program that have it: sequence i has queries
// [cu_seqlens[i], cu_seqlens[i + 1]), the last of its seq_lens[i] tokens, and the blocks
// block_table[i · max_blocks …]. With `sequences` (NULL: all), sequence i is that of row
// sequences[i] of seq_lens and block_table. Freed with its program.
typedef struct TlAttentionPlan TlAttentionPlan;
TL_API TlAttentionPlan* tl_add_attention_plan(TlProgram*, int32_t sequences_count,
                                              const int32_t* cu_seqlens, const int32_t* seq_lens,
                                              const int32_t* block_table, int64_t max_blocks,
                                              const int32_t* sequences, int64_t block_size);

// softmax(scale · q kᵀ) v as Kernels.paged_attention says it; query [rows, num_heads · head_dim].
// `count` is that of the rows; out in any form.
TL_API int32_t tl_add_attention(TlProgram*, int32_t count, TlAttentionPlan* plan,
                                const float* query, int64_t stride, int64_t num_heads, TlKvLayer kv,
                                float scale, int64_t sliding_window, TlRows out);

// -------------------------------------------------------------------------------------- sampling
// As the methods of Kernels with these names say. logits [n, vocab_size], rows `stride` apart.

TL_API int32_t tl_mask_logits(TlPool*, float* logits, int64_t stride, int64_t vocab_size,
                              int64_t num_rows, const int64_t* rows, const int32_t* allowed);
TL_API void tl_bias_logits(float* logits, int64_t stride, int64_t num_biases, const int64_t* rows,
                           const int64_t* token_ids, const float* biases);
// With `rows` NULL, row i of the arguments is that of the logits too.
TL_API int32_t tl_penalize(TlPool*, float* logits, int64_t stride, int64_t vocab_size,
                           int64_t num_rows, const int64_t* rows, const int32_t* token_ids,
                           int64_t token_stride, const int64_t* prompt_lens,
                           const int64_t* seq_lens, const float* repetition, const float* presence,
                           const float* frequency);
TL_API int32_t tl_sample(TlPool*, const float* logits, int64_t stride, int64_t vocab_size,
                         int64_t num_rows, const float* temperature, const float* min_p,
                         const int64_t* top_k, const float* top_p, const int64_t* seeds,
                         const int64_t* positions, int64_t* token_ids);
TL_API int32_t tl_token_logprobs(TlPool*, const float* logits, int64_t stride, int64_t vocab_size,
                                 int64_t num_rows, const int64_t* chosen, int64_t num_top,
                                 float* chosen_logprobs, int64_t* top_ids, float* top_logprobs);
