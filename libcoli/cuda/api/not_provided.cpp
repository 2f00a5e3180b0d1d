/* api/not_provided.cpp - names that hosts resolve and this library does not offer; see the last section of coli_cuda.h. */
#include "../error.h"

namespace {

/* Refuses in words and returns the 0 or NULL that hosts take as "not available". */
bool not_provided(const char *name) {
    return coli::fail(COLI_E_NOT_PROVIDED, "%s is not provided by this library; the host's own path remains", name);
}

} // namespace

int coli_cuda_attention_absorb(ColiCudaTensor *, float *, const float *, const float *, const float *, int, int, int, int,
                               int, int, float) {
    return not_provided("coli_cuda_attention_absorb");
}
int coli_cuda_attention_absorb_batch(ColiCudaTensor *, float *, const float *, const float *, const float *, int, int, int,
                                     int, int, int, int, float) {
    return not_provided("coli_cuda_attention_absorb_batch");
}
int coli_cuda_attention_absorb_batch_dev(ColiCudaTensor *, float *, const float *, const float *, const float *, int, int,
                                         int, int, int, int, int, float) {
    return not_provided("coli_cuda_attention_absorb_batch_dev");
}
int coli_cuda_attention_absorb_kvdev(ColiCudaTensor *, float *, const float *, const float *, const float *, int, int, int,
                                     int, int, int, float) {
    return not_provided("coli_cuda_attention_absorb_kvdev");
}
int coli_cuda_attention_project_batch(ColiCudaTensor *, ColiCudaTensor *, float *, const float *, const float *,
                                      const float *, int, int, int, int, int, int, int, float) {
    return not_provided("coli_cuda_attention_project_batch");
}
int coli_cuda_attention_project_ragged(ColiCudaTensor *, ColiCudaTensor *, float *, const float *, const void *const *,
                                       const float *const *, const float *const *, const int *, int, int, int, int, int,
                                       int, int, float) {
    return not_provided("coli_cuda_attention_project_ragged");
}
int coli_cuda_attention_project_batch_dev(ColiCudaTensor *, ColiCudaTensor *, float *, const float *, const float *,
                                          const float *, int, int, int, int, int, int, int, float) {
    return not_provided("coli_cuda_attention_project_batch_dev");
}
int coli_cuda_attention_project_batch_dev_out(ColiCudaTensor *, ColiCudaTensor *, float *, const float *, const float *,
                                              const float *, int, int, int, int, int, int, int, float) {
    return not_provided("coli_cuda_attention_project_batch_dev_out");
}
int coli_cuda_expert_group_resident_issue(ColiCudaTensor *const *, ColiCudaTensor *const *, ColiCudaTensor *const *,
                                          const float *, int, int, const float *, float *) {
    return not_provided("coli_cuda_expert_group_resident_issue");
}
int coli_cuda_expert_group_resident_take(int, const int *, int, float *, float *, int) {
    return not_provided("coli_cuda_expert_group_resident_take");
}
float *coli_cuda_pipe_scratch(int, int, size_t) {
    return not_provided("coli_cuda_pipe_scratch"), nullptr;
}
void *coli_cuda_pipe_alloc(int, size_t) {
    return not_provided("coli_cuda_pipe_alloc"), nullptr;
}
void coli_cuda_pipe_free(int, void *) {
    (void)not_provided("coli_cuda_pipe_free");
}
int coli_cuda_pipe_upload(int, void *, const void *, size_t) {
    return not_provided("coli_cuda_pipe_upload");
}
int coli_cuda_pipe_download(int, const void *, void *, size_t) {
    return not_provided("coli_cuda_pipe_download");
}
int coli_cuda_pipe_sync(int) {
    return not_provided("coli_cuda_pipe_sync");
}
int coli_cuda_pipe_rmsnorm(int, float *, const float *, const float *, int, int, float) {
    return not_provided("coli_cuda_pipe_rmsnorm");
}
int coli_cuda_pipe_rmsnorm_s(int, float *, const float *, const float *, int, int, float, int, int) {
    return not_provided("coli_cuda_pipe_rmsnorm_s");
}
int coli_cuda_pipe_rope(int, float *, const int *, int, int, int, int, int, float) {
    return not_provided("coli_cuda_pipe_rope");
}
int coli_cuda_pipe_rope_base(int, float *, int, int, int, int, int, int, float) {
    return not_provided("coli_cuda_pipe_rope_base");
}
int coli_cuda_pipe_silu_mul(int, float *, const float *, size_t) {
    return not_provided("coli_cuda_pipe_silu_mul");
}
int coli_cuda_pipe_add(int, float *, const float *, size_t) {
    return not_provided("coli_cuda_pipe_add");
}
int coli_cuda_pipe_rows_add(int, float *, const float *, const int *, int, int) {
    return not_provided("coli_cuda_pipe_rows_add");
}
int coli_cuda_pipe_gemm(ColiCudaTensor *, float *, const float *, int) {
    return not_provided("coli_cuda_pipe_gemm");
}
int coli_cuda_pipe_copy2d(int, void *, size_t, const void *, size_t, size_t, size_t) {
    return not_provided("coli_cuda_pipe_copy2d");
}
int coli_cuda_pipe_peer_copy(int, void *, int, const void *, size_t) {
    return not_provided("coli_cuda_pipe_peer_copy");
}
int coli_cuda_pipe_router(int, const float *, const void *, const void *, int, int, int, float, int, float, int *, float *,
                          int *) {
    return not_provided("coli_cuda_pipe_router");
}
ColiCudaDn *coli_cuda_dn_create(int, int, int, int, int, int, int, float, const float *, const float *) {
    return not_provided("coli_cuda_dn_create"), nullptr;
}
void coli_cuda_dn_free(ColiCudaDn *) {
    (void)not_provided("coli_cuda_dn_free");
}
int coli_cuda_dn_set_state(ColiCudaDn *, const float *, const float *) {
    return not_provided("coli_cuda_dn_set_state");
}
int coli_cuda_dn_get_state(ColiCudaDn *, float *, float *) {
    return not_provided("coli_cuda_dn_get_state");
}
int coli_cuda_dn_step(ColiCudaDn *, ColiCudaTensor *, ColiCudaTensor *, ColiCudaTensor *, const float *, float *,
                      const float *, const float *) {
    return not_provided("coli_cuda_dn_step");
}
const ColiCudaChainOps *coli_cuda_chain_ops(void) {
    return not_provided("coli_cuda_chain_ops"), nullptr;
}
