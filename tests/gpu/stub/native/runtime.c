/* Devices, streams, events and launches of CUDA's runtime. Kernels are counted and never run. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "stub.h"
#undef cudaGetDeviceProperties
#undef cudaLaunchKernel

#define CUDA_VERSION_TOLD 13000

static __thread int current;

int stub_devices(void)
{
    const char *count = getenv("STUB_DEVICES");
    return count ? atoi(count) : 1;
}

/* How many of them CUDA_VISIBLE_DEVICES leaves. */
static int visible(void)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    int listed = list && *list && *list != '-';
    for (const char *each = list; listed && *each; each++)
        listed += *each == ',';
    return !list || listed > stub_devices() ? stub_devices() : listed;
}

static int capability(int part)
{
    const char *stated = getenv("STUB_CAP");
    int found[2] = {9, 0};
    if (stated)
        sscanf(stated, "%d.%d", found, found + 1);
    return found[part];
}

int stub_major(void) { return capability(0); }
int stub_minor(void) { return capability(1); }

static __thread int last_error;

int stub_failed(int error)
{
    if (error)
        last_error = error;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void)
{
    int error = last_error;
    last_error = cudaSuccess;
    return error;
}

int stub_launch(void *stream, const char *name)
{
    int captured, error = stub_work(stream, 1, name, &captured);
    if (!captured) {
        stub_lock();
        stub_counted.launches++;
        stub_unlock();
        stub_report(LAUNCH, 0, name);
    }
    return error;
}

/* Bytes of shared memory that a block may ask for, and multiprocessors: A100, RTX 4090, H100. */
static int shared_memory(void)
{
    int number = stub_major() * 10 + stub_minor();
    return number == 80 ? 166912 : number < 90 || number >= 120 ? 101376 : 232448;
}

static int processors(void)
{
    int number = stub_major() * 10 + stub_minor();
    return number == 80 ? 108 : number < 90 ? 128 : 132;
}

int stub_attribute(int attribute)
{
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMultiProcessorCount: return processors();
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return stub_major() == 8 && stub_minor() ? 1536 : 2048;
    case cudaDevAttrComputeCapabilityMajor: return stub_major();
    case cudaDevAttrComputeCapabilityMinor: return stub_minor();
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return shared_memory() + 1024;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return shared_memory();
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    default: return 1;
    }
}

cudaError_t cudaGetDeviceCount(int *to) { return *to = visible(), cudaSuccess; }
cudaError_t cudaGetDevice(int *to) { return *to = current, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return current = device, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *to) { return *to = CUDA_VERSION_TOLD, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *to) { return *to = CUDA_VERSION_TOLD, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int *to, enum cudaDeviceAttr attribute, int device)
{
    return *to = stub_attribute(attribute), cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *to, int device)
{
    memset(to, 0, sizeof *to);
    strcpy(to->name, "NVIDIA stub");
    to->totalGlobalMem = stub_memory();
    to->major = stub_major();
    to->minor = stub_minor();
    to->multiProcessorCount = processors();
    to->warpSize = 32;
    to->maxThreadsPerBlock = 1024;
    to->maxThreadsPerMultiProcessor = stub_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    to->maxBlocksPerMultiProcessor = 32;
    to->sharedMemPerBlock = 49152;
    to->sharedMemPerBlockOptin = shared_memory();
    to->sharedMemPerMultiprocessor = shared_memory() + 1024;
    to->regsPerBlock = to->regsPerMultiprocessor = 65536;
    to->maxThreadsDim[0] = to->maxThreadsDim[1] = 1024;
    to->maxThreadsDim[2] = 64;
    to->maxGridSize[0] = 2147483647;
    to->maxGridSize[1] = to->maxGridSize[2] = 65535;
    to->memPitch = 2147483647;
    to->l2CacheSize = 50 << 20;
    to->textureAlignment = 512;
    to->unifiedAddressing = to->managedMemory = to->concurrentKernels = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *to, int length, int device)
{
    snprintf(to, length, "0000:%02x:00.0", device);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *to, int one, int other) { return *to = 0, cudaSuccess; }

static const struct {
    int number;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorIllegalState, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
     "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
};

const char *stub_error(int error, int text)
{
    for (size_t number = 0; number < sizeof errors / sizeof *errors; number++)
        if (errors[number].number == error)
            return text ? errors[number].text : errors[number].name;
    return text ? "an error of the stub" : "cudaErrorUnknown";
}
const char *cudaGetErrorString(cudaError_t error) { return stub_error(error, 1); }
const char *cudaGetErrorName(cudaError_t error) { return stub_error(error, 0); }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    return *least = 0, *greatest = -5, cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *to, const void *kernel)
{
    memset(to, 0, sizeof *to);
    to->maxThreadsPerBlock = 1024;
    to->numRegs = 64;
    /* What torch's builds have for the card: 8.9 runs the code for 8.6, and CUB knows no other. */
    int version = stub_major() * 10 + stub_minor();
    to->ptxVersion = to->binaryVersion = version == 89 ? 86 : version;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *to, const void *kernel, int threads, size_t shared, unsigned flags)
{
    return *to = 2, cudaSuccess;
}

/* Names of the driver as libcuda.so.1 beside this library has them; a function that does nothing
   in place of others. */
static int nothing(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **to, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *status)
{
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    *to = driver ? dlsym(driver, name) : NULL;
    if (!*to) {
        stub_left_out(name);
        *to = (void *)nothing;
    }
    if (status)
        *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

static char symbol[1 << 20];
cudaError_t cudaGetSymbolAddress(void **to, const void *name) { return *to = symbol, cudaSuccess; }

/* What compilers put around kernels: registration, and the launch behind <<<...>>>. */
static struct kernel {
    const void *function;
    const char *name;
} *kernels;
static size_t registered, room;
static int sorted;

void **__cudaRegisterFatBinary(void *binary)
{
    static void *handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterVar(void) {}
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterFunction(
    void **handle, const char *function, char *of_device, const char *name, int threads, void *tid,
    void *bid, void *block, void *grid, int *warp)
{
    stub_lock();
    if (registered == room) {
        room = room ? 2 * room : 1 << 14;
        kernels = realloc(kernels, room * sizeof *kernels);
        if (!kernels)
            abort();
    }
    kernels[registered++] = (struct kernel){function, name};
    sorted = 0;
    stub_unlock();
}

static int order(const void *one, const void *other)
{
    const char *a = ((struct kernel *)one)->function, *b = ((struct kernel *)other)->function;
    return a < b ? -1 : a > b;
}

const char *stub_kernel(const void *function)
{
    struct kernel wanted = {function, NULL};
    stub_lock();
    if (!sorted)
        qsort(kernels, registered, sizeof *kernels, order);
    sorted = 1;
    struct kernel *found = bsearch(&wanted, kernels, registered, sizeof *kernels, order);
    stub_unlock();
    return found ? found->name : "a kernel";
}

static __thread struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} next;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream)
{
    next.grid = grid;
    next.block = block;
    next.shared = shared;
    next.stream = stream;
    return 0;
}
int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    *grid = next.grid;
    *block = next.block;
    *shared = next.shared;
    *(cudaStream_t *)stream = next.stream;
    return 0;
}
int __cudaGetKernel(void **to, const void *function) { return *to = (void *)function, 0; }
cudaError_t cudaLaunchKernel(
    const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
{
    return stub_launch(stream, stub_kernel(kernel));
}
int __cudaLaunchKernel(
    void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
{
    return stub_launch(stream, stub_kernel(kernel));
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **arguments)
{
    return stub_launch(how->stream, stub_kernel(kernel));
}
