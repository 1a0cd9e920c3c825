/* Devices, streams, events and launches of CUDA's runtime. Kernels are counted and never run. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "stub.h"
#undef cudaGetDeviceProperties

#define CUDA_VERSION_TOLD 13000

static __thread int current;

static int devices(void)
{
    const char *count = getenv("STUB_DEVICES");
    return count ? atoi(count) : 1;
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

void stub_launch(void)
{
    stub_lock();
    stub_counted.launches++;
    stub_unlock();
}

void stub_wait(void)
{
    stub_lock();
    stub_counted.waits++;
    stub_unlock();
}

void stub_left_out(const char *name)
{
    if (getenv("STUB_TELL"))
        fprintf(stderr, "stub: %s does nothing\n", name);
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

cudaError_t cudaGetDeviceCount(int *to) { return *to = devices(), cudaSuccess; }
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
cudaError_t cudaDeviceSynchronize(void) { return stub_wait(), cudaSuccess; }

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the stub";
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}

/* Streams and events are numbers: everything is done at once. */
static void *another(void)
{
    static long last = 0x1000;
    return (void *)__sync_add_and_fetch(&last, 16);
}

cudaError_t cudaStreamCreate(cudaStream_t *to) { return *to = another(), cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *to, unsigned f) { return cudaStreamCreate(to); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *to, unsigned flags, int priority)
{
    return cudaStreamCreate(to);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return stub_wait(), cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *to) { return *to = 0, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *to)
{
    return *to = cudaStreamCaptureStatusNone, cudaSuccess;
}
#undef cudaStreamGetCaptureInfo
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *to, unsigned long long *id, cudaGraph_t *g,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count)
{
    *to = cudaStreamCaptureStatusNone;
    if (id)
        *id = 0;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *to) { return *to = another(), cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *to, unsigned flags) { return cudaEventCreate(to); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return stub_wait(), cudaSuccess; }
#undef cudaEventElapsedTime
cudaError_t cudaEventElapsedTime(float *to, cudaEvent_t start, cudaEvent_t end)
{
    return *to = 1.0f, cudaSuccess;
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
void **__cudaRegisterFatBinary(void *binary)
{
    static void *handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
char __cudaInitModule(void **handle) { return 1; }
unsigned __cudaPushCallConfiguration(void) { return 0; }
int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    *grid = *block = (dim3){1, 1, 1};
    *shared = 0;
    *(void **)stream = NULL;
    return 0;
}
int __cudaGetKernel(void **to, const void *function) { return *to = (void *)function, 0; }
int __cudaLaunchKernel(void) { return stub_launch(), 0; }
#undef cudaLaunchKernel
cudaError_t cudaLaunchKernel(
    const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
{
    return stub_launch(), cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **arguments)
{
    return stub_launch(), cudaSuccess;
}
