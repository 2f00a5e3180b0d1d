/* coli_cuda.h - the GPU backend, libcoli_cuda: weight matrices resident on GPUs, products with them, groups of experts.
 *
 * Introduction
 *   The names, argument orders and results are those of the interface that existing C hosts load; nothing is changed, the
 *   last sections add to it. A host that links or loads that interface can use this library in its place.
 *
 *       int devices[] = {0};
 *       ColiCudaTensor *w = NULL;
 *       if (!coli_cuda_init(devices, 1) ||
 *           !coli_cuda_tensor_upload(&w, bytes, scales, COLI_INT8, I, O, 0) ||
 *           !coli_cuda_matmul(&w, y, x, NULL, NULL, COLI_INT8, S, I, O, 0, 0))
 *           fprintf(stderr, "%s\n", coli_cuda_last_error());
 *
 * Conventions
 *   - int results: 1 done, 0 not done. After 0, coli_cuda_last_status() and coli_cuda_last_error() of the same thread say
 *     why: what was tried, with which values, what the runtime answered, what to do. Results are written on success only.
 *   - Devices are CUDA ordinals, never positions. At most COLI_CUDA_MAX_DEVICES.
 *   - Pointers are host pointers, except those whose names end in _dev. Activations are float32 [rows, dim], dense.
 *   - I is the number of columns (inputs), O of rows (outputs); matrices are [O, I] in the formats of coli_common.h.
 *     COLI_INT3_G64 is refused. `gs` is the group size of COLI_INT4_GROUPED and ignored elsewhere.
 *   - E8 matrices are stored rotated. The caller rotates what meets a gate or up matrix, and anything given to
 *     coli_cuda_matmul, with coli_rotate_rows (coli.h) or coli_cuda_rotate_rows_dev; the hidden rows of an expert are
 *     rotated on the device where down is E8. Gate and up meet the same rows, so both are rotated or neither is.
 *   - Threads: calls for different devices may run at once; calls for one device take turns inside the library.
 *     coli_cuda_init, coli_cuda_shutdown and the table setters must not run at the same time as any other call.
 *   - Same input, same bits: run to run, and for a row alone or among others in calls of up to 16 rows an expert.
 *
 * Environment, read at every call
 *   COLI_GPU_FAIL_AFTER=N   compute calls, issue, take and encoding included, fail after N of them (for tests)
 *   COLI_CUDA_PROFILE=1     coli_cuda_group_stats reports times of synchronous groups
 *   COLI_LOG=1              log lines go to stderr when no callback is set
 *   The switches that select kernels in other builds (COLI_CUDA_TC_INT4, COLI_CUDA_W4_PACKED, ...) have no effect here.
 */
#ifndef COLI_CUDA_H
#define COLI_CUDA_H

#include "coli_common.h"

#ifdef __cplusplus
extern "C" {
#endif

#define COLI_CUDA_MAX_DEVICES 16
#define COLI_CUDA_MAX_EXPERTS 64   /* experts in a group */
#define COLI_CUDA_MAX_ISSUE_ROWS 8 /* rows in an issued group, all experts together */

/* A matrix on a device. Created by coli_cuda_tensor_upload, released by coli_cuda_tensor_free. */
typedef struct ColiCudaTensor ColiCudaTensor;

/*------   Devices   ------*/

/* Prepares `count` devices. The whole list is checked before anything is built; on failure nothing is. Calling it again
 * with the same list does nothing; with another list it fails until coli_cuda_shutdown. */
COLI_API int coli_cuda_init(const int *devices, int count);
/* Waits for work in flight and releases everything the library holds on the devices, tensors included. Handles of such
 * tensors are still to be freed; calls that need their contents refuse them in words. Counters of tensors return to
 * zero, those of groups stay. */
COLI_API void coli_cuda_shutdown(void);
/* Visible devices; needs no init. 0 where there is no driver or no GPU, and then last_error says which. */
COLI_API int coli_cuda_available_device_count(void);
/* Configured devices, and the ordinal of the index-th of them (-1 past the end). */
COLI_API int coli_cuda_device_count(void);
COLI_API int coli_cuda_device_at(int index);
/* Free and total memory of a configured device, in bytes. */
COLI_API int coli_cuda_mem_info(int device, size_t *free_bytes, size_t *total_bytes);
/* 1 when a visible device shares the host's memory; 0 otherwise, and with an error set for one that is not there. */
COLI_API int coli_cuda_device_integrated(int device);

/*------   Tables   ------*/

/* Replaces the E8 codebook (1024 bytes: 256 entries of 4 doubled magnitudes) on every configured device. The published
 * table is built in, so the call is needed only for another one. coli_cuda_shutdown returns to the published table. */
COLI_API int coli_cuda_e8_set_grid(const void *grid);
/* Publishes the decode table of fp8-e4m3 (256 floats, such as coli_e4m3_table() of coli.h) to every configured device.
 * Until then, and again after coli_cuda_shutdown, uploads of COLI_FP8_B128 are refused. */
COLI_API int coli_cuda_fp8_set_lut(const float *lut);

/*------   Tensors   ------*/

/* Copies a matrix to `device`. `scales` is NULL for COLI_F32 and COLI_E8 (and ignored), ue8m0 bytes for COLI_MXFP4, floats
 * otherwise. If *tensor already holds a matrix of the same format, shape, device and group size, nothing is done, and the
 * data pointers may be NULL; if it holds another one, 0. On failure *tensor stays as it was and nothing is kept. The host
 * memory is free for reuse on return. COLI_INT4_GROUPED needs the _g form: uploaded without it,
 * it takes one scale a row and is refused by every product. */
COLI_API int coli_cuda_tensor_upload(ColiCudaTensor **tensor, const void *weights, const float *scales, int fmt, int I,
                                     int O, int device);
COLI_API int coli_cuda_tensor_upload_g(ColiCudaTensor **tensor, const void *weights, const float *scales, int fmt, int I,
                                       int O, int device, int gs);
/* Replaces the contents in place: same shape, format and pointer rules. Ordered after all work of this library that still
 * reads the tensor. If the copy fails half-way, the tensor says so and refuses to compute until an update succeeds. */
COLI_API int coli_cuda_tensor_update(ColiCudaTensor *tensor, const void *weights, const float *scales);
/* The same under its other name. */
COLI_API int coli_cuda_tensor_overwrite(ColiCudaTensor *tensor, const void *weights, const float *scales);
/* Waits for work that uses the tensor, then releases it. NULL is allowed. */
COLI_API void coli_cuda_tensor_free(ColiCudaTensor *tensor);
/* Logical bytes of weights and scales; 0 for NULL. */
COLI_API size_t coli_cuda_tensor_bytes(const ColiCudaTensor *tensor);
/* Device memory that the tensor takes, padding included; 0 for NULL. */
COLI_API size_t coli_cuda_tensor_vram(const ColiCudaTensor *tensor);
/* Device memory that an allocation of so many bytes takes. */
COLI_API size_t coli_cuda_alloc_footprint(size_t bytes);
/* Ordinal; -1 for NULL or after coli_cuda_shutdown. */
COLI_API int coli_cuda_tensor_device(const ColiCudaTensor *tensor);

/*------   Statistics   ------*/

/* Live tensors and their logical bytes on a configured device, or on all of them (device < 0). Zeros for an unknown
 * device. Either pointer may be NULL. */
COLI_API void coli_cuda_stats(int device, size_t *tensor_count, size_t *tensor_bytes);
/* Calls, experts and rows of successful groups (an issued group counts when issued), and with COLI_CUDA_PROFILE=1 the
 * milliseconds of synchronous ones. Any pointer may be NULL. */
COLI_API void coli_cuda_group_stats(uint64_t *calls, uint64_t *experts, uint64_t *rows, double *h2d_ms, double *kernel_ms,
                                    double *d2h_ms);
COLI_API void coli_cuda_group_stats_device(int device, uint64_t *calls, uint64_t *experts, uint64_t *rows, double *h2d_ms,
                                           double *kernel_ms, double *d2h_ms);

/*------   Products   ------*/

/* y [S, O] = x [S, I] w^T. Uploads `weights` into *tensor first if that is NULL; afterwards the data pointers may be NULL.
 * Never rotates. */
COLI_API int coli_cuda_matmul(ColiCudaTensor **tensor, float *y, const float *x, const void *weights, const float *scales,
                              int fmt, int S, int I, int O, int device, int gs);
/* y [S, D] = down(silu(gate x) * (up x)); gate and up [H, D], down [D, H] on one device, in any formats. */
COLI_API int coli_cuda_expert_mlp(ColiCudaTensor *gate, ColiCudaTensor *up, ColiCudaTensor *down, float *y, const float *x,
                                  int S);
/* expert_mlp for int4 matrices alone (COLI_INT4); other formats are refused. Activations stay float32. */
COLI_API int coli_cuda_shared_mlp_w4a16(ColiCudaTensor *gate, ColiCudaTensor *up, ColiCudaTensor *down, float *y,
                                        const float *x, int S);

/* `count` experts of one shape on one device, formats mixed at will. x and y are the experts' rows [sum(rows), D], in call
 * order. 1 to COLI_CUDA_MAX_EXPERTS experts, at least one row each. */
COLI_API int coli_cuda_expert_group(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                                    const int *rows, int count, float *y, const float *x);
/* The same; a non-zero `pin_small_batch` forces kernels whose results do not depend on the number of rows, also beyond 16
 * rows, where they are slower. */
COLI_API int coli_cuda_expert_group_pinned(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups,
                                           ColiCudaTensor *const *downs, const int *rows, int count, float *y,
                                           const float *x, int pin_small_batch);
/* Starts a group of at most COLI_CUDA_MAX_ISSUE_ROWS rows and returns; x may be reused at once. One outstanding issue a
 * device. Synchronous calls on the device may follow before the take. */
COLI_API int coli_cuda_expert_group_issue(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups,
                                          ColiCudaTensor *const *downs, const int *rows, int count, const float *x);
/* Waits for the issued group and returns its rows in issue order; NULL when nothing is pending or the work failed. The rows
 * belong to the library and live until the next issue on the device or coli_cuda_shutdown. */
COLI_API const float *coli_cuda_expert_group_take(int device);

/* Products with MXFP4 weights in host memory, on the first configured device; nothing stays there.
 * The expert's activation is b1 tanh(g/b1) sigmoid(g) * b2 tanh(u/b2); gate and up [I, D], down [D, I]. */
COLI_API int coli_cuda_matmul_mxfp4(float *y, const float *x, const unsigned char *q4, const unsigned char *e8s, int S,
                                    int I, int O);
COLI_API int coli_cuda_expert_mxfp4(float *y, const float *x, const unsigned char *gate_w, const unsigned char *gate_s,
                                    const unsigned char *up_w, const unsigned char *up_s, const unsigned char *down_w,
                                    const unsigned char *down_s, int S, int D, int I, float b1, float b2);

/*------   Additions: version, errors, log   ------*/

/* COLI_CUDA_ABI_MAJOR * 1000 + COLI_CUDA_ABI_MINOR. Libraries that lack this symbol are older than it. */
COLI_API int coli_cuda_abi_version(void);
/* "0.1.0". Static. */
COLI_API const char *coli_cuda_version_string(void);
/* One line: version, CUDA runtime, GPU architectures built in. Static. */
COLI_API const char *coli_cuda_build_info(void);
/* Name of a visible device, cut to `size` bytes, terminator included; needs no init. */
COLI_API int coli_cuda_device_name(int device, char *name, size_t size);
/* Text and status of this thread's last failing call; "" and COLI_OK when none failed yet. The text lives until the
 * thread's next failing call. */
COLI_API const char *coli_cuda_last_error(void);
COLI_API coli_status coli_cuda_last_status(void);
/* See coli_log_fn. Not to be called while other threads use the library. */
COLI_API void coli_cuda_set_log(coli_log_fn log, void *user);

/*------   Additions: tensors   ------*/

/* Gives back the very bytes that were uploaded. After a failure the caller's memory may hold part of them. `scales` may be
 * NULL (then only the weights are copied), and is ignored
 * where the format has none. */
COLI_API int coli_cuda_tensor_download(const ColiCudaTensor *tensor, void *weights, void *scales);
/* Declares an E8 matrix as stored without rotation (rotated = 0): as a down matrix it then takes the hidden rows as they
 * are. Uploaded matrices count as rotated. */
COLI_API int coli_cuda_tensor_set_rotated(ColiCudaTensor *tensor, int rotated);

/*------   Additions: device pointers, the caller's stream   ------*/

/* As the calls above with x and y in the memory of the tensors' device. `stream` is a cudaStream_t (NULL: the default
 * stream). Nothing is copied, allocated or waited for, so they can be captured in a CUDA graph; the caller orders
 * coli_cuda_tensor_update after replays of it. `rows` is read before the call returns and may hold zeros; a group may have
 * any number of experts. `workspace_dev` is scratch of the device, aligned to 256 bytes, of the size that
 * coli_cuda_expert_group_workspace gives for the same arguments (0 with an error set when they do not fit); calls that may
 * overlap do not share it. */
COLI_API size_t coli_cuda_expert_group_workspace(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups,
                                                 ColiCudaTensor *const *downs, const int *rows, int count);
COLI_API int coli_cuda_matmul_dev(const ColiCudaTensor *tensor, float *y_dev, const float *x_dev, int S, void *stream);
COLI_API int coli_cuda_expert_group_dev(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups,
                                        ColiCudaTensor *const *downs, const int *rows, int count, float *y_dev,
                                        const float *x_dev, void *workspace_dev, size_t workspace_bytes, void *stream);
/* Rotates (inverse = 0) or unrotates `rows` rows of `dim` floats; y_dev must not overlap x_dev. */
COLI_API int coli_cuda_rotate_rows_dev(int device, float *y_dev, const float *x_dev, int rows, int dim, int inverse,
                                       void *stream);

/* A group whose rows are summed up to those of tokens: y[row_tokens[r]] += row_weights[r] * expert row r, in the order of
 * the rows, for y [tokens, D], which is written whole (zeros where a token has no row). row_tokens_dev and row_weights_dev
 * are in device memory, a value for each of the sum(rows) rows; tokens outside 0 ... tokens - 1 are left out. The workspace
 * is that of coli_cuda_expert_group_combine_workspace. */
COLI_API size_t coli_cuda_expert_group_combine_workspace(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups,
                                                         ColiCudaTensor *const *downs, const int *rows, int count);
COLI_API int coli_cuda_expert_group_combine_dev(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups,
                                                ColiCudaTensor *const *downs, const int *rows, int count, float *y_dev,
                                                int tokens, const float *x_dev, const int *row_tokens_dev,
                                                const float *row_weights_dev, void *workspace_dev, size_t workspace_bytes,
                                                void *stream);

/* Starts a group whose rows are those of a batch, and whose results are sums for tokens: row r of the experts' rows is row
 * x_index[r] of x [x_rows, D], and goes into the sum of token row_tokens[r] with the factor row_weights[r], in the order of
 * the rows. coli_cuda_expert_group_take then gives [tokens, D], zeros where a token has no row. As
 * coli_cuda_expert_group_issue otherwise, and for any number of rows. All pointers are host pointers and may be reused at
 * once. */
COLI_API int coli_cuda_expert_group_issue_sum(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups,
                                              ColiCudaTensor *const *downs, const int *rows, int count, const float *x,
                                              int x_rows, const int *x_index, int tokens, const int *row_tokens,
                                              const float *row_weights);

/*------   Additions: encoding   ------*/

/* Encodes w [rows, columns] as COLI_E8 on a device, into ceil(columns / 256) * 98 bytes a row at `blocks`: the very bytes
 * that coli_encode_e8 (coli.h) gives for the rows, or with rotate = 1 for the rows that coli_rotate_rows makes of them.
 * `quality` is COLI_E8_SEARCH or COLI_E8_REFERENCE; COLI_E8_CALIBRATED is for the CPU. `importance` [columns], finite and 0
 * or more, weighs the squared errors of the columns as they are stored; for COLI_E8_SEARCH, or NULL. The published codebook
 * is used, whatever coli_cuda_e8_set_grid has set. At most 524288 columns.
 *
 * Rows pass through in chunks: at most 22 MiB on host and device together, kept until coli_cuda_shutdown. COLI_E_NOT_FINITE
 * names the first NaN or infinity, or says that rotating overflows float32. After a failure the caller's memory may hold a
 * part of the blocks. */
COLI_API int coli_cuda_encode_e8(int device, int quality, int rotate, const float *importance, const float *w, int rows,
                                 int columns, void *blocks);

/*------   Additions: plans and measurements   ------*/

/* How a group of `experts` experts with `rows` rows each, gate and up [H, D] and down [D, H] in formats[0 ... 2], is
 * computed on a GPU of `capability` (80, 86, 89, 90, 100, 120; 0: the configured or visible `device`): one line a launch.
 * Needs no GPU when capability is given. Returns the length of the whole text, of which `capacity` bytes are stored,
 * terminator included; 0 with an error set. INT4_GROUPED counts as groups of 64. */
COLI_API size_t coli_cuda_plan_text(int device, int capability, const int *formats, int D, int H, int experts, int rows,
                                    char *text, size_t capacity);
/* Limits what plans may use, for tests: "hopper" (the default: everything the GPU has), "ampere" (tensor cores, no copy
 * engine), "plain" (neither). Process-wide; not to be called while other threads use the library. */
COLI_API int coli_cuda_limit_path(const char *path);
/* exact = 1 (the default): a relative error of 3e-6 at most, however many rows an expert has; 0: experts of more than 16
 * rows have activations rounded to fp16, with 3e-4 at most, and are faster. A row of up to 16 has the same bits whatever
 * the others are. Process-wide; not to be called while other threads use the library. coli_cuda_matmul_dev is always exact.
 */
COLI_API void coli_cuda_require_exact(int exact);
/* Ceilings of memory to compare with: a kernel that reads `bytes` at a_dev (kind 0) or copies them to b_dev (kind 1). Both
 * are aligned to 16 bytes, and so is `bytes`. */
COLI_API int coli_cuda_probe_dev(int device, int kind, const void *a_dev, void *b_dev, size_t bytes, void *stream);

/*------   Not provided   ------*/

/* Names that hosts resolve but that lie outside this library: attention, pipelines, the resident path, gated delta layers.
 * They return 0 or NULL, which hosts take as "not available", and set COLI_E_NOT_PROVIDED. */
typedef struct ColiCudaDn ColiCudaDn;
typedef struct ColiCudaChainOps ColiCudaChainOps;
COLI_API int coli_cuda_attention_absorb(ColiCudaTensor *kv_b, float *ctx, const float *q, const float *latent,
                                        const float *rope, int H, int Q, int R, int V, int K, int T, float scale);
COLI_API int coli_cuda_attention_absorb_batch(ColiCudaTensor *kv_b, float *ctx, const float *q, const float *latent,
                                              const float *rope, int S, int H, int Q, int R, int V, int K, int T,
                                              float scale);
COLI_API int coli_cuda_attention_absorb_batch_dev(ColiCudaTensor *shard, float *ctx_dev, const float *q_dev,
                                                  const float *latent_dev, const float *rope_dev, int S, int H, int Q,
                                                  int R, int V, int K, int T, float scale);
COLI_API int coli_cuda_attention_absorb_kvdev(ColiCudaTensor *kv_b, float *ctx, const float *q, const float *latent_dev,
                                              const float *rope_dev, int H, int Q, int R, int V, int K, int T, float scale);
COLI_API int coli_cuda_attention_project_batch(ColiCudaTensor *kv_b, ColiCudaTensor *o_proj, float *out, const float *q,
                                               const float *latent, const float *rope, int S, int H, int Q, int R, int V,
                                               int K, int T, float scale);
COLI_API int coli_cuda_attention_project_ragged(ColiCudaTensor *kv_b, ColiCudaTensor *o_proj, float *out, const float *q,
                                                const void *const *keys, const float *const *latent,
                                                const float *const *rope, const int *lengths, int S, int H, int Q, int R,
                                                int V, int K, int max_t, float scale);
COLI_API int coli_cuda_attention_project_batch_dev(ColiCudaTensor *kv_b, ColiCudaTensor *o_proj, float *out,
                                                   const float *q_dev, const float *latent_dev, const float *rope_dev,
                                                   int S, int H, int Q, int R, int V, int K, int T, float scale);
COLI_API int coli_cuda_attention_project_batch_dev_out(ColiCudaTensor *kv_b, ColiCudaTensor *o_proj, float *out_dev,
                                                       const float *q_dev, const float *latent_dev, const float *rope_dev,
                                                       int S, int H, int Q, int R, int V, int K, int T, float scale);
COLI_API int coli_cuda_expert_group_resident_issue(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups,
                                                   ColiCudaTensor *const *downs, const float *weights, int count,
                                                   int home_device, const float *x_src_dev, float *partial_slot_dev);
COLI_API int coli_cuda_expert_group_resident_take(int home_device, const int *devices, int n_issued, float *slots_dev,
                                                  float *acc_dev, int D);
COLI_API float *coli_cuda_pipe_scratch(int device, int slot, size_t bytes);
COLI_API void *coli_cuda_pipe_alloc(int device, size_t bytes);
COLI_API void coli_cuda_pipe_free(int device, void *p);
COLI_API int coli_cuda_pipe_upload(int device, void *dst, const void *src, size_t bytes);
COLI_API int coli_cuda_pipe_download(int device, const void *src, void *dst, size_t bytes);
COLI_API int coli_cuda_pipe_sync(int device);
COLI_API int coli_cuda_pipe_rmsnorm(int device, float *y_dev, const float *x_dev, const float *w_dev, int S, int D,
                                    float eps);
COLI_API int coli_cuda_pipe_rmsnorm_s(int device, float *y_dev, const float *x_dev, const float *w_dev, int S, int D,
                                      float eps, int xstride, int ystride);
COLI_API int coli_cuda_pipe_rope(int device, float *v_dev, const int *pos_dev, int rows, int stride, int offset, int R,
                                 int heads, float theta);
COLI_API int coli_cuda_pipe_rope_base(int device, float *v_dev, int pos_base, int rows, int stride, int offset, int R,
                                      int heads, float theta);
COLI_API int coli_cuda_pipe_silu_mul(int device, float *gate_dev, const float *up_dev, size_t n);
COLI_API int coli_cuda_pipe_add(int device, float *x_dev, const float *t_dev, size_t n);
COLI_API int coli_cuda_pipe_rows_add(int device, float *x_dev, const float *partial_dev, const int *rows_dev, int nrows,
                                     int D);
COLI_API int coli_cuda_pipe_gemm(ColiCudaTensor *w, float *y_dev, const float *x_dev, int S);
COLI_API int coli_cuda_pipe_copy2d(int device, void *dst, size_t dpitch, const void *src, size_t spitch, size_t width,
                                   size_t height);
COLI_API int coli_cuda_pipe_peer_copy(int dst_device, void *dst, int src_device, const void *src, size_t bytes);
COLI_API int coli_cuda_pipe_router(int device, const float *x_dev, const void *rw, const void *rb, int D, int E, int Ksel,
                                   float topp, int norm_topk, float routed_scale, int *idx_host, float *w_host,
                                   int *keff_host);
COLI_API ColiCudaDn *coli_cuda_dn_create(int device, int hidden, int vk, int vh, int kdim, int vdim, int convk, float eps,
                                         const float *conv_w, const float *norm_w);
COLI_API void coli_cuda_dn_free(ColiCudaDn *dn);
COLI_API int coli_cuda_dn_set_state(ColiCudaDn *dn, const float *ring, const float *rec);
COLI_API int coli_cuda_dn_get_state(ColiCudaDn *dn, float *ring, float *rec);
COLI_API int coli_cuda_dn_step(ColiCudaDn *dn, ColiCudaTensor *proj, ColiCudaTensor *projz, ColiCudaTensor *outp,
                               const float *x, float *out, const float *egh, const float *beta);
COLI_API const ColiCudaChainOps *coli_cuda_chain_ops(void);

#ifdef __cplusplus
}
#endif
#endif
