/* What the stub's two libraries share: libstub.so, which is preloaded and stands in for CUDA's
   runtime and cuBLAS, and libcuda.so.1, which stands in for the driver. */
#ifndef STUB_H
#define STUB_H
#include <stddef.h>

/* Since the last stub_reset, but for the two of memory, which are levels. tests/gpu/stub/probe.py
   reads this struct by ctypes: the order of its fields is the order there. */
struct stub_counts {
    long launches;           /* kernels, memsets and products */
    long to_device, from_device, on_device; /* copies */
    long pageable;           /* copies to the device from memory that is not pinned */
    long waits;              /* of the host for the device */
    long allocations;
    long bytes_to_device, bytes_from_device;
    long held, peak;         /* bytes of device memory */
    long handles;            /* of cuBLAS that were made */
    long late_handles;       /* of those, while CUBLAS_WORKSPACE_CONFIG was not set */
};

enum where { NOWHERE, ON_DEVICE, PINNED };

extern struct stub_counts stub_counted;

void stub_lock(void);
void stub_unlock(void);
void stub_launch(void);
void stub_wait(void);
/* Called by functions that the stub leaves out: told once each on stderr with STUB_TELL=1. */
void stub_left_out(const char *name);

/* A range of addresses that nothing may touch, or NULL. */
void *stub_reserve(size_t bytes);
/* Takes `bytes` of the device's memory into account; 0 where there is not so much left. */
int stub_hold(size_t bytes);
void stub_release(size_t bytes);
void stub_remember(void *start, size_t bytes, enum where where);
/* Forgets the range that starts there and returns its length; 0 if there is none. */
size_t stub_forget(void *start, enum where *where);
enum where stub_where(const void *address);
size_t stub_memory(void); /* bytes of the device: STUB_MEM gigabytes, 80 by default */
int stub_major(void);     /* compute capability: STUB_CAP, 9.0 by default */
int stub_minor(void);
/* One of enum cudaDeviceAttr, whose numbers are those of CUdevice_attribute. */
int stub_attribute(int attribute);
#endif
