/* NVML, as far as torch's allocator and its count of devices ask for it. Without its prototypes: the
   wheels of CUDA's runtime lack the header. */
#include <stdio.h>
#include <string.h>
#include "stub.h"

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3 };

int nvmlInit(void) { return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) { return error ? "an error of the stub" : "Success"; }
int nvmlDeviceGetCount_v2(unsigned *to) { return *to = stub_devices(), SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *to) { return *to = 13000, SUCCESS; }

/* A device is its number and one. */
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **to)
{
    *to = (void *)(size_t)(number + 1);
    return number < (unsigned)stub_devices() ? SUCCESS : INVALID_ARGUMENT;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **to)
{
    unsigned number = 0;
    sscanf(bus, "%*x:%x", &number);
    return nvmlDeviceGetHandleByIndex_v2(number, to);
}
int nvmlDeviceGetUUID(void *device, char *to, unsigned length)
{
    snprintf(to, length, "GPU-00000000-0000-0000-0000-%012zx", (size_t)device);
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *to)
{
    return *count = 0, SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *to)
{
    return *count = 0, SUCCESS;
}
/* There are no links between devices, and no fabric. */
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
struct fabric {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique;
    unsigned char state;
};
int nvmlDeviceGetGpuFabricInfoV(void *device, struct fabric *to) { return to->state = 0, SUCCESS; }
