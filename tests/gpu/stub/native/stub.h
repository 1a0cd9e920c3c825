/* What the stub's two libraries share: libstub.so, which is preloaded and stands in for CUDA's
   runtime and cuBLAS, and libcuda.so.1, which stands in for the driver. */
#ifndef STUB_H
#define STUB_H
#include <stddef.h>

/* Since the last stub_reset, but for the two of memory, which are levels. tests/helpers/device.py
   reads this struct by ctypes: the order of its fields is the order there. */
struct stub_counts {
    long launches;           /* kernels, memsets and products, outside of graphs */
    long to_device, from_device, on_device; /* copies, outside of graphs */
    long pageable;           /* copies to the device from memory that is not pinned */
    long waits;              /* of the host for the device */
    long allocations;
    long bytes_to_device, bytes_from_device;
    long held, peak;         /* bytes of device memory of this process */
    long handles;            /* of cuBLAS that were made */
    long late_handles;       /* of those, while CUBLAS_WORKSPACE_CONFIG was not set */
    long pageable_from_device; /* copies from the device to memory that is not pinned */
    long captured;           /* kernels, memsets, products and copies that went into a graph */
    long captures;           /* graphs that were captured */
    long graph_launches;
    long replayed;           /* what those launched graphs hold, summed */
    long refused;            /* calls that CUDA does not allow during a capture */
};

/* What stub_hook can be asked to report. */
enum event {
    WAIT = 1,
    FROM_DEVICE = 2,
    TO_DEVICE = 4,
    PAGEABLE = 8, /* a copy in either direction, besides FROM_DEVICE or TO_DEVICE */
    LAUNCH = 16,
    ALLOCATION = 32,
    REFUSED = 64,
    GRAPH_LAUNCH = 128,
    CAPTURED = 256,
};
typedef void (*stub_hook_t)(int event, long bytes, const char *name);

enum where { NOWHERE, ON_DEVICE, PINNED };

struct CUgraph_st { /* cudaGraph_t */
    long nodes;
};

extern struct stub_counts stub_counted;

void stub_lock(void);
void stub_unlock(void);
/* Calls `hook` at each of `events` from the thread where it happens, with what is copied or
   allocated, and the name of the kernel or call. NULL: no longer. */
void stub_hook(stub_hook_t hook, int events);
void stub_report(enum event event, long bytes, const char *name);
void stub_wait(const char *name);
/* Called by functions that the stub leaves out: told once each on stderr with STUB_TELL=1. */
void stub_left_out(const char *name);

/* What a function of CUDA answers: `error`, which cudaGetLastError then gives. */
int stub_failed(int error);
/* Counts a launch on `stream`, in its graph where that is capturing. Returns an error of CUDA. */
int stub_launch(void *stream, const char *name);
/* Work on `stream`: *captured says whether it went, as so many nodes, into a graph. */
int stub_work(void *stream, long nodes, const char *name, int *captured);
/* For calls that CUDA does not allow while this thread, or any in global mode, is capturing. */
int stub_unsafe(const char *name);
/* What such a call does: invalidates the captures of `stream` and answers that it is refused. */
int stub_refuse(void *stream, const char *name);
int stub_capturing(void *stream);
/* The name of a kernel by the address of its launching function. */
const char *stub_kernel(const void *function);
/* The name of an error of CUDA, or its text. */
const char *stub_error(int error, int text);

/* A range of addresses that nothing may touch, or NULL. */
void *stub_reserve(size_t bytes);
/* Takes `bytes` of the device's memory into account; 0 where there is not so much left. */
int stub_hold(size_t bytes, const char *name);
void stub_release(size_t bytes);
size_t stub_left(void);   /* bytes of the device that no process holds */
void stub_remember(void *start, size_t bytes, enum where where);
/* Forgets the range that starts there and returns its length; 0 if there is none. */
size_t stub_forget(void *start, enum where *where);
/* The range that `address` lies in: its length, or 0. */
size_t stub_range(const void *address, void **start);
enum where stub_where(const void *address);
size_t stub_memory(void); /* bytes of the device: STUB_MEM gigabytes, 80 by default */
int stub_major(void);     /* compute capability: STUB_CAP, 9.0 by default */
int stub_minor(void);
int stub_devices(void);   /* STUB_DEVICES, 1 by default */
/* One of enum cudaDeviceAttr, whose numbers are those of CUdevice_attribute. */
int stub_attribute(int attribute);
#endif
