/* cuBLAS: handles, what is asked of them, and products, which are counted. Without its prototypes:
   the stub's products read their handle or stream and no other argument. */
#include <stdlib.h>
#include "stub.h"

static int make(void **to)
{
    *to = calloc(1, 256);
    return *to ? 0 : 3; /* CUBLAS_STATUS_ALLOC_FAILED */
}

static int drop(void *handle)
{
    free(handle);
    return 0;
}

int cublasCreate_v2(void **to)
{
    stub_lock();
    stub_counted.handles++;
    stub_counted.late_handles += !getenv("CUBLAS_WORKSPACE_CONFIG");
    stub_unlock();
    return stub_unsafe("cublasCreate_v2") ? 1 : make(to); /* CUBLAS_STATUS_NOT_INITIALIZED */
}
int cublasDestroy_v2(void *handle) { return drop(handle); }
int cublasSetStream_v2(void **handle, void *stream) { return *handle = stream, 0; }
int cublasGetStream_v2(void **handle, void **to) { return *to = *handle, 0; }
int cublasGetMathMode(void *handle, int *to) { return *to = 0; }
int cublasGetPointerMode_v2(void *handle, int *to) { return *to = 0; }
int cublasGetVersion_v2(void *handle, int *to) { return *to = 130100, 0; }
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulDescCreate(void **to, int compute, int scale) { return make(to); }
int cublasLtMatmulDescDestroy(void *description) { return drop(description); }
int cublasLtMatmulPreferenceCreate(void **to) { return make(to); }
int cublasLtMatmulPreferenceDestroy(void *preference) { return drop(preference); }
int cublasLtMatrixLayoutCreate(void **to, int type, size_t rows, size_t columns, long leading)
{
    return make(to);
}
int cublasLtMatrixLayoutDestroy(void *layout) { return drop(layout); }
int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int most,
    void *results, int *count)
{
    return *count = 1, 0;
}

int cublasLtMatmul(
    void *handle, void *operation, void *alpha, void *a, void *of_a, void *b, void *of_b, void *beta,
    void *c, void *of_c, void *d, void *of_d, void *algorithm, void *workspace, size_t bytes,
    void *stream)
{
    return stub_launch(stream, "cublasLtMatmul") ? 13 : 0; /* CUBLAS_STATUS_EXECUTION_FAILED */
}

#define PRODUCT(name) \
    int name(void **handle) { return stub_launch(*handle, #name) ? 13 : 0; }
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasDotEx)
