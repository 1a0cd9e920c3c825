/* cuDNN's graphs, by which torch asks it for attention: descriptors without content, one engine that
   needs no workspace, and executions, which are counted. Convolutions are left to the real library,
   which does not start here. */
#include <cudnn.h>
#include <stdlib.h>
#include <string.h>
#include "stub.h"

cudnnStatus_t cudnnCreate(cudnnHandle_t *to)
{
    *to = calloc(1, 256); /* begins with its stream */
    return *to ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_ALLOC_FAILED;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) { return free(handle), CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream)
{
    return *(cudaStream_t *)handle = stream, CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t *to)
{
    return *to = *(cudaStream_t *)handle, CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(
    cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *to)
{
    *to = calloc(1, 16);
    return *to ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_ALLOC_FAILED;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor)
{
    return free(descriptor), CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor)
{
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendSetAttribute(
    cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
    cudnnBackendAttributeType_t type, int64_t count, const void *from)
{
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendGetAttribute(
    cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
    cudnnBackendAttributeType_t type, int64_t room, int64_t *count, void *to)
{
    int number = type == CUDNN_TYPE_INT64 || type == CUDNN_TYPE_INT32;
    int64_t has = number || name == CUDNN_ATTR_ENGINEHEUR_RESULTS || name == CUDNN_ATTR_ENGINECFG_ENGINE;
    if (count)
        *count = has;
    if (number && to && room)
        memset(to, 0, type == CUDNN_TYPE_INT64 ? sizeof(int64_t) : sizeof(int32_t));
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendExecute(
    cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack)
{
    int error = stub_launch(*(cudaStream_t *)handle, "cudnnBackendExecute");
    return error ? CUDNN_STATUS_EXECUTION_FAILED : CUDNN_STATUS_SUCCESS;
}
