/* The wheels of CUDA's runtime lack this header. Its macros mean nothing to a C compiler. */
#ifndef STUB_HOST_DEFINES_H
#define STUB_HOST_DEFINES_H
#define __host__
#define __device__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __CUDA_ARCH_HAS_FEATURE__(feature) 0
#endif
