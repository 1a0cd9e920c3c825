/* Kernels that Triton compiled, in libcuda.so.1: loaded, never run. What ptxas says of their
   resources is read from the ELF file that it wrote. */
#define _GNU_SOURCE
#include <cuda.h>
#include <elf.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "stub.h"

/* Attributes of .nv.info that hold a symbol and a number each, and the form of such entries. */
enum { FRAME_SIZE = 0x11, REGISTERS = 0x2f, SIZED = 4 };
enum { REGISTER_FILE = 65536, PER_WARP = 256, WARP = 32 };

struct kernel {
    char *name;
    int registers, local, shared; /* local: bytes of a thread's frame, where spilled values lie */
    int most_shared;              /* of a launch, dynamic bytes included */
    long launches;
    struct kernel *next;
};

static struct kernel *kernels;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* Calls `each` for every kernel that was loaded: bytes of a block's shared memory, of a thread's
   local memory. */
void stub_kernels(void (*each)(const char *name, int registers, int local, int shared, long launches))
{
    for (struct kernel *kernel = kernels; kernel; kernel = kernel->next)
        each(kernel->name, kernel->registers, kernel->local, kernel->most_shared, kernel->launches);
}

static const Elf64_Shdr *section(const char *image, const char *name)
{
    const Elf64_Ehdr *file = (const Elf64_Ehdr *)image;
    const Elf64_Shdr *all = (const Elf64_Shdr *)(image + file->e_shoff);
    const char *names = image + all[file->e_shstrndx].sh_offset;
    for (int number = 0; number < file->e_shnum; number++)
        if (!strcmp(names + all[number].sh_name, name))
            return all + number;
    return NULL;
}

/* The number of an attribute of the function `name`; 0 where .nv.info has none. */
static int attribute(const char *image, const char *name, int wanted)
{
    const Elf64_Shdr *info = section(image, ".nv.info"), *table = section(image, ".symtab");
    const Elf64_Shdr *strings = section(image, ".strtab");
    if (!info || !table || !strings)
        return 0;
    const Elf64_Sym *symbols = (const Elf64_Sym *)(image + table->sh_offset);
    const char *at = image + info->sh_offset, *end = at + info->sh_size;
    while (at + 4 <= end) {
        int form = at[0], entry = at[1], size = *(const unsigned short *)(at + 2);
        const unsigned *value = (const unsigned *)(at + 4);
        at += form == SIZED ? 4 + size : 4;
        if (form == SIZED && entry == wanted && size >= 8 &&
            !strcmp(image + strings->sh_offset + symbols[value[0]].st_name, name))
            return value[1];
    }
    return 0;
}

CUresult cuModuleLoadData(CUmodule *to, const void *image)
{
    int refused = stub_unsafe("cuModuleLoadData");
    if (refused)
        return refused; /* the errors of both libraries have the same numbers */
    const Elf64_Ehdr *file = image;
    if (memcmp(file->e_ident, ELFMAG, SELFMAG))
        return CUDA_ERROR_INVALID_IMAGE;
    size_t bytes = file->e_shoff + (size_t)file->e_shnum * file->e_shentsize;
    size_t headers = file->e_phoff + (size_t)file->e_phnum * file->e_phentsize;
    bytes = bytes > headers ? bytes : headers;
    char *copy = malloc(bytes);
    if (!copy)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *to = memcpy(copy, image, bytes);
    return CUDA_SUCCESS;
}
CUresult cuModuleLoadDataEx(
    CUmodule *to, const void *image, unsigned count, CUjit_option *options, void **values)
{
    return cuModuleLoadData(to, image);
}
CUresult cuModuleLoad(CUmodule *to, const char *path)
{
    struct stat state;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &state))
        return CUDA_ERROR_FILE_NOT_FOUND;
    void *image = mmap(NULL, state.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (image == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    int error = cuModuleLoadData(to, image);
    munmap(image, state.st_size);
    return error;
}
CUresult cuModuleUnload(CUmodule module) { return free(module), CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *to, CUmodule module, const char *name)
{
    const char *image = (const char *)module;
    struct kernel *kernel = calloc(1, sizeof *kernel);
    char *of_shared = malloc(strlen(name) + sizeof ".nv.shared.");
    if (!kernel || !of_shared)
        abort();
    strcat(strcpy(of_shared, ".nv.shared."), name);
    const Elf64_Shdr *shared = section(image, of_shared);
    free(of_shared);
    kernel->name = strdup(name);
    kernel->registers = attribute(image, name, REGISTERS);
    kernel->local = attribute(image, name, FRAME_SIZE);
    kernel->shared = shared ? shared->sh_size : 0;
    pthread_mutex_lock(&mutex);
    kernel->next = kernels;
    kernels = kernel;
    pthread_mutex_unlock(&mutex);
    *to = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

/* Threads of a block whose registers fit: warps are given registers in pieces. */
static int most_threads(const struct kernel *kernel)
{
    int each = (kernel->registers * WARP + PER_WARP - 1) / PER_WARP * PER_WARP;
    int warps = each ? REGISTER_FILE / each / 4 * 4 : WARP;
    return warps * WARP < 1024 ? warps * WARP : 1024;
}

CUresult cuFuncGetAttribute(int *to, CUfunction_attribute wanted, CUfunction function)
{
    const struct kernel *kernel = (const struct kernel *)function;
    switch (wanted) {
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *to = kernel->registers; break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *to = kernel->local; break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *to = kernel->shared; break;
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *to = most_threads(kernel); break;
    default: *to = 0;
    }
    return CUDA_SUCCESS;
}

static int launch(CUfunction function, unsigned threads, unsigned dynamic, void *stream)
{
    struct kernel *kernel = (struct kernel *)function;
    int shared = kernel->shared + dynamic;
    if (shared > stub_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN))
        return CUDA_ERROR_INVALID_VALUE;
    if (threads > (unsigned)most_threads(kernel))
        return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    pthread_mutex_lock(&mutex);
    kernel->launches++;
    if (shared > kernel->most_shared)
        kernel->most_shared = shared;
    pthread_mutex_unlock(&mutex);
    return stub_launch(stream, kernel->name);
}
CUresult cuLaunchKernel(
    CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
    unsigned bz, unsigned shared, CUstream stream, void **arguments, void **extra)
{
    return launch(function, bx * by * bz, shared, stream);
}
CUresult cuLaunchCooperativeKernel(
    CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
    unsigned bz, unsigned shared, CUstream stream, void **arguments)
{
    return launch(function, bx * by * bz, shared, stream);
}
CUresult cuLaunchKernelEx(
    const CUlaunchConfig *how, CUfunction function, void **arguments, void **extra)
{
    unsigned threads = how->blockDimX * how->blockDimY * how->blockDimZ;
    return launch(function, threads, how->sharedMemBytes, how->hStream);
}
