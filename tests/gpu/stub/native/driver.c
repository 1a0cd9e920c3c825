/* CUDA's driver, as far as torch's lazily loaded half, Triton and the caching allocator's
   expandable segments ask for it. */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <string.h>
#include <sys/mman.h>
#include "stub.h"
#undef cuDeviceGetUuid
#undef cuGetProcAddress
#undef cuMemGetAddressRange

static CUcontext context = (CUcontext)16;

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *to) { return *to = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *to) { return *to = stub_devices(), CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *to, int number) { return *to = number, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *to) { return *to = context, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *to, CUdevice d) { return *to = context, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *to, CUdevice_attribute attribute, CUdevice device)
{
    return *to = stub_attribute(attribute), CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **to)
{
    return *to = stub_error(error, 1), CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **to)
{
    return *to = stub_error(error, 0), CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *to, CUfunction f, int threads, size_t shared)
{
    return *to = 2, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *to, CUfunction function, const CUlaunchConfig *how)
{
    return *to = 1, CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *to, CUpointer_attribute attribute, CUdeviceptr address)
{
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *(CUdeviceptr *)to = address;
    else
        *(unsigned *)to = stub_where((void *)address) == ON_DEVICE ? CU_MEMORYTYPE_DEVICE
                                                                  : CU_MEMORYTYPE_HOST;
    return CUDA_SUCCESS;
}

/* Memory in two parts, addresses and what is mapped there: expandable segments. */
CUresult cuMemGetAllocationGranularity(
    size_t *to, const CUmemAllocationProp *of, CUmemAllocationGranularity_flags which)
{
    return *to = 2 << 20, CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(
    CUdeviceptr *to, size_t bytes, size_t alignment, CUdeviceptr at, unsigned long long flags)
{
    *to = (CUdeviceptr)stub_reserve(bytes);
    return *to ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes)
{
    munmap((void *)start, bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemCreate(
    CUmemGenericAllocationHandle *to, size_t bytes, const CUmemAllocationProp *of,
    unsigned long long flags)
{
    *to = bytes; /* a handle is how much it holds */
    return stub_hold(bytes, "cuMemCreate") ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    stub_release(handle);
    return CUDA_SUCCESS;
}
CUresult cuMemMap(
    CUdeviceptr start, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
    unsigned long long flags)
{
    stub_remember((void *)start, bytes, ON_DEVICE);
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr start, size_t bytes)
{
    enum where where;
    stub_forget((void *)start, &where);
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(
    CUdeviceptr start, size_t bytes, const CUmemAccessDesc *of, size_t count)
{
    return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *to, size_t *bytes, CUdeviceptr address)
{
    void *start = NULL;
    size_t length = stub_range((void *)address, &start);
    if (to)
        *to = (CUdeviceptr)start;
    if (bytes)
        *bytes = length;
    return length ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
CUresult cuMemGetAddressRange(CUdeviceptr *to, size_t *bytes, CUdeviceptr address)
{
    return cuMemGetAddressRange_v2(to, bytes, address);
}

/* Memory that processes hand to each other: a handle is how much it holds, and who opens it gets
   addresses of its own, which are in nobody's account. */
extern int cudaMalloc(void **to, size_t bytes);
extern int cudaFree(void *start);
CUresult cuMemAlloc(CUdeviceptr *to, size_t bytes) { return cudaMalloc((void **)to, bytes); }
CUresult cuMemFree(CUdeviceptr start) { return cudaFree((void *)start); }
CUresult cuIpcGetMemHandle(CUipcMemHandle *to, CUdeviceptr start)
{
    void *found = NULL;
    size_t bytes = stub_range((void *)start, &found);
    memset(to, 0, sizeof *to);
    memcpy(to, &bytes, sizeof bytes);
    return found == (void *)start ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuIpcOpenMemHandle(CUdeviceptr *to, CUipcMemHandle handle, unsigned flags)
{
    size_t bytes;
    memcpy(&bytes, &handle, sizeof bytes);
    void *start = bytes ? stub_reserve(bytes) : NULL;
    if (!start)
        return CUDA_ERROR_INVALID_HANDLE;
    stub_remember(start, bytes, ON_DEVICE);
    return *to = (CUdeviceptr)start, CUDA_SUCCESS;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr start)
{
    enum where where;
    size_t bytes = stub_forget((void *)start, &where);
    return bytes && !munmap((void *)start, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* But not by the handles of other parts of CUDA. */
CUresult cuMemExportToShareableHandle(
    void *to, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
    unsigned long long flags)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemImportFromShareableHandle(
    CUmemGenericAllocationHandle *to, void *of_other, CUmemAllocationHandleType type)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *to, void *address)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

static int nothing(void) { return 0; }
CUresult cuGetProcAddress_v2(
    const char *name, void **to, int version, cuuint64_t flags,
    CUdriverProcAddressQueryResult *status)
{
    void *self = dlopen("libcuda.so.1", RTLD_LAZY);
    *to = self ? dlsym(self, name) : NULL;
    if (!*to)
        *to = (void *)nothing;
    if (status)
        *status = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}
