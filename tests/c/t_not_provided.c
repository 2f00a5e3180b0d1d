/* t_not_provided.c - names that hosts resolve and this library does not offer: each answers 0 or NULL, says so in words
 * that name it, and sets COLI_E_NOT_PROVIDED. Needs no GPU. */
#include "coli/coli_cuda.h"

#include "check.h"

/* Leaves another error behind, so that each call has to set its own. */
static void fail_otherwise(void) {
    CHECK(!coli_cuda_tensor_upload(NULL, NULL, NULL, COLI_F32, 1, 1, 0), "an upload to nowhere was done");
    CHECK(coli_cuda_last_status() != COLI_E_NOT_PROVIDED, "an upload to nowhere is not provided");
}

static void check_reason(const char *name) {
    CHECK(coli_cuda_last_status() == COLI_E_NOT_PROVIDED, "after %s the status is %d", name, (int)coli_cuda_last_status());
    CHECK(strstr(coli_cuda_last_error(), name), "the error of %s does not name it: %s", name, coli_cuda_last_error());
}

#define CHECK_ABSENT(name, ...)                                                                                            \
    do {                                                                                                                   \
        fail_otherwise();                                                                                                  \
        CHECK(!name(__VA_ARGS__), #name " gave a result");                                                                 \
        check_reason(#name);                                                                                               \
    } while (0)

int main(void) {
    CHECK_ABSENT(coli_cuda_attention_absorb, NULL, NULL, NULL, NULL, NULL, 1, 1, 1, 1, 1, 1, 1);
    CHECK_ABSENT(coli_cuda_attention_absorb_batch, NULL, NULL, NULL, NULL, NULL, 1, 1, 1, 1, 1, 1, 1, 1);
    CHECK_ABSENT(coli_cuda_attention_absorb_batch_dev, NULL, NULL, NULL, NULL, NULL, 1, 1, 1, 1, 1, 1, 1, 1);
    CHECK_ABSENT(coli_cuda_attention_absorb_kvdev, NULL, NULL, NULL, NULL, NULL, 1, 1, 1, 1, 1, 1, 1);
    CHECK_ABSENT(coli_cuda_attention_project_batch, NULL, NULL, NULL, NULL, NULL, NULL, 1, 1, 1, 1, 1, 1, 1, 1);
    CHECK_ABSENT(coli_cuda_attention_project_ragged, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1, 1, 1, 1, 1, 1, 1,
                 1);
    CHECK_ABSENT(coli_cuda_attention_project_batch_dev, NULL, NULL, NULL, NULL, NULL, NULL, 1, 1, 1, 1, 1, 1, 1, 1);
    CHECK_ABSENT(coli_cuda_attention_project_batch_dev_out, NULL, NULL, NULL, NULL, NULL, NULL, 1, 1, 1, 1, 1, 1, 1, 1);

    CHECK_ABSENT(coli_cuda_expert_group_resident_issue, NULL, NULL, NULL, NULL, 1, 0, NULL, NULL);
    CHECK_ABSENT(coli_cuda_expert_group_resident_take, 0, NULL, 1, NULL, NULL, 1);

    CHECK_ABSENT(coli_cuda_pipe_scratch, 0, 0, 1);
    CHECK_ABSENT(coli_cuda_pipe_alloc, 0, 1);
    CHECK_ABSENT(coli_cuda_pipe_upload, 0, NULL, NULL, 1);
    CHECK_ABSENT(coli_cuda_pipe_download, 0, NULL, NULL, 1);
    CHECK_ABSENT(coli_cuda_pipe_sync, 0);
    CHECK_ABSENT(coli_cuda_pipe_rmsnorm, 0, NULL, NULL, NULL, 1, 1, 1);
    CHECK_ABSENT(coli_cuda_pipe_rmsnorm_s, 0, NULL, NULL, NULL, 1, 1, 1, 1, 1);
    CHECK_ABSENT(coli_cuda_pipe_rope, 0, NULL, NULL, 1, 1, 0, 1, 1, 1);
    CHECK_ABSENT(coli_cuda_pipe_rope_base, 0, NULL, 0, 1, 1, 0, 1, 1, 1);
    CHECK_ABSENT(coli_cuda_pipe_silu_mul, 0, NULL, NULL, 1);
    CHECK_ABSENT(coli_cuda_pipe_add, 0, NULL, NULL, 1);
    CHECK_ABSENT(coli_cuda_pipe_rows_add, 0, NULL, NULL, NULL, 1, 1);
    CHECK_ABSENT(coli_cuda_pipe_gemm, NULL, NULL, NULL, 1);
    CHECK_ABSENT(coli_cuda_pipe_copy2d, 0, NULL, 1, NULL, 1, 1, 1);
    CHECK_ABSENT(coli_cuda_pipe_peer_copy, 0, NULL, 0, NULL, 1);
    CHECK_ABSENT(coli_cuda_pipe_router, 0, NULL, NULL, NULL, 1, 1, 1, 1, 0, 1, NULL, NULL, NULL);

    CHECK_ABSENT(coli_cuda_dn_create, 0, 1, 1, 1, 1, 1, 1, 1, NULL, NULL);
    CHECK_ABSENT(coli_cuda_dn_set_state, NULL, NULL, NULL);
    CHECK_ABSENT(coli_cuda_dn_get_state, NULL, NULL, NULL);
    CHECK_ABSENT(coli_cuda_dn_step, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
    CHECK_ABSENT(coli_cuda_chain_ops);

    coli_cuda_pipe_free(0, NULL);
    coli_cuda_dn_free(NULL);
    return finish("t_not_provided");
}
