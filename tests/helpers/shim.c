/* Counts the calls that change files below one folder, and makes one of them fail.
 *
 * Preloaded into a process (LD_PRELOAD), it stands between every library and the C library, so that
 * Python's files, safetensors' Rust and shutil all pass through it:
 *
 *     cc -O1 -shared -fPIC -o shim.so shim.c -ldl
 *
 * fault_arm(root, first, last, kind) says which calls fail: those numbered first..last, from 1.
 * The count lives in memory shared with the parent of a fork, which reads it after a kill.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { NONE, KILL, IO_ERROR, FULL, SHORT, SLOW, KILL_ALL };

#define MOST_FILES 65536
#define NAMES 4096

struct shared {
    long calls;
    char names[NAMES]; /* one letter a call: Open Write fSync Rename Unlink Mkdir rmDir Truncate Link Chmod */
};

static struct shared *shared;
static char root[PATH_MAX];
static long first, last;
static enum kind kind;
static char ours[MOST_FILES]; /* descriptors of files below root */

__attribute__((constructor)) static void set_up(void) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

void fault_arm(const char *folder, long from, long to, int what) {
    snprintf(root, sizeof root, "%s", folder);
    first = from;
    last = to;
    kind = what;
    memset(shared, 0, sizeof *shared);
}

long fault_calls(void) { return shared->calls; }
const char *fault_names(void) { return shared->names; }

static int below(int folder, const char *path) {
    char whole[PATH_MAX];
    if (!root[0] || !path) return 0;
    if (path[0] != '/') {
        if (folder != AT_FDCWD) return folder >= 0 && folder < MOST_FILES && ours[folder];
        if (!getcwd(whole, sizeof whole)) return 0;
        strncat(whole, "/", sizeof whole - strlen(whole) - 1);
        strncat(whole, path, sizeof whole - strlen(whole) - 1);
        path = whole;
    }
    size_t n = strlen(root);
    return !strncmp(path, root, n) && (path[n] == '/' || path[n] == 0);
}

/* This process, or every one that was started with it. */
static void die(void) {
    kill(kind == KILL_ALL ? 0 : getpid(), SIGKILL);
    pause();
}

/* What becomes of the next call: 0 made, 1 made in part, -1 failed with errno set. */
static int next(char name) {
    long number = __atomic_add_fetch(&shared->calls, 1, __ATOMIC_SEQ_CST);
    if (number < NAMES) shared->names[number - 1] = name;
    if (number < first || number > last) return 0;
    switch (kind) {
    case KILL:
    case KILL_ALL:
        if (name == 'W') return 1; /* half a write first */
        die();
        return 0;
    case IO_ERROR:
        errno = EIO;
        return -1;
    case FULL:
        if (!strchr("OWSM", name)) return 0; /* removing and renaming take no room */
        errno = ENOSPC;
        return -1;
    case SHORT:
        return name == 'W';
    case SLOW:
        usleep(20000);
        return 0;
    default:
        return 0;
    }
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, name)

static void remember(int file, int is_ours) {
    if (file >= 0 && file < MOST_FILES) ours[file] = is_ours;
}

/* Opening counts where it may change something: to read is not to change. */
#define OPEN(function, folder, call) \
    va_list more; \
    va_start(more, flags); \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more); \
    int is_ours = below(folder, path); \
    if (is_ours && flags & (O_WRONLY | O_RDWR | O_CREAT) && next('O') < 0) return -1; \
    int file = call; \
    remember(file, is_ours); \
    return file

int open(const char *path, int flags, ...) {
    REAL(int, "open", const char *, int, ...);
    OPEN(open, AT_FDCWD, real(path, flags, mode));
}
int open64(const char *path, int flags, ...) {
    REAL(int, "open64", const char *, int, ...);
    OPEN(open64, AT_FDCWD, real(path, flags, mode));
}
int openat(int folder, const char *path, int flags, ...) {
    REAL(int, "openat", int, const char *, int, ...);
    OPEN(openat, folder, real(folder, path, flags, mode));
}
int openat64(int folder, const char *path, int flags, ...) {
    REAL(int, "openat64", int, const char *, int, ...);
    OPEN(openat64, folder, real(folder, path, flags, mode));
}
int close(int file) {
    REAL(int, "close", int);
    remember(file, 0);
    return real(file);
}

static int is_ours(int file) { return file >= 0 && file < MOST_FILES && ours[file]; }

#define WRITE(whole, half) \
    int what = is_ours(file) ? next('W') : 0; \
    if (what < 0) return -1; \
    if (!what || length < 2) return whole; \
    ssize_t written = half; \
    if (kind == KILL || kind == KILL_ALL) die(); \
    return written

ssize_t write(int file, const void *data, size_t length) {
    REAL(ssize_t, "write", int, const void *, size_t);
    WRITE(real(file, data, length), real(file, data, length / 2));
}
ssize_t pwrite(int file, const void *data, size_t length, off_t place) {
    REAL(ssize_t, "pwrite", int, const void *, size_t, off_t);
    WRITE(real(file, data, length, place), real(file, data, length / 2, place));
}
ssize_t pwrite64(int file, const void *data, size_t length, off64_t place) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
    WRITE(real(file, data, length, place), real(file, data, length / 2, place));
}
ssize_t writev(int file, const struct iovec *parts, int n) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    size_t length = n;
    WRITE(real(file, parts, n), real(file, parts, n / 2));
}

#define CALL(name, condition, call) \
    if ((condition) && next(name) < 0) return -1; \
    return call

int fsync(int file) {
    REAL(int, "fsync", int);
    CALL('S', is_ours(file), real(file));
}
int fdatasync(int file) {
    REAL(int, "fdatasync", int);
    CALL('S', is_ours(file), real(file));
}
int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    CALL('R', below(AT_FDCWD, to), real(from, to));
}
int renameat(int a, const char *from, int b, const char *to) {
    REAL(int, "renameat", int, const char *, int, const char *);
    CALL('R', below(b, to), real(a, from, b, to));
}
int link(const char *from, const char *to) {
    REAL(int, "link", const char *, const char *);
    CALL('L', below(AT_FDCWD, to), real(from, to));
}
int linkat(int a, const char *from, int b, const char *to, int flags) {
    REAL(int, "linkat", int, const char *, int, const char *, int);
    CALL('L', below(b, to), real(a, from, b, to, flags));
}
int chmod(const char *path, mode_t mode) {
    REAL(int, "chmod", const char *, mode_t);
    CALL('C', below(AT_FDCWD, path), real(path, mode));
}
int fchmodat(int folder, const char *path, mode_t mode, int flags) {
    REAL(int, "fchmodat", int, const char *, mode_t, int);
    CALL('C', below(folder, path), real(folder, path, mode, flags));
}
int unlink(const char *path) {
    REAL(int, "unlink", const char *);
    CALL('U', below(AT_FDCWD, path), real(path));
}
int unlinkat(int folder, const char *path, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    CALL('U', below(folder, path), real(folder, path, flags));
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    CALL('M', below(AT_FDCWD, path), real(path, mode));
}
int rmdir(const char *path) {
    REAL(int, "rmdir", const char *);
    CALL('D', below(AT_FDCWD, path), real(path));
}
int ftruncate(int file, off_t size) {
    REAL(int, "ftruncate", int, off_t);
    CALL('T', is_ours(file), real(file, size));
}
int ftruncate64(int file, off64_t size) {
    REAL(int, "ftruncate64", int, off64_t);
    CALL('T', is_ours(file), real(file, size));
}
int truncate(const char *path, off_t size) {
    REAL(int, "truncate", const char *, off_t);
    CALL('T', below(AT_FDCWD, path), real(path, size));
}
int truncate64(const char *path, off64_t size) {
    REAL(int, "truncate64", const char *, off64_t);
    CALL('T', below(AT_FDCWD, path), real(path, size));
}
