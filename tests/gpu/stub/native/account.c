/* The account: what was counted, who is told of it, and how much of the device's memory is held,
   by this process alone or by all that share a card. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "stub.h"

enum { PLACES = 256 };
struct card {
    long held[PLACES]; /* bytes of each process; its place is locked in the file while it lives */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct card *card;
static int file = -1, place = -1;
static pid_t of_process; /* whose place that is: a fork takes a place of its own */
static stub_hook_t hook;
static int hooked;
static __thread int reporting;
struct stub_counts stub_counted;

void stub_lock(void) { pthread_mutex_lock(&mutex); }
void stub_unlock(void) { pthread_mutex_unlock(&mutex); }

void stub_counts(struct stub_counts *to)
{
    stub_lock();
    *to = stub_counted;
    stub_unlock();
}

void stub_reset(void)
{
    stub_lock();
    long held = stub_counted.held;
    memset(&stub_counted, 0, sizeof stub_counted);
    stub_counted.held = stub_counted.peak = held;
    stub_unlock();
}

void stub_hook(stub_hook_t call, int events)
{
    hooked = 0;
    hook = call;
    hooked = call ? events : 0;
}

void stub_report(enum event event, long bytes, const char *name)
{
    stub_hook_t call = hook;
    if (!(hooked & event) || !call || reporting)
        return;
    reporting = 1; /* what the hook itself asks of the device is not reported */
    call(event, bytes, name);
    reporting = 0;
}

void stub_wait(const char *name)
{
    stub_lock();
    stub_counted.waits++;
    stub_unlock();
    stub_report(WAIT, 0, name);
}

void stub_left_out(const char *name)
{
    if (getenv("STUB_TELL"))
        fprintf(stderr, "stub: %s does nothing\n", name);
}

size_t stub_memory(void)
{
    const char *gigabytes = getenv("STUB_MEM");
    return (size_t)((gigabytes ? atof(gigabytes) : 80.0) * (1 << 30));
}

static void fail(const char *what)
{
    fprintf(stderr, "stub: STUB_CARD=%s: %s: %s\n", getenv("STUB_CARD"), what, strerror(errno));
    abort();
}

/* Byte 0 of the file is locked by who reads or writes it; byte 1 + n by the process of place n
   until its end, however it ends. */
static int lock(int how, int type, long byte)
{
    struct flock range = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    int done = fcntl(file, how, &range);
    return how == F_GETLK ? range.l_type : done;
}

static int alive(int number)
{
    return number == place || lock(F_GETLK, F_WRLCK, 1 + number) != F_UNLCK;
}

/* Opens the card that STUB_CARD names and takes a place on it. */
static void join_card(void)
{
    const char *path = getenv("STUB_CARD");
    if (!path || of_process == getpid())
        return;
    place = -1;
    of_process = getpid();
    file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof *card))
        fail("cannot be opened");
    card = mmap(NULL, sizeof *card, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (card == MAP_FAILED)
        fail("cannot be mapped");
    for (int number = 0; number < PLACES && place < 0; number++)
        if (!lock(F_SETLK, F_WRLCK, 1 + number))
            place = number;
    if (place < 0)
        fail("has no place left");
    card->held[place] = 0;
}

/* Bytes that other living processes hold. The card is locked. */
static size_t elsewhere(void)
{
    size_t bytes = 0;
    for (int number = 0; card && number < PLACES; number++)
        if (number != place && card->held[number] && alive(number))
            bytes += card->held[number];
    return bytes;
}

static void enter(void)
{
    stub_lock();
    join_card();
    if (card && lock(F_SETLKW, F_WRLCK, 0))
        fail("cannot be locked");
}

static void leave(void)
{
    if (card) {
        card->held[place] = stub_counted.held;
        lock(F_SETLK, F_UNLCK, 0);
    }
    stub_unlock();
}

int stub_hold(size_t bytes, const char *name)
{
    enter();
    int fits = stub_counted.held + elsewhere() + bytes <= stub_memory();
    if (fits) {
        stub_counted.held += bytes;
        if (stub_counted.held > stub_counted.peak)
            stub_counted.peak = stub_counted.held;
    }
    stub_counted.allocations++;
    leave();
    stub_report(ALLOCATION, bytes, name);
    return fits;
}

void stub_release(size_t bytes)
{
    enter();
    stub_counted.held -= bytes;
    leave();
}

size_t stub_left(void)
{
    enter();
    size_t held = stub_counted.held + elsewhere(), all = stub_memory();
    leave();
    return held < all ? all - held : 0;
}
