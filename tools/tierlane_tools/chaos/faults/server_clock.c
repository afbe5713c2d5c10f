/* Preloaded into the server: moves its wall clock by the microseconds in the file CHAOS_CLOCK, which is mapped, so that a
 * new value applies at once. Valkey reads its wall clock only by gettimeofday; its monotonic clock is not moved. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

static const volatile int64_t *moved_us;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof *moved_us, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED) moved_us = page;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "gettimeofday");
    int failed = real(now, zone);
    if (!failed && now && moved_us) {
        int64_t us = now->tv_sec * INT64_C(1000000) + now->tv_usec + *moved_us;
        now->tv_sec = us / 1000000;
        now->tv_usec = us % 1000000;
    }
    return failed;
}
